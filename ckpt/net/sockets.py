"""Both ends of one TCP stream between two ranks, without blocking: who moves what, how far it is, and what the two say to each other.

The sender says who it is and how much it has (``HELLO``), waits until the receiver is ready for exactly that, sends, and waits until all
of it has arrived.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol
from weakref import WeakSet

from .shm_pool import ANNOUNCEMENT_BYTES

# What every TCP connection of ours has set, and how bytes come without waiting.

_sockets: WeakSet[socket.socket] = WeakSet()


def close_when_forked(sock: socket.socket) -> None:
    """Close a socket in processes that this one forks, as data loaders do. A connection that a child has, too, does not end with the
    process that talks on it: whoever waits at the other end would wait until the child has ended."""
    _sockets.add(sock)


def _close() -> None:
    for sock in list(_sockets):
        sock.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_close)


def prepare(sock: socket.socket, timeout: float) -> None:
    """A connection that neither waits with small messages nor waits for a silent machine for much longer than ``timeout`` seconds: the
    kernel asks whether the other end is still there, and gives up what is not acknowledged. It ends with this process."""
    close_when_forked(sock)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = min(timeout, 86400.0)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, int(seconds / 4))),
        ("TCP_KEEPINTVL", max(1, int(seconds / 8))),
        ("TCP_KEEPCNT", 6),
        ("TCP_USER_TIMEOUT", max(1, int(seconds * 1000))),
    ):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def receive_exactly(sock: socket.socket, size: int, have: bytes = b"") -> bytes:
    """What came of a message of ``size`` bytes, of which ``have`` came before."""
    try:
        data = sock.recv(size - len(have))
    except BlockingIOError:
        return have
    if not data:
        raise ConnectionError("the stream ended early")
    return have + data


HELLO = struct.Struct(f"!4s16sIIQ{ANNOUNCEMENT_BYTES}s")
"""Magic, the receiver's secret, number of the exchange, the sender's rank, how much it has, and where its shared memory is."""
MAGIC = b"ckp2"
READY, OPENED, ARRIVED, REFUSED = b"r", b"o", b"a", b"x"
"""Ready; ready, and the sender's shared memory is open; all has arrived; not expected."""

_NO_MEMORY = bytes(ANNOUNCEMENT_BYTES)
_MOST_VIEWS = 64
"""Views that one system call gets; the kernel takes at most 1024."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What the sender of a stream says first: number of the exchange, its rank, how much it has, and where its shared memory is, if it has
    some."""

    number: int
    rank: int
    size: int
    announcement: bytes

    def pack(self, secret: bytes) -> bytes:
        return HELLO.pack(MAGIC, secret, self.number, self.rank, self.size, self.announcement or _NO_MEMORY)

    @classmethod
    def unpack(cls, data: bytes, secret: bytes) -> Hello:
        """Raises:
        ConnectionError: it is from somebody who does not know the secret.
        """
        # Constant-time comparison: the secret went through the job's store, and a stranger who can connect must not
        # be able to guess it byte by byte.
        magic, given, number, rank, size, announcement = HELLO.unpack(data)
        if magic != MAGIC or not hmac.compare_digest(given, secret):
            raise ConnectionError("somebody else")
        return cls(number=number, rank=rank, size=size, announcement=b"" if announcement == _NO_MEMORY else announcement)


class Refused(Exception):
    """The other end does not expect what this one has."""


class Outgoing(Protocol):
    """What a stream carries to another rank: ``size`` of ``unit``, which that rank must expect."""

    size: int
    unit: str
    announcement: bytes
    """Where there is memory that the other rank may open; empty if there is none."""

    def answered(self, *, opened: bool) -> None:
        """The other rank is ready, and has ``opened`` that memory or not. Before anything is sent."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send now, but will be."""

    def send(self, sock: socket.socket) -> bool:
        """Send what fits of what is there; whether all is sent."""


