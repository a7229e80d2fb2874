"""Reads chunks and compares them with their digests: the one way in which load, verify, cp, convert and import read. No torch.

    storage ─read_into─► memory ──hash while in cache──► compare ──equal──► count as verified
                  ▲                                          │
                  └──── evict from caches, read again ◄──────┘ different

Three layers, each usable alone:

* :meth:`DigestReader.fill` reads a range into memory and passes it to a :class:`ChunkDigest`, block by block, in the cache;
* :meth:`DigestReader.read_chunk`, ``compare``, ``compare_rows`` end with a comparison, and raise if it fails;
* :meth:`DigestReader.reread` runs such work, and runs it again from storage if it fails (``io_backends.checks``): a network, a cache or a
  memory bank may have flipped a bit, and then the stored bytes are right.

Thread-safe. Scratch memory belongs to a thread, and is as long as its longest read or encoded chunk so far.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt import settings
from ckpt.catalog import Extent
from ckpt.concurrency import waits_so_far
from ckpt.errors import CorruptError
from ckpt.formats.native.codecs import decode
from ckpt.io_backends.checks import read_checked
from ckpt.io_backends.protocol import Backend
from ckpt.plan.layout.geometry import Box
from ckpt.telemetry.spans import Spans

T = TypeVar("T")
Verify = Literal["full", "partial", "off"]
"""``full``: every chunk that is touched is read whole and checked. ``partial``: only what is needed is read; chunks that are needed whole
are checked. ``off``: nothing is checked."""

PROBE = 4 << 20
"""Bytes that are read to see whether the storage makes a thread wait."""
PAGE = 4096
SPARE = 512
"""Scratch memory begins at a multiple of this many bytes: of every item size, and of what direct I/O asks for."""


class ChunkName(NamedTuple):
    """A stored chunk, as messages name it. ``box`` is None where ``tensor`` is a key of a file that says all."""

    tensor: str
    box: Box | None
    extent: Extent

    def damaged(self, difference: str, url: str) -> CorruptError:
        """The error for a chunk that is not what its digest says."""
        tensor, box, extent = self
        return CorruptError(
            f"chunk {tensor} is damaged: {difference}" if box is None else f"chunk {box} of tensor {tensor} is damaged: {difference}",
            where=f"{url.rstrip('/')}/{extent.path}, bytes {extent.offset} to {extent.offset + extent.length}",
            hint="run `ckpt verify` to see what else is damaged, and use another step",
        )


class _Scratch(threading.local):
    """What one thread has: bytes that it has read and not compared, and memory by use."""

    unchecked = 0

    def __init__(self) -> None:
        self.memory: dict[str, npt.NDArray[np.uint8]] = {}


class DigestReader:
    """Reads from one storage. ``read`` and ``verified`` count bytes: all, and those that were compared with a digest; ``requests`` counts
    reads, ``paths`` the files read from, ``memory`` bytes of scratch memory; ``waits`` how often a thread gave up its core during the
    first reads, ``PROBE`` bytes.

    ``crc32``: chunks without a digest are compared with the CRC-32 that another format has of them.
    """

    def __init__(
        self,
        backend: Backend,
        verify: Verify = "full",
        *,
        crc32: bool = False,
        beat: Callable[[], None] = lambda: None,
        spans: Spans | None = None,
    ) -> None:
        self.backend = backend
        self.verify = verify
        self.crc32 = crc32
        self.piece = max(settings.PIECE, backend.io_hints.read_size)
        self.stretch = max(settings.DIRECT_READ, self.piece, backend.io_hints.split_read_size)
        self.read = 0
        self.verified = 0
        self.requests = 0
        self.paths: set[str] = set()
        self.memory = 0
        self.waits = 0
        self.beat = beat
        self.allocate: Callable[[int], npt.NDArray[np.uint8]] = lambda nbytes: np.empty(nbytes, dtype=np.uint8)
        """Makes scratch memory."""
        self._spans = spans
        self._lock = threading.Lock()
        self._local = _Scratch()

    def span(self, phase: str, nbytes: int) -> AbstractContextManager[object]:
        return _NO_SPAN if self._spans is None else self._spans.span(phase, nbytes)

    # ---- reading

    def fill(self, path: str, offset: int, memory: memoryview, digest: ChunkDigest | None = None) -> None:
        """Read a range, whatever its length, and give its bytes to ``digest``."""
        # The first PROBE bytes show whether the storage makes threads wait. If it does not, the data is in the page
        # cache or on a fast device, and more threads than a few would only compete for cores.
        before = waits_so_far() if self.read < PROBE else None
        if digest is None or not digest.compares:
            with self.span("read", len(memory)):
                self.backend.read_into(path, offset, memory)
            if digest is not None:
                digest.add(memory)
        else:
            # The backend reads and hashes by turns, slice by slice, so that a slice is hashed while the cache has it.
            began, hashed = time.perf_counter(), digest.seconds
            self.backend.read_hashed(path, offset, memory, digest.add if self._spans is None else digest.add_timed)
            if self._spans is not None:  # the two take turns every few microseconds: each counts for how long it took in all
                ended = time.perf_counter()
                turn = ended - (digest.seconds - hashed)
                self._spans.add("read", began, turn, len(memory))
                self._spans.add("verify", turn, ended, len(memory))
        self._local.unchecked += len(memory)
        with self._lock:
            self.read += len(memory)
            self.requests += 1
            self.paths.add(path)
            self.waits += waits_so_far() - before if before is not None else 0
        self.beat()

    def reread(self, extent: Extent, read: Callable[[], T]) -> T:
        """The result of ``read``, which fills and checks ``extent``; it is called again if the bytes do not fit."""

        def attempt() -> T:
            before = self._local.unchecked
            try:
                return read()
            except CorruptError:
                self.count_verified(max(0, self._local.unchecked - before))  # nobody uses these bytes
                raise

        return read_checked(self.backend, extent.path, attempt, offset=extent.offset, length=extent.length)

    def read_chunk(self, chunk: ChunkName, memory: memoryview, offset: int | None = None) -> None:
        """Read the stored bytes of a chunk, piece by piece: all of them, which are checked, or those from ``offset`` of the file on. Within
        :meth:`reread`."""
        digest, start = ChunkDigest(self, chunk), chunk.extent.offset if offset is None else offset
        for at, length in self.stretches(len(memory)):
            self.fill(chunk.extent.path, start + at, memory[at : at + length], digest)
        digest.end()

    def stretches(self, length: int) -> Iterator[tuple[int, int]]:
        """Where the reads of one long range begin, and how long they are."""
        return ((at, min(self.stretch, length - at)) for at in range(0, length, self.stretch))

    def pass_over(self, chunk: ChunkName, digest: ChunkDigest) -> None:
        """Read the stored bytes of a chunk only to hash them. Within :meth:`reread`."""
        extent, memory = chunk.extent, self.scratch(min(self.piece, chunk.extent.length)).data
        for at in range(0, extent.length, self.piece):
            self.fill(extent.path, extent.offset + at, memory[: min(self.piece, extent.length - at)], digest)

    def verify_chunk(self, chunk: ChunkName) -> None:
        """Read the stored bytes of a chunk only to compare them. Within :meth:`reread`."""
        digest = ChunkDigest(self, chunk)
        self.pass_over(chunk, digest)
        digest.end()

    def recheck(self, chunk: ChunkName, damage: CorruptError) -> None:
        """Read a chunk again that was put into place before its digest turned out wrong: is it stored like that?"""
        before = [damage]
        self.count_verified(chunk.extent.length)

        def read() -> None:
            # The first "read" is the one that has already failed: it counts as one of ``READS``, so that a chunk
            # which is damaged in the same way twice is reported after one more read instead of two.
            if before:
                raise before.pop()
            self.verify_chunk(chunk)

        self.reread(chunk.extent, read)

    def decode(self, chunk: ChunkName, blob: memoryview, out: memoryview, itemsize: int) -> None:
        """What an encoded chunk was encoded from. Reads its anchor, if it has one."""
        anchored = chunk.extent.anchor
        anchor = None if anchored is None else self.read_decoded(chunk._replace(extent=anchored.extent), len(out), itemsize)
        try:
            with self.span("decode", len(out)):
                decode(chunk.extent.codec or "", blob, out, itemsize, anchor)
        except CorruptError as err:
            raise chunk.damaged(err.message, self.backend.url) from err
        if anchored is None or self.verify == "off":
            return
        # Both halves fit their digests. That they belong together, and were put together rightly, only this one says.
        with self.span("verify", len(out)):
            computed = xxhash.xxh3_128_hexdigest(out)
        if computed != anchored.digest:
            difference = f"with its anchor in {anchored.extent.path} it has the XXH3-128 digest {computed}, should be {anchored.digest}"
            raise chunk.damaged(difference, self.backend.url)

    def read_decoded(self, anchor: ChunkName, nbytes: int, itemsize: int) -> memoryview:
        """The bytes of an anchor, which has none itself, in scratch memory of its own."""
        extent, memory = anchor.extent, self.scratch(nbytes, "anchor")[:nbytes].data
        if extent.codec is None:
            self.reread(extent, partial(self.read_chunk, anchor, memory))
        else:
            stored = self.scratch(extent.length, "anchor, encoded")[: extent.length].data
            self.reread(extent, partial(self.read_chunk, anchor, stored))
            self.decode(anchor, stored, memory, itemsize)
        return memory

    # ---- comparing bytes that are in memory

    def difference(self, extent: Extent, data: memoryview) -> str | None:
        """How the bytes of a whole chunk differ from its digest or checksum; None if they do not, or there is nothing to compare with."""
        if self.verify == "off":
            return None
        if extent.digest is not None:
            return _difference(extent, _hexdigest(data))
        return _difference(extent, zlib.crc32(data)) if self.crc32 and extent.crc32 is not None else None

    def compare(self, chunk: ChunkName, data: memoryview) -> None:
        """Compare bytes that were read with the digest of their chunk, if they are all of it."""
        extent = chunk.extent
        if self.verify == "off" or len(data) != extent.length or (extent.digest is None and not (self.crc32 and extent.crc32 is not None)):
            return
        with self.span("verify", len(data)):
            difference = self.difference(extent, data)
        if difference is not None:
            raise chunk.damaged(difference, self.backend.url)
        self.count_verified(len(data))

    def compare_rows(
        self,
        data: memoryview,
        origin: int,
        offsets: Sequence[int],
        lengths: Sequence[int],
        digests: Sequence[str | None],
        chunk_at: Callable[[int], ChunkName],
    ) -> None:
        """``compare`` for many small chunks in one read, whose first byte is byte ``origin`` of the file. They come as columns, since an
        object for each would take longer than its hash; ``chunk_at`` names the one that is damaged. Neighbours that are the same bytes
        are hashed once."""
        if self.verify == "off":
            return
        verified, last, last_length = 0, -1, 0
        with self.span("verify", len(data)):
            # Rows come sorted by offset, so equal neighbours are the same bytes: a replicated chunk that several
            # targets want is hashed once.
            for i, (offset, length, digest) in enumerate(zip(offsets, lengths, digests, strict=True)):
                if digest is None or (offset == last and length == last_length):
                    continue
                at = offset - origin
                if (computed := _hexdigest(data[at : at + length])) != digest:
                    chunk = chunk_at(i)
                    raise chunk.damaged(_difference(chunk.extent, computed) or "", self.backend.url)
                verified, last, last_length = verified + length, offset, length
        self.count_verified(verified)

    def count_verified(self, nbytes: int) -> None:
        """Count bytes that a digest was compared with."""
        self._local.unchecked -= nbytes
        with self._lock:
            self.verified += nbytes

    # ---- memory

    def scratch(self, size: int, use: str = "read") -> npt.NDArray[np.uint8]:
        """This thread's memory for one ``use``, at least ``size`` bytes of it: overwritten by the next that asks for the same use."""
        memory = self._local.memory.get(use)
        if memory is None or len(memory) < size:
            # One buffer per thread and use, as long as the longest request so far: memory that is new for each chunk
            # would be faulted in page by page each time.
            length = max(size, self.piece)
            raw = self.allocate(length + SPARE)
            with self._lock:
                self.memory += length + SPARE - (0 if memory is None else len(memory) + SPARE)
            start = -raw.ctypes.data % SPARE
            memory = self._local.memory[use] = raw[start : start + length]
        return memory


