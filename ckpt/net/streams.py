"""Both ends of one TCP stream between two ranks, without blocking: who moves what, how far it is, and what the two say to each other.

The two prove to each other that they know the receiver's secret (``wire.py``). The sender says who it is and how much it has (``HELLO``),
waits until the receiver is ready for exactly that, sends, and waits until all of it has arrived. No torch.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import xxhash

from ckpt.errors import ExchangeError

from .endpoints import receive_exactly
from .shared_memory import ANNOUNCEMENT_BYTES
from .wire import Prover

PURPOSE = "exchange"
HELLO = struct.Struct(f"!IIQ{ANNOUNCEMENT_BYTES}s")
"""Number of the exchange, the sender's rank, how much it has, and where its shared memory is."""
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

    def pack(self) -> bytes:
        return HELLO.pack(self.number, self.rank, self.size, self.announcement or _NO_MEMORY)

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        number, rank, size, announcement = HELLO.unpack(data)
        return cls(number=number, rank=rank, size=size, announcement=b"" if announcement == _NO_MEMORY else announcement)


class Refused(Exception):
    """The other end does not expect what this one has."""


class Views:
    """Memory that is sent or filled in order, as one stream of bytes. ``nbytes`` are left of ``size``. No other process may open it."""

    idle = False
    unit = "bytes"
    announcement = b""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._left = deque(v.cast("B") for v in views if v.nbytes)
        self.size = self.nbytes = sum(len(v) for v in self._left)

    def answered(self, *, opened: bool) -> None:
        """The other rank is ready. Before anything is sent."""

    def open(self, announcement: bytes) -> bool:
        return False

    def send(self, sock: socket.socket) -> bool:
        """Send what fits; whether all is sent."""
        return self._advance(sock.sendmsg(list(islice(self._left, _MOST_VIEWS))))

    def receive(self, sock: socket.socket) -> bool:
        """Fill with what is there; whether all is filled."""
        # Straight into the caller's memory, many views in one call: there is no buffer between the socket and the tensors.
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
    """A stream to another rank: connecting, proving, sending, waiting for the end."""

    rank: int
    sock: socket.socket
    prover: Prover
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
        # The states of a sender, in order: connecting → greeted → proved → ready → sent. Each step does what it can
        # without waiting, and the selector calls again when the socket is readable or writable.
        if not self.greeted:
            error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, "connect")
            self.greeted = True
            self.prover.step(self.sock)
        elif not self.prover.done:
            self.prover.step(self.sock)
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


# Streams whose bytes become known while they flow: slices of shared reads, each after a record that says what it is.
#
# The sender puts pieces in from any thread; the thread of the exchange sends them. A piece comes as bytes in the stream, or as the number
# of a slot of the sender's pool, where the receiver could open that; with a digest of the bytes either way. The receiver never waits for
# anything but the stream, so senders that wait for room always get it.

RECORD = struct.Struct("<IIIIQ")
"""Shared read, piece, slot, bytes that follow or generation of the slot, XXH3-64 of the bytes."""
IN_STREAM = 0xFFFFFFFF
"""In place of a slot: the bytes follow."""
ALIVE = 0xFFFFFFFF
"""In place of a shared read: a sign of life."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    """A piece in a slot, until it is known whether the receiver can open the pool. ``packed``: what goes into the stream if it cannot, and
    then ``sent`` is called."""

    shared_read: int
    piece: int
    slot: int
    generation: int
    digest: int
    packed: Callable[[], Sequence[memoryview]]
    sent: Callable[[], None]


class Feed:
    """What goes to one rank: ``size`` shared reads in all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.unit = "shared reads"
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something to send; the exchange sets it."""
        self.announcement = b""
        """Where the slots of pieces are, if the receiver may open them."""
        self._opened = False
        self._queue: deque[tuple[Views, Callable[[], None]] | _Slot] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send now, but will be."""
        return not self._queue and not self._closed

    def answered(self, *, opened: bool) -> None:
        """The receiver is ready, and has ``opened`` the pool or not."""
        self._opened = opened

    def put_slot(
        self,
        shared_read: int,
        piece: int,
        *,
        slot: int,
        generation: int,
        digest: int,
        packed: Callable[[], Sequence[memoryview]],
        sent: Callable[[], None],
    ) -> None:
        """A piece in a slot of the pool, with the XXH3-64 of all of it. Where the receiver has not opened the pool, ``packed`` gives what
        it wants of the piece; ``sent`` is called when that has gone."""
        self._put(_Slot(shared_read=shared_read, piece=piece, slot=slot, generation=generation, digest=digest, packed=packed, sent=sent))

    def put_bytes(self, shared_read: int, piece: int, views: Sequence[memoryview], sent: Callable[[], None]) -> None:
        """``views`` must stay as they are until ``sent`` is called."""
        self._put((_in_stream(shared_read, piece, views), sent))

    def nudge(self) -> None:
        """Give a sign of life if there is nothing else to send."""
        if self.idle:
            self._put((_record(ALIVE, 0, IN_STREAM), lambda: None))

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True
        self.wake()

    def _put(self, entry: tuple[Views, Callable[[], None]] | _Slot) -> None:
        with self._lock:
            self._queue.append(entry)
        self.wake()

    def send(self, sock: socket.socket) -> bool:
        """Send what fits of what is there, once the receiver has :meth:`answered`; whether all there will ever be is sent."""
        # A stream is finished when it is closed *and* its queue is empty. ``closed`` is read first: entries that were
        # put in before the close are then still seen by the loop.
        closed = self._closed  # before the queue: what another thread puts in and then closes is not lost
        while self._queue:
            entry = self._queue[0]
            if isinstance(entry, _Slot):
                entry = self._queue[0] = self._spelled(entry)
            views, sent = entry
            if not views.send(sock):
                return False
            with self._lock:
                self._queue.popleft()
            sent()
        return closed

    def _spelled(self, entry: _Slot) -> tuple[Views, Callable[[], None]]:
        # Only now is it known whether the receiver could open the pool, so only now does an entry become bytes: a
        # record that names the slot, or the packed bytes themselves.
        if self._opened:
            return _record(entry.shared_read, entry.piece, entry.slot, entry.generation, entry.digest), lambda: None
        return _in_stream(entry.shared_read, entry.piece, entry.packed()), entry.sent


