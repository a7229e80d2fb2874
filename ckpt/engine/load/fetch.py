"""Bytes of one checkpoint on their way in: read in pieces that are still in the cache when they are hashed, checked, counted. No torch.

Thread-safe. Scratch memory is kept per thread, and is never more than what the longest single read or coded chunk takes.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt.catalog import Catalog, Extent
from ckpt.errors import CorruptError
from ckpt.formats.native.coding.codecs import decode
from ckpt.layout.geometry import Box
from ckpt.reread import read_checked

T = TypeVar("T")
Verify = Literal["full", "partial", "off"]
"""``full``: every chunk that is touched is read whole and checked. ``partial``: only what is needed is read; chunks that are needed whole
are checked. ``off``: nothing is checked."""

PIECE = 2 << 20
"""Bytes of a long range that are read, hashed and copied before the next ones."""
STRETCH = 8 << 20
"""Bytes that one call reads straight into place."""
PROBE = 4 << 20
"""Bytes that are read to see whether the storage makes a thread wait."""
PAGE = 4096
SPARE = 512
"""Scratch memory begins at a multiple of this many bytes: of every item size, and of what direct I/O asks for."""


class SpanRecorder(Protocol):
    """Where the time of a load is recorded."""

    def span(self, phase: str, nbytes: int = 0) -> AbstractContextManager[object]: ...
    def add(self, phase: str, began: float, ended: float, nbytes: int = 0) -> None: ...


class ChunkName(NamedTuple):
    """A stored chunk, as messages name it."""

    tensor: str
    box: Box
    extent: Extent


class Fetch:
    """Reads from one catalog. ``read`` and ``verified`` count bytes: all, and those that were compared with a digest; ``waits`` how
    often a thread gave up its core during the first reads, ``PROBE`` bytes."""

    def __init__(self, catalog: Catalog, verify: Verify, beat: Callable[[], None], spans: SpanRecorder | None) -> None:
        self.catalog = catalog
        self.verify = verify
        self.piece = max(PIECE, catalog.backend.io_hints.read_size)
        self.stretch = max(STRETCH, self.piece, catalog.backend.io_hints.split_read_size)
        self.read = 0
        self.verified = 0
        self.waits = 0
        self.beat = beat
        self.allocate: Callable[[int], npt.NDArray[np.uint8]] = _plain
        """Makes scratch memory."""
        self._spans = spans
        self._lock = threading.Lock()
        self._local = threading.local()

    def whole(self, extent: Extent) -> bool:
        """Whether a chunk has to be read whole although only a part of it is needed."""
        return extent.codec is not None or (self.verify == "full" and extent.digest is not None)

    def span(self, phase: str, nbytes: int) -> AbstractContextManager[object]:
        return _NOTHING if self._spans is None else self._spans.span(phase, nbytes)

    def fill(self, path: str, offset: int, memory: memoryview, check: Check | None = None) -> None:
        """Read a range, whatever its length, and give its bytes to ``check``.

        Raises:
            StorageError: the storage failed.
        """
        before = _waits() if self.read < PROBE else None
        if check is None or not check.on:
            with self.span("read", len(memory)):
                self.catalog.backend.read_into(path, offset, memory)
            if check is not None:
                check.update(memory)
        else:
            began, hashed = time.perf_counter(), check.seconds
            self.catalog.backend.read_hashed(path, offset, memory, check.timed_update)
            if self._spans is not None:  # the two take turns every few microseconds: each counts for how long it took in all
                ended = time.perf_counter()
                turn = ended - (check.seconds - hashed)
                self._spans.add("read", began, turn, len(memory))
                self._spans.add("verify", turn, ended, len(memory))
        self._local.unchecked = self._unchecked() + len(memory)
        with self._lock:
            self.read += len(memory)
            self.waits += _waits() - before if before is not None else 0
        self.beat()

    def checked(self, extent: Extent, read: Callable[[], T]) -> T:
        """What ``read`` gives, which fills and checks ``extent``; called again if the bytes do not fit (``ckpt.reread``).

        Raises:
            CorruptError: they do not fit again.
        """

        def attempt() -> T:
            before = self._unchecked()
            try:
                return read()
            except CorruptError:
                self.compared(max(0, self._unchecked() - before))  # nobody uses these bytes
                raise

        return read_checked(self.catalog.backend, extent.path, attempt, offset=extent.offset, length=extent.length)

    def chunk(self, chunk: ChunkName, memory: memoryview) -> None:
        """Read the stored bytes of a whole chunk, piece by piece, and check them. Within :meth:`checked`.

        Raises:
            CorruptError: they are not what the digest says.
            StorageError: the storage failed.
        """
        check = Check(self, chunk)
        for at in range(0, len(memory), self.stretch):
            self.fill(chunk.extent.path, chunk.extent.offset + at, memory[at : at + self.stretch], check)
        check.end()

    def look_again(self, chunk: ChunkName, damage: CorruptError) -> None:
        """Whether a chunk is damaged that was once, but was put into place meanwhile: its bytes are only checked.

        Raises:
            CorruptError: it is.
        """
        before = [damage]
        self.compared(chunk.extent.length)

        def read() -> None:
            if before:
                raise before.pop()
            check, extent = Check(self, chunk), chunk.extent
            memory = self.scratch(self.piece).data
            for at in range(0, extent.length, self.piece):
                self.fill(extent.path, extent.offset + at, memory[: min(self.piece, extent.length - at)], check)
            check.end()

        self.checked(chunk.extent, read)

    def check(self, chunk: ChunkName, data: memoryview) -> None:
        """Compare bytes that were read with the digest of their chunk, if they are all of it.

        Raises:
            CorruptError: they differ.
        """
        check = Check(self, chunk)
        check.update(data)
        check.end()

    def compared(self, nbytes: int) -> None:
        """Count bytes that a digest was compared with."""
        self._local.unchecked = self._unchecked() - nbytes
        with self._lock:
            self.verified += nbytes

    def _unchecked(self) -> int:
        """Bytes that this thread has read and not compared."""
        count: int = getattr(self._local, "unchecked", 0)
        return count

    def decode(self, chunk: ChunkName, blob: memoryview, out: memoryview, itemsize: int) -> None:
        """What a coded chunk was coded from.

        Raises:
            CorruptError: the bytes are not what a coder writes, or stand for more or fewer than ``out`` has.
            FormatError: they are of a version that this software does not know.
        """
        assert chunk.extent.codec is not None
        try:
            with self.span("decode", len(out)):
                decode(chunk.extent.codec, blob, out, itemsize)
        except CorruptError as err:
            raise damaged(chunk, err.message, self.catalog.url) from err

    def scratch(self, size: int, use: str = "read") -> npt.NDArray[np.uint8]:
        """This thread's memory for one ``use``, at least ``size`` bytes of it: overwritten by the next that asks for the same use."""
        found: npt.NDArray[np.uint8] | None = getattr(self._local, use, None)
        if found is None or len(found) < size:
            raw = self.allocate(max(size, self.piece) + SPARE)
            start = -raw.ctypes.data % SPARE
            found = raw[start : start + max(size, self.piece)]
            setattr(self._local, use, found)
        return found


