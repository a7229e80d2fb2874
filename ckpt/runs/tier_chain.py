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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

from ckpt import units
from ckpt.engine.load.load import PARTLY_WRITTEN, UNCHANGED
from ckpt.engine.save.options import SaveOptions
from ckpt.errors import (
    AccessError,
    CkptError,
    ConflictError,
    CorruptError,
    NotCommittedError,
    NotFoundError,
    StorageError,
    UsageError,
    raised,
)
from ckpt.formats.native.commit import Branch, Branches
from ckpt.formats.native.paths import step_number
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend, open_below
from ckpt.net.channel import Row
from ckpt.net.group import Group
from ckpt.nodes.backend import is_spread
from ckpt.nodes.nodes import StorageNode
from ckpt.nodes.rendezvous import is_memory
from ckpt.plan import tree
from ckpt.plan.tables import ranks_text
from ckpt.policies import All, KeepPolicy, Latest
from ckpt.settings import sources as checked_sources
from ckpt.text import url_text

from .node_tier import Memory, NodeLocal, SharedLocal, SpreadTier, merged_sources
from .reporter import Reporter
from .save_schedule import check_step
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
        if isinstance(local, Memory):
            raise UsageError("local= is a directory, a ckpt.SharedLocal or a ckpt.NodeLocal, not a ckpt.Memory", hint=f"memory={local!r}")
        if memory is not None and not isinstance(memory, Memory):
            raise UsageError(f"memory= takes a ckpt.Memory, not {memory!r}", hint="memory=ckpt.Memory(keep=2)")
        if memory is not None and isinstance(local, NodeLocal) and is_memory(url_text(local.directory)):
            raise UsageError("local= is in the memory of the machines, and so is memory=", hint="leave one of them out")
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

    # ---- going on

    def load_nearest(self, load: Callable[..., object], step: int | None, id: str | None = None) -> LoadedCopy | None:
        """Call ``load`` with the URL of the newest checkpoint, or of that of ``step``, until it finds one whole; None if there is none.
        With ``id``, of that save alone. Collective, and so is ``load``.

        A checkpoint that lost its values (``ckpt rebuild``) may lack what a job needs to go on as before. So unless ``step`` asks for it,
        it has to fit the state in full, also where ``load`` would take less; else it counts as damaged.
        """
        failed: CkptError | None = None
        tried: set[tuple[str, str]] = set()
        while True:
            # Listed anew each time: what could not be read may have been removed because something newer is there.
            call = self._group.call("restore", self.root, self._timeout)
            copies: list[list[Any]] = call.map_reduce(
                "list", dict, lambda rows: [c for c in self.later.copies(step, tried) if id is None or c[2] == id]
            )
            if not copies:
                break
            number, url, copy_id, lost, branches = copies[0]
            tried.add((url, copy_id))
            again = len(copies) > 1
            try:
                load(url, **({"strict": True} if lost and step is None else {}))
            except CkptError as err:
                if lost and step is None and isinstance(err, CorruptError):
                    err.hint = f"restore(state, step={number}, strict=False) takes what is left of it"
                # Damage always leads to another copy. A storage error does only if there is another copy of the *same*
                # step: an older step instead of one that is merely out of reach would silently lose training.
                kinds = (CorruptError, *(_NOT_THERE if again else () if step is not None else _GONE))
                if (step is not None and not again) or not self._passed_over(url, err, kinds):
                    raise
                # A load says what has become of the state, for callers that stop there. Here another copy or step is loaded into
                # all of it next; if that fails too, the error that is raised still says it.
                reason = str(err).replace(f"; {PARTLY_WRITTEN}", "").replace(f"; {UNCHANGED}", "")
                log.warning("%s is passed over: %s; what the run has beside it is tried next", url, reason)
                self.nearest.damaged.add(copy_id)
                failed = err
                continue
            if self.uploader is not None:
                log.info("going on from step %d: %s", number, url)
            places = [other for _, other, other_id, *_ in copies if other_id == copy_id]
            lasting = [place for place in places if not is_spread(place)] if self.spreads else places
            return LoadedCopy(number, url, next(iter(lasting), None), tuple(Branch(*row) for row in branches))
        if failed is not None:
            raise failed
        return None

    def load_origin(self, origin: BeginFrom, load: Callable[..., object]) -> LoadedCopy:
        """Load the checkpoint that a run begins from. The leader finds the step, for all ranks. Collective."""
        call = self._group.call("restore", origin.location, self._timeout)
        step: int = call.map_reduce("begin", dict, lambda rows: origin.find_step())
        load(origin.location, **origin.load_options)
        log.info("loaded step %d of %s, to begin from", step, origin.location)
        return LoadedCopy(step, origin.location, origin.location)

    def _passed_over(self, url: str, err: CkptError, kinds: tuple[type[CkptError], ...]) -> bool:
        """Whether any rank raised one of these ``kinds``; all ranks come here together, since a load fails on all."""
        # The ranks may fail in different ways: one reads damage, the others hear of it. All of them ask together and take the same way.
        mine = raised(err, *kinds)
        call = self._group.call("restore", url, self._timeout)
        return bool(call.map_reduce("damaged", lambda: {"damaged": mine}, lambda rows: any(row["damaged"] for row in rows.values())))


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


