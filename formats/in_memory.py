"""A storage with one file more, which is in memory alone: elements that no file of a checkpoint has."""

from __future__ import annotations

import builtins
from collections.abc import Iterator

from ckpt.errors import CorruptError
from ckpt.io_backends.protocol import Backend, Entry, Grain, stamp_of

from .read_only import ReadOnly


class WithFile(ReadOnly):
    """What ``inner`` has, and at ``path`` these bytes, which are not listed."""

    why = "a checkpoint that is repaired while it is read is not written to"

    def __init__(self, inner: Backend, path: str, data: bytes) -> None:
        self.inner = inner
        self._path = path
        self._data = data

    @property
    def url(self) -> str:
        """See ``Backend.url``."""
        return self.inner.url

    @property
    def grain(self) -> Grain:
        """See ``Backend.grain``."""
        return self.inner.grain

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """See ``Backend.read``."""
        if path != self._path:
            return self.inner.read(path, offset, length)
        stop = len(self._data) if length is None else offset + length
        if not 0 <= offset <= stop <= len(self._data):
            raise CorruptError(f"bytes {offset} to {stop} of {len(self._data)}", where=f"{self.url}/{path}")
        return self._data[offset:stop]

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See ``Backend.read_into``."""
        if path != self._path:
            self.inner.read_into(path, offset, buffer)
            return
        out = buffer.cast("B")
        out[:] = self.read(path, offset, len(out))

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        """See ``Backend.evict``."""
        if path != self._path:
            self.inner.evict(path, offset, length)

    def size(self, path: str) -> int:
        """See ``Backend.size``."""
        return len(self._data) if path == self._path else self.inner.size(path)

    def stamp(self, path: str) -> str | None:
        """What tells versions of a file apart: see ``stamp_of``."""
        return "in memory" if path == self._path else stamp_of(self.inner, path)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See ``Backend.list``."""
        return self.inner.list(prefix)

    def children(self, prefix: str = "") -> builtins.list[str]:
        """See ``Backend.children``."""
        return self.inner.children(prefix)
