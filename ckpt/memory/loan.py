"""Memory that the daemon lends to a process: one connection for each loan, since what a process has borrowed goes back when its connection
ends, however that happens. No torch.
"""

from __future__ import annotations

import os
from contextlib import suppress
from weakref import finalize

from ckpt.errors import CkptError, NoSpaceError, StorageError
from ckpt.transport.idle_connections import IdleConnections

from .connection import DaemonConnection
from .mappings import Bytes, FileMapping, MappingCache
from .objects import MemoryObject


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
            raise StorageError(f"what was filled cannot be protected: {err}", where=f"mem://{path}", hint="save again") from err
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
