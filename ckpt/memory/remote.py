"""Reading from the daemon of another machine. No torch."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt.errors import AccessError, CkptError, DeadlineError, StorageError, UsageError, error_from_json
from ckpt.live.wire import Channel, dial, receive, send
from ckpt.settings import limits
from ckpt.transport.idle_connections import IdleConnections
from ckpt.transport.members import Kind, checked

from .messages import Message
from .objects import ROW, MemoryObject
from .serving import MOST_ANSWER, PURPOSE

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
            for at in range(0, len(view), limits.MIB):
                block = view[at : at + limits.MIB]
                channel.receive_into(block)
                update(block)

        self._ask({"ask": "read", "path": path, "offset": offset, "length": len(view)}, fill)

    def close(self) -> None:
        self._idle.clear()

    def _answer(self, question: Message, kind: Kind) -> Message:
        """An answer without bytes behind it, of this kind: one of another form is that of another release."""
        where, hint = f"mem://{self.address}", "use the same release of ckpt on both machines"
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
        where = f"mem://{self.address}"
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
                where=f"mem://{self.address}",
                hint="set CKPT_MEMORY_SECRET, the same on all machines, before their daemons start",
            ) from err


def _addresses(host: str, port: int) -> list[tuple[str, int]]:
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as err:
        raise StorageError(
            f"the name of the machine is not known here: {err.strerror}", where=f"mem://{host}:{port}", hint="check it"
        ) from err
    return list(dict.fromkeys((str(where[0]), port) for *_, where in known))
