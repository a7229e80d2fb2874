"""Ownership: which rank writes which chunk. Every rank computes it from the layouts alone, so ranks that see the same layouts agree without
a message.

    layout: rows over 2 ranks, each replicated twice     cells        chunks               owners
                                                         ┌──────────┐ ┌──────────┐
    ranks 0 and 2 have the upper half,                   │ cell 0   │ │  chunk 0 │         0
                                                         │          │ │  chunk 1 │         2
    ranks 1 and 3 the lower one                          ├──────────┤ ├──────────┤
                                                         │ cell 1   │ │  chunk 2 │         1
                                                         │          │ │  chunk 3 │         3
                                                         └──────────┘ └──────────┘

1. A layout cuts a tensor into *cells*: the boxes that a set of ranks, its replicas, have in common.
2. Replicas of a cell divide it by rows, so bytes are balanced by construction. A cell under ``settings.UNDIVIDED`` bytes goes whole to one
   replica: the least loaded of those that hold the same tensors. For that, tensors are taken largest first, in an order that names decide.
3. What is left is cut further until no chunk has more than ``settings.CHUNK`` bytes.

The result for a tensor depends on nothing but the tensors with the same replicas, so pipeline stages need not know each other's.

Flat ranges are stored as the boxes that they are made of, or *merged*: then the grid is regular, its chunks are whole rows, and ranks send
each other the edges of their ranges (:func:`fragments`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ckpt import settings
from ckpt.dtypes import DType
from ckpt.plan.layout.geometry import IntArray, cells, even_cuts
from ckpt.plan.layout.partition import BoxPartition
from ckpt.plan.layout.tensor_layout import TensorLayout, Tiling, states_boxes

from .flat import FlatGrid, caps, is_whole, refine, row_grid, whole_grid


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What all ranks that hold a tensor must agree about: name, dtype, global shape, the part of it that is not padding, and the layout."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    layout: TensorLayout
    logical: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkAssignment(BoxPartition):
    """The stored grid of one tensor, and the rank that writes each chunk.

    ``owners`` is ``[chunks]``. Chunk i is cut from cell ``cell[i]`` of the tensor's tiling, and the ranks
    ``cell_holders[cell[i]]`` have its bytes.

    Of a merged tensor, cells are flat ranges and may be empty, ``cell[i]`` is the one whose holders write chunk i, and they may lack
    bytes of the chunk or have more than it: ``holders`` and ``held_by`` are about the cell. Each chunk is a contiguous range of the
    row-major flattening.
    """

    owners: IntArray
    cell: IntArray
    cell_holders: IntArray
    flat: FlatGrid | None = None
    """What a merged tensor's grid was made from."""
    rotation: int = 0
    """Part p of a cell is written by holder ``(p + rotation) % replicas``."""
    alone: bool = False
    """Whether it has the chunks of some ranks only, which state their own boxes (``StatedBoxes``): the job numbers them otherwise."""

    @property
    def merged(self) -> bool:
        """Whether chunks may have bytes of several cells, which their owners get from other ranks before they write them."""
        return self.flat is not None

    @property
    def replicas(self) -> int:
        """How many ranks have each byte."""
        return int(self.cell_holders.shape[1])

    @property
    def holders(self) -> IntArray:
        """The ranks that have each chunk's bytes, ``[chunks, replicas]``."""
        return self.cell_holders[self.cell]

    def written_by(self, rank: int) -> list[int]:
        """Numbers of the chunks that ``rank`` writes."""
        chunks: list[int] = np.flatnonzero(self.owners == rank).tolist()
        return chunks

    def chunks_on(self, rank: int) -> list[int]:
        """Numbers of the chunks whose bytes ``rank`` has."""
        chunks: list[int] = np.flatnonzero((self.cell_holders == rank).any(axis=1)[self.cell]).tolist()
        return chunks


