"""Buffers of this process as a source of bytes: chunks of a live state, or of a checkpoint that is kept in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt.errors import CorruptError, NotFoundError
from ckpt.io_backends.protocol import IOHints

from .port import Update

BLOCK = 256 << 10
"""Bytes that are copied and then hashed: they are still in the cache."""


@dataclass(frozen=True)
class MemorySource:
    """See ``ByteSource``. ``buffers`` are contiguous bytes by path; they must not change while they are read, and are kept alive."""

    url: str
    buffers: Mapping[str, memoryview]

    @property
    def io_hints(self) -> IOHints:
        return IOHints()  # memory is read at any offset, in pieces of any length

    def read_into(self, path: str, offset: int, buffer: memoryview, update: Update | None = None) -> None:
        """See ``ByteSource.read_into``."""
        where = f"{self.url.rstrip('/')}/{path}"
        if path not in self.buffers:
            raise NotFoundError("no buffer has this name", where=where, hint="list the paths of the source, and compare")
        stored, wanted = self.buffers[path].cast("B"), buffer.cast("B")
        stop = offset + len(wanted)
        if not 0 <= offset <= stop <= len(stored):
            message = f"bytes {offset} to {stop} are wanted, and it has {len(stored)}"
            raise CorruptError(message, where=where, hint="the table of chunks does not fit these buffers")
        for at in range(0, len(wanted), BLOCK):
            part = wanted[at : at + BLOCK]
            part[:] = stored[offset + at : offset + at + len(part)]
            if update is not None:
                update(part)

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        """Nothing: memory has no copy of itself to read again."""
