"""``Flat``: contiguous ranges of the row-major flattening."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, cast

import numpy as np

from ckpt.errors import LayoutError
from ckpt.layout.geometry import Box, Cuts, IntArray, ceil_cut, ceil_cuts, flat_to_boxes
from ckpt.layout.intervals import Interval

from .base import BlockSplit, Piece, Shape


class Sizes(tuple[int, ...]):
    """Sizes of ranges, one for each rank of a job perhaps. Equal ones are one object, which is hashed and added up once: layouts of
    thousands of tensors have them, and are keys of caches."""

    @cached_property
    def cuts(self) -> Cuts:
        if min(self, default=0) < 0:
            raise LayoutError(f"sizes of flat ranges must not be negative, and one is {min(self)}")
        return Cuts.of(np.append(0, np.cumsum(np.fromiter(self, dtype=np.int64, count=len(self)))))

    @cached_property
    def filled(self) -> tuple[int, ...]:
        """The numbers of those that are not empty."""
        numbers: list[int] = np.flatnonzero(np.diff(self.cuts.array)).tolist()
        return tuple(numbers)

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)


@lru_cache(maxsize=4096)
def _interned(sizes: tuple[int, ...]) -> Sizes:
    return Sizes(sizes)


@lru_cache(maxsize=4096)
def window_sizes(each: int, start: int, numel: int, parts: int) -> Sizes:
    """The sizes of ``parts`` ranges of ``each`` elements as a window of ``numel`` elements from ``start`` on sees them."""
    cuts = np.clip(np.arange(parts + 1, dtype=np.int64) * each - start, 0, numel)
    return _interned(tuple(np.diff(cuts).tolist()))


@dataclass(frozen=True, slots=True)
class Flat(BlockSplit):
    """What earlier splits left is flattened (row-major) and cut into contiguous ranges of ``ceil(numel / n)`` elements; the last
    may be shorter or empty. Or into ranges of the given ``sizes``, any of which may be empty.

    The layout of ZeRO and of FSDP1. Must come last; a rank's memory is one-dimensional.
    """

    over: str
    sizes: tuple[int, ...] | None = None
    flattens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.sizes is not None and not isinstance(self.sizes, Sizes):
            object.__setattr__(self, "sizes", _interned(tuple(self.sizes)))

    @property
    def _given(self) -> Sizes:
        return cast(Sizes, self.sizes)

    def pieces(self, block: list[Piece], parts: int, index: int) -> list[Piece]:
        if not block:
            return []
        block_shape = tuple(np.max([p.local.end for p in block], axis=0).tolist()) if block[0].local.shape else ()
        start, stop = self._range(math.prod(block_shape), parts, index)
        pieces, at = [], 0
        for part in flat_to_boxes(block_shape, start, stop):
            for piece in block:
                common = part.intersect(piece.local)
                if common is None:
                    continue
                if common != part:
                    raise LayoutError("Flat over Interleaved is not supported", hint="shard each fused part under a name of its own")
                shift = tuple(g - o for g, o in zip(piece.box.offset, piece.local.offset, strict=True))
                pieces.append(Piece(common.shifted(shift), Box((at,), (part.numel,))))
            at += part.numel
        return pieces

    def local_shape(self, block: Shape, parts: int, index: int) -> Shape:
        start, stop = self._range(math.prod(block), parts, index)
        return (stop - start,)

    def _range(self, numel: int, parts: int, index: int) -> Interval:
        if self.sizes is None:
            return ceil_cut(numel, parts, index), ceil_cut(numel, parts, index + 1)
        cuts = self.range_cuts(numel, parts)
        return int(cuts[index]), int(cuts[index + 1])

    def has_even_ranges(self) -> bool:
        return self.sizes is None

    def range_cuts(self, numel: int, parts: int) -> IntArray:
        """Boundaries of the ranges of a block of ``numel`` elements.

        Raises:
            LayoutError: the given sizes are those of another block.
        """
        if self.sizes is None:
            return ceil_cuts(numel, parts).array
        cuts = self._given.cuts
        if len(self.sizes) != parts or cuts[-1] != numel:
            text = f"{self.sizes}" if len(self.sizes) <= 16 else f"of {len(self.sizes)} ranges, {cuts[-1]} elements in all,"
            raise LayoutError(f"sizes {text} must be {parts} numbers that add up to {numel}")
        return cuts.array

    def filled(self, parts: int) -> tuple[int, ...]:
        return tuple(range(parts)) if self.sizes is None else self._given.filled
