"""``Flat``: contiguous ranges of the row-major flattening."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckpt.errors import LayoutError
from ckpt.layout.geometry import Box, ceil_cut, flat_to_boxes
from ckpt.layout.intervals import Interval

from .base import BlockSplit, Piece, Shape
from .shard import given_cuts


@dataclass(frozen=True, slots=True)
class Flat(BlockSplit):
    """What earlier splits left is flattened (row-major) and cut into contiguous ranges of ``ceil(numel / n)`` elements; the last
    may be shorter or empty. Or into ranges of the given ``sizes``, any of which may be empty.

    The layout of ZeRO and of FSDP1. Must come last; a rank's memory is one-dimensional.
    """

    over: str
    sizes: tuple[int, ...] | None = None
    flattens: ClassVar[bool] = True

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
        cuts = given_cuts(self.sizes, numel, parts)
        return cuts[index], cuts[index + 1]

    def has_even_ranges(self) -> bool:
        return self.sizes is None

    def is_empty(self, index: int) -> bool:
        return self.sizes is not None and self.sizes[index : index + 1] == (0,)
