"""What the daemon gives to other machines: lists of its objects, and their bytes, over TCP, to whoever knows the secret.

asked                                  answered
{"ask": "hello"}                       {"id": the daemon's, "host": the machine's name}
{"ask": "list", "prefix": …}           {"objects": [rows]}
{"ask": "stat", "path": …}             {"object": row}
{"ask": "read", "path": …,             {"object": row}, and then the bytes themselves, straight from the object's pages
 "offset": …, "length": …}
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ckpt.errors import BusyError, CkptError, CorruptError, DeadlineError, FormatError, error_to_json
from ckpt.live.connections import ConnectionServer
from ckpt.live.wire import Channel, receive, send
from ckpt.settings import limits
from ckpt.transport.endpoints import listen

from .messages import Message
from .store import MemoryStore

PURPOSE = "memory"
MOST_ASKED = limits.MIB
MOST_ANSWER = 256 * limits.MIB
_SILENT_SECONDS = 60.0
"""A peer that takes nothing for so long is dropped."""
_STRETCH = 4 * limits.MIB
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
            raise CorruptError(f"bytes [{offset}, {offset + length}) were wanted, but it has {known.size}", where=f"mem://{path}")
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
