"""The daemon: one loop that answers the processes of its machine, and threads for other machines where somebody asked for them.

A connection is that of one process, or lends one object: what was lent goes back when it ends. No answer waits for anything, so one loop is
enough; a client that does not take its answer is dropped.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import struct
import time
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt.errors import AccessError, CkptError, FormatError, UsageError, error_to_json
from ckpt.settings import __version__

from . import connection as place
from .messages import PROTOCOL, Message, close_all, receive, send
from .remote import MemoryServer
from .store import Lent, MemoryStore

_TICK = 2.0
_PAUSE = 0.01
"""Seconds after a client that could not be accepted: where files have run out, the next try would come at once."""
_PEER = struct.Struct("3i")

log = logging.getLogger("ckpt")

Answer = tuple[Message, list[int]]
"""A message, and the files that go with it."""


@dataclass(eq=False)
class ClientConnection:
    sock: socket.socket
    greeted: bool = False
    lent: Lent | None = None


class MemoryDaemon:
    """Serves ``store`` at the socket of ``folder``, which it listens at already."""

    def __init__(
        self,
        folder: Path,
        listening: socket.socket,
        store: MemoryStore,
        *,
        secret: str,
        idle: float,
        server: MemoryServer | None,
    ) -> None:
        """``server``: for other machines, if it listens for them yet."""
        self._folder = folder
        self._listening = listening
        self._store = store
        self._secret = secret
        self._idle = idle
        self._selector = selectors.DefaultSelector()
        self._connections: set[ClientConnection] = set()
        self._server = server
        self._began = self._used = time.monotonic()
        self._ending = False
        self._inode = place.socket_inode(folder)
        self._answers: dict[str, Callable[[ClientConnection, Message], Answer]] = {
            "hello": self._hello,
            "status": self._status,
            "stop": self._stop,
            "lend": self._lend,
            "put": self._put,
            "give_back": self._give_back,
            "put_bytes": self._put_bytes,
            "get": self._get,
            "stat": self._stat,
            "list": self._list,
            "delete": self._delete,
            "drop": self._drop,
            "address": self._address,
        }

    def stop(self) -> None:
        """End soon; for handlers of signals."""
        self._ending = True

    def run(self) -> None:
        """Serve until somebody says ``stop``, or nothing happens for long."""
        self._listening.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ, None)
        ticked, freeing = time.monotonic(), False
        while not self._ending:
            for key, _ in self._selector.select(0 if freeing else _TICK):
                if key.data is None:
                    self._accept()
                else:
                    self._talk(key.data)
            freeing = self._store.free_some()
            if time.monotonic() - ticked > _TICK:
                ticked = time.monotonic()
                self._store.tend()
                self._look_whether_to_go_on()
        self._end()

    def _look_whether_to_go_on(self) -> None:
        if self._connections or self._server:
            self._used = time.monotonic()
        if not place.is_ours(self._folder, self._inode) and not self._connections:
            log.warning("the memory daemon ends: its folder is gone, and nobody can reach it")
            self._ending = True
        elif self._store.is_empty() and time.monotonic() - self._used > self._idle:
            self._ending = True

    def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            self._close(connection)
        if place.is_ours(self._folder, self._inode):
            place.forget_socket(self._folder)
        self._listening.close()
        self._store.close()

    # ---- connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except OSError:  # of that connection alone, which tries again; or too many files, and then it waits at the socket
            time.sleep(_PAUSE)
            return
        with suppress(OSError):
            sock.setblocking(False)
            _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if uid != os.getuid():
                with suppress(OSError):
                    send(sock, {"error": error_to_json(_of_another_account())})
                sock.close()
                return
            connection = ClientConnection(sock)
            self._connections.add(connection)
            self._selector.register(sock, selectors.EVENT_READ, connection)

    def _talk(self, connection: ClientConnection) -> None:
        try:
            packet = receive(connection.sock)
            if packet is None:
                self._close(connection)
                return
            close_all(packet.files)  # nobody has to send any
            answer, files = self._answer(connection, packet.message)
            try:
                send(connection.sock, answer, files)
            finally:
                close_all(files)
        except BlockingIOError:
            log.warning("a client that does not take its answer is dropped")
            self._close(connection)
        except (OSError, CkptError) as err:
            log.debug("memory: a client is served no longer: %s", err)
            self._close(connection)

    def _answer(self, connection: ClientConnection, asked: Message) -> Answer:
        try:
            what = str(asked.get("ask"))
            if what not in self._answers or not (connection.greeted or what in ("hello", "status", "stop")):
                raise FormatError(f"a question that this release does not know: {what!r}", hint="use one release of ckpt on this machine")
            return self._answers[what](connection, asked)
        except CkptError as err:
            return {"error": error_to_json(err)}, []
        except (KeyError, TypeError, ValueError) as err:
            return {"error": error_to_json(FormatError(f"a question that cannot be read: {err!r}"))}, []
        except Exception as err:  # whatever one client asks, the objects of the others stay
            log.exception("a question could not be answered")
            return {"error": error_to_json(CkptError(f"the memory daemon could not answer: {err!r}", hint="please report this"))}, []

    def _close(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._used = time.monotonic()
        if connection.lent is not None:
            self._store.take_back(connection.lent)

    # ---- answers

    def _hello(self, connection: ClientConnection, asked: Message) -> Answer:
        connection.greeted = asked.get("protocol") == PROTOCOL
        answer: Message = {"protocol": PROTOCOL, "release": __version__, "pid": os.getpid(), "id": self._store.id}
        return answer, [os.open(f"/proc/self/fd/{self._store.changes}", os.O_RDONLY | os.O_CLOEXEC)] if connection.greeted else []

    def _status(self, connection: ClientConnection, asked: Message) -> Answer:
        server = self._server
        status: Message = {
            **self._store.usage(),
            "pid": os.getpid(),
            "release": __version__,
            "protocol": PROTOCOL,
            "folder": str(self._folder),
            "seconds": time.monotonic() - self._began,
            "clients": len(self._connections) - 1,
            "addresses": [list(address) for address in server.addresses] if server is not None else [],
            "peers": len(server) if server is not None else 0,
        }
        return status, []

    def _stop(self, connection: ClientConnection, asked: Message) -> Answer:
        self._ending = True
        return {"pid": os.getpid()}, []

    def _lend(self, connection: ClientConnection, asked: Message) -> Answer:
        if connection.lent is not None:
            raise UsageError("this connection has borrowed memory already", hint="use another connection")
        size = int(asked["size"])
        if size < 0:
            raise UsageError(f"an object of {size} bytes", hint="a size is not negative")
        lent = connection.lent = self._store.lend(size)
        return {"capacity": lent.capacity, "fresh": lent.fresh}, [os.dup(lent.file)]

    def _put(self, connection: ClientConnection, asked: Message) -> Answer:
        if connection.lent is None:
            raise UsageError("this connection has borrowed no memory", hint="please report this")
        known = self._store.put(connection.lent, str(asked["path"]))
        connection.lent = None
        return {"object": known.row()}, []

    def _give_back(self, connection: ClientConnection, asked: Message) -> Answer:
        if connection.lent is not None:
            self._store.take_back(connection.lent)
            connection.lent = None
        return {}, []

    def _put_bytes(self, connection: ClientConnection, asked: Message) -> Answer:
        expected = None if asked["expected"] is None else b64decode(asked["expected"], validate=True)
        return {"object": self._store.put_bytes(str(asked["path"]), b64decode(asked["data"], validate=True), expected).row()}, []

    def _get(self, connection: ClientConnection, asked: Message) -> Answer:
        known, file = self._store.open(str(asked["path"]))
        return {"object": known.row()}, [file]

    def _stat(self, connection: ClientConnection, asked: Message) -> Answer:
        return {"object": self._store.stat(str(asked["path"])).row()}, []

    def _list(self, connection: ClientConnection, asked: Message) -> Answer:
        return {"objects": [known.row() for known in self._store.list(str(asked["prefix"]))]}, []

    def _delete(self, connection: ClientConnection, asked: Message) -> Answer:
        return {"deleted": self._store.delete(str(asked["path"]))}, []

    def _drop(self, connection: ClientConnection, asked: Message) -> Answer:
        return {"bytes": self._store.drop(str(asked["prefix"]))}, []

    def _address(self, connection: ClientConnection, asked: Message) -> Answer:
        if self._server is None:
            self._server = MemoryServer(self._store, self._secret)
        return {"addresses": [list(address) for address in self._server.addresses]}, []


def _of_another_account() -> AccessError:
    return AccessError("this memory is another account's", hint="each account has a daemon of its own: see CKPT_MEMORY_DIR")
