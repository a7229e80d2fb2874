"""Memory that processes of one machine share: files without a name that one makes and others open, leases on them, and pools of slots.

The memory has no name in any file system, so nothing is left of it when its last process ends, however that does. Another process opens
it through the number that it has in its owner's. That number can lead to other memory, where two machines or containers look like one, so
the memory begins with a random token that only its owner's announcement has: without it nothing is copied.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.errors import DeadlineError
from ckpt.plan.tables import ranks_text

_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""MADV_POPULATE_READ and MADV_POPULATE_WRITE."""


def make_file(name: str, size: int) -> int:
    """A descriptor of a new file of shared memory, open for writing. What it is called tells others that it is one of ours."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
    except BaseException:
        os.close(file)
        raise
    return file


def is_ours(path: str, name: str) -> bool:
    """Whether a descriptor of another process leads to memory that is called so. It is not opened: to open a device may do something."""
    return os.readlink(path).startswith(f"/memfd:{name}")


def whole_pages(size: int) -> int:
    """The bytes of the pages that so many bytes take."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def populate(memory: mmap.mmap, start: int, length: int, *, write: bool) -> None:
    """Map these pages now, by one call in place of a fault for each few of them; ``start`` is that of a page. A kernel before Linux 5.14
    brings them one by one when they are touched."""
    with suppress(OSError):
        memory.madvise(_POPULATE_WRITE if write else _POPULATE_READ, start, length)


