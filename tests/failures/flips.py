"""A storage whose bytes are right and one of whose answers is not: one bit flips on the way down, once."""

from __future__ import annotations

import threading

from ckpt.io_backends.faulty import FaultyBackend, FaultyProcess
from ckpt.io_backends.protocol import Backend


class Flip:
    """Flips bit ``bit`` of byte ``at`` of the object at ``url`` in the first ``times`` answers that have it, after those to ``skip``.
    ``happened`` counts them; ``evicted`` are the objects that caches were told to forget."""

    def __init__(self, url: str, at: int, bit: int = 2, *, times: int = 1, skip: int = 0) -> None:
        self._url = url
        self._at = at
        self._bit = bit
        self._left = times
        self._skip = skip
        self._lock = threading.Lock()
        self.happened = 0
        self.evicted: list[str] = []

    def wrap(self, inner: Backend) -> FlippingBackend:
        """For ``wrap_backends``."""
        return FlippingBackend(inner, self)

    def spoil(self, url: str, offset: int, data: memoryview) -> None:
        if url != self._url or not offset <= self._at < offset + len(data):
            return
        with self._lock:
            self._skip -= 1
            if self._left and self._skip < 0:
                self._left -= 1
                self.happened += 1
                data[self._at - offset] ^= 1 << self._bit


class FlippingBackend(FaultyBackend):
    """``inner`` with a flip."""

    def __init__(self, inner: Backend, flip: Flip) -> None:
        super().__init__(inner, process=FaultyProcess())
        self._flip = flip

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        data = bytearray(super().read(path, offset, length))
        self._flip.spoil(f"{self.url.rstrip('/')}/{path}", offset, memoryview(data))
        return bytes(data)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        super().read_into(path, offset, buffer)
        self._flip.spoil(f"{self.url.rstrip('/')}/{path}", offset, buffer.cast("B"))

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        self._flip.evicted.append(f"{self.url.rstrip('/')}/{path}")
        super().evict(path, offset, length)
