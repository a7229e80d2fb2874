"""Hypothesis strategies for meshes and layouts, and a numpy oracle that cuts an array as the layouts' docstrings say.

The oracle shares no arithmetic with the package: it splits real arrays, one split after another, and never computes where a part begins
in the global tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from ckpt.dtypes import DTYPES, DType
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placement_base import Split
from ckpt.plan.layout.placements import Flat, Interleaved, Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec

MAX_RANKS = 12
NAMES = ("pp", "dp", "tp")


# ------------------------------------------------------------------------------------------------------------------- oracle


def chunked(array: np.ndarray, parts: int, dim: int) -> list[np.ndarray]:
    """What ``torch.chunk`` gives, with empty arrays in place of the chunks that it leaves out."""
    step = math.ceil(array.shape[dim] / parts)
    return np.split(array, [step * (i + 1) for i in range(parts - 1)], axis=dim)


def sized(array: np.ndarray, sizes: Sequence[int], dim: int) -> list[np.ndarray]:
    """Consecutive parts of these sizes."""
    assert sum(sizes) == array.shape[dim]
    return np.split(array, np.cumsum(sizes)[:-1].tolist(), axis=dim)


def split_array(array: np.ndarray, split: Split, parts: int) -> list[np.ndarray]:
    """The part of each coordinate of the split's mesh dimension."""
    if isinstance(split, Flat):
        flat = array.reshape(-1)
        return chunked(flat, parts, 0) if split.sizes is None else sized(flat, split.sizes, 0)
    if isinstance(split, Shard):
        return chunked(array, parts, split.dim) if split.sizes is None else sized(array, split.sizes, split.dim)
    equal = isinstance(split.groups, int)
    groups = chunked(array, split.groups, split.dim) if equal else sized(array, split.groups, split.dim)
    return [np.concatenate(group, axis=split.dim) for group in zip(*(chunked(g, parts, split.dim) for g in groups), strict=True)]


def coordinate_of(mesh: Mesh, rank: int) -> dict[str, int] | None:
    """Mesh dimension → coordinate of a rank; None if it is not in the mesh."""
    found = np.argwhere(np.array(list(mesh.ranks)).reshape(mesh.sizes) == rank)
    return dict(zip(mesh.names, found[0].tolist(), strict=True)) if len(found) else None


def local_array(layout: TensorLayout, array: np.ndarray, rank: int) -> np.ndarray | None:
    """What ``rank`` has in memory of a global array; None if it takes no part."""
    where = coordinate_of(layout.mesh, rank)
    if where is None or any(where[name] not in allowed for name, allowed in layout.at):
        return None
    for split in layout.splits:
        array = split_array(array, split, dict(zip(layout.mesh.names, layout.mesh.sizes, strict=True))[split.over])[where[split.over]]
    return array


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """An array whose elements are their own positions in row-major order."""
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


def through_pieces(layout: TensorLayout, array: np.ndarray, rank: int) -> np.ndarray:
    """The rank's memory as the package's pieces fill it, −1 where none does."""
    local = np.full(layout.local_shape(array.shape, rank), -1, dtype=np.int64)
    for piece in layout.pieces(array.shape, rank):
        assert (local[piece.local.slices] == -1).all(), "two pieces share memory"
        local[piece.local.slices] = array[piece.box.slices].reshape(piece.local.shape)
    return local


# --------------------------------------------------------------------------------------------------------------- strategies


