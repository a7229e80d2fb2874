"""The objects of a daemon and the memory that they lie in. Thread-safe; no sockets.

    lend ──► lent ── put ──► object ── delete, replace ──► dropped ── nobody reads it ──► spare ── lend ──► lent
              │                                                                            │
              └── the borrower ends: freeing                         unused for some time, or room is needed: freeing

Every byte is in exactly one of these, and all together stay within the budget. To free the memory of a large state takes a minute: it is
done piece by piece (``free_some``), so that nobody waits for it but who needs the room.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckpt import settings, units
from ckpt.errors import NoSpaceError, NotFoundError
from ckpt.io_backends.checks import put_conflict
from ckpt.net.shared_memory import c_function, end_lease, is_unread, make_file, whole_pages

from .memory_connection import MemoryObject, Message, close_all

# Anonymous files of shared memory, as the daemon makes and hands them out.
#
# A file of the daemon is open twice:
#
#     for writing    lent to the one process that fills it; that process maps it, and gives the mapping up when it puts the object
#     for reading    under a shared lock; every reader gets this one. The lock is of the open file, so it is held until the last reader,
#                    or the last mapping of one, is gone, however that ends
#
# So the kernel says when nobody reads a dropped object any more: when its file can be locked alone. Then its pages can be filled again, or
# given back by punching a hole into the file, whoever still maps it. No write seal is set: it could not be taken off again, and fresh
# memory costs more than the copy into it. Instead the file is open for writing in the daemon alone, which never maps it.

_NAME = "ckpt-object"
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02


def capacity_of(size: int) -> int:
    """Bytes of the file for an object of ``size`` bytes: whole pages."""
    return max(mmap.PAGESIZE, whole_pages(size))


def make_object_file(capacity: int) -> int:
    """A descriptor of a new file, open for writing, whose size cannot change."""
    file = make_file(_NAME, capacity)
    try:
        os.fchmod(file, 0o400)  # who has a descriptor to read cannot open the file for writing through /proc
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(file)
        raise
    return file


def open_to_read(file: int) -> int:
    """A descriptor that only reads, under the lock that keeps the file from being filled again."""
    reading = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(reading, fcntl.LOCK_SH)
    return reading


def free_pages(file: int, start: int, length: int) -> None:
    """Free pages of a file, though processes may still map it. A core frees some 4 GB a second."""
    c_function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)(file, _PUNCH_HOLE | _KEEP_SIZE, start, length)


SPARE_SECONDS = 300.0
"""A spare file that nobody wanted for so long is freed."""
_FIT = 1.125
"""A spare file serves objects that are smaller by at most this factor: those of one state differ a little."""
_PIECE = 128 * settings.MIB
"""Bytes that are freed at once."""
_NAMED = 5
_RUN_LOG = "ckpt-log.json"
"""What a run has beside its checkpoints (``ckpt.formats.native.runlog``); it is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """Memory that a process fills: ``file`` is open for writing; ``fresh`` if its pages do not exist yet."""

    file: int
    capacity: int
    size: int
    fresh: bool


@dataclass(frozen=True, slots=True, eq=False)
class ObjectFile:
    """An object and its file: ``file`` open for writing, ``reading`` for readers, locked."""

    known: MemoryObject
    capacity: int
    file: int
    reading: int


@dataclass(frozen=True, slots=True, eq=False)
class UnusedFile:
    """A file that belongs to no object any more, since the moment ``since``."""

    file: int
    capacity: int
    since: float


