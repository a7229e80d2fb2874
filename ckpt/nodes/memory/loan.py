"""Memory that the daemon lends to a process: one connection for each loan, since what a process has borrowed goes back when its connection
ends, however that happens. No torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import OrderedDict
from contextlib import suppress
from functools import cache
from weakref import finalize

import numpy as np
import numpy.typing as npt

from ckpt import settings
from ckpt.errors import CkptError, NoSpaceError, StorageError
from ckpt.net.dialing import IdleConnections

from .connection import DaemonConnection
from .messages import MemoryObject

# What this process maps of the files that it fills: kept from one object to the next, since a new mapping costs a fault for each page.
#
# A mapping that is not being filled is protected: a stray write ends the process instead of changing a checkpoint. Changing that costs
# time for each page, a tenth of the copy, and everything else that changes the address space of the process waits for it. So pages become
# writable only where they are about to be filled, by the thread that fills them, and are protected piece by piece. A mapping keeps no
# memory: the daemon frees the pages of a file whoever maps it.

_KEPT = 64
"""Mappings that are kept: the files of three versions of a rank's state."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: one call in place of a fault for each page."""

_STRETCH = 16 * settings.MIB
"""The protection of so many bytes is changed at once: page faults of other threads wait no longer than that."""

Bytes = npt.NDArray[np.uint8]


class FileMapping:
    """A whole file of the daemon, mapped to be filled; ``data`` has its bytes."""

    def __init__(self, file: int, capacity: int, *, fresh: bool) -> None:
        """``fresh``: its pages do not exist yet, so the copy makes them, by as many threads as copy."""
        memory = mmap.mmap(file, capacity)
        memory.madvise(mmap.MADV_DONTFORK)
        if not fresh:
            populate(memory, _POPULATE_WRITE)
        self.data: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self.address = int(self.data.ctypes.data)
        self.protected = False

    def open(self, start: int, length: int) -> None:
        """Let these bytes, and the pages around them, be written to. Any number of threads may call it."""
        if self.protected and length:
            first, last = start // mmap.PAGESIZE * mmap.PAGESIZE, -(-(start + length) // mmap.PAGESIZE) * mmap.PAGESIZE
            self._change(first, last, writable=True)

    def protect(self) -> None:
        """Nobody writes to it from here on, until it is opened again."""
        self._change(0, len(self.data), writable=False)
        self.protected = True

    def _change(self, first: int, last: int, *, writable: bool) -> None:
        for at in range(first, last, _STRETCH):
            protect(self.address + at, min(_STRETCH, last - at), writable=writable)


def protect(address: int, size: int, *, writable: bool) -> None:
    """What this process may do to mapped pages: a stray write to those that are not writable ends it."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if _mprotect()(address, size, access):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@cache
def _mprotect() -> ctypes._NamedFuncPointer:
    call = ctypes.CDLL(None, use_errno=True).mprotect
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call


def populate(memory: mmap.mmap, advice: int) -> None:
    """Ask for all pages of a mapping at once; a kernel that cannot do it brings them one by one."""
    try:
        memory.madvise(advice)
    except OSError:
        return


class MappingCache:
    """Mappings by the file's inode: a file that is mapped keeps its number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, FileMapping] = OrderedDict()

    def open(self, file: int, capacity: int, *, fresh: bool) -> FileMapping:
        """The mapping of a lent file, to be written to where it is opened."""
        with self._lock:
            mapping = self._kept.pop(os.fstat(file).st_ino, None)
        if mapping is None:
            return FileMapping(file, capacity, fresh=fresh)
        return mapping

    def keep(self, file: int, mapping: FileMapping) -> None:
        """It is filled: nobody writes to it from here on."""
        mapping.protect()
        with self._lock:
            self._kept[os.fstat(file).st_ino] = mapping
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


class Loan:
    """Memory of the daemon in which an object's bytes can be put before it has a name. Gone with the process, unless ``put``.

    Not for several threads at once, but for ``memory`` and ``open``.
    """

    def __init__(self, connection: DaemonConnection, size: int, mappings: MappingCache, idle: IdleConnections[DaemonConnection]) -> None:
        answer, files = connection.ask({"ask": "lend", "size": size})
        self.size = size
        self._connection = connection
        self._mappings = mappings
        self._idle = idle
        self._ended = False
        """The daemon has said that nothing is lent over the connection any more."""
        self._file = files[0]
        self._close = finalize(self, _end, connection, self._file)
        self.mapping: FileMapping | None = None
        try:
            self.mapping = mappings.open(self._file, int(answer["capacity"]), fresh=bool(answer["fresh"]))
        except OSError as err:
            self.close()
            raise NoSpaceError(
                f"{size:,} bytes of the daemon's memory cannot be mapped: {err}", hint="look at the limits of this process (ulimit -v)"
            ) from err

    @property
    def data(self) -> Bytes:
        """Its bytes, to be filled where they are opened."""
        return self._mapped().data[: self.size]

    def open(self, start: int, length: int) -> None:
        """See ``LentMemory.open``."""
        try:
            self._mapped().open(start, length)
        except OSError as err:
            if isinstance(err, CkptError):
                raise
            raise NoSpaceError(
                f"{length:,} bytes of the daemon's memory cannot be made writable: {err}",
                hint="look at the limits of this process (ulimit)",
            ) from err

    def _mapped(self) -> FileMapping:
        if self.mapping is None:
            raise StorageError("this memory was given back already", where="the memory of this machine", hint="please report this")
        return self.mapping

    @property
    def memory(self) -> memoryview:
        """The same as ``data``."""
        return self.data.data

    def put(self, path: str) -> MemoryObject:
        """Name what was filled; from here on it cannot be written, and outlives this process. If that fails, it is given back."""
        mapping, self.mapping = self._mapped(), None
        try:
            self._mappings.keep(self._file, mapping)
            answer, _ = self._connection.ask({"ask": "put", "path": path})
            self._ended = True
        except OSError as err:
            if isinstance(err, CkptError):
                raise
            raise StorageError(f"what was filled cannot be protected: {err}", where=f"memory://{path}", hint="save again") from err
        finally:
            self.close()
        return MemoryObject.of(answer["object"])

    def close(self) -> None:
        """Give it back, unless it was put."""
        if self.mapping is not None:
            self.mapping = None
            with suppress(CkptError):  # a daemon that is gone has nothing any more
                self._connection.ask({"ask": "give_back"})
                self._ended = True
        if self._ended and self._close.detach() is not None:
            os.close(self._file)
            self._idle.keep(self._connection)
        else:
            self._close()


def _end(connection: DaemonConnection, file: int) -> None:
    os.close(file)
    connection.close()