def assign(tensors: Iterable[TensorSpec], *, merge_flat_shards: bool = False) -> dict[str, ChunkAssignment]:
    """Decide the stored grid and the writers of every tensor. With ``merge_flat_shards``, flat ranges become whole rows where few bytes
    have to move for it.

    The result for one tensor depends only on the tensors that are replicated over the same mesh dimensions, so ranks that hold different
    pipeline stages need not know each other's tensors.
    """
    # Load is balanced within a group: the tensors that are replicated over the same mesh dimensions. Each rank sees
    # all tensors of its own groups and perhaps none of others, so a group is the largest set over which all ranks
    # that take part can do the same arithmetic and arrive at the same answer without a message.
    groups: dict[object, list[TensorSpec]] = defaultdict(list)
    merged: dict[object, list[tuple[TensorSpec, FlatGrid]]] = defaultdict(list)
    of_layout: dict[int, list[TensorSpec]] = {}
    for t in tensors:
        # A model has thousands of tensors and a handful of layout objects. The group of a layout is looked up by
        # identity, since hashing a layout means hashing the list of all ranks of its mesh.
        members = of_layout.get(id(t.layout))
        if members is None:
            may_merge = merge_flat_shards and t.layout.is_flat  # some of a layout's tensors, and others not
            grid = None
            if may_merge and _is_whole(t):
                grid = whole_grid(t.layout, t.shape, 0)
            elif may_merge:
                grid = row_grid(t.layout, t.shape, t.dtype.itemsize, settings.CHUNK, settings.UNDIVIDED)
            if grid is not None:
                merged[_replica_group(t.layout), t.layout.splits[-1].over].append((t, grid))
                continue
            members = groups[_replica_group(t.layout)]
            if not may_merge:
                of_layout[id(t.layout)] = members
        members.append(t)
    assignments: dict[str, ChunkAssignment] = {}
    # Equal layout, shape, element size and rotation mean equal chunks and owners. Such tensors share one object,
    # which later steps also compare by identity: the index stores one grid for all of them.
    for members in groups.values():
        alike: dict[object, ChunkAssignment] = {}
        for t, rotation in _rotations(members):
            key = id(t.layout), t.shape, t.dtype.itemsize, rotation
            known = alike.get(key)
            if known is None:
                known = alike[key] = _assignment(t.layout, t.shape, t.dtype.itemsize, rotation)
            assignments[t.name] = known
    for flat in merged.values():
        assignments.update((t.name, _assignment_of_rows(grid, rotation)) for t, grid, rotation in _merged_rotations(flat))
    return assignments


def _is_whole(t: TensorSpec) -> bool:
    return is_whole(t.layout, t.shape, t.dtype.itemsize, settings.UNDIVIDED)


