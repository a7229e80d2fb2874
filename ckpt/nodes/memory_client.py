"""What a process asks of the memory daemon of its machine, and the memory that it borrows: one connection for each loan, since what a
process has borrowed goes back when its connection ends, however that happens. No torch."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ckpt import settings
from ckpt.concurrency import ProcessLock, when_dropped
from ckpt.errors import CkptError, NoSpaceError, NotFoundError, StorageError
from ckpt.net.dialing import IdleConnections
from ckpt.net.shared_memory import populate, protect, whole_pages
from ckpt.text import address_text

from . import memory_connection as place
from .memory_connection import DaemonConnection, MemoryObject
from .memory_remote import split_host

# What this process maps of the files that it fills: kept from one object to the next, since a new mapping costs a fault for each page.
#
# A mapping that is not being filled is protected: a stray write ends the process instead of changing a checkpoint. Changing that costs
# time for each page, a tenth of the copy, and everything else that changes the address space of the process waits for it. So pages become
# writable only where they are about to be filled, by the thread that fills them, and are protected piece by piece. A mapping keeps no
# memory: the daemon frees the pages of a file whoever maps it.

_KEPT = 64
"""Mappings that are kept: the files of three versions of a rank's state."""
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
            populate(memory, 0, capacity, write=True)
        self.data: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self.address = int(self.data.ctypes.data)
        self.protected = False

    def open(self, start: int, length: int) -> None:
        """Let these bytes, and the pages around them, be written to. Any number of threads may call it."""
        if self.protected and length:
            self._change(start // mmap.PAGESIZE * mmap.PAGESIZE, whole_pages(start + length), writable=True)

    def protect(self) -> None:
        """Nobody writes to it from here on, until it is opened again."""
        self._change(0, len(self.data), writable=False)
        self.protected = True

    def _change(self, first: int, last: int, *, writable: bool) -> None:
        for at in range(first, last, _STRETCH):
            protect(self.address + at, min(_STRETCH, last - at), writable=writable)


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
        self._close = when_dropped(self, _end, connection, self._file)
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


_SILENT_SECONDS = 2.0
"""For a daemon that did not answer the last question: it has had its time, and each of the next questions would cost as much."""
_IDLE = 16
"""Connections that are kept for loans: those of the files that one rank fills at once."""
_clients: dict[Path, MemoryClient] = {}
_clients_lock = ProcessLock(_clients.clear)
_secrets: dict[str, str] = {}


def connect(*, start: bool = True, folder: str | os.PathLike[str] | None = None) -> MemoryClient:
    """The client of this process for the daemon of ``folder``; by default ``CKPT_MEMORY_DIR`` or that of the account.

    ``start``: start the daemon if none runs.
    """
    where = place.folder() if folder is None else Path(folder).absolute()
    with _clients_lock:
        client = _clients.get(where)
        if client is None:
            client = _clients[where] = MemoryClient(where)
    client.reach(start=start)
    return client


def trust(address: str, secret: str) -> None:
    """Use this secret for the daemon at ``address`` (``host:port``), in this process."""
    split_host(address)
    _secrets[address] = secret


def secret_for(address: str) -> str:
    """The secret of a daemon on another machine: what ``trust`` was given, else ``CKPT_MEMORY_SECRET``, else that of the daemon here."""
    return _secrets[address] if address in _secrets else place.secret_of(place.folder())


def end_daemon(folder: Path) -> None:
    """End the daemon of a folder, of whatever release; its memory is lost."""
    place.check_private(folder)
    try:
        with place.connect_socket(folder, place.TIMEOUT) as sock:
            place.send(sock, {"ask": "stop"})
            place.receive(sock)
    except (FileNotFoundError, ConnectionRefusedError) as err:
        raise NotFoundError("no memory daemon runs", where=str(folder)) from err
    except OSError as err:
        raise place.gone(folder, str(err)) from err
    _await_end(folder)


class MemoryClient:
    """The daemon of one folder, asked by any number of threads. :func:`connect` gives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._connection: DaemonConnection | None = None
        self._silent = False
        """Whether the daemon has not answered the last question in time."""
        self._mappings = MappingCache()
        self._idle = IdleConnections[DaemonConnection](_IDLE)

    def reach(self, *, start: bool) -> None:
        """Connect, unless that was done; see :func:`connect`."""
        with self._lock:
            self._reached(start=start)

    def _reached(self, *, start: bool) -> DaemonConnection:
        """The open connection; the lock is taken."""
        if self._connection is not None and not self._connection.is_open():
            self._connection.close()
            self._connection = None
        if self._connection is None:
            connection = self._try_to_connect()
            if connection is None and start:
                place.start_daemon(self.folder)
                connection = self._try_to_connect()
            if connection is None:
                raise NotFoundError(
                    "no memory daemon runs",
                    where=str(self.folder),
                    hint="it starts with the first save to memory://, or by `ckpt memory serve`; inprocess:// is this process alone",
                )
            self._mappings.clear()  # of another daemon, perhaps
            self._idle.clear()
            self._connection = connection
        return self._connection

    def _try_to_connect(self) -> DaemonConnection | None:
        with self._noting_silence():
            return place.try_to_connect(self.folder, _SILENT_SECONDS if self._silent else place.TIMEOUT)

    @contextmanager
    def _noting_silence(self) -> Iterator[None]:
        """Something is asked."""
        try:
            yield
        except StorageError as err:
            self._silent = isinstance(err.__cause__, TimeoutError)
            raise
        self._silent = False

    def _ask(self, question: place.Message) -> tuple[place.Message, Sequence[int]]:
        with self._lock:
            connection = self._reached(start=False)
            with self._noting_silence():
                return connection.ask(question)

    # ---- objects

    def changes(self) -> tuple[str, int]:
        """Equal as long as no object was deleted or replaced. Asks nobody, unless the connection is lost."""
        connection = self._connection
        return ("", -1) if connection is None else connection.changes()

    def lend(self, size: int) -> Loan:
        """Memory for an object of ``size`` bytes."""
        connection = self._idle.take_open() or self._try_to_connect()
        if connection is None:
            raise place.gone(self.folder, "nobody listens")
        try:
            with self._noting_silence():
                return Loan(connection, size, self._mappings, self._idle)
        except BaseException:
            connection.close()
            raise

    def put(self, path: str, data: bytes | memoryview, *, expected: bytes | None = None) -> MemoryObject:
        """Compare and swap: put a small object if ``path`` has just ``expected``, or nothing if that is None."""
        question = {
            "ask": "put_bytes",
            "path": path,
            "data": b64encode(data).decode(),
            "expected": None if expected is None else b64encode(expected).decode(),
        }
        return MemoryObject.of(self._ask(question)[0]["object"])

    def get(self, path: str) -> place.OpenObject:
        """An object, to be read."""
        answer, files = self._ask({"ask": "get", "path": path})
        return place.OpenObject(MemoryObject.of(answer["object"]), files[0])

    def stat(self, path: str) -> MemoryObject:
        return MemoryObject.of(self._ask({"ask": "stat", "path": path})[0]["object"])

    def list(self, prefix: str = "") -> Sequence[MemoryObject]:
        """Objects whose path starts with ``prefix``, sorted."""
        return [MemoryObject.of(row) for row in self._ask({"ask": "list", "prefix": prefix})[0]["objects"]]

    def delete(self, path: str) -> bool:
        """Whether it was there."""
        return bool(self._ask({"ask": "delete", "path": path})[0]["deleted"])

    def drop(self, prefix: str) -> int:
        """Delete all objects below the directory ``prefix``, or all for an empty one; gives their bytes. Their memory is free when nobody
        reads them any more."""
        return int(self._ask({"ask": "drop", "prefix": prefix})[0]["bytes"])

    # ---- other machines

    def address(self) -> str:
        """``host:port`` at which readers on other machines reach this one; it listens there from the first call on."""
        return address_text(*self.addresses()[0])

    def addresses(self) -> Sequence[tuple[str, int]]:
        """All of them, the most likely first."""
        return [(str(host), int(port)) for host, port in self._ask({"ask": "address"})[0]["addresses"]]

    def secret(self) -> str:
        """What readers on other machines have to know. Send it only where you would send a password."""
        return place.secret_of(self.folder)

    # ---- the daemon itself

    def status(self) -> place.Message:
        """What it holds, in bytes, and who it is."""
        return self._ask({"ask": "status"})[0]

    def stop(self) -> None:
        """End it; its memory is lost. Returns when it has ended."""
        end_daemon(self.folder)


def _await_end(folder: Path, timeout: float = place.TIMEOUT) -> None:
    """Wait until the daemon of a folder has let go of its lock."""
    lock, end = place.open_lock(folder), time.monotonic() + timeout
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(lock, fcntl.LOCK_UN)  # a process that was forked meanwhile would go on holding it
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    raise StorageError("the memory daemon does not end", where=str(folder), hint="end its process") from None
                time.sleep(0.01)
    finally:
        os.close(lock)