class Incoming(Protocol):
    """What a stream brings from another rank: ``size`` of ``unit``, which that rank must have."""

    size: int
    unit: str

    def open(self, announcement: bytes) -> bool:
        """Open memory of the other rank; whether that could be done."""

    def receive(self, sock: socket.socket) -> bool:
        """Take what is there; whether all has come.

        Raises:
            ConnectionError: the other end is gone.
        """


class Views:
    """Memory that is sent or filled in order, as one stream of bytes. ``nbytes`` are left of ``size``."""

    idle = False
    unit = "bytes"
    announcement = b""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._left = deque(v.cast("B") for v in views if v.nbytes)
        self.size = self.nbytes = sum(len(v) for v in self._left)

    def answered(self, *, opened: bool) -> None:
        """See :class:`Outgoing`."""

    def open(self, announcement: bytes) -> bool:
        """See :class:`Incoming`."""
        return False

    def send(self, sock: socket.socket) -> bool:
        """Send what fits; whether all is sent."""
        return self._advance(sock.sendmsg(list(islice(self._left, _MOST_VIEWS))))

    def receive(self, sock: socket.socket) -> bool:
        """Fill with what is there; whether all is filled."""
        # Straight into the caller's memory, many views in one call: there is no buffer between the socket and the
        # tensors.
        count = sock.recvmsg_into(list(islice(self._left, _MOST_VIEWS)))[0]
        if not count:
            raise ConnectionError("the stream ended early")
        return self._advance(count)

    def fill(self, other: Views) -> None:
        """Copy what ``other`` has, which is as much."""
        while self.nbytes:
            into, data = self._left[0], other._left[0]
            count = min(len(into), len(data))
            into[:count] = data[:count]
            self._advance(count)
            other._advance(count)

    def _advance(self, count: int) -> bool:
        self.nbytes -= count
        while count:
            first = self._left[0]
            if len(first) > count:
                self._left[0] = first[count:]
                break
            count -= len(self._left.popleft())
        return not self.nbytes


@dataclass(eq=False)
class Sending:
    """A stream to another rank: connecting, greeting, sending, waiting for the end."""

    rank: int
    sock: socket.socket
    hello: bytes
    views: Outgoing
    greeted: bool = False
    ready: bool = False
    sent: bool = False

    @property
    def writes(self) -> bool:
        """Whether the next step waits for room in the stream, not for an answer."""
        return not self.greeted or (self.ready and not self.sent and not self.views.idle)

    def step(self) -> bool:
        """Go on as far as is possible without waiting; whether all has arrived."""
        # The four states of a sender, in order: connecting → greeted → ready → sent. Each step does what it can
        # without waiting, and the selector calls again when the socket is readable or writable.
        if not self.greeted:
            error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, "connect")
            self.sock.send(self.hello)  # the first bytes of a stream always fit
            self.greeted = True
        elif not self.ready:
            if (answer := self._answer()) in (READY, OPENED):
                self.views.answered(opened=answer == OPENED)
                self.ready = True
        elif not self.sent and not self.views.idle:
            self.sent = self.views.send(self.sock)
        else:
            return self._answer() == ARRIVED
        return False

    def _answer(self) -> bytes:
        answer = receive_exactly(self.sock, 1)
        if answer == REFUSED:
            raise Refused
        return answer


@dataclass(eq=False)
class Greeting:
    """A connection whose other end has not yet said who it is."""

    sock: socket.socket
    secret: bytes
    began: float = field(default_factory=time.monotonic)
    _received: bytes = b""

    def step(self) -> Hello | None:
        """What the other end says first, once all of that has come."""
        self._received = receive_exactly(self.sock, HELLO.size, self._received)
        return Hello.unpack(self._received, self.secret) if len(self._received) == HELLO.size else None


@dataclass(eq=False)
class Receiving:
    """A stream from another rank, which has been told to begin."""

    rank: int
    sock: socket.socket
    views: Incoming

    def step(self) -> bool:
        """Take what is there; whether all has arrived, which the other end is then told."""
        if not self.views.receive(self.sock):
            return False
        self.sock.send(ARRIVED)
        return True
