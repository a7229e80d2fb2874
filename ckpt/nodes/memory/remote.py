"""Reading from the daemon of another machine: what a daemon answers over TCP, and who asks it. No torch."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ckpt import settings
from ckpt.errors import (
    AccessError,
    BusyError,
    CkptError,
    CorruptError,
    DeadlineError,
    FormatError,
    StorageError,
    UsageError,
    error_from_json,
    error_to_json,
)
from ckpt.net.connections import ConnectionServer
from ckpt.net.dialing import IdleConnections
from ckpt.net.endpoints import listen
from ckpt.net.message_fields import Kind, checked
from ckpt.net.wire import Channel, dial, receive, send

from .connection import ROW, MemoryObject, Message
from .store import MemoryStore

# What the daemon gives to other machines: lists of its objects, and their bytes, over TCP, to whoever knows the secret.
#
# asked                                  answered
# {"ask": "hello"}                       {"id": the daemon's, "host": the machine's name}
# {"ask": "list", "prefix": …}           {"objects": [rows]}
# {"ask": "stat", "path": …}             {"object": row}
# {"ask": "read", "path": …,             {"object": row}, and then the bytes themselves, straight from the object's pages
#  "offset": …, "length": …}

PURPOSE = "memory"
MOST_ASKED = settings.MIB
MOST_ANSWER = 256 * settings.MIB
_SILENT_SECONDS = 60.0
"""A peer that takes nothing for so long is dropped."""
_STRETCH = 4 * settings.MIB
_RELEASE = "use the same release of ckpt on both machines"


class ObjectRange(NamedTuple):
    """Bytes of an open file, which whoever sends them closes."""

    file: int
    offset: int
    length: int


Answer = tuple[dict[str, Any], ObjectRange | None]
"""A message, and the bytes that follow it."""


class MemoryServer:
    """Serves the objects of a store. ``addresses`` are where it listens, the most likely first."""

    def __init__(self, store: MemoryStore, secret: str, port: int = 0) -> None:
        """``port``: where to listen; by default any that is free."""
        self._store = store
        ports = listen(None, port)
        if not ports:
            raise BusyError(f"port {port} is taken", where="CKPT_MEMORY_PORT", hint="look who has it: ss -lptn; or choose another one")
        self.addresses: Sequence[tuple[str, int]] = [port.getsockname()[:2] for port in ports]
        self._connections = ConnectionServer(
            ports, secret.encode(), _SILENT_SECONDS, purpose=PURPOSE, name="ckpt-memory-serve", serve=self._converse
        )

    def __len__(self) -> int:
        """How many peers are connected."""
        return len(self._connections)

    def close(self) -> None:
        """Stop listening, and drop who is connected."""
        self._connections.close()

    def _converse(self, channel: Channel) -> None:
        while channel.await_next():
            asked, _ = receive(channel, MOST_ASKED)
            answer, content = self._answer_or_error(asked)
            try:
                # Whatever fails from here on ends the connection: an error among the bytes would count as bytes.
                send(channel, answer, ())
                if content is not None:
                    _send_file(channel, content)
            finally:
                if content is not None:
                    os.close(content.file)

    def _answer_or_error(self, asked: Message) -> Answer:
        try:
            return self._answer(asked)
        except CkptError as err:
            return {"error": error_to_json(err)}, None
        except (KeyError, TypeError, ValueError) as err:
            return {"error": error_to_json(FormatError(f"a question that cannot be read: {err!r}", hint=_RELEASE))}, None

    def _answer(self, asked: Message) -> Answer:
        match asked.get("ask"):
            case "hello":
                return {"id": self._store.id, "host": socket.gethostname()}, None
            case "list":
                return {"objects": [known.row() for known in self._store.list(str(asked["prefix"]))]}, None
            case "stat":
                return {"object": self._store.stat(str(asked["path"])).row()}, None
            case "read":
                return self._read(str(asked["path"]), int(asked["offset"]), int(asked["length"]))
            case other:
                raise FormatError(f"a question that this release does not know: {other!r}", hint=_RELEASE)

    def _read(self, path: str, offset: int, length: int) -> Answer:
        known, file = self._store.open(path)
        if offset < 0 or length < 0 or offset + length > known.size:
            os.close(file)
            raise CorruptError(f"bytes [{offset}, {offset + length}) were wanted, but it has {known.size}", where=f"memory://{path}")
        return {"object": known.row()}, ObjectRange(file, offset, length)


def _send_file(channel: Channel, content: ObjectRange) -> None:
    """The bytes of a file, which the kernel moves."""
    file, offset, length = content
    end, moved = offset + length, time.monotonic()
    room = select.poll()  # select() takes no descriptor above 1,023, and each object has two
    room.register(channel.sock, select.POLLOUT)
    while offset < end:
        try:
            sent = os.sendfile(channel.sock.fileno(), file, offset, min(_STRETCH, end - offset))
        except BlockingIOError:
            channel.alive()
            if time.monotonic() - moved > _SILENT_SECONDS:
                raise DeadlineError(f"{channel.peer} takes nothing for {_SILENT_SECONDS:g} s") from None
            room.poll(200)
            continue
        if not sent:
            raise ConnectionError("the object ended early")
        offset, moved = offset + sent, time.monotonic()


TIMEOUT = 30.0
"""Seconds in which nothing moves, after which a peer counts as dead."""
_IDLE = 8


def split_host(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{address!r} is no address of a memory daemon", hint="write host:port, as `ckpt memory status --listen` shows it")
    return host.removeprefix("[").removesuffix("]"), int(port)


class RemoteMemory:
    """The objects of the daemon at ``address``; any number of threads may ask at once. Connections are made when they are needed."""

    def __init__(self, address: str, secret: str, timeout: float = TIMEOUT) -> None:
        self.address = address
        self._host, self._port = split_host(address)
        self._secret = secret
        self._timeout = timeout
        self._idle = IdleConnections[Channel](_IDLE)

    def hello(self) -> tuple[str, str]:
        """The id of the daemon, and the name of its machine."""
        answer = self._answer({"ask": "hello"}, {"id": str, "host": str})
        return answer["id"], answer["host"]

    def list(self, prefix: str) -> list[MemoryObject]:
        return [MemoryObject.of(row) for row in self._answer({"ask": "list", "prefix": prefix}, {"objects": [ROW]})["objects"]]

    def stat(self, path: str) -> MemoryObject:
        return MemoryObject.of(self._answer({"ask": "stat", "path": path}, {"object": ROW})["object"])

    def read_into(self, path: str, offset: int, view: memoryview, update: Callable[[memoryview], object] = lambda view: None) -> None:
        """Fill ``view``, and give all of it to ``update`` in order."""

        def fill(channel: Channel) -> None:
            for at in range(0, len(view), settings.MIB):
                block = view[at : at + settings.MIB]
                channel.receive_into(block)
                update(block)

        self._ask({"ask": "read", "path": path, "offset": offset, "length": len(view)}, fill)

    def close(self) -> None:
        self._idle.clear()

    def _answer(self, question: Message, kind: Kind) -> Message:
        """An answer without bytes behind it, of this kind: one of another form is that of another release."""
        where, hint = f"memory://{self.address}", "use the same release of ckpt on both machines"
        answer: Message = checked(self._ask(question), kind, "answer of a memory daemon", where, hint)
        return answer

    def _ask(self, question: Message, then: Callable[[Channel], None] = lambda channel: None) -> Message:
        """The answer to a question; ``then`` takes what comes behind it."""
        with self._channel() as channel:
            send(channel, question, ())
            answer, _ = receive(channel, MOST_ANSWER)
            if "error" not in answer:
                then(channel)
        if "error" in answer:
            raise error_from_json(answer["error"])
        return answer

    @contextmanager
    def _channel(self) -> Iterator[Channel]:
        """A connection for one question. One that failed is closed: what comes next on it is unknown."""
        where = f"memory://{self.address}"
        try:
            channel = self._idle.take(self._dial)
            try:
                yield channel
            except BaseException:
                channel.close()
                raise
        except DeadlineError as err:
            raise StorageError(f"the memory daemon does not answer: {err.message}", where=where, hint=err.hint) from err
        except CkptError:
            raise
        except (OSError, UnicodeError) as err:  # the latter of a host that no name can be
            raise StorageError(
                f"the memory daemon is gone: {err}", where=where, hint="look whether that machine is up; its memory is lost with it"
            ) from err
        self._idle.keep(channel)

    def _dial(self) -> Channel:
        try:
            addresses = _addresses(self._host, self._port)
            return dial(addresses, self._secret.encode(), self._timeout, peer="the daemon", purpose=PURPOSE)
        except AccessError as err:
            raise AccessError(
                "the memory daemon of that machine has another secret",
                where=f"memory://{self.address}",
                hint="set CKPT_MEMORY_SECRET, the same on all machines, before their daemons start",
            ) from err


def _addresses(host: str, port: int) -> list[tuple[str, int]]:
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as err:
        raise StorageError(
            f"the name of the machine is not known here: {err.strerror}", where=f"memory://{host}:{port}", hint="check it"
        ) from err
    return list(dict.fromkeys((str(where[0]), port) for *_, where in known))
