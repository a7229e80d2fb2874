"""Where each rank's elements of one global tensor are: a mesh, and the splits that cut the tensor over it. Pure numpy.

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

from ckpt.errors import LayoutError

from .flat_ranges import FlatBlocks
from .geometry import Box, Cuts, IntArray, ceil_cut, flat_to_boxes, merge_cuts
from .mesh import Mesh
from .splits import Boxes, Flat, Interleaved, Interval, Shard, Shares, Split, given_cuts, part_of, split_from_json


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the global tensor, and where it is in this rank's memory: a box of the local tensor (a range of it for ``Flat``)."""

    box: Box
    local: Box


@dataclass(frozen=True, kw_only=True, eq=False)
class Tiling:
    """Who holds what of one tensor: cells that tile it, and for each cell the ranks that hold it.

    ``cuts`` per dimension, or explicit ``boxes`` (offsets, shapes); ``holders`` is ``[cells, replicas]``, global ranks.
    """

    cuts: tuple[tuple[int, ...], ...] | None
    boxes: tuple[IntArray, IntArray] | None
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
        if any(isinstance(s, Flat) for s in self.splits[:-1]):
            raise LayoutError("Flat must be the last split")
        if len(self.splits) > 1 and any(isinstance(s, Boxes) for s in self.splits):
            raise LayoutError("Boxes must be the only split")
        if len(set(over)) != len(over) and not self._is_flat_at():
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
    def is_flat(self) -> bool:
        return bool(self.splits) and isinstance(self.splits[-1], Flat)

    @property
    def boxes(self) -> Boxes | None:
        """The split, if boxes are listed."""
        return self.splits[0] if self.splits and isinstance(self.splits[0], Boxes) else None

    def _is_flat_at(self) -> bool:
        """Whether ``at`` names the coordinates of a single flat split whose given ranges are empty at all others."""
        sizes = self.splits[0].sizes if len(self.splits) == 1 and isinstance(self.splits[0], Flat) else None
        if sizes is None or len(self.at) != 1 or self.at[0][0] != self.splits[0].over:
            return False
        return not any(size for i, size in enumerate(sizes) if i not in self.at[0][1])

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
        if not self.is_flat:
            return block
        start, stop = _flat_range(self, math.prod(block), where)
        return (stop - start,)

    def tiling(self, shape: tuple[int, ...]) -> Tiling:
        """The cells of a tensor of global ``shape`` and their holders, the same on every rank."""
        return _tiling(self, shape)

    def to_json(self) -> Any:
        splits = [[type(s).__name__, *(getattr(s, f) for f in s.__slots__)] for s in self.splits]
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
    splits: tuple[Shard | Interleaved, ...]
    mesh_axes: tuple[int, ...]
    counts: tuple[int, ...]

    def intervals(self, where: tuple[int, ...]) -> tuple[Interval, ...]:
        """What the coordinate ``where`` of the mesh holds, in local order."""
        held: tuple[Interval, ...] = ((0, self.size),)
        for split, axis, count in zip(self.splits, self.mesh_axes, self.counts, strict=True):
            held = part_of(split, held, count, where[axis])
        return held

    @cached_property
    def shares(self) -> Shares:
        """What all coordinates on ``mesh_axes`` hold, these numbered row-major."""
        shares = Shares.all_of(self.size)
        for split, count in zip(self.splits, self.counts, strict=True):
            shares = shares.divided(split, count)
        return shares


@lru_cache(maxsize=4096)
def _axes(layout: TensorLayout, shape: tuple[int, ...]) -> tuple[_Axis, ...]:
    return tuple(_axis(layout, dim, size, len(shape)) for dim, size in enumerate(shape)) if shape else _no_axes(layout)


def _no_axes(layout: TensorLayout) -> tuple[_Axis, ...]:
    if any(not isinstance(s, Flat) for s in layout.splits):
        raise LayoutError("a scalar cannot be sharded", hint="give it a rule of its own: Replicate()")
    return ()


def _axis(layout: TensorLayout, dim: int, size: int, ndim: int) -> _Axis:
    splits: list[Shard | Interleaved] = []
    for split in layout.splits:
        if isinstance(split, Flat | Boxes):
            continue
        if not -ndim <= split.dim < ndim:
            raise LayoutError(f"{split} does not fit a tensor of {ndim} dimensions")
        if split.dim % ndim == dim:
            splits.append(split)
    axes = tuple(layout.mesh.axis(split.over) for split in splits)
    return _Axis(size, tuple(splits), axes, tuple(layout.mesh.sizes[axis] for axis in axes))


# ------------------------------------------------------------------------------------------------------- pieces, tiling


@lru_cache(maxsize=16384)
def _pieces(layout: TensorLayout, shape: tuple[int, ...], rank: int) -> list[Piece]:
    where = layout.coordinate(rank)
    if where is None:
        return []
    if layout.boxes is not None:
        held = layout.boxes.held[where[layout.mesh.axis(layout.boxes.over)]]
        return [Piece(Box(offset, size), Box((0,) * len(size), size)) for offset, size in held]
    pieces = _product_pieces([axis.intervals(where) for axis in _axes(layout, shape)])
    return _flat_pieces(layout, pieces, where) if layout.is_flat else pieces


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


