"""What the nodes have of one checkpoint, as of one look, what of it has no second place yet, and what of it is lost; and the second copies,
which are made in the background. No torch."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.catalog import DataFile
from ckpt.concurrency import waiting_once
from ckpt.engine.copied_files import FileCheck, FileCopy
from ckpt.engine.digest_reader import DigestReader
from ckpt.errors import CkptError, ConflictError, CorruptError, NotFoundError
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.datafile import box_text
from ckpt.formats.native.paths import COPIES, data_prefix, index_path, parity_prefix
from ckpt.formats.native.spans import read_spans
from ckpt.formats.native.writer import WriteJournal, committed_id
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend
from ckpt.plan.copies import NodeCopy, domain_groups, even_groups, is_complete, missing_copies
from ckpt.plan.parity import ParityLayout, PlannedParity, plan_parity, protected_files
from ckpt.runs.step_listing import Step, list_steps

from .backend import SpreadBackend
from .nodes import NodeSet
from .parity import BLOCK, ParityRecord, add_xor, block_digest, parity_path, read_records, record_path


@dataclass(frozen=True, slots=True, eq=False)
class SpreadFiles:
    """The data files of a checkpoint, and their sizes by path and node; and those of its parity files."""

    nodes: NodeSet
    backend: SpreadBackend
    id: str
    files: Mapping[str, DataFile]
    sizes: Mapping[str, Mapping[int, int]]
    parity: Mapping[str, Mapping[int, int]]

    @classmethod
    def of(cls, url: str, nodes: NodeSet) -> SpreadFiles:
        backend, catalog = open_backend(url), open_catalog(url)
        assert isinstance(backend, SpreadBackend) and isinstance(catalog, NativeCatalog)
        id = catalog.record.id
        parity = backend.holders(parity_prefix(id)) if nodes.parity is not None else {}
        return cls(nodes, backend, id, {f.path: f for f in catalog.files}, backend.holders(data_prefix(id)), parity)

    def holders(self) -> dict[str, set[int]]:
        """The nodes of the job that have each file whole: no copies are made from or to machines where no rank runs."""
        return {path: self._whole(self.sizes.get(path, {}), f.size) for path, f in self.files.items()}

    def _whole(self, sizes: Mapping[int, int], size: int) -> set[int]:
        return {node for node, there in sizes.items() if there == size and node < len(self.nodes.nodes)}

    @property
    def is_lost(self) -> bool:
        """Whether no node of the job has some file."""
        return not all(self.holders().values())

    @property
    def is_complete(self) -> bool:
        """Whether each file survives the loss of as many domains as it is meant to, and none is lost."""
        nodes = self.nodes
        if nodes.parity is None:
            return is_complete(self.holders(), nodes.domains, nodes.copies)
        return not self.is_lost and not self.missing_parity()

    def missing_copies(self) -> list[NodeCopy]:
        """What has to be copied."""
        if self.nodes.parity is not None:
            return []
        return missing_copies(self.holders(), self.nodes.domains, self.nodes.copies)

    def missing_parity(self) -> list[PlannedParity]:
        """The parity files that have to be made. None of a checkpoint of which something is lost: it cannot be protected any more."""
        holders, sizes, domains = self.holders(), {path: f.size for path, f in self.files.items()}, self.nodes.domains
        if self.nodes.parity is None or self.is_lost:
            return []
        groups = parity_groups(self.nodes, self.nodes.parity)
        planned = plan_parity(holders, sizes, domains, groups)
        missing = [one for one in planned if not self._is_made(one)]
        if missing and self.parity.keys() - {path for one in planned for path in self._paths(one)}:
            # An earlier job had other groups, since it had other nodes: what its parity protects needs no other.
            records = read_records(self.backend.reader, self.id, self.parity)
            stored = [(domains[node], r.layout) for path, r in records.items() for node in self._nodes_with(path, r.layout.size)]
            protected = protected_files(stored, holders, sizes, domains)
            planned = plan_parity(
                {path: nodes_with for path, nodes_with in holders.items() if path not in protected}, sizes, domains, groups
            )
            missing = [one for one in planned if not self._is_made(one)]
        return missing

    def _paths(self, planned: PlannedParity) -> tuple[str, str]:
        path = parity_path(self.id, planned.layout)
        return path, record_path(path)

    def _nodes_with(self, path: str, size: int) -> set[int]:
        """The nodes that have a parity file whole, with its record."""
        return self._whole(self.parity.get(path, {}), size) & self.parity.get(record_path(path), {}).keys()

    def _is_made(self, planned: PlannedParity) -> bool:
        """Whether a node that has none of its terms has a parity file whole, with its record."""
        nodes = self._nodes_with(self._paths(planned)[0], planned.layout.size)
        return not {self.nodes.domains[node] for node in nodes} <= {term.domain for term in planned.layout.terms}


def parity_groups(nodes: NodeSet, size: int) -> Sequence[Sequence[str]]:
    """The domains in groups of ``size``, or of more where some are left over."""
    return even_groups(domain_groups(nodes.domains, size - 1), size)


# That all second copies of a checkpoint were seen: a small file beside its index on every node, for ``ckpt memory status``.
#
# The leader writes it when the copies are complete, and removes it when a later life of the job finds that some are missing. Nothing that
# loads or copies asks it: what nodes have is asked of the nodes themselves.


def note_copies(nodes: NodeSet, url: str, id: str) -> None:
    """Note on every node of the job that the checkpoint ``id`` at ``url`` has all of its copies."""
    backend, path = open_backend(url), index_path(id, COPIES)
    assert isinstance(backend, SpreadBackend)
    data = json.dumps({"nodes": [node.name for node in nodes.nodes]}).encode()

    def put(node: int) -> None:
        with suppress(ConflictError):  # an earlier life of the job has noted it
            backend.node(node).put_if(path, data, expected=None)

    nodes.ask_all(put)
    if committed_id(backend) != id:  # it was removed or replaced meanwhile, and nobody would remove the note
        backend.delete(path)


def forget_copies(nodes: NodeSet, url: str, id: str) -> None:
    """Some copies are missing, though an earlier life of the job may have noted that it has all. Costs no message if it has not."""
    backend, path = open_backend(url), index_path(id, COPIES)
    assert isinstance(backend, SpreadBackend)
    with suppress(NotFoundError):
        backend.node(nodes.own).size(path)
        backend.delete(path)


def copies_seen(url: str) -> bool | None:
    """Whether all copies of the checkpoint at ``url``, in the memory of this machine, were seen. None if no other machine had a part in it:
    all of its files are here, and no copies are noted; or if it cannot be read, or only by those who ask for what it is."""
    backend = open_backend(url)
    try:
        id = committed_id(backend)
        if id is None:
            return None
        if COPIES in backend.list_dir(f"index-{id}"):
            return True
        prefix = data_prefix(id)
        here = {entry.path for entry in backend.list_prefix(prefix)}
        own = (file.path for file in open_catalog(url).files if file.path.startswith(prefix))  # others are of checkpoints referred to
        return None if here.issuperset(own) else False
    except CkptError:
        return None


# What of a checkpoint is lost: files that no node has that answers, that parity cannot give, and that are not at the root; by tensor, box
# and who had them.

NAMED = 4
"""Chunks that a message names."""


def lost_files(backend: SpreadBackend, catalog: NativeCatalog) -> list[int]:
    """Rows of the catalog's files that nobody has whole, and that cannot be computed."""
    prefix = data_prefix(catalog.record.id)
    sizes = backend.holders(prefix)
    lost = [n for n, f in enumerate(catalog.files) if f.size not in sizes.get(f.path, {}).values()]
    lost = [n for n in lost if not _is_computable(backend, catalog.files[n])]
    if not lost or (root := backend.root()) is None:
        return lost
    there = {entry.path: entry.size for entry in root.list_prefix(prefix)}
    return [n for n in lost if there.get(catalog.files[n].path) != catalog.files[n].size]


