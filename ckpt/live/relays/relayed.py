"""The boxes of one version that one rank of a sink takes, given to others from when each is here. No torch."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import xxhash

from ckpt.errors import CorruptError, NotFoundError
from ckpt.plan.transfers import RequestList


class RelayedVersion:
    """Boxes by what is asked for (``RequestList.key``), in memory that nobody writes before :meth:`close`. Thread-safe.

    ``name`` is new each time: who has heard of an earlier try at the same version finds nothing here, so two sinks that try again never
    wait for each other.
    """

    def __init__(self) -> None:
        self.name = secrets.token_hex(8)
        self._boxes: dict[bytes, tuple[memoryview, int]] = {}
        self._memory: list[memoryview] = []
        self._readers = 0
        self._closed = False
        self._condition = threading.Condition()

    def add(self, requests: RequestList, piece: int, data: memoryview) -> None:
        """A piece is here; its bytes have just been verified. ``data`` is this version's from now on."""
        rows = requests.pieces[piece]
        places, _ = requests.places(piece)
        boxes = {}
        for row, at, size in zip(rows, places, requests.nbytes[rows.start : rows.stop].tolist(), strict=True):
            box = data[at : at + size]
            boxes[requests.key(row)] = box, xxhash.xxh3_64_intdigest(box)
        with self._condition:
            self._boxes.update(boxes)
            self._memory.append(data)
            self._condition.notify_all()

    def ready(self, requests: RequestList, piece: int, seconds: float) -> bool:
        """Whether all boxes of a piece are here within some seconds."""
        keys = [requests.key(row) for row in requests.pieces[piece]]
        with self._condition:
            here = self._condition.wait_for(lambda: self._closed or all(key in self._boxes for key in keys), seconds)
            self._check_open()
            return here

    def pack(self, requests: RequestList, piece: int, out: memoryview) -> int:
        """Pack a piece that is ready; as ``Holdings.pack``."""
        places, length = requests.places(piece)
        with self._reading():
            for row, at in zip(requests.pieces[piece], places, strict=True):
                box, digest = self._boxes.get(requests.key(row), (None, 0))
                if box is None or len(box) != requests.nbytes[row]:
                    raise NotFoundError("this relay has other boxes", hint="take again")
                target = out[at : at + len(box)]
                target[:] = box
                if xxhash.xxh3_64_intdigest(target) != digest:
                    raise CorruptError("a box that this relay has taken has changed since", hint="look at that machine's memory")
        return length

    def views(self, requests: RequestList, piece: int, out: memoryview) -> list[memoryview]:
        """A piece that is ready, in ``out``: its own memory may be another version's before it is sent."""
        return [out[: self.pack(requests, piece, out)]]

    def close(self) -> list[memoryview]:
        """Give nothing any more, and wait until nobody reads; the memory, which is free now."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._readers)  # each copies one piece
            memory, self._memory = self._memory, []
            self._boxes.clear()
        return memory

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._condition:
            self._check_open()
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise NotFoundError("this relay has gone on to another version", hint="take it from another rank")
