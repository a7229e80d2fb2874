"""``Boxes``: any boxes, listed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ckpt.layout.geometry import Box

from .base import BlockSplit, Piece, Shape


@dataclass(frozen=True, slots=True)
class Boxes(BlockSplit):
    """Each coordinate of ``over`` holds the boxes that are listed for it, as pairs of offset and shape, each with memory of its own.

    The layout of a ``ShardedTensor`` that is cut along several dimensions. Must be the only split.
    """

    over: str
    boxes: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...]
    in_rules: ClassVar[bool] = False
    alone: ClassVar[bool] = True

    def pieces(self, block: list[Piece], parts: int, index: int) -> list[Piece]:
        return [Piece(Box(offset, shape), Box((0,) * len(shape), shape)) for offset, shape in self.boxes[index]]

    def local_shape(self, block: Shape, parts: int, index: int) -> Shape:
        return block


@dataclass(frozen=True, slots=True)
class StatedBoxes(Boxes):
    """The boxes of one coordinate, whose ranks know no others: together with the layouts of the other ranks they tile the tensor."""