class ChunkDigest:
    """The digest of one chunk, computed while its bytes come in; ``length`` counts them. ``always``: also where there is nothing to compare
    it with."""

    def __init__(self, reader: DigestReader, chunk: ChunkName, *, always: bool = False) -> None:
        extent, on = chunk.extent, reader.verify != "off"
        self._reader = reader
        self._chunk = chunk
        self.length = 0
        self.also: xxhash.xxh3_64 | None = None
        """Another digest, that of what comes now."""
        self.seconds = 0.0
        """How long hashing took, of what was hashed while it was read."""
        self._hash = xxhash.xxh3_64() if always or (on and extent.digest is not None) else None
        self._crc = 0 if on and reader.crc32 and extent.digest is None and extent.crc32 is not None else None
        self.compares = self._hash is not None or self._crc is not None
        """Whether bytes are hashed as they come."""

    def add_timed(self, data: memoryview) -> None:
        """``add`` of a few bytes of many, into ``seconds``: a span for each would cost too much."""
        began = time.perf_counter()
        self.add(data)
        self.seconds += time.perf_counter() - began

    def update(self, data: memoryview) -> None:
        """``add``, with a span if it takes time."""
        with self._reader.span("verify", len(data)) if self.compares else _NO_SPAN:
            self.add(data)

    def add(self, data: memoryview) -> None:
        """Bytes that follow those before."""
        self.length += len(data)
        if self._hash is not None:
            self._hash.update(data)
        if self._crc is not None:
            self._crc = zlib.crc32(data, self._crc)
        if self.also is not None:
            self.also.update(data)

    def hexdigest(self) -> str:
        """Of what has come."""
        return "" if self._hash is None else self._hash.hexdigest()

    def difference(self) -> str | None:
        """How what has come differs; None if it does not, or is not all of the chunk, or there is nothing to compare with."""
        extent = self._chunk.extent
        if self.length != extent.length:
            return None
        return _difference(extent, self._hash.hexdigest() if self._hash is not None and extent.digest is not None else self._crc)

    def end(self) -> None:
        """Raise CorruptError if the bytes are all of the chunk and not what its digest says."""
        difference = self.difference()
        if difference is not None:
            raise self._chunk.damaged(difference, self._reader.backend.url)
        extent = self._chunk.extent
        if self.length == extent.length and self.compares and (extent.digest is not None or self._crc is not None):
            self._reader.count_verified(self.length)


def _difference(extent: Extent, computed: str | int | None) -> str | None:
    """How an XXH3-64 (text) or CRC-32 (a number) of all bytes differs from that of the extent."""
    if computed is None or computed in (extent.digest, extent.crc32):
        return None
    if isinstance(computed, str):
        return f"its XXH3-64 digest is {computed}, should be {extent.digest}"
    return f"its CRC-32 is {computed:08x}, should be {extent.crc32:08x}"


_NO_SPAN: AbstractContextManager[object] = nullcontext()
_hexdigest = xxhash.xxh3_64_hexdigest