def missing_data(url: str) -> str | None:
    """Why the checkpoint cannot be loaded from the nodes that answer; None if it can, as far as listings say."""
    backend = open_backend(url)
    try:
        catalog = open_catalog(url)
    except CkptError as err:
        return f"its index cannot be read: {err.message}"
    if not isinstance(catalog, NativeCatalog) or not isinstance(backend, SpreadBackend):
        return None
    lost = lost_files(backend, catalog)
    if not lost:
        return None
    hosts: dict[int, str | None] = {}
    with suppress(CkptError):
        hosts = {rank: table.host for rank, table in read_spans(backend, catalog.record).items()}
    chunks = list(_chunks(catalog, lost))
    ranks = sorted({catalog.files[n].rank for n in lost})
    who = ", ".join(f"rank {rank}{f' on {host}' if (host := hosts.get(rank)) else ''}" for rank in ranks[:NAMED])
    names = ", ".join(chunks[:NAMED]) + (f" and {len(chunks) - NAMED} more" if len(chunks) > NAMED else "")
    parity = next((missing for n in lost if (missing := backend.reader.parity.missing(catalog.files[n].path)) is not None), None)
    places = "on no node that answers and not at the root"
    places += "" if parity is None else f", and parity gives the first of them only with {parity}"
    count = f"{len(lost)} of {len(catalog.files)} files are {places}"
    return f"{count}; {who}{' and others' if len(ranks) > NAMED else ''} wrote them: {names}"


