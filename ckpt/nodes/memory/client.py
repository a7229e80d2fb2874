"""What a process asks of the memory daemon of its machine. No torch."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from weakref import finalize

from ckpt.errors import NotFoundError, StorageError
from ckpt.net.dialing import IdleConnections
from ckpt.text import address_text

from . import connection as place
from .connection import TIMEOUT, DaemonConnection, gone, start_daemon, try_to_connect
from .loan import Loan, MappingCache
from .messages import MemoryObject, Message, receive, send
from .remote import split_host

_SILENT_SECONDS = 2.0
"""For a daemon that did not answer the last question: it has had its time, and each of the next questions would cost as much."""
_IDLE = 16
"""Connections that are kept for loans: those of the files that one rank fills at once."""
_clients: dict[Path, MemoryClient] = {}
_clients_lock = threading.Lock()
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


def _after_fork() -> None:
    """The child has connections of its own."""
    global _clients_lock
    _clients_lock = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork)


def end_daemon(folder: Path) -> None:
    """End the daemon of a folder, of whatever release; its memory is lost."""
    place.check_private(folder)
    try:
        with place.connect_socket(folder, TIMEOUT) as sock:
            send(sock, {"ask": "stop"})
            receive(sock)
    except (FileNotFoundError, ConnectionRefusedError) as err:
        raise NotFoundError("no memory daemon runs", where=str(folder)) from err
    except OSError as err:
        raise gone(folder, str(err)) from err
    _await_end(folder)


class MappedObject:
    """An object of this machine's memory, to be read for as long as this lives: its memory is not used again before."""

    def __init__(self, known: MemoryObject, file: int) -> None:
        self.known = known
        self.file = file
        self._close = finalize(self, os.close, file)

    def close(self) -> None:
        self._close()


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
            self._connection = self._connected(start=start)
        return self._connection

    def _connected(self, *, start: bool) -> DaemonConnection:
        connection = self._try_to_connect()
        if connection is None and start:
            start_daemon(self.folder)
            connection = self._try_to_connect()
        if connection is None:
            raise NotFoundError(
                "no memory daemon runs",
                where=str(self.folder),
                hint="it starts with the first save to memory://, or by `ckpt memory serve`; inprocess:// is this process alone",
            )
        self._mappings.clear()  # of another daemon, perhaps
        self._idle.clear()
        return connection

    def _try_to_connect(self) -> DaemonConnection | None:
        with self._noting_silence():
            return try_to_connect(self.folder, _SILENT_SECONDS if self._silent else TIMEOUT)

    @contextmanager
    def _noting_silence(self) -> Iterator[None]:
        """Something is asked."""
        try:
            yield
        except StorageError as err:
            self._silent = _is_silence(err)
            raise
        self._silent = False

    def _ask(self, question: Message) -> tuple[Message, Sequence[int]]:
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
            raise gone(self.folder, "nobody listens")
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

    def get(self, path: str) -> MappedObject:
        """An object, to be read."""
        answer, files = self._ask({"ask": "get", "path": path})
        return MappedObject(MemoryObject.of(answer["object"]), files[0])

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

    def status(self) -> Message:
        """What it holds, in bytes, and who it is."""
        return self._ask({"ask": "status"})[0]

    def stop(self) -> None:
        """End it; its memory is lost. Returns when it has ended."""
        end_daemon(self.folder)


def _is_silence(err: StorageError) -> bool:
    return isinstance(err.__cause__, TimeoutError)


def _await_end(folder: Path, timeout: float = TIMEOUT) -> None:
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