def hash_of(views: Iterable[memoryview]) -> xxhash.xxh3_64:
    """XXH3-64 of a stream, sent beside it: TCP's own checksum misses one damaged segment in some ten thousand."""
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return digest


def _record(shared_read: int, piece: int, slot: int, generation: int = 0, digest: int = 0) -> Views:
    return Views([memoryview(RECORD.pack(shared_read, piece, slot, generation, digest))])


def _in_stream(shared_read: int, piece: int, views: Sequence[memoryview]) -> Views:
    digest = hash_of(views).intdigest()
    return Views([memoryview(RECORD.pack(shared_read, piece, IN_STREAM, sum(map(len, views)), digest)), *views])


class PieceReceiver(Protocol):
    """What a rank does with the pieces of one sender."""

    def open(self, announcement: bytes) -> bool:
        """Open the sender's pool; whether that could be done."""

    def slot(self, shared_read: int, piece: int, slot: int, generation: int, digest: int) -> bool:
        """Copy what is wanted out of a slot; whether this was the last piece of the last shared read.

        Raises:
            ExchangeError: the slot has other bytes.
        """

    def room(self, shared_read: int, piece: int, length: int) -> Sequence[memoryview]:
        """Memory for the bytes of a piece that come next."""

    def filled(self, shared_read: int, piece: int) -> bool:
        """They are there; whether this was the last piece of the last shared read."""


class Inlet:
    """What comes from one rank: ``size`` shared reads in all."""

    def __init__(self, rank: int, size: int, taker: PieceReceiver) -> None:
        self.size = size
        self.unit = "shared reads"
        self._rank = rank
        self._taker = taker
        self._record = bytearray(RECORD.size)
        self._views = Views([memoryview(self._record)])
        self._room: Sequence[memoryview] | None = None
        self._done = False

    def open(self, announcement: bytes) -> bool:
        return self._taker.open(announcement)

    def receive(self, sock: socket.socket) -> bool:
        """Take what is there; whether all pieces of all shared reads have come."""
        if self._views.receive(sock):
            if self._room is None:
                self._began()
            else:
                shared_read, piece, _, _, wanted = RECORD.unpack(self._record)
                if hash_of(self._room).intdigest() != wanted:
                    raise damaged(f"rank {self._rank}")
                self._room, self._views = None, Views([memoryview(self._record)])
                self._done = self._taker.filled(shared_read, piece)
        return self._done

    def _began(self) -> None:
        shared_read, piece, slot, length, digest = RECORD.unpack(self._record)
        # Three kinds of record: the number of a slot, to be copied from shared memory at once; a length, after which
        # that many bytes follow in the stream; and a sign of life, after which nothing follows.
        if shared_read != ALIVE and slot != IN_STREAM:
            self._done = self._taker.slot(shared_read, piece, slot, length, digest)
        elif shared_read != ALIVE:
            self._room = self._taker.room(shared_read, piece, length)
            self._views = Views(self._room)
            return
        self._views = Views([memoryview(self._record)])


Outgoing = Views | Feed
"""What a stream carries to another rank: ``size`` of ``unit``, which that rank must expect."""
Incoming = Views | Inlet
"""What a stream brings from another rank: ``size`` of ``unit``, which that rank must have."""


def damaged(sender: str) -> ExchangeError:
    return ExchangeError(
        f"what {sender} sent was damaged on the way",
        hint="try again; if it comes back, look at the network and the memory of these machines",
    )
