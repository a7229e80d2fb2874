"""How a tensor is cut into boxes. The one place that knows its two forms. Stored grids, layouts and assignments are
of this kind. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .geometry import Box, IntArray, TilingFault, cell_box, cells, cells_overlapping, find_fault, intersect_all

# A product of cuts, one list of boundaries for each dimension, or boxes at any place:
#
#     cuts ((0, 2, 4), (0, 3, 6))         boxes
#     ┌─────┬─────┐                       ┌───────────┐
#     │  0  │  1  │                       │     0     │
#     ├─────┼─────┤                       ├───┬───────┤
#     │  2  │  3  │                       │ 1 │   2   │
#     └─────┴─────┘                       └───┴───────┘
#
# Cells of cuts are numbered row-major, and tile the tensor whatever the cuts; boxes tile it only if somebody has checked.


@dataclass(frozen=True, kw_only=True, eq=False)
class BoxPartition:
    """A tensor in boxes, by number: exactly one of ``cuts`` (boundaries per dimension) and ``boxes`` is given. All in elements."""

    cuts: tuple[tuple[int, ...], ...] | None = None
    boxes: tuple[IntArray, IntArray] | None = None
    """Offsets and shapes, ``[n, d]`` each."""

    @property
    def _listed(self) -> tuple[IntArray, IntArray]:
        if self.boxes is None:
            raise ValueError("a partition needs cuts or boxes")
        return self.boxes

    @property
    def product(self) -> tuple[tuple[int, ...], ...]:
        """The cuts of a partition that is known to have some."""
        if self.cuts is None:
            raise ValueError("this partition is of boxes at any place")
        return self.cuts

    @property
    def count(self) -> int:
        """How many boxes there are: also more than ``len`` can say."""
        return len(self._listed[0]) if self.cuts is None else math.prod(len(c) - 1 for c in self.cuts)

    def __len__(self) -> int:
        return self.count

    @cached_property
    def single(self) -> bool:
        """Whether the whole tensor is one box."""
        return self.count == 1

    def all_boxes(self) -> tuple[IntArray, IntArray]:
        """Offsets and shapes ``[n, d]``."""
        return self._listed if self.cuts is None else cells(self.cuts)

    def boxes_of(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Offsets and shapes ``[k, d]`` of these boxes alone."""
        if self.cuts is None:
            offsets, shapes = self._listed
            return offsets[numbers], shapes[numbers]
        if not self.cuts:
            none = np.zeros((len(numbers), 0), dtype=np.int64)
            return none, none
        cuts = [np.asarray(c, dtype=np.int64) for c in self.cuts]
        at = np.unravel_index(numbers, [len(c) - 1 for c in cuts])
        starts = np.stack([c[i] for c, i in zip(cuts, at, strict=True)], axis=1)
        return starts, np.stack([c[i + 1] for c, i in zip(cuts, at, strict=True)], axis=1) - starts

    def box(self, number: int) -> Box:
        if self.cuts is None:
            offsets, shapes = self._listed
            return Box(tuple(offsets[number].tolist()), tuple(shapes[number].tolist()))
        return cell_box(self.cuts, number)

    def overlapping(self, box: Box) -> IntArray:
        """Numbers of the boxes that share an element with ``box``."""
        return intersect_all(box, *self._listed)[0] if self.cuts is None else cells_overlapping(self.cuts, box)

    def widest(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The largest extent of a box along each dimension; ``shape``, that of the tensor, where there is no box."""
        if self.cuts is not None:
            return tuple(int(np.diff(c).max()) for c in self.cuts)
        shapes = self._listed[1]
        return tuple(shapes.max(axis=0).tolist()) if len(shapes) else tuple(shape)

    def fault(self, shape: Sequence[int]) -> TilingFault | None:
        """Where listed boxes fail to tile a tensor of ``shape``; None if they do. Cells always do."""
        return find_fault(shape, *self._listed) if self.cuts is None else None
