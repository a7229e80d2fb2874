"""Where the boxes of one rank lie in its segment, and whether they are still what was published. No torch."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ckpt.errors import CorruptError, NotFoundError
from ckpt.layout.geometry import Box, row_major_strides
from ckpt.live.holdings import BoxMemory, Holdings, TensorParts
from ckpt.plan.ownership import TensorSpec

from .segment import BLOCK, Bytes, Digests, MemorySegment, digest_of_digests

_RAW: Mapping[int, np.dtype[Any]] = {
    **{n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
    16: np.dtype(np.complex128),
}


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


class BlockCheck:
    """Compares the blocks of a segment with their digests, each once; of one reader's pass."""

    def __init__(self, data: Bytes, digests: Digests, layout: SegmentLayout, where: str) -> None:
        self._data = data
        self._digests = digests
        self._layout = layout
        self._where = where
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
            if not self._right[number]:
                if xxhash.xxh3_64_intdigest(self._data[number * BLOCK : (number + 1) * BLOCK].data) != self._digests[number]:
                    raise CorruptError(
                        f"tensor {name}: bytes {number * BLOCK} to {min((number + 1) * BLOCK, len(self._data))} of the published memory "
                        "have changed since they were published",
                        where=self._where,
                        hint="look at that machine's memory; take the next version",
                    )
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
