"""Segments: what one rank has published of a state, in memory that other processes of its machine can map. No torch.

    ┌────────┬──────────────────────────────────────────────────────────────┬─────────┐
    │ header │ boxes of tensors, row-major, one after another               │ digests │
    └────────┴──────────────────────────────────────────────────────────────┴─────────┘
      magic,    the widest elements first, so that each is aligned; where        XXH3-64 of
      token     each lies follows from names and layouts alone, so that         each MiB of
                nobody has to be told (``SegmentLayout``)                        the boxes

The memory has no name in any file system: it is gone with its last user, however that ends. When a segment is *sealed*, the kernel lets
no other process write it or change its size, and whoever serves it reads it through a mapping that is read-only. The mapping that fills it
stays as it is, for the capture alone: to change the protection of all its pages, twice a version, takes more than half of a copy. What a
stray write of the owner changes is noticed by the readers, who compare digests before they copy: each block once, by one of those that
share a machine.

A segment is filled again when its version is dropped, since fresh memory costs more than the copy into it. So a reader takes a *lease*, a
shared lock on the file, which the kernel releases when the reader lets go of the memory or dies. The owner renews a segment only if it
gets that lock alone; else it leaves it to its readers. The token, which is new each time, tells a late reader that this is another version.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt import settings
from ckpt.concurrency import run_tasks, when_dropped
from ckpt.errors import CkptError, CorruptError, NotFoundError
from ckpt.net.endpoints import EXHAUSTED, exhausted
from ckpt.net.shared_memory import end_lease, is_unread, make_file, populate, protect, whole_pages
from ckpt.plan.layout.geometry import Box, row_major_strides
from ckpt.plan.ownership import TensorSpec

from .holdings import BoxMemory, Holdings, TensorParts

BLOCK = settings.MIB
"""Bytes that have one digest."""
DATA = mmap.PAGESIZE
"""Where the boxes begin: the header has a page of its own."""
TOKEN_BYTES = 16
MAGIC = b"ckptseg1"
NAME = "ckpt-segment"
_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of Linux 5.1: whoever maps it from now on cannot write."""

Bytes = npt.NDArray[np.uint8]
Digests = npt.NDArray[np.uint64]
"""XXH3-64 of each block."""


class SegmentAddress(NamedTuple):
    """Where another process of the machine finds a segment: number of the file in process ``pid``, the token that it begins with, and bytes
    of its boxes."""

    pid: int
    file: int
    token: str
    nbytes: int


class BlockDigests:
    """The XXH3-64 of each block of memory that is being filled. Whoever fills it may say how far it is (``filled``): then a block is hashed
    as soon as it is whole, while it is in the cache, in less than half of the time. ``rest`` hashes what is left."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._digests = np.zeros(-(-len(data) // BLOCK), dtype="<u8")
        self._lacking = [min(BLOCK, len(data) - start) for start in range(0, len(data), BLOCK)]
        """Bytes of each block that nobody has reported."""
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        """Bytes that are not hashed."""
        return sum(self._bytes(number) for number, lacking in enumerate(self._lacking) if lacking)

    def filled(self, start: int, stop: int) -> None:
        """Bytes from ``start`` to ``stop`` are there, and stay as they are. Any thread; each byte at most once."""
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            with self._lock:
                self._lacking[number] -= min(stop, (number + 1) * BLOCK) - max(start, number * BLOCK)
                whole = not self._lacking[number]
            if whole:
                self._hash(number)

    def rest(self, threads: int = 1, beat: Callable[[], None] = lambda: None) -> Digests:
        """All bytes are there: the digests of all blocks."""
        left = [number for number, lacking in enumerate(self._lacking) if lacking]

        def hash_from(first: int) -> None:
            for number in left[first : first + 64]:
                self._hash(number)
            beat()

        run_tasks([partial(hash_from, first) for first in range(0, len(left), 64)], threads, "ckpt-hash")
        return self._digests

    def _hash(self, number: int) -> None:
        self._digests[number] = xxhash.xxh3_64_intdigest(self._data[number * BLOCK : number * BLOCK + self._bytes(number)].data)

    def _bytes(self, number: int) -> int:
        return min(BLOCK, len(self._data) - number * BLOCK)


def digest_of_digests(digests: Digests) -> str:
    """The XXH3-128 by which a manifest knows the bytes of a segment, in hex."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(digests).data)


