"""The tiers of one job, from the nearest to the root: what is where, and what goes from each to the next.

    save ──► root                                                       neither ``local`` nor ``memory``
    save ──► local tier ──► root                                        ``local``, or ``memory`` in its place
    every step ──► memory ── what ``save`` asks for ──► local tier ──► root
                    keep=2                               its keep        keep

Each arrow between tiers is an :class:`Uploader` of its own, and the second begins a round when the first has ended one. A checkpoint has
the same id, and so the same names of files, in all tiers: what a machine has lost from its memory is read from disks, range by range.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from ckpt.engine.save.options import SaveOptions
from ckpt.errors import NotFoundError, StorageError, UsageError
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend, open_below
from ckpt.net.channel import Row
from ckpt.net.group import Group
from ckpt.nodes.nodes import StorageNode
from ckpt.nodes.rendezvous import is_memory
from ckpt.plan.tables import ranks_text
from ckpt.policies import All, KeepPolicy, Latest
from ckpt.text import url_text

from .node_tier import Memory, NodeLocal, SharedLocal, SpreadTier, merged_sources
from .reporter import Reporter
from .tiers import LOOK, Tiers
from .uploader import Uploader

log = logging.getLogger("ckpt")


class TierChain:
    """One rank's end. ``root``, ``keep``, ``local`` and ``memory`` are those of the ``Checkpointer``."""

    def __init__(
        self,
        root: str,
        keep: KeepPolicy,
        local: str | os.PathLike[str] | SharedLocal | NodeLocal | None,
        memory: Memory | None,
        group: Group,
        options: SaveOptions,
    ) -> None:
        self.root = root
        self._group = group
        timeout, threads = options.timeout, options.threads
        self._timeout = timeout
        self._shared = group.size == 1 or (local is None and memory is None)
        """Whether it is known that all ranks see the local tier; nodes have connections instead."""
        self.spreads: list[SpreadTier] = []
        """Tiers that are spread over the nodes, the nearest first."""
        self.uploader: Uploader | None = None
        self.memory_uploader: Uploader | None = None
        """From memory to the local tier, if there are both."""
        if local is None and memory is None:
            self.later = self.nearest = Tiers(root, keep)
            return
        _check_memory(memory, local)
        in_front = memory if local is not None else None
        if memory is not None and local is None:
            local = memory.on_nodes(root)
        elif not isinstance(local, SharedLocal | NodeLocal):
            local = SharedLocal(local)  # type: ignore[arg-type]  # not None
        newest_only = memory is not None and in_front is None
        spread = SpreadTier(local, root, group, timeout) if isinstance(local, NodeLocal) else None
        if spread is not None:
            self.spreads.append(spread)
        where = spread.url if spread is not None else url_text(local.directory)
        self.later = Tiers(root, keep, where, local.keep, spread, newest_only=newest_only)
        """The local tier and the root."""
        self.uploader = Uploader(self.later, group, timeout=timeout, threads=threads)
        self.nearest = self.later
        """Where saves are committed first."""
        if in_front is not None:
            spread = SpreadTier(in_front.on_nodes(root), root, group, timeout)
            self.spreads.insert(0, spread)
            self.nearest = self.later.nearer = Tiers(where, All(), spread.url, Latest(in_front.keep), spread, newest_only=True)
            self.memory_uploader = Uploader(self.nearest, group, timeout=timeout, threads=threads)
            self.memory_uploader.published = lambda step, url, id: self.later.retain_in_background()

    def report_to(self, reporter: Reporter, published: Callable[[int, str, str | None], object]) -> None:
        """Have a reporter told of what happens to checkpoints here; and ``published`` of those that are at the root."""
        self.later.removed = partial(reporter.tell, "save.removed")
        if self.spread is not None:
            self.spread.copied = partial(reporter.tell, "save.copied")
        if self.uploader is not None:
            self.uploader.published, self.uploader.failed = published, reporter.not_published

    @property
    def spread(self) -> SpreadTier | None:
        """The nearest tier, if it is spread over the nodes."""
        return self.nearest.spread

    def check(self) -> None:
        """Once, if there are several ranks: whether all see the files of the local tier, or are connected to those who have them.
        Collective."""
        if self.later.spread is not None:
            self.later.spread.connect()
        elif not self._shared and self.later.local is not None:
            self._check_shared(open_backend(self.later.local))
            self._shared = True
        if self.memory_uploader is not None and self.nearest.spread is not None and self.later.local is not None:
            disks = StorageNode(name=self.later.local, domain="", below=partial(open_below, self.later.local), shared=True)
            self.nearest.spread.connect([disks] if self.later.spread is None else self.later.spread.nodes.nodes)

    def _check_shared(self, backend: Backend) -> None:
        call = self._group.call("local tier", self.root, self._timeout)

        def leave_file(rows: dict[int, Row]) -> str:
            path = f".prepare-{secrets.token_hex(8)}.tmp"  # `ckpt gc` knows such names
            backend.prepare()
            with backend.create(path, 0) as writer:
                writer.commit()
            return path

        path = call.map_reduce("write", dict, leave_file)

        def all_see(rows: dict[int, Row]) -> None:
            blind = [rank for rank, row in rows.items() if not row["seen"]]
            if blind:
                who = f"{ranks_text(blind)} cannot see what rank {self._group.leader} writes there"
                hint = "give local= a directory that all nodes share; or ckpt.NodeLocal(directory), if each node is to keep its own files"
                raise UsageError(f"the local tier is not the same directory on all ranks: {who}", where=backend.url, hint=hint)

        try:
            call.map_reduce("look", lambda: {"seen": _shows(backend, path)}, all_see)
        finally:
            if call.is_leader:
                backend.delete(path)

    def sources(self) -> dict[str, int]:
        """Bytes of data files that this process has read since the last restore began, by place."""
        return merged_sources([spread.sources() for spread in self.spreads])

    # ---- on the way to the root

    def publish(self, after: Future[Any] | None = None) -> None:
        """Bring what is committed to the later tiers when ``after`` has ended. Every rank does, in the same order."""
        if self.memory_uploader is not None:
            after = self.memory_uploader.add(after).over
        if self.uploader is not None:
            self.uploader.add(after)
        if self.memory_uploader is not None:
            self.spreads[-1].add(after)

    def finish(self, patience: float) -> StorageError | None:
        """Wait until everything is published and copied, and give why it could not be in so many seconds. Collective."""
        if self.uploader is None:
            return None
        staging = self.memory_uploader.finish(patience) if self.memory_uploader is not None else None
        error = self.uploader.finish(patience) or staging
        if self.memory_uploader is not None:
            self.spreads[-1].add()
        for spread in self.spreads:
            if uncopied := spread.finish():
                log.warning("steps of which not every file is on another node: %s", ", ".join(map(str, uncopied)))
        return error

    def settle(self, *, rest: bool = False) -> None:
        """Wait for what removes old checkpoints in the background; ``rest``: also of what waits there for further saves."""
        for tiers in {id(tiers): tiers for tiers in (self.later, self.nearest)}.values():
            tiers.settle(self._timeout, rest=rest)

    @property
    def uncopied(self) -> tuple[int, ...]:
        """Steps of which this node has still to give files to another one, or could not when it tried last."""
        return tuple(sorted({step for spread in self.spreads for step in spread.uncopied}))


def _check_memory(memory: object, local: object) -> None:
    if isinstance(local, Memory):
        raise UsageError("local= takes a directory or a ckpt.NodeLocal, not a ckpt.Memory", hint=f"memory={local!r}")
    if memory is not None and not isinstance(memory, Memory):
        raise UsageError(f"memory= takes a ckpt.Memory, not {memory!r}", hint="memory=ckpt.Memory(keep=2)")
    if memory is not None and isinstance(local, NodeLocal) and is_memory(url_text(local.directory)):
        raise UsageError("local= is in the memory of the machines, and so is memory=", hint="leave one of them out")


def _shows(backend: Backend, path: str) -> bool:
    end = time.monotonic() + LOOK
    while True:
        try:
            backend.size(path)
        except NotFoundError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.1)
        else:
            return True
