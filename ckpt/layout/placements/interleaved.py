"""``Interleaved``: a dimension of several groups, each of which is cut for itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.errors import LayoutError
from ckpt.layout.geometry import IntArray, ceil_cut, ceil_cuts
from ckpt.layout.intervals import Interval

from .base import AxisSplit, DTensorAxis, Split
from .shard import given_cuts, strided_dim, strided_position


@dataclass(frozen=True, slots=True)
class Interleaved(AxisSplit):
    """Dimension ``dim`` is made of groups, each of which is cut over ``over``; a rank holds its part of every group, one after another.

    ``groups`` are the groups' sizes (fused QKV with the three parts one below the other), or their number if they are equal (2 for
    gate/up). Group sizes refer to what earlier splits left of the dimension.
    """

    dim: int
    over: str
    groups: tuple[int, ...] | int

    def part(self, size: int, parts: int, index: int) -> Sequence[Interval]:
        cuts = itertools.pairwise(self._group_cuts(size))
        return [(a + ceil_cut(b - a, parts, index), a + ceil_cut(b - a, parts, index + 1)) for a, b in cuts]

    def all_parts(self, size: int, parts: int) -> tuple[IntArray, IntArray]:
        edges = np.stack([a + ceil_cuts(b - a, parts).array for a, b in itertools.pairwise(self._group_cuts(size))])
        return edges[:, :-1], edges[:, 1:]

    def _group_cuts(self, size: int) -> Sequence[int]:
        if isinstance(self.groups, tuple):
            return given_cuts(self.groups, size, len(self.groups))
        return ceil_cuts(size, self.groups)

    def size_before(self, size: int, parts: int) -> int:
        if isinstance(self.groups, tuple):
            return sum(self.groups)
        if size * parts % self.groups:
            raise LayoutError(
                f"dimension {self.dim} has {size * parts} elements, which are not {self.groups} equal groups",
                hint="give Interleaved their sizes",
            )
        return size * parts

    @classmethod
    def from_dtensor(cls, placement: Any, axis: DTensorAxis) -> tuple[Split, int] | None:
        """A ``_StridedShard`` whose split factor no splits to its right explain interleaves that many groups."""
        strided = strided_dim(placement, axis)
        if strided is None:
            return None
        dim, factor = strided
        if strided_position(dim, factor, axis.later) is not None:
            return None
        return cls(dim, axis.over, tuple(b - a for a, b in itertools.pairwise(ceil_cuts(axis.shape[dim], factor)))), 0
