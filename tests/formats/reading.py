"""What tests of foreign formats share: real files, comparing tensors bit by bit, counting what is read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import wrap_backends

FIXTURES = Path(__file__).parent.parent / "fixtures"
"""Small checkpoints that the frameworks themselves wrote."""


class Counts:
    """Bytes and calls so far."""

    def __init__(self) -> None:
        self.bytes = 0
        self.calls = 0
        self.lock = threading.Lock()

    def add(self, length: int) -> None:
        with self.lock:
            self.bytes += length
            self.calls += 1


class Counted:
    """A backend that counts; everything else is the inner one's."""

    def __init__(self, inner: Backend, counts: Counts) -> None:
        self._inner = inner
        self._counts = counts

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        data = self._inner.read(path, offset, length)
        self._counts.add(len(data))
        return data

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self._inner.read_into(path, offset, buffer)
        self._counts.add(memoryview(buffer).nbytes)

    def read_hashed(self, path: str, offset: int, buffer: memoryview, update: Callable[[memoryview], object]) -> None:
        self._inner.read_hashed(path, offset, buffer, update)
        self._counts.add(memoryview(buffer).nbytes)


@contextmanager
def counted() -> Iterator[Counts]:
    counts = Counts()
    with wrap_backends(lambda backend: Counted(backend, counts)):
        yield counts


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bits."""
    one, other = (t.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(one, other)