def _merged_rotations(members: Sequence[tuple[TensorSpec, FlatGrid]]) -> Iterator[tuple[TensorSpec, FlatGrid, int]]:
    """For each merged tensor its grid, and the replica that starts."""
    # A small one goes to whoever has least so far of its block.
    #
    # Without small ones it is enough to know what each replica has of all ranges together: nothing is done for each range of each tensor.
    #
    # The largest tensor comes first and ties are broken by name: all ranks must take them in one order, and a greedy
    # assignment is close to the best one if what comes last is small. There are two levels of detail:
    #
    # no small tensors    load[replica]            the sum over the ranges: they are cut almost evenly
    # small tensors       load[range, replica]     each goes whole to one rank, so ranges differ as well
    load = np.zeros(0)
    unsplit = {t.name for t, _ in members if _is_whole(t)}
    totals: dict[int, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
    for t, grid in sorted(members, key=lambda member: (-member[0].nbytes, member[0].name)):
        replicas = grid.holders.shape[1]
        load = load if len(load) else np.zeros(grid.ranges * replicas if unsplit else replicas)
        # A row-cut tensor adds the same bytes whichever rotation it gets, only shifted by it: so the totals are
        # computed once per grid and rolled.
        if not unsplit:
            rotation = int(load.argmin())
            if id(grid) not in totals:
                totals[id(grid)] = grid.load.sum(axis=0)
            load += np.roll(totals[id(grid)], rotation) * t.dtype.itemsize
            yield t, grid, rotation
            continue
        if t.name in unsplit:
            slot = int(load.argmin())
            load[slot] += t.nbytes / len(grid.cell)
            yield t, whole_grid(t.layout, t.shape, slot // replicas), slot % replicas
            continue
        rotation = int(load.reshape(-1, replicas).sum(axis=0).argmin()) if replicas > 1 else 0
        load += np.roll(grid.load, rotation, axis=1).ravel() * t.dtype.itemsize
        yield t, grid, rotation


@lru_cache(maxsize=4096)
def _assignment_of_rows(grid: FlatGrid, rotation: int) -> ChunkAssignment:
    owners = grid.holders[grid.cell, (grid.part + rotation) % grid.holders.shape[1]]
    return ChunkAssignment(cuts=grid.cuts, owners=owners, cell=grid.cell, cell_holders=grid.holders, flat=grid, rotation=rotation)


def _replica_group(layout: TensorLayout) -> object:
    return layout.mesh, layout.at, frozenset(s.over for s in layout.splits)


def _rotations(members: Sequence[TensorSpec]) -> list[tuple[TensorSpec, int]]:
    """For each tensor the replica that starts: the one that has least so far."""
    # Large tensors first, so that small ones even out the rest.
    replicas = members[0].layout.tiling(members[0].shape).holders.shape[1]
    if replicas == 1:
        return [(t, 0) for t in members]
    # Greedy, largest first (longest-processing-time scheduling): each tensor starts at the replica that has the least so far. An even cut
    # leaves replica 0 with the larger part, so without the rotation the first replica of every group would write the most of every tensor.
    load = np.zeros(replicas)
    bytes_of: dict[object, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    rotations = []
    for t in sorted(members, key=lambda t: (-t.nbytes, t.name)):
        alike = t.layout, t.shape, t.dtype
        if alike not in bytes_of:
            tiling = t.layout.tiling(t.shape)
            shares = _shares(tiling, t.shape, t.dtype.itemsize, replicas) * (t.nbytes / max(len(tiling.holders), 1))
            # Two copies end to end turn a rotation into a slice, which is far cheaper than np.roll per tensor.
            bytes_of[alike] = np.concatenate([shares, shares])  # a slice of it is the shares, rotated
        rotation = int(load.argmin())
        load += bytes_of[alike][replicas - rotation : 2 * replicas - rotation]
        rotations.append((t, rotation))
    return rotations


def _shares(tiling: Tiling, shape: tuple[int, ...], itemsize: int, replicas: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Fraction of a typical cell that each replica writes, before the rotation."""
    widest = tiling.widest(shape)
    shares = np.zeros(replicas)
    if math.prod(widest) * itemsize < settings.UNDIVIDED:
        shares[0] = 1
        return shares
    rows = widest[_row_dim(widest, replicas)]
    sizes = np.diff(even_cuts(rows, min(replicas, rows)))
    shares[: len(sizes)] = sizes / rows
    return shares


def _row_dim(widest: tuple[int, ...], replicas: int) -> int:
    """The dimension along which replicas split a cell: the first that is long enough, or the longest."""
    for dim, size in enumerate(widest):
        if size >= replicas:
            return dim
    return max(range(len(widest)), key=lambda d: widest[d])


@lru_cache(maxsize=2048)
def _assignment(layout: TensorLayout, shape: tuple[int, ...], itemsize: int, rotation: int) -> ChunkAssignment:
    tiling = layout.tiling(shape)
    if tiling.cuts is None:
        alone = states_boxes(layout)
        return _assignment_of_boxes(tiling, itemsize, rotation, alone=alone)
    widest = tiling.widest(shape)
    replicas = tiling.holders.shape[1]
    # A cell is cut along one dimension only (``row``), so that the parts of a row-major cell stay long runs of bytes.
    # Along the others it is cut only where a chunk would be larger than ``settings.CHUNK``.
    small = replicas == 1 or not shape or math.prod(widest) * itemsize < settings.UNDIVIDED
    row = None if small else _row_dim(widest, replicas)
    most = caps(widest, itemsize, settings.CHUNK)
    refined = [refine(cuts, replicas if dim == row else 1, most[dim]) for dim, cuts in enumerate(tiling.cuts)]
    counts = [len(parent) for _, parent, _ in refined]
    # The grid's cells in row-major order: ``index`` has the coordinates of every chunk, ``parents`` the cell of the
    # tiling that the chunk was cut from, and ``part`` which replica's share of that cell it is.
    index = np.indices(counts).reshape(len(counts), -1) if counts else np.zeros((0, 1), dtype=np.int64)
    parents = np.zeros(index.shape[1], dtype=np.int64)
    for dim, (_, parent, _) in enumerate(refined):
        parents = parents * (len(tiling.cuts[dim]) - 1) + parent[index[dim]]
    part = 0 if row is None else refined[row][2][index[row]]
    owners = tiling.holders[parents, (part + rotation) % replicas]
    return ChunkAssignment(cuts=tuple(new for new, _, _ in refined), owners=owners, cell=parents, cell_holders=tiling.holders)


def _assignment_of_boxes(tiling: Tiling, itemsize: int, rotation: int, *, alone: bool) -> ChunkAssignment:
    """Explicit boxes (flat ranges): each is cut by rows among its replicas and to the size of a chunk."""
    # Boxes of one shape are cut alike.
    offsets, shapes = tiling.all_boxes()
    replicas = tiling.holders.shape[1]
    if not len(offsets):  # of a rank that states that it holds nothing
        none = np.zeros(0, dtype=np.int64)
        return ChunkAssignment(boxes=(offsets, shapes), owners=none, cell=none, cell_holders=tiling.holders, alone=True)
    # Flat ranges of a model with thousands of ranks are hundreds of thousands of boxes of few different shapes. Each
    # shape is cut once, and the result is spread over all boxes that have it, by index arithmetic alone.
    kinds, kind = _distinct_rows(shapes)
    first, counts, pieces = _cut_boxes(kinds, replicas, itemsize)
    cell = np.repeat(np.arange(len(kind), dtype=np.int64), counts[kind])
    number = np.arange(len(cell), dtype=np.int64) - np.repeat(np.cumsum(counts[kind]) - counts[kind], counts[kind])
    at, sizes, part = (column[first[kind[cell]] + number] for column in pieces)
    owners = tiling.holders[cell, (part + rotation) % replicas]
    return ChunkAssignment(boxes=(offsets[cell] + at, sizes), owners=owners, cell=cell, cell_holders=tiling.holders, alone=alone)


def _distinct_rows(rows: IntArray) -> tuple[IntArray, IntArray]:
    """``np.unique`` of whole rows, and the number of each row's own: column by column, which is far faster for very many rows."""
    number = np.zeros(len(rows), dtype=np.int64)
    for column in rows.T:
        values, place = np.unique(column, return_inverse=True)
        number = np.unique(number * len(values) + place.reshape(-1), return_inverse=True)[1].reshape(-1)
    return rows[np.unique(number, return_index=True)[1]], number


_Pieces = tuple[IntArray, IntArray, IntArray]
"""Of chunks of boxes: offsets in the box, shapes, and the number of the replica's part that each is in."""


def _cut_boxes(shapes: IntArray, replicas: int, itemsize: int) -> tuple[IntArray, IntArray, _Pieces]:
    """The chunks of boxes ``[n, d]``: the number of the first of each and how many it has, and all of them."""
    # Ranges that begin anywhere have an end of a row of any length: most boxes of a shape of their own are one chunk.
    nbytes = shapes.prod(axis=1) * itemsize
    whole = (nbytes < settings.UNDIVIDED) if replicas > 1 else np.ones(len(shapes), dtype=bool)
    whole &= (nbytes <= settings.CHUNK) & (nbytes > 0)
    cut = [_cut_box(tuple(shape), replicas, itemsize) for shape in shapes[~whole].tolist()]
    counts = np.ones(len(shapes), dtype=np.int64)
    counts[~whole] = [len(part) for _, _, part in cut]
    sizes = np.repeat(shapes, counts, axis=0)
    at, part = np.zeros_like(sizes), np.zeros(len(sizes), dtype=np.int64)
    if cut:
        several = np.repeat(~whole, counts)
        at[several], sizes[several], part[several] = (np.concatenate(column) for column in zip(*cut, strict=True))
    return np.cumsum(counts) - counts, counts, (at, sizes, part)


def _cut_box(shape: tuple[int, ...], replicas: int, itemsize: int) -> _Pieces:
    """The chunks of a box."""
    small = math.prod(shape) * itemsize < settings.UNDIVIDED
    row = _row_dim(shape, replicas)
    most = caps(shape, itemsize, settings.CHUNK)
    refined = [refine((0, n), replicas if d == row and not small else 1, most[d]) for d, n in enumerate(shape)]
    at, sizes = cells([new for new, _, _ in refined])
    return at, sizes, refined[row][2][np.indices([len(r[1]) for r in refined])[row].ravel()]


# What ranks send each other so that merged chunks are whole: the edges of their flat ranges, less than a row each. Pure.


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """Contiguous elements ``[start, stop)`` of the row-major flattening of one tensor, that move from the rank that holds them to the
    one that writes them as a part of ``chunk``."""

    name: str
    chunk: int
    start: int
    stop: int
    source: int
    target: int


def fragments(
    tensors: Iterable[TensorSpec], assignments: Mapping[str, ChunkAssignment], rank: int
) -> tuple[list[Fragment], list[Fragment]]:
    """What ``rank`` sends and what it receives, by name and start: so two ranks list what moves between them in the same order.

    Among replicas, the owner of a chunk gets what it lacks from the ranks that have its own place on the other mesh dimensions.
    Tensors that are not merged have no fragments.
    """
    sends: list[Fragment] = []
    receives: list[Fragment] = []
    for name in sorted(t.name for t in tensors):
        grid = assignments[name].flat
        if grid is not None:
            out, into = _moves(grid, assignments[name].rotation, rank)
            sends += [Fragment(name=name, chunk=c, start=a, stop=b, source=rank, target=other) for c, a, b, other in out]
            receives += [Fragment(name=name, chunk=c, start=a, stop=b, source=other, target=rank) for c, a, b, other in into]
    return sends, receives


Moves = list[tuple[int, int, int, int]]
"""Chunk, start, stop, and the other rank."""


@lru_cache(maxsize=16384)
def _moves(grid: FlatGrid, rotation: int, rank: int) -> tuple[Moves, Moves]:
    """What a rank sends and receives of one tensor."""
    mine = _place(grid, rank)
    if mine is None:
        return [], []
    cell, replica = mine
    # ``foreign`` lists, for the whole grid, which elements of a chunk lie in another cell than the one whose holders
    # write it. Both sides of a transfer derive it from the same grid, so sender and receiver agree about chunk, start
    # and stop without a message, and in the same order.
    #
    # Of the source's replicas the one in the writer's own place (``column``) sends. So every transfer happens once,
    # whatever the number of replicas, and a rank exchanges only with ranks that share its other mesh coordinates.
    chunk, source, start, stop = grid.foreign
    column = (grid.part[chunk] + rotation) % grid.holders.shape[1]
    out = np.flatnonzero((source == cell) & (column == replica))
    into = np.flatnonzero((grid.cell[chunk] == cell) & (column == replica))
    to, of = grid.holders[grid.cell[chunk[out]], replica], grid.holders[source[into], replica]
    sends, receives = (np.column_stack([chunk[at], start[at], stop[at], other]).tolist() for at, other in ((out, to), (into, of)))
    return sends, receives


@lru_cache(maxsize=16384)
def _place(grid: FlatGrid, rank: int) -> tuple[int, int] | None:
    """The cell that a rank holds, and which of its replicas it is."""
    box = np.argwhere(grid.holders == rank)
    return (int(box[0, 0]), int(box[0, 1])) if len(box) else None


def replicated_chunks(assignments: Mapping[str, ChunkAssignment], rank: int) -> list[tuple[str, Sequence[int]]]:
    """The tensors of this rank that other ranks have too, and the chunks by which they are compared: those that the rank has; a merged
    tensor is compared whole, as chunk 0."""
    compared: dict[int, list[int]] = {}
    for assignment in assignments.values():
        if assignment.replicas > 1 and id(assignment) not in compared:
            if assignment.merged:
                compared[id(assignment)] = [0] if (assignment.cell_holders == rank).any() else []
            else:
                compared[id(assignment)] = assignment.chunks_on(rank)
    return [(name, numbers) for name, assignment in assignments.items() if (numbers := compared.get(id(assignment)))]
