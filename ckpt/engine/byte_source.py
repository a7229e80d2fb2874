"""Where the bytes of chunks come from, and the one way to read and verify them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ckpt.catalog import Catalog, Extent
from ckpt.errors import CorruptError, NotFoundError
from ckpt.io_backends.protocol import Backend, IOHints
from ckpt.plan.layout.geometry import Box

# The port through which chunks are read, wherever their bytes are: in a storage, or in memory.
#
# An ``Extent`` says where a chunk lies in a source: ``length`` bytes from ``offset`` on of the object ``path``. What an object is depends
# on the source: a file of a checkpoint, or a buffer of this process. Everything above, the planner, the
# digests, the shared reads between ranks, works with extents alone and does not know which of them it has:
#
#         load  verify  cp  convert  import        what is wanted, where it goes
#                       │
#                 DigestReader                     read, hash while in cache, compare, read again
#                       │
#                  ByteSource                      bytes of an extent → given memory
#                  ┌────┴─────┐
#          StorageSource   MemorySource
#               │              │
#            Backend       buffers of this process
#
# Memory of *another* rank needs no third source. The rank that has it reads its own ``MemorySource``, and hands the bytes on as it hands on
# what it reads from storage for others (``engine.load.shared_reads``): with memory, the reader of a shared read is a rank that has it.

Update = Callable[[memoryview], object]
"""Takes bytes, part by part and in order: a digest's ``update``."""


class ByteSource(Protocol):
    """Objects whose bytes can be read. Thread-safe."""

    @property
    def url(self) -> str:
        """What messages call the source."""

    @property
    def io_hints(self) -> IOHints:
        """How it is read fastest. Hints change no bytes."""

    def read_into(self, path: str, offset: int, buffer: memoryview, update: Update | None = None) -> None:
        """Fill ``buffer`` with the bytes of the object ``path`` from ``offset`` on, and give all of them to ``update``.

        A source calls ``update`` with each part right after it has filled it, while it is in the cache: then hashing costs no second
        pass over memory. What ``update`` got of a read that raises is undefined.

        ============================================  ==========================================================================
        situation                                     required outcome
        ============================================  ==========================================================================
        the range is inside                           every byte of the buffer is set, and ``update`` got each once, in order
        the range reaches beyond the end              CorruptError with path, wanted range and size; never fewer bytes
        there is no such object                       NotFoundError
        the source fails otherwise                    StorageError
        ============================================  ==========================================================================
        """

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        """Let caches forget these bytes, so that the next read gets them from where they are stored. Only a hint: it never fails."""


class SpanRecorder(Protocol):
    """Where the time of a load is recorded."""

    def span(self, phase: str, nbytes: int = 0) -> AbstractContextManager[object]: ...
    def add(self, phase: str, began: float, ended: float, nbytes: int = 0) -> None: ...


# Objects of a storage as a source of bytes.


@dataclass(frozen=True, slots=True)
class StorageSource:
    """See ``ByteSource``; ``backend`` has the objects."""

    backend: Backend

    @property
    def url(self) -> str:
        return self.backend.url

    @property
    def io_hints(self) -> IOHints:
        return self.backend.io_hints

    def read_into(self, path: str, offset: int, buffer: memoryview, update: Update | None = None) -> None:
        """See ``ByteSource.read_into``."""
        if update is None:
            self.backend.read_into(path, offset, buffer)
        else:
            self.backend.read_hashed(path, offset, buffer, update)

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        """See ``ByteSource.evict``."""
        self.backend.evict(path, offset, length)


def source_of(catalog: Catalog) -> ByteSource:
    """Where the extents of a stored checkpoint lie."""
    return StorageSource(catalog.backend)


# Buffers of this process as a source of bytes: chunks of a live state, or of a checkpoint that is kept in memory.

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


class ChunkName(NamedTuple):
    """A stored chunk, as messages name it. ``box`` is None where ``tensor`` is a key of a file that says all."""

    tensor: str
    box: Box | None
    extent: Extent


def has_digest(extent: Extent, *, crc32: bool = True) -> bool:
    """Whether there is something to compare the bytes with."""
    return extent.digest is not None or (crc32 and extent.crc32 is not None)


def damaged(chunk: ChunkName, difference: str, url: str) -> CorruptError:
    """The error for a chunk that is not what its digest says."""
    tensor, box, extent = chunk
    return CorruptError(
        f"chunk {tensor} is damaged: {difference}" if box is None else f"chunk {box} of tensor {tensor} is damaged: {difference}",
        where=f"{url.rstrip('/')}/{extent.path}, bytes {extent.offset} to {extent.offset + extent.length}",
        hint="run `ckpt verify` to see what else is damaged, and use another step",
    )


def digest_difference(computed: str, expected: str) -> str | None:
    return None if computed == expected else f"its XXH3-64 digest is {computed}, should be {expected}"


def crc_difference(computed: int, expected: int) -> str | None:
    return None if computed == expected else f"its CRC-32 is {computed:08x}, should be {expected:08x}"