def _flat_range(layout: TensorLayout, numel: int, where: tuple[int, ...]) -> Interval:
    split = layout.splits[-1]
    axis = layout.mesh.axis(split.over)
    given, parts, number = split.sizes if isinstance(split, Flat) else None, layout.mesh.sizes[axis], where[axis]
    if given is None:
        return ceil_cut(numel, parts, number), ceil_cut(numel, parts, number + 1)
    cuts = given_cuts(given, numel, parts)
    return cuts[number], cuts[number + 1]


def _flat_pieces(layout: TensorLayout, block: list[Piece], where: tuple[int, ...]) -> list[Piece]:
    """Cut the block that earlier splits left (its pieces) to this rank's flat range."""
    if not block:
        return []
    local_shape = tuple(np.max([p.local.end for p in block], axis=0).tolist()) if block[0].local.shape else ()
    start, stop = _flat_range(layout, math.prod(local_shape), where)
    found, at = [], 0
    for part in flat_to_boxes(local_shape, start, stop):
        for piece in block:
            common = part.intersect(piece.local)
            if common is None:
                continue
            if common != part:
                raise LayoutError("Flat over Interleaved is not supported", hint="shard each fused part under a name of its own")
            shift = tuple(g - o for g, o in zip(piece.box.offset, piece.local.offset, strict=True))
            found.append(Piece(common.shifted(shift), Box((at,), (part.numel,))))
        at += part.numel
    return found


@lru_cache(maxsize=4096)
def _tiling(layout: TensorLayout, shape: tuple[int, ...]) -> Tiling:
    if layout.is_flat or layout.boxes is not None:
        return _flat_tiling(layout, shape)
    axes = _axes(layout, shape)
    array = layout._submesh()
    cuts = tuple(map(_axis_cuts, axes))
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
    return Tiling(cuts=cuts, boxes=None, holders=holders)


def _axis_cuts(axis: _Axis) -> Cuts:
    return merge_cuts((0, axis.size), axis.shares.start, axis.shares.stop) if axis.size else Cuts((0, 0))


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


def _flat_tiling(layout: TensorLayout, shape: tuple[int, ...]) -> Tiling:
    """Explicit boxes: what each rank holds, once per group of ranks that hold the same."""
    blocks = flat_blocks(layout, shape)
    if blocks is not None:
        offsets, shapes, holders = blocks.boxes()
        return Tiling(cuts=None, boxes=(offsets, shapes), holders=holders)
    array = layout._submesh()
    split_axes = [layout.mesh.axis(s.over) for s in layout.splits]
    free = [i for i in range(array.ndim) if i not in split_axes]
    groups = array.transpose(split_axes + free).reshape(math.prod(array.shape[i] for i in split_axes), -1)
    if math.prod(shape) == 0 or not shape:
        # One cell, at the first coordinate: explicit boxes need at least one box and one dimension.
        return Tiling(cuts=tuple((0, n) for n in shape), boxes=None, holders=groups[:1])
    pieces = [(piece.box, group) for group in groups for piece in layout.pieces(shape, int(group[0]))]
    return Tiling(
        cuts=None,
        boxes=(np.array([b.offset for b, _ in pieces], dtype=np.int64), np.array([b.shape for b, _ in pieces], dtype=np.int64)),
        holders=np.array([group for _, group in pieces], dtype=np.int64),
    )


@lru_cache(maxsize=2048)
def flat_blocks(layout: TensorLayout, shape: tuple[int, ...]) -> FlatBlocks | None:
    """The blocks of a flat layout and who holds their ranges. None where there are no blocks to speak of: an empty tensor, a scalar,
    interleaved parts, of which a rank holds several, or ranges of given sizes."""
    flat = layout.splits[-1] if layout.splits else None
    if not isinstance(flat, Flat) or flat.sizes is not None or math.prod(shape) == 0 or not shape:
        return None
    if not all(isinstance(s, Shard) for s in layout.splits[:-1]):
        return None
    tiling = TensorLayout(layout.mesh, layout.splits[:-1], layout.at).tiling(shape)
    assert tiling.cuts is not None
    sizes = dict(zip(layout.mesh.names, layout.mesh.sizes, strict=True)) | {name: len(allowed) for name, allowed in layout.at}
    free = [name for name in layout.mesh.names if name not in {s.over for s in layout.splits[:-1]}]
    holders = tiling.holders.reshape(-1, *(sizes[name] for name in free))
    holders = np.moveaxis(holders, 1 + free.index(flat.over), 1)
    return FlatBlocks(cuts=tiling.cuts, holders=np.ascontiguousarray(holders.reshape(len(holders), sizes[flat.over], -1)))
