"""``Shard``: a dimension in consecutive parts, one for each coordinate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ckpt.errors import LayoutError
from ckpt.layout.geometry import IntArray, ceil_cut, ceil_cuts
from ckpt.layout.intervals import Interval

from .base import AxisSplit, DTensorAxis, Split


@dataclass(frozen=True, slots=True)
class Shard(AxisSplit):
    """Dimension ``dim`` is cut over mesh dimension ``over``: parts of ``ceil(size / n)`` as ``torch.chunk`` makes them, or of the
    given ``sizes``."""

    dim: int
    over: str
    sizes: tuple[int, ...] | None = None
    contiguous: ClassVar[bool] = True

    def part(self, size: int, parts: int, index: int) -> Sequence[Interval]:
        if self.sizes is None:
            return ((ceil_cut(size, parts, index), ceil_cut(size, parts, index + 1)),)
        cuts = given_cuts(self.sizes, size, parts)
        return ((cuts[index], cuts[index + 1]),)

    def all_parts(self, size: int, parts: int) -> tuple[IntArray, IntArray]:
        cuts = ceil_cuts(size, parts).array if self.sizes is None else np.asarray(given_cuts(self.sizes, size, parts), dtype=np.int64)
        return cuts[None, :-1], cuts[None, 1:]

    def size_before(self, size: int, parts: int) -> int:
        return size * parts if self.sizes is None else sum(self.sizes)

    @classmethod
    def from_dtensor(cls, placement: Any, axis: DTensorAxis) -> tuple[Split, int] | None:
        strided = strided_dim(placement, axis)
        if strided is None:
            return None
        dim, factor = strided
        position = strided_position(dim, factor, axis.later)
        return None if position is None else (cls(dim, axis.over), position)


def strided_dim(placement: Any, axis: DTensorAxis) -> tuple[int, int] | None:
    """Dimension and split factor of torch's ``Shard`` (1) and ``_StridedShard``; the latter is a subclass of the former in some versions
    only."""
    if not placement.is_shard() and not hasattr(placement, "split_factor"):
        return None
    return int(placement.dim) % max(len(axis.shape), 1), int(getattr(placement, "split_factor", 1))


def strided_position(dim: int, factor: int, later: Sequence[tuple[Split, int]]) -> int | None:
    """Where a torch ``Shard`` or ``_StridedShard`` goes among the splits of the mesh dimensions to its right.

    A plain one cuts before all of these. A strided one cuts after those whose parts multiply to its ``split_factor``
    (torch/distributed/tensor/placement_types.py). None if no such splits explain the factor.
    """
    position, product = 0, 1
    for number, (split, parts) in enumerate(later):
        if isinstance(split, Shard) and split.dim == dim and product < factor:
            position, product = number + 1, product * parts
    if product != factor:
        return None
    return position if factor > 1 else 0


def given_cuts(sizes: tuple[int, ...], size: int, parts: int) -> tuple[int, ...]:
    """Boundaries of parts of these sizes, which must be those of ``parts`` parts of ``size`` elements."""
    if len(sizes) != parts or sum(sizes) != size:
        raise LayoutError(f"sizes {sizes} must be {parts} numbers that add up to {size}")
    return tuple(itertools.accumulate(sizes, initial=0))