# Which checkpoint a job goes on from: the newest that is whole, the nearest copy first; or, where the run has none of its own yet, one of
# DCP, Megatron, DeepSpeed or of another run. All ranks take the same.

_COUNTERS = ("step", "global_step", "global_steps", "iteration")
"""Names by which training loops keep the number of their steps in the state."""


@dataclass(frozen=True, slots=True)
class BeginFrom:
    """A checkpoint to begin a run from, for :meth:`ckpt.Checkpointer.restore`. Any format that ``ckpt.load`` reads.

    Args:
        url: path or URL of the checkpoint.
        step: the training step that it was saved after. By default the number at the end of its path (``step-7``, ``iter_0001000``,
            ``global_step3``, ``checkpoint-500``, ``500``), or else a whole number that its state has as ``step``, ``global_step``,
            ``global_steps`` or ``iteration``.
        only, rename, strict, cast: as for :func:`ckpt.load`, for this checkpoint alone. What is not given is as ``restore`` was given it.
        sources: as for :func:`ckpt.open`.
    """

    url: str | os.PathLike[str]
    step: int | None = None
    only: str | Sequence[str] | None = field(default=None, hash=False)
    rename: Mapping[str, str] | None = field(default=None, hash=False)
    strict: bool | None = None
    cast: bool | None = None
    sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] | None = field(default=None, hash=False)

    @classmethod
    def of(cls, given: str | os.PathLike[str] | BeginFrom) -> BeginFrom:
        """A URL alone stands for itself with no options."""
        origin = given if isinstance(given, BeginFrom) else cls(given)
        if not isinstance(origin.url, str | os.PathLike):
            raise UsageError(f"begin_from= takes a path, a URL or a ckpt.BeginFrom, not {given!r}")
        if origin.step is not None:
            check_step(origin.step)
        return origin

    @property
    def location(self) -> str:
        """The text of ``url``."""
        return url_text(self.url)

    @property
    def load_options(self) -> dict[str, Any]:
        """What was given for the load."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("url", "step")}
        return {name: value for name, value in values.items() if value is not None}

    def find_step(self) -> int:
        """The step that the checkpoint was saved after."""
        if self.step is not None:
            return self.step
        catalog = open_catalog(self.location, sources=checked_sources(self.sources))
        name = catalog.url.rstrip("/").rpartition("/")[2]  # not ours: of a directory above several, the catalog's is the latest of them
        number = step_number(name)
        if number is not None:
            return number
        counted = {key: value for key, value in tree.pairs_of(catalog.state) or () if key in _COUNTERS}
        steps = {value for value in counted.values() if isinstance(value, int) and not isinstance(value, bool) and value >= 0}
        if len(steps) != 1:
            what = f"its state has {counted}" if counted else "neither its path nor its state has a number"
            raise UsageError(
                f"which step this checkpoint was saved after is not clear: {what}",
                where=self.location,
                hint="give the number: restore(state, begin_from=ckpt.BeginFrom(url, step=…))",
            )
        return steps.pop()


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredFrom:
    """What :meth:`ckpt.Checkpointer.restore` has loaded; ``str`` has it in words.

    ``url``: a copy of it that any process can open; None if only this job can, since its files are spread over machines and the step is
    not at the root. ``sources``: the bytes of data files that this rank has read, by where they were: ``memory of this host``,
    ``disk of host b``, ``parity`` (computed from what other machines have), ``root``. Empty without a tier that is spread over machines.
    """

    step: int
    url: str | None
    sources: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        where = self.url if self.url is not None else f"step {self.step}, which only this job can open"
        if not self.sources:
            return where
        return f"{where}: {', '.join(f'{place} {units.size(nbytes)}' for place, nbytes in self.sources.items())}"


_NOT_THERE = (StorageError, AccessError, NotFoundError, NotCommittedError)
"""What, beside damage, sends ranks to another copy of the same step, if there is one."""
_GONE = (NotFoundError, NotCommittedError, ConflictError)
"""What a step gives that was removed or replaced after it was listed."""


def origin_of(step: int | None, begin_from: str | os.PathLike[str] | BeginFrom | None, options: Mapping[str, Any]) -> BeginFrom | None:
    """What a run without checkpoints begins from, if something is given."""
    if begin_from is not None and step is not None:
        raise UsageError("step= asks for a checkpoint of this run, begin_from= for one from elsewhere", hint="give one of them")
    if options.get("dry_run"):
        raise UsageError("restore loads, and continues from the loaded step", hint="ckpt.load(c.url(n), state, dry_run=True) plans it")
    return BeginFrom.of(begin_from) if begin_from is not None else None


class LoadedCopy(NamedTuple):
    """The copy that was loaded: its step, and where ``load`` found it. ``lasting``: the URL of a copy with the same bytes that any process
    can open, if there is one. ``branches``: of what is saved after it."""

    step: int
    url: str
    lasting: str | None
    branches: Branches = ()
