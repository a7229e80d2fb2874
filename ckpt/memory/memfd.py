"""Anonymous files of shared memory, as the daemon makes and hands them out.

A file of the daemon is open twice:

    for writing    lent to the one process that fills it; that process maps it, and gives the mapping up when it puts the object
    for reading    under a shared lock; every reader gets this one. The lock is of the open file, so it is held until the last reader,
                   or the last mapping of one, is gone, however that ends

So the kernel says when nobody reads a dropped object any more: when its file can be locked alone. Then its pages can be filled again, or
given back by punching a hole into the file, whoever still maps it. No write seal is set: it could not be taken off again, and fresh
memory costs more than the copy into it. Instead the file is open for writing in the daemon alone, which never maps it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from functools import cache

_NAME = "ckpt-object"
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02


def capacity_of(size: int) -> int:
    """Bytes of the file for an object of ``size`` bytes: whole pages."""
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


def make_file(capacity: int) -> int:
    """A descriptor of a new file, open for writing, whose size cannot change."""
    file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, capacity)
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


def is_unread(file: int) -> bool:
    """Whether nobody has the file open, or mapped, to read."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def free_pages(file: int, start: int, length: int) -> None:
    """Free pages of a file, though processes may still map it. A core frees some 4 GB a second."""
    _fallocate()(file, _PUNCH_HOLE | _KEEP_SIZE, start, length)


@cache
def _fallocate() -> ctypes._NamedFuncPointer:
    call = ctypes.CDLL(None).fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call