class MemorySegment:
    """A segment that this process fills: ``data`` has room for ``capacity`` bytes of boxes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        size = file_size(capacity)
        try:
            self._file = make_file(NAME, size)
        except (AttributeError, OSError, OverflowError, ValueError) as err:
            raise _no_memory(size, err) from err
        # A publication that fails forgets its segment: the open file is all the memory.
        self._close = when_dropped(self, os.close, self._file)
        self._memory = self._mapped(mmap.PROT_READ | mmap.PROT_WRITE)
        self._whole: Bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._sealed: Bytes | None = None
        """The boxes as the read-only mapping has them, which is made when the segment is sealed for the first time."""
        self._fresh = True
        self._begin()

    def _begin(self) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.data: Bytes = self._whole[DATA : DATA + self.capacity]
        """The boxes: to be filled, and once they are sealed, to be read."""
        self.digests = BlockDigests(self.data)
        self._memory[: len(MAGIC) + TOKEN_BYTES] = MAGIC + self.token

    @property
    def memory(self) -> memoryview:
        """``data``."""
        return self.data.data

    def open(self, start: int, length: int) -> None:
        """Have the pages of these bytes of ``data``, which are about to be filled: those of a new segment do not exist yet."""
        if self._fresh and length:
            first = (DATA + start) // DATA * DATA
            populate(self._memory, first, whole_pages(DATA + start + length) - first, write=True)

    def address(self) -> SegmentAddress:
        """For readers on this machine."""
        return SegmentAddress(os.getpid(), self._file, self.token.hex(), self.capacity)

    def seal(self, threads: int = 1, beat: Callable[[], None] = lambda: None) -> Digests:
        """All boxes are there, and nothing changes any more. The digests of all blocks."""
        digests = self.digests.rest(threads, beat)
        at = digests_at(self.capacity)
        self._whole[at : at + digests.nbytes] = digests.view(np.uint8)
        if self._sealed is None:
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            try:
                fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals | _FUTURE_WRITE)
            except OSError:  # before Linux 5.1: then only digests tell what another process has changed
                fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
            memory = self._mapped(mmap.PROT_READ)
            self._sealed = np.frombuffer(memory, dtype=np.uint8)[DATA : DATA + self.capacity]
        self._protect(writable=False)
        self.data = self._sealed
        return digests

    def renew(self) -> bool:
        """Begin another version in the same memory, unless somebody still reads it."""
        if not is_unread(self._file):
            return False
        try:
            self._protect(writable=True)
            self._fresh = False
            self._begin()
        finally:
            end_lease(self._file)
        return True

    def close(self) -> None:
        """Let go of the file; the memory goes with the last array that refers to it."""
        self._close()
        self._file = -1

    def _mapped(self, access: int) -> mmap.mmap:
        size = file_size(self.capacity)
        try:
            memory = mmap.mmap(self._file, size, prot=access)
            if hasattr(mmap, "MADV_DONTFORK"):
                memory.madvise(mmap.MADV_DONTFORK)
        except (OSError, OverflowError, ValueError) as err:
            raise _no_memory(size, err) from err
        return memory

    def _protect(self, *, writable: bool) -> None:
        """Whether this process may write the pages of the token and of the digests. They enclose the boxes, so a write that runs beyond the
        boxes ends the process."""
        address, digests, size = self._whole.ctypes.data, digests_at(self.capacity) // DATA * DATA, len(self._whole)
        try:
            protect(address, DATA, writable=writable)
            protect(address + digests, size - digests, writable=writable)
        except OSError as err:
            raise _no_memory(size, err) from err


class SegmentPool:
    """Segments of dropped versions, to be filled again. Those that somebody still reads wait; of these no more than ``SPARE`` are kept."""

    SPARE = 2

    def __init__(self) -> None:
        self._idle: deque[MemorySegment] = deque()
        self._renewed: MemorySegment | None = None
        self._closed = False

    def take(self, capacity: int) -> MemorySegment:
        """A segment to fill, of just so many bytes."""
        segment, self._renewed = self._renewed, None
        if segment is not None:
            if segment.capacity == capacity:
                return segment
            segment.close()
        return self._renew(capacity) or MemorySegment(capacity)

    def prepare(self, capacity: int) -> None:
        """Renew a segment now, if there is one, so that the next ``take`` need not: with the caller of that, training waits."""
        if self._renewed is None:
            self._renewed = self._renew(capacity)

    def _renew(self, capacity: int) -> MemorySegment | None:
        for _ in range(len(self._idle)):
            segment = self._idle.popleft()
            if segment.capacity == capacity and segment.renew():
                return segment
            if segment.capacity == capacity and len(self._idle) < self.SPARE:
                self._idle.append(segment)
            else:
                segment.close()
        return None

    def give(self, segment: MemorySegment) -> None:
        """It belongs to no version any more. Called when the last reference to it goes, which may be anywhere: nothing is locked."""
        self._idle.append(segment)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Let go of all of them, and of those that are given later."""
        self._closed = True
        if self._renewed is not None:
            self._renewed.close()
            self._renewed = None
        while self._idle:
            self._idle.popleft().close()


