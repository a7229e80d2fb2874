"""Streams whose bytes become known while they flow: pieces of parcels, each after a record that says what it is. No torch.

The sender puts pieces in from any thread; the thread of the exchange sends them. A piece comes as bytes in the stream, with a digest, or
as the number of a slot of the sender's ring, where both ranks are on one machine. The receiver never waits for anything but the stream,
so senders that wait for room always get it.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import xxhash

from .errors import CorruptError
from .streams import Views

RECORD = struct.Struct("<IIIIQ")
"""Parcel, piece, slot, bytes that follow, their XXH3-64."""
IN_STREAM = 0xFFFFFFFF
"""In place of a slot: the bytes follow."""
ALIVE = 0xFFFFFFFF
"""In place of a parcel: a sign of life."""
RING = 0xFFFFFFFE
"""In place of a parcel: where the sender's ring is."""


class Feed:
    """What goes to one rank: ``size`` parcels in all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.unit = "parcels"
        self.wake: Callable[[], None] = lambda: None
        """Called when there is something to send; the exchange sets it."""
        self._queue: deque[tuple[Views, Callable[[], None]]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send now, but will be."""
        return not self._queue and not self._closed

    def put_ring(self, pid: int, file: int, shape: tuple[int, int, int]) -> None:
        """Say where the slots of later pieces are; before them."""
        self._put([RECORD.pack(RING, pid, file, shape[0] << 16 | shape[2], shape[1])], lambda: None)

    def put_slot(self, parcel: int, piece: int, slot: int) -> None:
        self._put([RECORD.pack(parcel, piece, slot, 0, 0)], lambda: None)

    def put_bytes(self, parcel: int, piece: int, views: Sequence[memoryview], sent: Callable[[], None]) -> None:
        """``views`` must stay as they are until ``sent`` is called."""
        digest = xxhash.xxh3_64()
        for view in views:
            digest.update(view)
        self._put([RECORD.pack(parcel, piece, IN_STREAM, sum(map(len, views)), digest.intdigest()), *views], sent)

    def nudge(self) -> None:
        """Give a sign of life if there is nothing else to send."""
        if self.idle:
            self._put([RECORD.pack(ALIVE, 0, IN_STREAM, 0, 0)], lambda: None)

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True
        self.wake()

    def _put(self, views: Sequence[memoryview | bytes], sent: Callable[[], None]) -> None:
        with self._lock:
            self._queue.append((Views([memoryview(v) for v in views]), sent))
        self.wake()

    def send(self, sock: socket.socket) -> bool:
        """Send what fits of what is there; whether all there will ever be is sent."""
        closed = self._closed  # before the queue: what another thread puts in and then closes is not lost
        while self._queue:
            views, sent = self._queue[0]
            if not views.send(sock):
                return False
            with self._lock:
                self._queue.popleft()
            sent()
        return closed


class Taker(Protocol):
    """What a rank does with the pieces of one sender."""

    def ring(self, pid: int, file: int, shape: tuple[int, int, int]) -> None: ...

    def slot(self, parcel: int, piece: int, slot: int) -> bool:
        """Copy what is wanted out of a slot; whether this was the last piece of the last parcel."""

    def room(self, parcel: int, piece: int, length: int) -> Sequence[memoryview]:
        """Memory for the bytes of a piece that come next."""

    def filled(self, parcel: int, piece: int) -> bool:
        """They are there; whether this was the last piece of the last parcel."""


class Inlet:
    """What comes from one rank: ``size`` parcels in all."""

    def __init__(self, rank: int, size: int, taker: Taker) -> None:
        self.size = size
        self.unit = "parcels"
        self._rank = rank
        self._taker = taker
        self._record = bytearray(RECORD.size)
        self._views = Views([memoryview(self._record)])
        self._room: Sequence[memoryview] | None = None
        self._done = False

    def receive(self, sock: socket.socket) -> bool:
        """Take what is there; whether all pieces of all parcels have come.

        Raises:
            ConnectionError: the other end is gone.
            CorruptError: bytes were damaged on the way.
        """
        if self._views.receive(sock):
            if self._room is None:
                self._began()
            else:
                self._ended()
        return self._done

    def _began(self) -> None:
        parcel, piece, slot, length, last = RECORD.unpack(self._record)
        if parcel == RING:
            self._taker.ring(piece, slot, (length >> 16, last, length & 0xFFFF))
        elif parcel != ALIVE and slot != IN_STREAM:
            self._done = self._taker.slot(parcel, piece, slot)
        elif parcel != ALIVE:
            self._room = self._taker.room(parcel, piece, length)
            self._views = Views(self._room)
            return
        self._views = Views([memoryview(self._record)])

    def _ended(self) -> None:
        parcel, piece, _, _, wanted = RECORD.unpack(self._record)
        assert self._room is not None
        digest = xxhash.xxh3_64()
        for view in self._room:
            digest.update(view)
        if digest.intdigest() != wanted:
            raise damaged(self._rank)
        self._room, self._views = None, Views([memoryview(self._record)])
        self._done = self._taker.filled(parcel, piece)


def damaged(rank: int) -> CorruptError:
    return CorruptError(
        f"what rank {rank} sent was damaged on the way",
        hint="try again; if it comes back, look at the network and the memory of these machines",
    )