class MemoryStore:
    """Objects by path, within ``budget`` bytes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.id = secrets.token_hex(8)
        self.changes = make_object_file(8)
        """A file of eight bytes: another number whenever an object was deleted or replaced. Readers map it."""
        self._lock = threading.RLock()
        self._entries: dict[str, ObjectFile] = {}
        self._lent: set[Lent] = set()
        self._dropped: list[UnusedFile] = []
        """Somebody may still read them."""
        self._spare: list[UnusedFile] = []
        self._freeing: list[UnusedFile] = []
        """``capacity`` is what is left to be freed, from the beginning on."""
        self._number = 0
        self._changed = 0

    # ---- writing

    def lend(self, size: int) -> Lent:
        """Memory for an object of ``size`` bytes, whatever it has in it."""
        capacity = capacity_of(size)
        with self._lock:
            self._recycle()
            fits = [left for left in self._spare if capacity <= left.capacity <= capacity * _FIT]
            if fits:
                best = min(fits, key=lambda left: left.capacity)
                self._spare.remove(best)
                lent = Lent(best.file, best.capacity, size, fresh=False)
            else:
                self._make_room(capacity)
                try:
                    lent = Lent(make_object_file(capacity), capacity, size, fresh=True)
                except OSError as err:
                    raise _no_file(capacity, err) from err
            self._lent.add(lent)
            return lent

    def _make_room(self, capacity: int) -> None:
        while (used := sum(self._by_kind().values())) + capacity > self.budget and (self._freeing or self._spare):
            if not self._freeing:
                oldest = min(self._spare, key=lambda left: left.since)
                self._spare.remove(oldest)
                self._freeing.append(oldest)
            self.free_some()
        if used + capacity > self.budget:
            raise NoSpaceError(
                f"{units.size(capacity)} do not fit: {units.size(used)} of the budget of {units.size(self.budget)} are taken "
                f"({self._takers()})",
                where="the memory of this machine",
                hint="keep fewer versions (keep=), drop some (ckpt memory drop memory://…), or set CKPT_MEMORY_BUDGET, in bytes",
            )

    def put(self, lent: Lent, path: str) -> MemoryObject:
        """Give lent memory, which its borrower has stopped writing to, a name. If that fails it stays lent."""
        with self._lock:
            if path in self._entries:
                raise put_conflict(f"memory://{path}", None)
            return self._put(lent, path)

    def _put(self, lent: Lent, path: str) -> MemoryObject:
        try:
            reading = open_to_read(lent.file)
        except OSError as err:
            raise _no_file(lent.capacity, err) from err
        # From here on nothing can fail: an object that is replaced goes only when the new one can be named.
        if path in self._entries:
            self._drop(path)
        self._lent.remove(lent)
        self._number += 1
        known = MemoryObject(path, lent.size, f"{self.id}-{self._number}", time.time())
        self._entries[path] = ObjectFile(known, lent.capacity, lent.file, reading)
        return known

    def take_back(self, lent: Lent) -> None:
        """The borrower ended without putting it. He may still map it, so it is not lent again."""
        with self._lock:
            if lent in self._lent:
                self._lent.remove(lent)
                self._freeing.append(UnusedFile(lent.file, lent.capacity, time.monotonic()))

    def put_bytes(self, path: str, data: bytes, expected: bytes | None) -> MemoryObject:
        """Compare and swap: put a small object if the path has just ``expected``, or nothing."""
        with self._lock:
            entry = self._entries.get(path)
            size = None if expected is None else len(expected)
            there = os.pread(entry.reading, size, 0) if entry is not None and entry.known.size == size else None
            if there != expected or (entry is not None and size is None):
                raise put_conflict(f"memory://{path}", expected)
            lent = self.lend(len(data))
            try:
                if data:
                    os.pwrite(lent.file, data, 0)
                return self._put(lent, path)
            except BaseException:
                self.take_back(lent)
                raise

    def delete(self, path: str) -> bool:
        """Whether it was there."""
        with self._lock:
            if path not in self._entries:
                return False
            self._drop(path)
            self._recycle()
            return True

    def drop(self, prefix: str) -> int:
        """Delete all objects below the directory ``prefix``, or all for an empty one, and free what is spare; the bytes of the objects."""
        with self._lock:
            below = f"{prefix.rstrip('/')}/" if prefix else ""
            gone = [path for path in self._entries if path.startswith(below)]
            size = sum(self._entries[path].known.size for path in gone)
            for path in sorted(gone, key=lambda path: path.endswith("checkpoint.json"), reverse=True):  # what makes one exist goes first
                self._drop(path)
            self.tend(spare_seconds=0)
            return size

    def _drop(self, path: str) -> None:
        entry = self._entries.pop(path)
        self._changed += 1
        os.pwrite(self.changes, struct.pack("<Q", self._changed), 0)
        os.close(entry.reading)  # the lock stays as long as a reader has it, too
        self._dropped.append(UnusedFile(entry.file, entry.capacity, time.monotonic()))

    # ---- reading

    def open(self, path: str) -> tuple[MemoryObject, int]:
        """An object, and a descriptor to read it from, which the caller closes."""
        with self._lock:
            entry = self._get(path)
            return entry.known, os.dup(entry.reading)

    def stat(self, path: str) -> MemoryObject:
        with self._lock:
            return self._get(path).known

    def list(self, prefix: str) -> list[MemoryObject]:
        """Objects whose path starts with ``prefix``, sorted."""
        with self._lock:
            return sorted((e.known for path, e in self._entries.items() if path.startswith(prefix)), key=lambda known: known.path)

    def _get(self, path: str) -> ObjectFile:
        entry = self._entries.get(path)
        if entry is None:
            raise NotFoundError(
                "no such object",
                where=f"memory://{path}",
                hint="`ckpt memory status` shows what the memory of this machine has; inprocess:// is this process alone",
            )
        return entry

    # ---- memory

    def tend(self, spare_seconds: float = SPARE_SECONDS) -> None:
        """Now and then: what nobody reads any more becomes spare, and what is spare for long is freed."""
        with self._lock:
            self._recycle()
            for left in [left for left in self._spare if time.monotonic() - left.since >= spare_seconds]:
                self._spare.remove(left)
                self._freeing.append(left)

    def free_some(self) -> bool:
        """Free a piece of what nobody needs any more; whether there is more of it."""
        with self._lock:
            if self._freeing:
                left = self._freeing.pop()
                start = max(0, left.capacity - _PIECE)
                free_pages(left.file, start, left.capacity - start)
                if start:
                    self._freeing.append(replace(left, capacity=start))
                else:
                    os.close(left.file)
            return bool(self._freeing)

    def _recycle(self) -> None:
        for left in [left for left in self._dropped if is_unread(left.file)]:
            end_lease(left.file)
            self._dropped.remove(left)
            if left.capacity > settings.MIB:
                self._spare.append(replace(left, since=time.monotonic()))
            else:  # not worth keeping
                self._freeing.append(left)

    def _by_kind(self) -> Mapping[str, int]:
        return {
            "objects": sum(entry.capacity for entry in self._entries.values()),
            "lent": sum(lent.capacity for lent in self._lent),
            "dropped": sum(left.capacity for left in self._dropped),
            "spare": sum(left.capacity for left in self._spare),
            "freeing": sum(left.capacity for left in self._freeing),
        }

    def usage(self) -> Message:
        """Bytes by what they are for, and by checkpoint."""
        with self._lock:
            return {"budget": self.budget, **self._by_kind(), "count": len(self._entries), "by_checkpoint": self._by_checkpoint()}

    def is_empty(self) -> bool:
        with self._lock:
            return not self._entries and not self._lent

    def _by_checkpoint(self) -> dict[str, int]:
        """Bytes by the directory of the checkpoint that they belong to; the largest first."""
        sizes: Counter[str] = Counter()
        for path, entry in self._entries.items():
            if path.rpartition("/")[2] != _RUN_LOG:
                sizes[checkpoint_of(path)] += entry.capacity
        return dict(sizes.most_common())

    def _takers(self) -> str:
        kinds = {name: size for name, size in self._by_kind().items() if name in ("lent", "dropped") and size}
        largest = list(self._by_checkpoint().items())
        parts = [f"memory://{path}: {units.size(size)}" for path, size in largest[:_NAMED]]
        more = [f"{len(largest) - _NAMED} more"] if len(largest) > _NAMED else []
        words = {"lent": "saves that are going on", "dropped": "dropped, but still read"}
        return "; ".join([*parts, *more, *(f"{words[name]}: {units.size(size)}" for name, size in kinds.items())]) or "nothing is stored"

    def close(self) -> None:
        """Free everything that nobody reads."""
        with self._lock:
            self.drop("")
            while self.free_some():  # a process may map it, and live on
                pass
            close_all([*(left.file for left in self._dropped), *(lent.file for lent in self._lent), self.changes])


def checkpoint_of(path: str) -> str:
    """The directory of the checkpoint that an object most likely belongs to: above ``data/``, ``parity/``, ``index-…/`` and
    ``checkpoint.json``. A run's log is as if it were a checkpoint of the run."""
    *above, name = path.split("/")
    if name == _RUN_LOG:
        return path
    if above and (above[-1] in ("data", "parity") or above[-1].startswith("index-")):
        above = above[:-1]
    return "/".join(above) or path


def _no_file(capacity: int, err: OSError) -> NoSpaceError:
    return NoSpaceError(
        f"the memory daemon has no file for {capacity:,} bytes: {err}",
        hint="raise the limit of open files (`ulimit -n`) where the daemon is started, or drop checkpoints (ckpt memory drop)",
    )
