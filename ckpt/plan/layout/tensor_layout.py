"""Where each rank's elements of one global tensor are: a mesh, and the splits that cut the tensor over it. Pure numpy.

How a layout becomes boxes. Each dimension is cut on its own into the ranges that each coordinate holds; the boxes of a rank are the
product of its ranges, and its memory has them in this order::

    Shard(0, "dp"), Interleaved(1, "tp", 2) on {dp: 2, tp: 2}, shape (4, 8)

               tp 0 1   0 1        dimension 0: dp 0 has rows 0:2, dp 1 has 2:4
        dp 0   │ A B │ A B │       dimension 1: two groups of 4 columns; tp 0 has 0:2 and 4:6, tp 1 the rest
        dp 1   │ C D │ C D │       rank (0, 0) has the boxes [0:2,0:2] and [0:2,4:6], side by side in memory of shape (2, 4)

The tiling is the reverse: the boundaries of all ranges of all coordinates are a grid of cells, and each cell has one coordinate of the mesh
dimensions that cut, and every coordinate of those that do not: its replicas. A ``BlockSplit`` (flat ranges, listed boxes) has no such
grid; its cells are listed.

A tensor's splits are applied one after another, each to what the ones before it left: ``(Shard(0, "tp"), Shard(0, "dp"))`` is FSDP over
tensor parallelism, the layout that DTensor spells ``_StridedShard``. Mesh dimensions that no split names hold replicas.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import CoverageError, LayoutError

from .geometry import Box, Cuts, IntArray, merge_cuts
from .mesh import Mesh
from .partition import BoxPartition, FlatBlocks, Interval, Shares, joined, slice_of
from .placement_base import AxisSplit, BlockSplit, Piece, Split
from .placements import Boxes, Flat, StatedBoxes, split_from_json


@dataclass(frozen=True, kw_only=True, eq=False)
class Tiling(BoxPartition):
    """Who holds what of one tensor: cells that tile it, and for each cell the ranks that hold it.

    ``holders`` is ``[cells, replicas]``, global ranks.
    """

    holders: IntArray


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The layout of one tensor: hashable, and the same on every rank. ``at`` restricts it to some coordinates of mesh dimensions
    (a pipeline stage)."""

    mesh: Mesh
    splits: tuple[Split, ...] = ()
    at: tuple[tuple[str, tuple[int, ...]], ...] = ()
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.mesh, self.splits, self.at)))
        over = [s.over for s in self.splits] + [name for name, _ in self.at]
        for name in over:
            self.mesh.axis(name)
        for split in self.splits if len(self.splits) > 1 else ():
            if isinstance(split, BlockSplit) and (split.alone or split is not self.splits[-1]):
                raise LayoutError(f"{type(split).__name__} must be the {'only' if split.alone else 'last'} split")
        if len(set(over)) != len(over) and not self._leaves_out_empty_parts():
            raise LayoutError(f"a mesh dimension is used twice: {over}", hint="each mesh dimension can split a tensor once")
        for name, allowed in self.at:
            size = self.mesh.size(name)
            if not allowed or len(set(allowed)) != len(allowed) or not all(0 <= i < size for i in allowed):
                raise LayoutError(f"coordinates {allowed} of {name!r} must be different numbers from 0 to {size - 1}, at least one")

    def __hash__(self) -> int:
        """Computed once: layouts are keys of caches that are asked for every tensor."""
        return self._hash

    @classmethod
    def replicated(cls, ranks: Sequence[int]) -> TensorLayout:
        return cls(Mesh.flat(ranks))

    @property
    def block_split(self) -> BlockSplit | None:
        """The last split, if it cuts the block that the others leave."""
        last = self.splits[-1] if self.splits else None
        return last if isinstance(last, BlockSplit) else None

    @property
    def is_flat(self) -> bool:
        """Whether a rank's memory is one-dimensional, whatever the tensor's shape."""
        return self.block_split is not None and self.block_split.flattens

    def filled(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """An ``at`` that leaves out the coordinates of a block split that hold nothing of any tensor; nothing without such a split."""
        split = self.block_split
        return () if split is None else ((split.over, split.filled(self.mesh.size(split.over))),)

    def _leaves_out_empty_parts(self) -> bool:
        """Whether ``at`` names the mesh dimension of a single split, all of whose parts at other coordinates are empty."""
        if len(self.splits) != 1 or len(self.at) != 1:
            return False
        (name, allowed), filled = self.at[0], dict(self.filled())
        return name in filled and set(filled[name]) <= set(allowed)

    def _submesh(self) -> npt.NDArray[np.int64]:
        """The mesh's ranks, restricted by ``at``."""
        array = self.mesh.array()
        for name, coordinates in self.at:
            array = np.take(array, coordinates, axis=self.mesh.axis(name))
        return array

    def ranks(self) -> frozenset[int]:
        """All ranks that take part (some may hold nothing of an uneven tensor)."""
        return frozenset(self._submesh().ravel().tolist())

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Place of a rank in the mesh, or None if it takes no part."""
        where = self.mesh.coordinate(rank)
        if where is None or any(where[self.mesh.axis(name)] not in allowed for name, allowed in self.at):
            return None
        return where

    def pieces(self, shape: tuple[int, ...], rank: int) -> list[Piece]:
        """What ``rank`` holds of a tensor of global ``shape``; empty pieces are left out."""
        return _pieces(self, shape, rank)

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Shape of the rank's memory for a tensor of global ``shape``, in elements (one-dimensional for ``Flat``).

        A rank that takes no part gets sizes of 0.
        """
        where = self.coordinate(rank)
        if where is None:
            return (0,) if self.is_flat else (0,) * len(shape)
        block = tuple(sum(b - a for a, b in axis.intervals(where)) for axis in _axes(self, shape))
        split = self.block_split
        return block if split is None else split.local_shape(block, self.mesh.size(split.over), where[self.mesh.axis(split.over)])

    def tiling(self, shape: tuple[int, ...]) -> Tiling:
        """The cells of a tensor of global ``shape`` and their holders, the same on every rank."""
        return _tiling(self, shape)

    def to_json(self) -> Any:
        splits = [s.to_json() for s in self.splits]
        ranks = self.mesh.ranks
        spelled = {"start": ranks.start} if isinstance(ranks, range) else ranks
        return [self.mesh.names, self.mesh.sizes, spelled, splits, self.at]

    @classmethod
    def from_json(cls, data: Any) -> TensorLayout:
        names, sizes, spelled, splits, at = data
        ranks = range(spelled["start"], spelled["start"] + math.prod(sizes)) if isinstance(spelled, dict) else tuple(spelled)
        return cls(
            Mesh(tuple(names), tuple(sizes), ranks),
            tuple(split_from_json(s) for s in splits),
            tuple((name, tuple(allowed)) for name, allowed in at),
        )


# ------------------------------------------------------------------------------------------------ one dimension at a time


@dataclass(frozen=True, eq=False)
class _Axis:
    """How one tensor dimension of ``size`` elements is cut: by ``splits``, over ``mesh_axes`` of ``counts`` coordinates."""

    size: int
    splits: tuple[AxisSplit, ...]
    mesh_axes: tuple[int, ...]
    counts: tuple[int, ...]

    def intervals(self, where: tuple[int, ...]) -> tuple[Interval, ...]:
        """What the coordinate ``where`` of the mesh holds, in local order."""
        # Splits of one dimension nest: the second one cuts what the first has left to this coordinate, which may be
        # several intervals (of strided or interleaved splits), as if these were one.
        left: tuple[Interval, ...] = ((0, self.size),)
        for split, axis, count in zip(self.splits, self.mesh_axes, self.counts, strict=True):
            ranges = split.part(sum(b - a for a, b in left), count, where[axis])
            left = joined([interval for start, stop in ranges for interval in slice_of(left, start, stop)])
        return left

    @cached_property
    def shares(self) -> Shares:
        """What all coordinates on ``mesh_axes`` hold, these numbered row-major: :meth:`intervals` of all of them. Rows of one size are cut
        alike, so their ranges are made once."""
        shares = Shares.all_of(self.size)
        for split, count in zip(self.splits, self.counts, strict=True):
            sizes, kind = np.unique(shares.sizes(), return_inverse=True)
            ranges = [split.all_parts(size, count) for size in sizes.tolist()]
            most = max(len(first) for first, _ in ranges)
            first, last = (np.stack([_padded(edges, most) for edges in side])[kind.reshape(-1)] for side in zip(*ranges, strict=True))
            shares = shares.divided(first, last)
        return shares


def _padded(edges: IntArray, ranges: int) -> IntArray:
    """``[ranges, parts]``, with empty ranges after those that there are: sizes that are cut into fewer ranges than others."""
    return edges if len(edges) == ranges else np.pad(edges, ((0, ranges - len(edges)), (0, 0)))


@lru_cache(maxsize=4096)
def _axes(layout: TensorLayout, shape: tuple[int, ...]) -> tuple[_Axis, ...]:
    splits = [split for split in layout.splits if isinstance(split, AxisSplit)]
    if splits and not shape:
        raise LayoutError("a scalar cannot be sharded", hint="give it its own rule: Replicate()")
    dims = [split.dimension(len(shape)) for split in splits]
    axes = []
    for dim, size in enumerate(shape):
        own = tuple(split for split, its_dim in zip(splits, dims, strict=True) if its_dim == dim)
        over = tuple(layout.mesh.axis(split.over) for split in own)
        axes.append(_Axis(size, own, over, tuple(layout.mesh.sizes[axis] for axis in over)))
    return tuple(axes)


# ------------------------------------------------------------------------------------------------------- pieces, tiling


@lru_cache(maxsize=16384)
def _pieces(layout: TensorLayout, shape: tuple[int, ...], rank: int) -> list[Piece]:
    where = layout.coordinate(rank)
    if where is None:
        return []
    pieces = _product_pieces([axis.intervals(where) for axis in _axes(layout, shape)])
    split = layout.block_split
    return pieces if split is None else split.pieces(pieces, layout.mesh.size(split.over), where[layout.mesh.axis(split.over)])


def _product_pieces(per_dim: Sequence[tuple[Interval, ...]]) -> list[Piece]:
    """Every combination of one interval per dimension; local offsets follow the order of the intervals."""
    options = []
    for intervals in per_dim:
        starts = itertools.accumulate((b - a for a, b in intervals), initial=0)
        options.append([(a, b - a, at) for (a, b), at in zip(intervals, starts, strict=False)])
    pieces = []
    for choice in itertools.product(*options):
        shape = tuple(n for _, n, _ in choice)
        if all(shape):
            pieces.append(Piece(Box(tuple(a for a, _, _ in choice), shape), Box(tuple(at for _, _, at in choice), shape)))
    return pieces


@lru_cache(maxsize=4096)
def _tiling(layout: TensorLayout, shape: tuple[int, ...]) -> Tiling:
    if layout.block_split is not None:
        return _listed_tiling(layout, shape)
    axes = _axes(layout, shape)
    # Two steps: bring the mesh axes that cut dimensions to the front, so that an index by their coordinates gives the
    # ranks that differ only on the other axes, the replicas; then look that up for every cell of the grid at once,
    # each dimension's coordinates being broadcast over the others'.
    array = layout._submesh()
    cuts = tuple(merge_cuts((0, axis.size), axis.shares.start, axis.shares.stop) if axis.size else Cuts((0, 0)) for axis in axes)
    used = [i for axis in axes for i in axis.mesh_axes]
    free = [i for i in range(array.ndim) if i not in used]
    array = array.transpose(used + free).reshape([array.shape[i] for i in used] + [-1])
    counts = [len(c) - 1 for c in cuts]
    index: list[npt.NDArray[np.int64]] = []
    for dim, axis in enumerate(axes):
        owners = _cell_coordinates(axis, cuts[dim])
        spread = [1] * len(counts)
        spread[dim] = counts[dim]
        index += [owners[:, k].reshape(spread) for k in range(owners.shape[1])]
    holders = array[tuple(index)] if index else array
    holders = np.broadcast_to(holders, (*counts, holders.shape[-1])).reshape(-1, holders.shape[-1])
    return Tiling(cuts=cuts, holders=holders)


def _cell_coordinates(axis: _Axis, cuts: Cuts) -> npt.NDArray[np.int64]:
    """For each cell along one dimension, the coordinate on ``axis.mesh_axes`` that holds it."""
    shares = axis.shares
    holder = np.zeros(len(cuts) - 1, dtype=np.int64)
    first, last = np.searchsorted(cuts.array, shares.start), np.searchsorted(cuts.array, shares.stop)
    count = last - first
    inside = np.arange(count.sum(), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    holder[np.repeat(first, count) + inside] = np.repeat(shares.row, count)
    if not axis.counts:
        return np.zeros((len(holder), 0), dtype=np.int64)
    return np.stack(np.unravel_index(holder, axis.counts), axis=1).astype(np.int64)


def _listed_tiling(layout: TensorLayout, shape: tuple[int, ...]) -> Tiling:
    """Explicit boxes: what each rank holds, once per group of ranks that hold the same."""
    blocks = _range_blocks(layout, shape)
    if blocks is not None:
        offsets, shapes, holders = blocks.boxes()
        return Tiling(boxes=(offsets, shapes), holders=holders)
    array = layout._submesh()
    split_axes = [layout.mesh.axis(s.over) for s in layout.splits]
    free = [i for i in range(array.ndim) if i not in split_axes]
    groups = array.transpose(split_axes + free).reshape(math.prod(array.shape[i] for i in split_axes), -1)
    if math.prod(shape) == 0 or not shape:
        # One cell, at the first coordinate that has something: explicit boxes need at least one box and one dimension.
        first = next((i for i, group in enumerate(groups) if layout.pieces(shape, int(group[0]))), 0) if not shape else 0
        return Tiling(cuts=tuple((0, n) for n in shape), holders=groups[first : first + 1])
    pieces = [(piece.box, group) for group in groups for piece in layout.pieces(shape, int(group[0]))]
    dims = len(shape)
    offsets = np.array([b.offset for b, _ in pieces], dtype=np.int64).reshape(-1, dims)
    shapes = np.array([b.shape for b, _ in pieces], dtype=np.int64).reshape(-1, dims)
    holders = np.array([group for _, group in pieces], dtype=np.int64).reshape(-1, groups.shape[1])
    return Tiling(boxes=(offsets, shapes), holders=holders)


@lru_cache(maxsize=2048)
def flat_blocks(layout: TensorLayout, shape: tuple[int, ...]) -> FlatBlocks | None:
    """The blocks of a flat layout and who holds their ranges. None where there are no blocks to speak of: an empty tensor, a scalar,
    interleaved parts, of which a rank holds several, or ranges of given sizes."""
    flat = layout.block_split
    return _range_blocks(layout, shape) if flat is not None and flat.has_even_ranges() else None


def _range_blocks(layout: TensorLayout, shape: tuple[int, ...]) -> FlatBlocks | None:
    """The same, also for ranges of given sizes."""
    flat = layout.block_split
    if not isinstance(flat, Flat) or math.prod(shape) == 0 or not shape:
        return None
    if not all(isinstance(s, AxisSplit) and s.contiguous for s in layout.splits[:-1]):
        return None
    allowed = dict(layout.at)
    tiling = TensorLayout(layout.mesh, layout.splits[:-1], layout.at).tiling(shape)
    parts = layout.mesh.size(flat.over)
    occupied = allowed.get(flat.over, tuple(range(parts)))  # all others are empty
    if tiling.cuts is None or list(occupied) != sorted(occupied):
        return None
    sizes = dict(zip(layout.mesh.names, layout.mesh.sizes, strict=True)) | {name: len(numbers) for name, numbers in allowed.items()}
    free = [name for name in layout.mesh.names if name not in {s.over for s in layout.splits[:-1]}]
    holders = tiling.holders.reshape(-1, *(sizes[name] for name in free))
    holders = np.moveaxis(holders, 1 + free.index(flat.over), 1)
    return FlatBlocks(
        cuts=tiling.cuts,
        holders=np.ascontiguousarray(holders.reshape(len(holders), sizes[flat.over], -1)),
        range_cuts=lambda numel: flat.range_cuts(numel, parts)[[*occupied, occupied[-1] + 1]],
    )


# Layouts that list the boxes of some ranks alone (``StatedBoxes``), joined to the layout of one tensor. Pure.


def states_boxes(layout: TensorLayout) -> bool:
    """Whether a layout lists the boxes of its own ranks alone, and other ranks have other layouts for the same tensor."""
    return isinstance(layout.block_split, StatedBoxes)


def joined_layout(name: str, layouts: Sequence[TensorLayout]) -> TensorLayout:
    """The layout of a tensor whose ranks state their boxes."""
    holding = [layout for layout in layouts if _boxes(layout)] or list(layouts[:1])
    ranks = [tuple(layout.mesh.array().ravel().tolist()) for layout in holding]
    copies = {len(each) for each in ranks}
    if len(copies) > 1 or len({rank for each in ranks for rank in each}) < sum(map(len, ranks)):
        raise CoverageError(
            f"tensor {name}: the ranks that hold the boxes that it states are not the same number for each box",
            hint="put it on one mesh, as a DTensor that is replicated over the same dimensions on all ranks",
        )
    mesh = Mesh(("stated", "copies"), (len(holding), copies.pop()), tuple(rank for each in ranks for rank in each))
    return TensorLayout(mesh, (Boxes("stated", tuple(_boxes(layout) for layout in holding)),))


def _boxes(layout: TensorLayout) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    split = layout.block_split
    assert isinstance(split, StatedBoxes)
    return split.boxes[0]
