"""A local tier whose files stay on the nodes that wrote them, with copies on others (docs/storage.md). No torch."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import xxhash

from ckpt.concurrency import waiting_once
from ckpt.errors import CkptError, UsageError
from ckpt.io_backends.registry import is_file_system, open_below, real_url
from ckpt.net.group import Group
from ckpt.nodes.backend import register_run, run_url, unregister_run
from ckpt.nodes.copies import Completed, NodeCopier, missing_data, note_copies
from ckpt.nodes.nodes import PARITY, ROOT, NodeSet, StorageNode
from ckpt.nodes.rendezvous import JobNodes, is_memory, meet, own_node
from ckpt.plan.copies import MirrorPlacement
from ckpt.policies import EverySteps, KeepPolicy, Latest, SavePolicy
from ckpt.policies.both import check_arguments
from ckpt.settings import check_whole
from ckpt.text import show_as, url_text

from .step_listing import Step

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class SharedLocal:
    """A directory on a fast disk that all ranks see, for ``Checkpointer(local=...)``. A path alone means the same.

    Args:
        directory: its path.
        keep: what stays there. The newest checkpoint, and the one that is being published, always do.
    """

    directory: str | os.PathLike[str]
    keep: KeepPolicy = Latest(1)  # noqa: RUF009  a value

    def __post_init__(self) -> None:
        check_arguments(keep=self.keep)
        directory: object = self.directory
        if not isinstance(directory, str | os.PathLike):
            text = f"local= is a directory, a ckpt.SharedLocal or a ckpt.NodeLocal, not {type(directory).__name__}"
            raise UsageError(text, hint='local="/scratch/run"')


@dataclass(frozen=True, slots=True)
class NodeLocal:
    """A directory on a disk of each node, for ``Checkpointer(local=...)``: each rank's files stay on its node, and ``copies`` other nodes
    get them in the background, or ``parity`` of them. Small files, such as the index, are on every node.

    Args:
        directory: a path that is on another disk on each node; or ``memory://name``, the memory of each machine, where checkpoints outlive
            the processes that saved them.
        copies: how many nodes may be lost without losing a checkpoint, if their copies are complete. Copies go to other failure domains:
            machines, or the value of ``CKPT_DOMAIN``. 0: none. By default 1, or none with ``parity``.
        parity: in place of copies, groups of so many failure domains keep the XOR of each other's files, which takes 1 / (``parity`` - 1)
            of their space. Of each group one domain may be lost. At least 3.
        max_bandwidth: bytes a second at which a node gives copies away, or reads for parity, at most.
        keep: what stays there, as for :class:`SharedLocal`.

    Raises:
        UsageError: ``directory`` is a URL of something else, ``copies`` no number of nodes, ``parity`` below 3 or given with copies, or
            ``max_bandwidth`` no speed.
    """

    directory: str | os.PathLike[str]
    copies: int | None = None
    parity: int | None = None
    max_bandwidth: float | None = None
    keep: KeepPolicy = Latest(1)  # noqa: RUF009  a value

    def __post_init__(self) -> None:
        check_arguments(keep=self.keep)
        text = url_text(self.directory) if isinstance(self.directory, str | os.PathLike) else None
        if text is None or not (is_file_system(text) or is_memory(text)):
            hint = 'give a path or "memory://name"; root= takes the URL of an object store'
            raise UsageError(f"NodeLocal takes a directory or this machine's memory, not {self.directory!r}", hint=hint)
        if self.copies is not None:
            check_whole(self.copies, "copies", 0, "1 survives the loss of any one node")
        if self.parity is not None:
            check_whole(self.parity, "parity, how many nodes form a group,", 3, "of 2 nodes it is copies=1")
        if self.parity is not None and self.copies:
            raise UsageError("copies= and parity= do not go together", hint="parity=4 takes less memory, copies=2 survives more losses")
        if self.max_bandwidth is not None and (not isinstance(self.max_bandwidth, int | float) or not self.max_bandwidth > 0):
            hint = "max_bandwidth=200e6; leave it out for no limit"
            raise UsageError(f"max_bandwidth is bytes a second, not {self.max_bandwidth!r}", hint=hint)


@dataclass(frozen=True, slots=True)
class Memory:
    """Checkpoints in the memory of the job's machines, for ``Checkpointer(memory=...)``: they outlive all processes of the job and the loss
    of machines, and cost no storage. Those that ``save=`` asks for are published to the root, too.

    Args:
        every: when to save into memory; of the policies those that follow from step numbers alone.
        keep: how many steps each machine keeps. At least 2: while one is saved, the one before must be whole.
        copies, parity, max_bandwidth: as for :class:`NodeLocal`.

    Raises:
        UsageError: ``every`` needs a clock or a signal, ``keep`` is below 2; or as for :class:`NodeLocal`.
    """

    every: SavePolicy = EverySteps(1)  # noqa: RUF009  a value
    keep: int = 2
    copies: int | None = None
    parity: int | None = None
    max_bandwidth: float | None = None

    def __post_init__(self) -> None:
        check_arguments(every=self.every)
        if self.every.leader_part is not None or self.every.watched_signals:
            hint = "every=EverySteps(1); save= takes all policies"
            raise UsageError(f"saves into memory follow from step numbers alone, and not from {self.every}", hint=hint)
        check_whole(self.keep, "keep, how many steps stay in memory,", 2, "while one is saved, the one before must be whole")
        self.on_nodes("run")

    def on_nodes(self, root: str) -> NodeLocal:
        """Where the checkpoints of the run at ``root`` lie in each machine's memory."""
        return NodeLocal(f"memory://{_name(root)}", self.copies, self.parity, self.max_bandwidth, Latest(self.keep))


