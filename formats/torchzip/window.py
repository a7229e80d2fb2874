"""A range of a file, read as if it were a file of its own: an archive that lies inside a data file is read like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from ckpt.errors import CorruptError
from ckpt.reread import read_checked

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


T = TypeVar("T")

TAIL = 16 << 10
"""Bytes at the end of an archive that are read first: they hold the directory of some 150 records."""


class FileRange:
    """``size`` bytes of ``path`` from ``start`` on. Positions count from there. Bytes that were read ahead are given by ``hold``.

    ``tail`` is how many bytes at the end are read at once.
    """

    def __init__(self, backend: Backend, path: str, start: int, size: int, tail: int = TAIL) -> None:
        self._backend = backend
        self.path = path
        self.start = start
        self.size = size
        self.tail = tail
        self._ahead: list[tuple[int, bytes]] = []

    @property
    def where(self) -> str:
        """For messages."""
        inside = f", bytes {self.start} to {self.start + self.size}" if self.start else ""
        return f"{self._backend.url.rstrip('/')}/{self.path}{inside}"

    def hold(self, parts: Iterable[tuple[int, bytes]]) -> None:
        """Keep bytes at hand: position and bytes of each part."""
        self._ahead += parts

    def checked(self, read: Callable[[], T]) -> T:
        """What ``read`` gives, which reads this window and raises CorruptError if its bytes do not fit; called again if it does."""

        def again() -> T:
            try:
                return read()
            except CorruptError:
                self._ahead.clear()  # what was read ahead may be what does not fit
                raise

        return read_checked(self._backend, self.path, again, offset=self.start, length=self.size)

    def read(self, offset: int, length: int) -> bytes:
        """These bytes."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise CorruptError(
                f"bytes {offset:,} to {offset + length:,} were wanted of {self.size:,}", where=self.where, hint="the file was cut off"
            )
        for start, data in self._ahead:
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        return self._backend.read(self.path, self.start + offset, length)