def _is_computable(backend: SpreadBackend, file: DataFile) -> bool:
    try:
        return backend.reader.parity.size(file.path) == file.size
    except NotFoundError:
        return False


def _chunks(catalog: NativeCatalog, files: Collection[int]) -> Iterator[str]:
    """Tensor and box of each chunk that is in one of these files."""
    for name, entry in catalog.tensors.items():
        if entry.alias is None:
            of_chunk = np.broadcast_to(entry.grid.files, (len(entry.grid.all_boxes()[0]),))
            for chunk in np.flatnonzero(np.isin(of_chunk, list(files))).tolist():
                yield name + box_text(entry.grid.box(chunk), entry.shape)


# Second copies: what this node has and too few others do is given to the nodes that ``plan.copies`` names, in the background; or it
# makes its part of the parity.
#
# One process of each node does it, after each save. It asks all nodes what they have and plans; all plan alike, so nothing is agreed, and a
# process that dies in the middle leaves nothing but a copy that the next round makes. Every chunk is compared with its digest before it is
# sent, and every message on its arrival: a copy is never anything but what the checkpoint says.


def _slow_down(nbytes: int, began: float, max_bandwidth: float | None) -> None:
    """Wait until ``nbytes`` that have moved since ``began`` are no more than the limit allows."""
    if max_bandwidth is not None:
        time.sleep(max(0.0, nbytes / max_bandwidth - (time.monotonic() - began)))


def _compare(own: Backend, file: DataFile) -> None:
    check = FileCheck(DigestReader(own), file)
    for task in check.jobs():
        task()
    if check.damaged:
        where = f"{own.url.rstrip('/')}/{file.path}"
        raise CorruptError("a file that parity is made of is damaged", where=where, hint="look at the disk or the memory of this machine")


log = logging.getLogger("ckpt")


Completed = Callable[[int, str, str, float], object]
PATIENCE, PAUSE = 5.0, 0.2
"""For so many seconds, and so often, one node looks whether the others have made their copies; then again after the next save."""


def _is_there(step: Step) -> bool:
    """Whether a step that was listed is still committed; also if nobody can say."""
    try:
        return committed_id(open_backend(step.url)) == step.id
    except CkptError:
        return True