def try_lease(file: int) -> bool:
    """Keep the owner of a file from filling it again, until the lease ends or nobody has this descriptor, or a mapping of it, any more."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def end_lease(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)


def is_unread(file: int) -> bool:
    """Whether nobody has a lease on a file of this process; then nobody can get one before ``end_lease``."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def protect(address: int, size: int, *, writable: bool) -> None:
    """What this process may do to mapped pages: a stray write to those that are not writable ends it."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if c_function("mprotect", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)(address, size, access):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@cache
def c_function(name: str, *types: type[ctypes._SimpleCData[int]]) -> ctypes._NamedFuncPointer:
    """A function of the C library that Python does not offer; ``types`` are those of its arguments."""
    call: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(None, use_errno=True), name)
    call.argtypes = types
    return call


# Memory that goes round: a rank fills a slot, others of its machine copy from it, and when all have, it is filled again.

PAUSE = 0.0002
"""Seconds between two looks at the slots that others copy from: they are not asked to tell."""
TOKEN_BYTES = 16
_HEADER = 64
"""Bytes of the token and of what aligns what follows: a generation for each slot, and a mark for each slot and reader."""
_GENERATION = np.dtype(np.uint32)
_NAME = "ckpt-pool"
_ANNOUNCEMENT = struct.Struct(f"!IIIIQ{TOKEN_BYTES}s")
ANNOUNCEMENT_BYTES = _ANNOUNCEMENT.size


class Announcement(NamedTuple):
    """Where the memory of a pool is: process, number of the file there; its slots, bytes of each, and readers; the token that it begins
    with."""

    pid: int
    file: int
    shape: tuple[int, int, int]
    token: bytes

    def pack(self) -> bytes:
        slots, size, readers = self.shape
        return _ANNOUNCEMENT.pack(self.pid, self.file, slots, readers, size, self.token)

    @classmethod
    def unpack(cls, data: bytes) -> Announcement:
        pid, file, slots, readers, size, token = _ANNOUNCEMENT.unpack(data)
        return cls(pid, file, (slots, size, readers), token)


class BrokenPoolError(Exception):
    """The exchange that the slots were for has failed: whoever waits for one gives up."""


class SlotPool:
    """Slots of ``size`` bytes each, filled by this process. ``readers``: others that may copy from a slot at the same time."""

    def __init__(self, slots: int, size: int, readers: int, *, shared: bool, timeout: float) -> None:
        self.shape = (slots, size, readers)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.file = make_file(_NAME, _nbytes(self.shape)) if shared else -1
        memory = mmap.mmap(self.file, _nbytes(self.shape))
        memory[:TOKEN_BYTES] = self.token
        # How the memory is laid out, and who writes what:
        #
        #  token │ generations    │ marks [slots, readers]        │ data [slots, size]
        #        │ owner: +1 per  │ owner sets 1 when it lends a  │ owner fills it
        #        │ lending        │ slot, the reader sets 0 when  │ readers copy from it
        #        │                │ it has what it wants          │
        #
        # A byte per reader instead of a counter: each byte has one writer at a time, so no atomic operation between
        # processes is needed. A slot is free when nobody in this process holds it and its whole row of marks is 0.
        self._generations, self._marks, self._data = _parts(memory, self.shape)
        self._seen = [memoryview(row) for row in self._marks]
        self._nobody = bytes(readers)
        self._timeout = timeout
        self._holds = [0] * slots
        self._lent: list[tuple[int, ...]] = [()] * slots
        self._lock = threading.Lock()
        self._broken = False

    def announcement(self) -> Announcement:
        """For other processes of this machine, if the pool is shared."""
        return Announcement(os.getpid(), self.file, self.shape, self.token)

    def take(self, wait: Callable[[], None]) -> int:
        """A free slot, the caller's until :meth:`release`. While there is none, ``wait`` is called, which is to take ``PAUSE``."""
        began = time.monotonic()
        while True:
            with self._lock:
                if self._broken:
                    raise BrokenPoolError
                # Free means: no hold in this process, and no reader of another process has its mark set. Readers clear
                # their marks without telling anybody, so the owner looks again after PAUSE.
                for slot, holds in enumerate(self._holds):
                    if not holds and self._seen[slot] == self._nobody:
                        self._holds[slot] = 1
                        return slot
            if time.monotonic() - began > self._timeout:
                raise self._late()
            wait()

    def _late(self) -> DeadlineError:
        ranks = {rank for slot, lent in enumerate(self._lent) for i, rank in enumerate(lent) if self._marks[slot, i]}
        who = ranks_text(sorted(ranks)) if ranks else "the other ranks"
        return DeadlineError(
            f"{who} took nothing that was read for them for {self._timeout:g} s",
            hint="look whether they died or hang; a larger Job(timeout=) waits longer",
        )

    def hold(self, slot: int) -> None:
        """Keep a slot until one more :meth:`release`."""
        with self._lock:
            self._holds[slot] += 1

    def release(self, slot: int) -> None:
        with self._lock:
            self._holds[slot] -= 1

    def lend(self, slot: int, ranks: tuple[int, ...], which: Iterable[int]) -> int:
        """Lend the slot to those of ``ranks`` that have the places ``which``, before it is released: they copy from it, and call
        :meth:`AttachedPool.done`. Returns the slot's generation, by which they know that its bytes are those that are meant for them."""
        self._lent[slot] = ranks
        # The generation goes with the slot's number. A reader that comes late, to a slot that was filled again, sees
        # another generation after its copy, and fails instead of keeping bytes that are not its own.
        self._generations[slot] += 1
        for i in which:
            self._marks[slot, i] = 1
        return int(self._generations[slot])

    def returned(self, slot: int, which: int) -> None:
        """Reader number ``which`` got what it wants of the slot in another way."""
        self._marks[slot, which] = 0

    def is_back(self, slot: int) -> bool:
        """Whether all to whom a slot was lent have said that they are done with it."""
        return bool(self._seen[slot] == self._nobody)

    def take_back(self, slot: int) -> None:
        """Lend a slot no longer to a reader that does not come back. Its generation is over, as one that still copies from it sees
        (:meth:`AttachedPool.generation`)."""
        self._generations[slot] += 1
        self._marks[slot] = 0

    def data(self, slot: int) -> npt.NDArray[np.uint8]:
        data: npt.NDArray[np.uint8] = self._data[slot]
        return data

    def stop(self) -> None:
        """Let nobody wait any more."""
        self._broken = True

    def close(self) -> None:
        """Give the memory back when no array refers to it any more."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class AttachedPool:
    """The pool of another process of this machine."""

    def __init__(self, at: Announcement) -> None:
        # Three checks before a byte is trusted: the name, so that no device is opened; the size, so that no access lies outside; the token,
        # so that a process with the same number in another container is not taken for the owner.
        path = f"/proc/{at.pid}/fd/{at.file}"
        if not is_ours(path, _NAME):
            raise OSError(f"{path} is not shared memory of ckpt")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != _nbytes(at.shape):
                raise OSError(f"{path} has another size")
            memory = mmap.mmap(fd, _nbytes(at.shape))
        finally:
            os.close(fd)
        if memory[:TOKEN_BYTES] != at.token:
            raise OSError(f"{path} is memory of another process than the one that announced it")
        self._generations, self._marks, self._data = _parts(memory, at.shape)

    def has(self, slot: int) -> bool:
        """Whether there is a slot of this number."""
        return slot < len(self._generations)

    def data(self, slot: int) -> npt.NDArray[np.uint8]:
        data: npt.NDArray[np.uint8] = self._data[slot]
        return data

    def generation(self, slot: int) -> int:
        return int(self._generations[slot])

    def done(self, slot: int, which: int) -> None:
        """Reader number ``which`` has what it wants of the slot. A copy gives up the interpreter's lock and takes it again, so the other
        process cannot see this before the copy has ended."""
        self._marks[slot, which] = 0


def machine() -> str:
    """Processes for which this is equal can probably open each other's pools: one kernel, one namespace of processes and one of users, one
    user with the same capabilities, confined alike by a security module, nobody protected from inspection (proc_pid_fd(5), ptrace(2)).
    Where that cannot be told, it is equal for none. It may be equal on two machines that were copied from one: :class:`AttachedPool` finds
    out."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            # /proc/<pid>/fd/<n> of another process can be opened only by the same user with the same capabilities, in the same namespaces,
            # unless a security module forbids it. What differs in any of these counts as another machine.
            capabilities = next(line.split()[1] for line in file if line.startswith("CapPrm"))
        user = os.geteuid()
        if not hasattr(os, "memfd_create") or os.stat("/proc/self/fd").st_uid != user:
            raise OSError("no anonymous files, or a protected process")
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "user") if os.path.exists(f"/proc/self/ns/{kind}")]
        return f"{boot}/{spaces}/{user}/{capabilities}/{_label()}"
    except (OSError, StopIteration):
        return f"{socket.gethostname()}/{os.getpid()}/{time.time_ns()}"


def _label() -> str:
    """What a security module confines this process as; empty where there is none."""
    with suppress(OSError), open("/proc/self/attr/current", encoding="utf-8", errors="replace") as file:
        return file.read().strip("\0\n")
    return ""


def _nbytes(shape: tuple[int, int, int]) -> int:
    slots, size, readers = shape
    return _lead(slots, readers) + slots * size


def _lead(slots: int, readers: int) -> int:
    return whole_pages(_HEADER + slots * (_GENERATION.itemsize + readers))


def _parts(memory: mmap.mmap, shape: tuple[int, int, int]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Generations, marks, and the slots."""
    # The arrays keep the memory.
    slots, size, readers = shape
    marks = _HEADER + slots * _GENERATION.itemsize
    data = np.frombuffer(memory, dtype=np.uint8)
    return (
        data[_HEADER:marks].view(_GENERATION),
        data[marks:][: slots * readers].reshape(slots, readers),
        data[_lead(slots, readers) :].reshape(slots, size),
    )
