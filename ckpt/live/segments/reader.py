"""Segments of other processes of this machine, as a reader maps them. No torch.

Mapping costs a fault, or its share of a call, for each page, and unmapping as much again: together more than half of a copy. A source fills
the same few files again and again, so a sink keeps what it has mapped, and a take begins with a lease and a look at the token:

    take       lease the file (a shared lock) ──► is the token that of the version? ──► read ──► end of the take: no lease any more
    between    the source may renew the segment: what is mapped shows the new bytes, and nobody reads them before the next lease

A mapping keeps the memory of a file that its owner has let go of. So a thread looks every ``LOOK`` seconds whether the owner still has the
file open; else the mapping goes, whether or not there is another take.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from contextlib import suppress
from weakref import ReferenceType, finalize, ref

import numpy as np

from ckpt.errors import CorruptError, NotFoundError

from .segment import BLOCK, DATA, MAGIC, NAME, TOKEN_BYTES, Bytes, Digests, SegmentAddress, digest_of_digests, digests_at, file_size

MOST_SEGMENT = 1 << 46
"""Bytes of a segment that a reader maps at most: what a peer says is not believed."""
LOOK = 2.0
"""Seconds for which the memory of a source that has closed or died may stay."""
_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14."""


class SegmentMapping:
    """The file of a segment, mapped, and leased when it is made: its owner does not fill it again before ``release``."""

    def __init__(self, at: SegmentAddress) -> None:
        self._path = path = f"/proc/{at.pid}/fd/{at.file}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{NAME}"):  # before it is opened: to open a device may do something
                raise _gone(path)
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as err:
            raise _gone(path) from err
        finalize(self, os.close, self._file).atexit = False  # what is mapped keeps a lease that is not released
        self.nbytes = at.nbytes
        self._inode = os.fstat(self._file).st_ino
        self.lease()
        if not 0 <= at.nbytes <= MOST_SEGMENT or os.fstat(self._file).st_size != file_size(at.nbytes):
            raise _gone(path)
        # A private mapping: it is never written, but numpy and torch are content.
        self._memory = mmap.mmap(self._file, file_size(at.nbytes), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.whole: Bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._populated = np.zeros(-(-len(self._memory) // BLOCK), dtype=bool)

    def lease(self) -> None:
        """Keep the owner from filling it again."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise _gone(self._path) from err

    def release(self) -> None:
        """Nobody reads it until the next lease."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def shows(self, token: str) -> bool:
        """Whether this is what it begins with; under a lease it stays so."""
        return self._memory[: len(MAGIC) + TOKEN_BYTES] == MAGIC + bytes.fromhex(token)

    def is_owned(self) -> bool:
        """Whether its owner still has it open."""
        try:
            return os.stat(self._path).st_ino == self._inode and os.readlink(self._path).startswith(f"/memfd:{NAME}")
        except OSError:
            return False

    def populate(self, start: int, stop: int) -> None:
        """Map the pages of these bytes of the file now, all at once: a fault for each few of them takes as long as hashing them."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        if self._populated[first:last].all():
            return
        with suppress(OSError):  # before Linux 5.14
            self._memory.madvise(_POPULATE_READ, first * BLOCK, min(last * BLOCK, len(self._memory)) - first * BLOCK)
        self._populated[first:last] = True


class SegmentMappings:
    """What one sink has mapped of a source. Leases last from ``lease`` to ``end``: the time of one take."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, int], SegmentMapping] = {}
        self._leased: list[SegmentMapping] = []
        self._stop = threading.Event()
        self._watched = False
        self._process = os.getpid()

    def lease(self, at: SegmentAddress) -> SegmentMapping:
        """The mapping of a segment with this token; raises as :class:`SegmentMapping`."""
        with self._lock:
            if self._process != os.getpid():  # a forked child has its parent's mappings, and would end its parent's leases
                self._process, self._watched = os.getpid(), False
                self._kept, self._leased = {}, []
            key = at.pid, at.file
            mapping = self._kept.pop(key, None)
            if mapping is not None and mapping.nbytes == at.nbytes:
                mapping.lease()
                if mapping.shows(at.token):
                    self._kept[key] = mapping
                    self._leased.append(mapping)
                    return mapping
                mapping.release()
                if mapping.is_owned():  # the same file, filled with another version: it may be the next one that is taken
                    self._kept[key] = mapping
                    raise _gone(f"/proc/{at.pid}/fd/{at.file}")
            mapping = SegmentMapping(at)
            if not mapping.shows(at.token):
                raise _gone(f"/proc/{at.pid}/fd/{at.file}")
            self._kept[key] = mapping
            self._leased.append(mapping)
            return mapping

    def end(self) -> None:
        """The take is over: owners may fill their segments again. What is mapped of those that they have closed is let go of."""
        with self._lock:
            for mapping in self._leased:
                mapping.release()
            self._leased = []
            if self._drop_closed() and not self._watched:
                self._watched = True
                threading.Thread(target=_watch, args=(ref(self), self._stop), name="ckpt-mapped", daemon=True).start()

    def close(self) -> None:
        """Let go of all of them."""
        self._stop.set()
        with self._lock:
            self._kept, self._leased = {}, []
            self._stop, self._watched = threading.Event(), False

    def watch(self) -> bool:
        """One look of the thread that watches; whether there is anything to look at the next time."""
        with self._lock:
            self._watched = bool(self._leased) or self._drop_closed()
            return self._watched

    def _drop_closed(self) -> bool:
        self._kept = {key: mapping for key, mapping in self._kept.items() if mapping.is_owned()}
        return bool(self._kept)


def _watch(mappings: ReferenceType[SegmentMappings], stop: threading.Event) -> None:
    """Runs in a thread of its own, which keeps nothing alive: a sink that nobody closes takes its mappings along."""
    while not stop.wait(LOOK):
        watched = mappings()
        if watched is None or not watched.watch():
            return
        del watched


class MappedSegment:
    """One version of the segment of another process of this machine, which it cannot fill again before the end of the lease."""

    def __init__(self, at: SegmentAddress, digest: str, mappings: SegmentMappings | None = None) -> None:
        """``digest``: that of the digests of its blocks. ``mappings`` of the sink; without them the lease lasts as long as this."""
        self._mapping = SegmentMapping(at) if mappings is None else mappings.lease(at)
        path = f"/proc/{at.pid}/fd/{at.file}"
        if not self._mapping.shows(at.token):
            raise _gone(path)
        self.data: Bytes = self._mapping.whole[DATA : DATA + at.nbytes]
        where, count = digests_at(at.nbytes), -(-at.nbytes // BLOCK)
        self.digests: Digests = self._mapping.whole[where : where + 8 * count].view("<u8")
        if digest_of_digests(self.digests) != digest:
            raise CorruptError("the digests of a segment are not what its manifest says", where=path, hint="publish again")

    def populate(self, start: int, stop: int) -> None:
        """Map the pages of these bytes of the boxes now, if they are not."""
        self._mapping.populate(DATA + start, DATA + stop)


def _gone(path: str) -> NotFoundError:
    return NotFoundError("a version was dropped before it was taken", where=path, hint="take it again: there is a newer one")