@st.composite
def meshes(draw: st.DrawFn, max_ranks: int = MAX_RANKS) -> Mesh:
    """One to three dimensions; ranks from 0, from an offset, or in any order with gaps."""
    sizes: list[int] = []
    for _ in range(draw(st.sampled_from([1, 2, 3, 2]))):
        left = max_ranks // math.prod(sizes)
        sizes.append(draw(st.sampled_from([n for n in (2, 3, 4, 2, 3, 1) if n <= left])))
    world = math.prod(sizes)
    how = draw(st.sampled_from(["plain", "offset", "any"]))
    if how == "any":
        ranks = tuple(draw(st.lists(st.integers(0, 2 * world), min_size=world, max_size=world, unique=True)))
    else:
        first = 0 if how == "plain" else draw(st.integers(1, 5))
        ranks = tuple(range(first, first + world))
    return Mesh(NAMES[: len(sizes)], tuple(sizes), ranks)


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...], *, stages: bool = True) -> TensorLayout:
    """Any splits that fit a tensor of ``shape``; with ``stages`` some mesh dimensions may be restricted to some coordinates."""
    free = draw(st.permutations(mesh.names))
    at = []
    if stages and draw(st.integers(0, 3)) == 0:
        name = free.pop()
        allowed = draw(st.sets(st.integers(0, mesh.size(name) - 1), min_size=1))
        at.append((name, tuple(sorted(allowed))))
    splits: tuple[Split, ...] = ()
    for over in free:
        kinds = ["none", "flat"] + (["shard", "shard", "sizes", "groups", "equal groups"] if shape else [])
        kind = draw(st.sampled_from(kinds))
        if kind == "flat" and not any(isinstance(s, Interleaved) for s in splits):
            numels = _numels_left(mesh, shape, splits)
            sizes = draw(_sums(numels.pop(), mesh.size(over))) if len(numels) == 1 and draw(st.booleans()) else None
            return TensorLayout(mesh, (*splits, Flat(over, sizes)), tuple(at))
        if kind in ("none", "flat"):
            continue
        splits += (draw(_split(mesh, shape, splits, over, kind)),)
    return TensorLayout(mesh, splits, tuple(at))


@st.composite
def _split(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...], before: tuple[Split, ...], over: str, kind: str) -> Split:
    dim = draw(st.integers(0, len(shape) - 1))
    said = dim - draw(st.sampled_from([0, len(shape)]))
    parts = mesh.size(over)
    if kind == "equal groups":
        return Interleaved(said, over, draw(st.integers(1, 3)))
    left = _sizes_left(mesh, shape, before, dim)
    if kind == "shard" or len(left) > 1:  # given sizes need to fit every rank's part
        return Shard(said, over)
    if kind == "groups":
        return Interleaved(said, over, draw(_sums(left.pop(), draw(st.integers(1, 3)))))
    return Shard(said, over, draw(_sums(left.pop(), parts)))


def _sizes_left(mesh: Mesh, shape: tuple[int, ...], splits: tuple[Split, ...], dim: int) -> set[int]:
    layout, array = TensorLayout(mesh, splits), np.zeros(shape)
    return {local.shape[dim] for r in mesh.ranks if (local := local_array(layout, array, r)) is not None}


def _numels_left(mesh: Mesh, shape: tuple[int, ...], splits: tuple[Split, ...]) -> set[int]:
    layout, array = TensorLayout(mesh, splits), np.zeros(shape)
    return {local.size for r in mesh.ranks if (local := local_array(layout, array, r)) is not None}


@st.composite
def _sums(draw: st.DrawFn, total: int, count: int) -> tuple[int, ...]:
    cuts = sorted(draw(st.integers(0, total)) for _ in range(count - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))


def tensor_shapes(max_side: int = 9, max_dims: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with zero to ``max_dims`` dimensions; a size of 0 is rare."""
    side = st.one_of(st.integers(1, max_side), st.integers(1, max_side), st.integers(1, max_side), st.integers(0, max_side))
    return st.lists(side, max_size=max_dims).map(tuple)


@st.composite
def placed_tensors(draw: st.DrawFn) -> tuple[TensorLayout, tuple[int, ...]]:
    """A layout and a shape that it fits."""
    shape = draw(tensor_shapes())
    return draw(layouts(draw(meshes()), shape)), shape


DTYPE_NAMES = ("uint8", "bfloat16", "float32", "float64")


@st.composite
def tensor_lists(draw: st.DrawFn, mesh: Mesh, max_tensors: int = 5, *, stages: bool = True) -> list[TensorSpec]:
    """Tensors of one job over ``mesh``; some lie as others do, as the layers of a model."""
    count = draw(st.integers(1, max_tensors))
    found: list[TensorSpec] = []
    for i in range(count):
        if found and draw(st.booleans()):
            like = draw(st.sampled_from(found))
            found.append(TensorSpec(f"t{i}", like.dtype, like.shape, like.layout))
            continue
        shape = draw(tensor_shapes())
        kind: DType = DTYPES[draw(st.sampled_from(DTYPE_NAMES))]
        found.append(TensorSpec(f"t{i}", kind, shape, draw(layouts(mesh, shape, stages=stages))))
    return found