class NodeCopier:
    """Copies the files of one node. ``max_bandwidth``: bytes a second at most, or None.

    ``completed``: called once for each step that has all of its copies, those by other nodes too, with its number, URL, id, and the seconds
    since this node saw it committed; on one node of the job.
    """

    def __init__(self, nodes: NodeSet, max_bandwidth: float | None, completed: Completed | None = None) -> None:
        self.uncopied: tuple[int, ...] = ()
        """Steps of which files of this node are still to be copied, or could not be when that was tried last."""
        self.copied = 0
        """Bytes that were given to other nodes, or read from them for parity."""
        self._nodes = nodes
        self._max_bandwidth = max_bandwidth
        self._complete: set[str | None] = set()
        """Ids of steps whose files this node has given away."""
        self._completed = completed
        self._incomplete: dict[str, tuple[Step, float]] = {}
        """By id the steps of which others have still to make copies, if somebody wants to know, and when they were seen first."""
        self._lost: set[str] = set()
        """Ids of steps that were said to lack files."""
        self._waiting: deque[Future[Any] | None] = deque()
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()

    def add(self, after: Future[Any] | None = None) -> None:
        """Copy what is committed when ``after`` has ended, well or not."""
        with self._lock:
            self._waiting.append(after)
            if self._idle.is_set():  # a daemon: a program that ends without close() does not wait
                self._idle.clear()
                threading.Thread(target=self._work, name="ckpt-copies", daemon=True).start()

    def finish(self, seconds: float) -> bool:
        """Wait until nothing is going on any more; whether that was so within so many seconds."""
        return self._idle.wait(seconds)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._idle.set()
                    return
                after = self._waiting.popleft()
            if after is not None:
                wait([after])
            try:
                self._round()
            except Exception as err:  # noqa: BLE001  the next round tries again, and ``uncopied`` stays
                log.warning("second copies could not be made: %s", err)

    @waiting_once()
    def _round(self) -> None:
        listed = list_steps(self._nodes.url)
        self._complete &= {step.id for step in listed}  # a job saves millions of steps, and few stay
        steps = [step for step in reversed(listed) if step.committed and step.id not in self._complete]
        self.uncopied = tuple(sorted(step.number for step in steps if step.number is not None))
        for step in steps:
            if self._completed is not None and step.id is not None:
                self._incomplete.setdefault(step.id, (step, time.monotonic()))
            try:
                self._protect(step)
                self._complete.add(step.id)
            except CkptError as err:
                if _is_there(step):
                    log.warning("%s: not every file could be copied to another node: %s", step.url, err)
                    continue
                log.debug("%s was removed while it was copied: %s", step.url, err)
            self.uncopied = tuple(number for number in self.uncopied if number != step.number)
        until = time.monotonic() + PATIENCE
        while self._report_complete() and not self._waiting and time.monotonic() < until:
            time.sleep(PAUSE)

    def report_complete(self) -> None:
        """Say of which steps all nodes have made their copies by now."""
        try:
            self._report_complete()
        except CkptError as err:
            log.warning("whether all second copies are there cannot be seen: %s", err)

    def _report_complete(self) -> bool:
        """The same; whether some may still become complete."""
        there = {step.id for step in list_steps(self._nodes.url)} if self._incomplete else set()
        going_on = False
        for id, (step, since) in [*self._incomplete.items()]:
            if id not in there:  # removed, or replaced
                self._incomplete.pop(id, None)
                continue
            files = SpreadFiles.of(step.url, self._nodes)
            if not files.is_complete:
                forget_copies(self._nodes, step.url, id)
                if files.is_lost:
                    self._warn_of_lost(step, id)
                else:
                    going_on = True
                continue
            self._incomplete.pop(id, None)
            if self._completed is not None and step.number is not None:
                self._completed(step.number, step.url, id, time.monotonic() - since)
        return going_on

    def _warn_of_lost(self, step: Step, id: str) -> None:
        """Nobody can copy what no node has: say so, once."""
        if id not in self._lost:
            self._lost.add(id)
            log.warning("%s: some of its files are on no machine of the job any more, so it gets no further copies or parity", step.url)

    def _protect(self, step: Step) -> None:
        """Make the copies, or the parity, that this node is to make of a checkpoint."""
        there = SpreadFiles.of(step.url, self._nodes)
        made: list[NodeCopy] = []
        failed: CkptError | None = None
        for copy in there.missing_copies():
            if copy.source != self._nodes.own:
                continue
            try:
                self._copy(there.backend, copy, there.files[copy.path], replace=copy.target in there.sizes.get(copy.path, {}))
                made.append(copy)
            except CkptError as err:  # the others are copied all the same
                failed = failed or err
        # Whoever removes a step deletes its record first, and then lists its files. So he has seen a copy that was there before
        # this look, and what came later is deleted here. No other save has a file of these names.
        if made and not _is_there(step):
            for copy in made:
                with suppress(CkptError):
                    there.backend.node(copy.target).delete(copy.path)
        if failed is not None:
            raise failed
        self._make_parity(there)

    def _copy(self, backend: SpreadBackend, copy: NodeCopy, file: DataFile, *, replace: bool) -> None:
        """Give one file to one node. ``replace``: it has one of this name that is not whole."""
        source, target = backend.node(copy.source), backend.node(copy.target)
        if replace:
            target.delete(copy.path)
        job = FileCopy(DigestReader(source), WriteJournal(target), file)
        try:
            for task in job.jobs():
                began = time.monotonic()
                count = task()
                self.copied += count
                _slow_down(count, began, self._max_bandwidth)
        except ConflictError:
            return  # another process was first
        finally:
            job.abort()  # does nothing to one that is committed

    # ---- parity: ranges of files of other nodes, whose XOR is stored with a record of what it is

    def _make_parity(self, there: SpreadFiles) -> None:
        """Make the parity files that this node lacks of a checkpoint."""
        missing, own = there.missing_parity(), there.backend.node(self._nodes.own)
        # Others compute parity of this node's files. Only this node can compare them with their digests without reading
        # them over the network; that it makes its own parity says that it has.
        wanted = {term.path for one in missing for term in one.layout.terms}
        for path, having in there.holders().items():
            if self._nodes.own in having and path in wanted:
                _compare(own, there.files[path])
        for one in missing:
            if one.target == self._nodes.own:
                self._make(there.backend, own, there.id, one.layout)

    def _make(self, backend: SpreadBackend, own: Backend, id: str, layout: ParityLayout) -> None:
        record = ParityRecord(id, layout, ())
        own.delete(record.record_path)  # of a process that died between the two, or of a disk that has cut one off
        own.delete(record.path)
        digests = []
        try:
            with own.create(record.path, layout.size) as writer:
                for at in range(0, layout.size, BLOCK):
                    block = self._block(backend, layout, at, min(BLOCK, layout.size - at))
                    digests.append(block_digest(block))
                    writer.write(at, [block])
                writer.commit()
            own.put_if(record.record_path, ParityRecord(id, layout, digests).encode(), expected=None)
        except ConflictError:
            return  # another process was first
        if committed_id(own) != id:  # removed meanwhile, by somebody who did not see these files
            own.delete(record.record_path)
            own.delete(record.path)

    def _block(self, backend: SpreadBackend, layout: ParityLayout, at: int, length: int) -> memoryview:
        began = time.monotonic()
        block = np.zeros(length, dtype=np.uint8).data
        received = add_xor(block, [*layout.overlapping(at, at + length)], backend.reader.read_from_any)
        self.copied += received
        _slow_down(received, began, self._max_bandwidth)
        return block
