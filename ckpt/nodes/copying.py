"""Second copies: what this node has and too few others do is given to the nodes that ``plan.copies`` names, in the background; or it
makes its part of the parity (:class:`ParityWriter`).

One process of each node does it, after each save. It asks all nodes what they have and plans; all plan alike, so nothing is agreed, and a
process that dies in the middle leaves nothing but a copy that the next round makes. Every chunk is compared with its digest before it is
sent, and every message on its arrival: a copy is never anything but what the checkpoint says. No torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

import numpy as np

from ckpt.catalog import DataFile
from ckpt.engine.copy.files import FileCheck, FileCopy
from ckpt.engine.digest_reader import DigestReader
from ckpt.errors import CkptError, ConflictError, CorruptError
from ckpt.formats.journal import WriteJournal
from ckpt.formats.native.writer import committed_id
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend
from ckpt.plan.copies import NodeCopy
from ckpt.plan.parity import ParityLayout
from ckpt.runs.step_listing import Step, list_steps

from .backend import SpreadBackend
from .copies import SpreadFiles, forget_copies
from .nodes import NodeSet
from .parity import BLOCK, ParityRecord, add_xor, block_digest

# Making a parity file: this node reads ranges of files of other nodes, and stores their XOR with a record of what it is.


class ParityWriter:
    """Makes the parity files of one node. ``pace``: bytes a second that it reads from others at most, or None."""

    def __init__(self, nodes: NodeSet, pace: float | None) -> None:
        self.received = 0
        """Bytes that were read from other nodes."""
        self._nodes = nodes
        self._pace = pace

    def make_missing(self, there: SpreadFiles) -> None:
        """Make those that this node lacks of a checkpoint."""
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
        self.received += received
        _limit_rate(received, self._pace, began)
        return block


def _limit_rate(count: int, pace: float | None, began: float) -> None:
    """Sleep until ``count`` bytes since ``began`` are no more than ``pace`` bytes a second."""
    if pace is not None:
        time.sleep(max(0.0, count / pace - (time.monotonic() - began)))


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
    """Copies the files of one node. ``pace``: bytes a second at most, or None. ``completed``: called once for each step that has all of its
    copies, those by other nodes too, with its number, URL, id, and the seconds since this node saw it committed; on one node of the job."""

    def __init__(self, nodes: NodeSet, pace: float | None, completed: Completed | None = None) -> None:
        self.uncopied: tuple[int, ...] = ()
        """Steps of which files of this node are still to be copied, or could not be when that was tried last."""
        self._given = 0
        self._parity = ParityWriter(nodes, pace)
        self._nodes = nodes
        self._pace = pace
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

    @property
    def copied(self) -> int:
        """Bytes that were given to other nodes, or read from them for parity."""
        return self._given + self._parity.received

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
        self._parity.make_missing(there)

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
                self._given += count
                _limit_rate(count, self._pace, began)
        except ConflictError:
            return  # another process was first
        finally:
            job.abort()  # does nothing to one that is committed
