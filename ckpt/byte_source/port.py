"""The port through which chunks are read, wherever their bytes are: in a storage, or in memory.

An ``Extent`` says where a chunk lies in a source: ``length`` bytes from ``offset`` on of the object ``path``. What an object is depends on
the source: a file of a checkpoint (``storage``), or a buffer of this process (``memory``). Everything above, the planner, the digests, the
shared reads between ranks, works with extents alone and does not know which of them it has:

        load  verify  cp  convert  import        what is wanted, where it goes
                      │
                DigestReader                     read, hash while in cache, compare, read again
                      │
                 ByteSource                      bytes of an extent → given memory
                 ┌────┴─────┐
         StorageSource   MemorySource
              │              │
           Backend       buffers of this process

Memory of *another* rank needs no third source. The rank that has it reads its own ``MemorySource``, and hands the bytes on as it hands on
what it reads from storage for others (``engine.load.shared_reads``): with memory, the reader of a shared read is a rank that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from ckpt.io_backends.protocol import IOHints

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
