"""Messages between the daemon and the processes of its machine: JSON, and open files, in one packet each; and what is said of an object.

A packet is whole or not there, so nothing has to be put together. JSON of more than ``_INLINE`` bytes goes in an anonymous file of its own.
Nothing that comes is unpickled, and every length is compared with a limit before memory is asked for.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckpt import settings
from ckpt.errors import FormatError
from ckpt.net.endpoints import exhausted
from ckpt.net.message_fields import is_count, is_seconds
from ckpt.text import parse_object

PROTOCOL = 1
"""Version of the messages. ``hello``, ``status`` and ``stop`` stay what they are in all of them."""
_INLINE = 60 * settings.KIB
_MOST = 256 * settings.MIB
_MOST_FILES = 4
_HERE, _IN_FILE = b"j", b"f"

Message = dict[str, Any]


@dataclass(frozen=True)
class Packet:
    """A message, and the files that came with it; whoever receives it closes them."""

    message: Message
    files: Sequence[int]


def send(sock: socket.socket, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """Send one message, and ``files``, which stay open here."""
    text = json.dumps(message).encode()
    if len(text) <= _INLINE:
        socket.send_fds(sock, [_HERE, text], list(files))
        return
    carrier = os.memfd_create("ckpt-message", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(carrier), "wb") as file:
            file.write(text)
        socket.send_fds(sock, [_IN_FILE], [carrier, *files])
    finally:
        os.close(carrier)


def receive(sock: socket.socket) -> Packet | None:
    """The next message; None if the other end has closed."""
    data, files, flags, _ = socket.recv_fds(sock, _INLINE + 1, _MOST_FILES, socket.MSG_CMSG_CLOEXEC)
    try:
        if not data:
            return None
        if flags & socket.MSG_TRUNC:
            raise FormatError("a message that is too long")
        if flags & socket.MSG_CTRUNC:  # the kernel gives fewer files than were sent where this process can open no more
            raise exhausted("no descriptor for a file of the memory daemon can be made", OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        text = data[1:]
        if data[:1] == _IN_FILE and files:
            carrier, *files = files
            with os.fdopen(carrier, "rb"):
                if os.fstat(carrier).st_size > _MOST:
                    raise FormatError("a message that is too long")
                text = os.pread(carrier, _MOST, 0)
        try:
            message = parse_object(text)
        except ValueError as err:
            raise FormatError(f"a message that cannot be read: {err}") from err
        passed, files = files, []
        return Packet(message, passed)
    finally:
        close_all(files)


def close_all(files: Sequence[int]) -> None:
    for file in files:
        with suppress(OSError):
            os.close(file)


# What the daemon says of an object, and where its files are.

ROW = (str, is_count, lambda unused: True, str, is_seconds)
"""What :meth:`MemoryObject.row` gives (``ckpt.net.message_fields``)."""


@dataclass(frozen=True, slots=True, order=True)
class MemoryObject:
    """An object in the memory of a machine."""

    path: str
    size: int
    """Bytes."""
    version: str
    """Another one for each object that was ever put."""
    modified: float
    """When it was put: seconds since 1970 by the machine's clock."""

    def row(self) -> list[Any]:
        # The third was a digest. It keeps its place, so that daemons and clients that still have one understand these rows.
        return [self.path, self.size, None, self.version, self.modified]

    @classmethod
    def of(cls, row: Any) -> MemoryObject:
        path, size, _, version, modified = row
        return cls(str(path), int(size), str(version), float(modified))