def digests_at(capacity: int) -> int:
    """Where the digests begin in a segment of so many bytes of boxes,"""
    return DATA + -(-capacity // 8) * 8


def file_size(capacity: int) -> int:
    """and how long its file is."""
    return whole_pages(digests_at(capacity) + 8 * -(-capacity // BLOCK))


def _no_memory(size: int, err: Exception) -> CkptError:
    if isinstance(err, OSError) and err.errno in EXHAUSTED[:2]:
        return exhausted(f"no shared memory of {size:,} bytes can be made", err)
    return CkptError(
        f"there is no shared memory for {size:,} bytes, which a published version of this rank's state needs: {err}",
        hint="publish a smaller state, or keep fewer versions (keep=)",
    )


# Where the boxes of one rank lie in its segment, and whether they are still what was published.

_RAW: Mapping[int, np.dtype[Any]] = {**{n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}, 16: np.dtype(np.complex128)}


class SegmentBox(NamedTuple):
    """A box of a tensor, from byte ``start`` of the segment's boxes on."""

    tensor: TensorSpec
    box: Box
    start: int

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.tensor.dtype.itemsize

    def span(self, part: Box) -> tuple[int, int]:
        """The bytes of the segment's boxes from the first to the last element of a part of this one, and what lies between."""
        inside, strides = part.relative_to(self.box.offset), row_major_strides(self.box.shape)
        first = sum(o * s for o, s in zip(inside.offset, strides, strict=True))
        last = sum((e - 1) * s for e, s in zip(inside.end, strides, strict=True)) + 1
        size = self.tensor.dtype.itemsize
        return self.start + first * size, self.start + last * size


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentLayout:
    """Where the boxes of one rank lie: ``boxes`` by the name of the tensor, ``nbytes`` of all."""

    boxes: Mapping[str, Sequence[SegmentBox]]
    nbytes: int

    @classmethod
    def of(cls, tensors: Iterable[TensorSpec], rank: int) -> SegmentLayout:
        """For the tensors that ``rank`` has any part of. Equal wherever it is computed."""
        boxes: dict[str, list[SegmentBox]] = {}
        at = 0
        for tensor in sorted(tensors, key=lambda t: (-t.dtype.itemsize, t.name)):
            pieces = tensor.layout.pieces(tensor.shape, rank)
            for box in sorted((piece.box for piece in pieces), key=lambda b: b.offset) if len(pieces) > 1 else [p.box for p in pieces]:
                placed = SegmentBox(tensor, box, at)
                boxes.setdefault(tensor.name, []).append(placed)
                at += placed.nbytes
        return cls(boxes=boxes, nbytes=at)

    def all(self) -> list[SegmentBox]:
        """In the order in which they lie."""
        return [box for boxes in self.boxes.values() for box in boxes]


class CheckedBlocks(NamedTuple):
    """Which blocks of a segment one of several readers has compared with their digests: none of them compares it again. An entry is the
    digest, mixed with the ``key`` of their common pass, so that neither damage nor what is left of an earlier pass is taken for one."""

    entries: Digests
    key: int

    def has(self, number: int, digest: int) -> bool:
        return int(self.entries[number]) == digest ^ self.key

    def add(self, number: int, digest: int) -> None:
        self.entries[number] = digest ^ self.key


class BlockCheck:
    """Compares the blocks of a segment with their digests, each once; of one reader's pass, or of those that share what is ``checked``."""

    def __init__(self, data: Bytes, digests: Digests, layout: SegmentLayout, where: str, checked: CheckedBlocks | None = None) -> None:
        self._data = data
        self._digests = digests
        self._layout = layout
        self._where = where
        self._checked = checked
        self._right = np.zeros(len(digests), dtype=bool)

    def box(self, name: str, wanted: Box) -> None:
        """Check what has a box of a tensor."""
        for part in self._layout.boxes.get(name, ()):
            common = part.box if part.box == wanted else part.box.intersect(wanted)
            if common is not None:
                self.range(*part.span(common), name)

    def range(self, start: int, stop: int, name: str) -> None:
        """Check bytes from ``start`` to ``stop``, in which tensor ``name`` lies."""
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            if self._right[number]:
                continue
            digest = int(self._digests[number])
            if self._checked is None or not self._checked.has(number, digest):
                if xxhash.xxh3_64_intdigest(self._data[number * BLOCK : (number + 1) * BLOCK].data) != digest:
                    raise CorruptError(
                        f"tensor {name}: bytes {number * BLOCK} to {min((number + 1) * BLOCK, len(self._data))} of the published memory "
                        "have changed since they were published",
                        where=self._where,
                        hint="look at that machine's memory; take the next version",
                    )
                if self._checked is not None:
                    self._checked.add(number, digest)
            self._right[number] = True


class PublishedSegment:
    """One rank's part of one version, from when it is sealed until nobody uses it any more."""

    def __init__(self, segment: MemorySegment, layout: SegmentLayout, digests: Digests, where: str) -> None:
        self.segment = segment
        self.layout = layout
        self.digests = digests
        self.numbers: Mapping[str, int] | None = None
        """Of the tensors in the catalog, by name, once all ranks have agreed on it: before, nothing of it is given."""
        self._where = where
        self._tensors: dict[int, TensorParts] = {}
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()

    @property
    def digest(self) -> str:
        """By which the manifest knows its bytes."""
        return digest_of_digests(self.digests)

    def holdings(self) -> Holdings:
        """For one pull: each block is checked when it is first touched."""
        numbers = self.numbers
        if numbers is None:
            raise NotFoundError("a version that is not complete", where=self._where, hint="take again")
        with self._lock:
            if not self._tensors:
                self._tensors = {numbers[name]: _parts_of(boxes, self.segment.data) for name, boxes in self.layout.boxes.items()}
                self._names = {numbers[name]: name for name in self.layout.boxes}
        check = BlockCheck(self.segment.data, self.digests, self.layout, self._where)

        def look(number: int, box: Box, names: Mapping[int, str] = self._names, keep: PublishedSegment = self) -> None:
            check.box(names.get(number, ""), box)

        return Holdings(tensors=self._tensors, check=look, is_sealed=True)


def _parts_of(boxes: Sequence[SegmentBox], data: Bytes) -> TensorParts:
    tensor = boxes[0].tensor
    size = tensor.dtype.itemsize
    parts = [BoxMemory(b.box, data[b.start : b.start + b.nbytes].view(_RAW[size]).reshape(b.box.shape)) for b in boxes]
    return TensorParts(len(tensor.shape), size, parts)