def _name(root: str) -> str:
    """A name of a run, the same on all machines. A colon would make the rest of it a port."""
    shown = re.sub(r"[^\w.=+-]", "_", root.rstrip("/").rpartition("/")[2])
    return f"{xxhash.xxh3_64_hexdigest(real_url(root).encode())[:8]}-{shown}"


class SpreadTier:
    """One rank's end of the tier of one run, whose checkpoints lie at ``url`` for this process."""

    def __init__(self, given: NodeLocal, root: str, group: Group, timeout: float) -> None:
        self._directory = url_text(given.directory)
        self._root = root
        self._parity = given.parity
        self._copies = (1 if given.parity is None else 0) if given.copies is None else given.copies
        self._members = self._copies + 1 if given.parity is None else given.parity
        """Domains of a group."""
        self._max_bandwidth = given.max_bandwidth
        self._group, self._finishing = group, group.apart()
        self._timeout = timeout
        if real_url(self._directory) == real_url(root):
            raise UsageError("local is the same place as the root", where=root, hint="leave local= out to save straight to the root")
        # Not the directory, which may have another name on each node: ranks compare URLs.
        self.url = run_url(f"{_name(root)}-{'memory' if is_memory(self._directory) else 'disks'}")
        self.in_memory = is_memory(self._directory)
        self.own_url = f"{self.url}-alone"
        """The same without what is only read: what may be removed here."""
        for url in (self.url, self.own_url):
            show_as(url, self._directory)
        self.nodes = self._set(JobNodes(nodes=[own_node(self._directory)], own=0), ())
        self._meeting: JobNodes | None = None
        self._copier: NodeCopier | None = None
        self.placement: MirrorPlacement | None = None
        """Which replicas make copies unnecessary, once connected; None if there are to be no copies. Parity takes less space than a second
        copy of what replicas have."""
        self.copied: Completed = lambda step, url, id, seconds: None
        """Told, on the leader, of each step that has all of its second copies (``NodeCopier``)."""
        self._know()

    def _know(self) -> None:
        self._alone = replace(self.nodes, url=self.own_url, further=(), strict=True)
        register_run(self.nodes)
        register_run(self._alone)

    def _set(self, meeting: JobNodes, behind: Sequence[StorageNode]) -> NodeSet:
        return NodeSet(
            url=self.url,
            nodes=meeting.nodes,
            own=meeting.own,
            copies=self._copies,
            parity=self._parity,
            fallback=partial(open_below, self._root),
            further=[*meeting.survivors, *behind],
        )

    def connect(self, behind: Sequence[StorageNode] = ()) -> None:
        """Find the nodes of all ranks, once. ``behind``: where the same files may be, too. Collective."""
        if self._meeting is not None:
            return
        self._meeting = meeting = meet(self._group, self._directory, self.url, self._timeout)
        self.nodes = self._set(meeting, behind)
        self._know()
        if self._members == 1:
            return
        if self._parity is None and len(self.nodes.nodes) > 1:
            domain_of = {rank: node.domain for node in self.nodes.nodes for rank in node.ranks}
            self.placement = MirrorPlacement(domains={rank: domain_of[rank] for rank in self._group.ranks}, copies=self._copies)
        domains = sorted({*self.nodes.domains})
        leads = self._group.rank == self._group.leader
        if leads and len(domains) < self._members:
            asked = f"copies={self._copies}" if self._parity is None else f"parity={self._parity}"
            if len(domains) == 1:
                made = "nothing is kept elsewhere, and with this machine its files are lost"
            else:
                made = f"only {len(domains) - 1} are made" if self._parity is None else f"it takes {100 // (len(domains) - 1)} % more space"
            message = "%s needs %d failure domains (CKPT_DOMAIN), and the job is in %d: %s; %s"
            log.warning(message, asked, self._members, len(domains), ", ".join(domains), made)
        if meeting.server is not None or self._group.size == 1:
            # The leader says when a step has all of its copies; never, if it cannot have them.
            says = leads and len(domains) >= (self._members if self._parity is None else 2)
            self._copier = NodeCopier(self.nodes, self._max_bandwidth, self._completed if says else None)

    def judged(self, step: Step) -> Step:
        """The same step; as damaged, with the reason, if the nodes that answer and the root lack files of it."""
        why = missing_data(step.url) if step.committed else None
        return step if why is None else replace(step, committed=False, damaged=True, reason=why)

    def sources(self) -> dict[str, int]:
        """Bytes of data files that this process has read since :meth:`forget_sources`, by place, the nearest first; the root last."""
        read, places = self.nodes.read_from, {self.nodes.place_of(self.nodes.own): 0}
        for number in self.nodes.by_nearness():
            if number in read:
                places[self.nodes.place_of(number)] = places.get(self.nodes.place_of(number), 0) + read[number]
        computed = {"parity": read[PARITY]} if read[PARITY] else {}
        return {**places, **computed, "root": read[ROOT]}

    def forget_sources(self) -> None:
        self.nodes.read_from.clear()

    def removing(self) -> AbstractContextManager[None]:
        """Around what removes steps here: a silent node is waited for once. The other ranks wait for the end of that where it is memory,
        and must not take this one for dead."""
        return waiting_once(self._timeout / 2 if self.in_memory else self._timeout)

    # ---- copies

    def _completed(self, step: int, url: str, id: str, seconds: float) -> None:
        if self.in_memory:
            try:
                note_copies(self.nodes, url, id)
            except CkptError as err:  # for people alone
                log.debug("that step %d has all of its copies was not noted: %s", step, err)
        self.copied(step, url, id, seconds)

    def add(self, after: Future[Any] | None = None) -> None:
        """Make copies of what is committed when ``after`` has ended."""
        if self._copier is not None:
            self._copier.add(after)

    @property
    def uncopied(self) -> tuple[int, ...]:
        """Steps of which this node has still to copy its files, or could not when it tried last."""
        return self._copier.uncopied if self._copier is not None else ()

    def finish(self) -> tuple[int, ...]:
        """Wait until all nodes have made their copies; the steps of which some could not, or have not within the timeout. Collective."""
        if self._meeting is None:
            return ()
        if self._copier is not None and not self._copier.finish(self._timeout):
            log.warning("second copies are still being made after %g s", self._timeout)
        call = self._finishing.call("copies", self.url, self._timeout)
        uncopied: list[int] = call.map_reduce(
            "finish",
            lambda: {"uncopied": list(self.uncopied)},
            lambda rows: sorted({step for row in rows.values() for step in row["uncopied"]}),
        )
        if self._copier is not None:
            self._copier.report_complete()
        return tuple(uncopied)

    def close(self) -> None:
        """Serve no other node any more."""
        if self._meeting is not None:
            self._meeting.close()
        unregister_run(self.nodes)
        unregister_run(self._alone)


def merged_sources(sources: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The bytes of several tiers, the nearest first, by place; what was computed from parity and the root last."""
    merged: Counter[str] = Counter()
    for places in sources:
        merged.update(places)
    last = {place: merged.pop(place) for place in ("parity", "root") if place in merged}
    return {**merged, **last}