class Check:
    """The digest of one chunk while its bytes come in."""

    def __init__(self, fetch: Fetch, chunk: ChunkName) -> None:
        self._fetch = fetch
        self._chunk = chunk
        self._length = 0
        self.also: xxhash.xxh3_64 | None = None
        """Another digest, that of what comes now."""
        self.seconds = 0.0
        """How long hashing took, of what was hashed while it was read."""
        self._digest = xxhash.xxh3_64() if fetch.verify != "off" and chunk.extent.digest is not None else None

    @property
    def on(self) -> bool:
        """Whether there is a digest to compare with."""
        return self._digest is not None

    def timed_update(self, data: memoryview) -> None:
        """``update`` of a few bytes of many: a span for each would cost too much."""
        self._length += len(data)
        if self._digest is not None:
            began = time.perf_counter()
            self._digest.update(data)
            if self.also is not None:
                self.also.update(data)
            self.seconds += time.perf_counter() - began

    def update(self, data: memoryview) -> None:
        self._length += len(data)
        if self.also is not None:
            self.also.update(data)
        if self._digest is not None:
            with self._fetch.span("verify", len(data)):
                self._digest.update(data)

    def end(self) -> None:
        """Raise CorruptError if the bytes are all of the chunk and not what its digest says."""
        extent = self._chunk.extent
        if self._digest is None or self._length != extent.length:
            return
        if (found := self._digest.hexdigest()) != extent.digest:
            raise damaged(self._chunk, f"digest {found}, should be {extent.digest}", self._fetch.catalog.url)
        self._fetch.compared(self._length)


def damaged(chunk: ChunkName, what: str, url: str) -> CorruptError:
    extent = chunk.extent
    return CorruptError(
        f"chunk {chunk.box} of tensor {chunk.tensor} is damaged: {what}",
        where=f"{url}/{extent.path}, bytes {extent.offset} to {extent.offset + extent.length}",
        hint="run `ckpt verify` to see what else is damaged, and load another step",
    )


def _plain(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.empty(nbytes, dtype=np.uint8)


def _waits() -> int:
    """How often this thread has given up its core of its own accord."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if hasattr(resource, "RUSAGE_THREAD") else 0


_NOTHING: AbstractContextManager[object] = nullcontext()
