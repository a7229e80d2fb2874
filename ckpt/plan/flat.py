"""Tensors that are cut into flat ranges (``Flat``): a regular grid of whole rows for them. Pure.

A *cell* is the flat range of one group of replicas. Where the splits before ``Flat`` leave blocks that are contiguous in the row-major
flattening of the tensor (none, or ``Shard`` of the leading dimensions), the cells follow one another in that flattening and a regular
grid can be made: the boundary between two cells moves to the nearest row boundary, so less than a row changes hands there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ckpt.plan.layout.geometry import IntArray, ceil_cuts, cells
from ckpt.plan.layout.partition import FlatBlocks
from ckpt.plan.layout.tensor_layout import TensorLayout, flat_blocks

# Cells cut into parts: one for each replica, and none larger than a chunk may be. Vectorised. Pure.


def caps(widest: Sequence[int], itemsize: int, max_chunk: int) -> list[int]:
    """Most elements that a chunk of at most ``max_chunk`` bytes may have along each dimension: rows are cut first, and within a row only
    if one row is too large."""
    # From the outermost dimension inwards: cut rows until the chunk fits; go on to the next dimension only if a
    # single row is still too large. So chunks are contiguous in their cell wherever that is possible.
    largest = [max(n, 1) for n in widest]
    for dim in range(len(largest)):
        if math.prod(largest) * itemsize <= max_chunk:
            break
        largest[dim] = max(1, max_chunk // (math.prod(largest[dim + 1 :]) * itemsize))
    return largest


def refine(cuts: Sequence[int] | IntArray, parts: int, cap: int) -> tuple[tuple[int, ...], IntArray, IntArray]:
    """Cut each interval into ``parts`` (fewer if it is shorter), and these into pieces of at most ``cap``.

    Returns:
        The new cuts; for each new interval the number of the old one, and the number of its part.
    """
    edges = np.asarray(cuts, dtype=np.int64)
    sizes = np.diff(edges)
    parent, part, starts, lengths = _even(edges[:-1], sizes, np.clip(sizes, 1, parts))
    outer, _, starts, lengths = _even(starts, lengths, np.maximum(-(-lengths // cap), 1))
    return (*starts.tolist(), int(edges[-1])), parent[outer], part[outer]


def _even(starts: IntArray, sizes: IntArray, counts: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cut intervals into ``counts`` each, whose sizes differ by at most one, the larger ones first.

    Returns:
        For each new interval the number of the old one, its number in that, its start and its size.
    """
    parent = np.repeat(np.arange(len(starts), dtype=np.int64), counts)
    number = np.arange(len(parent), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    base, extra = np.divmod(sizes, counts)
    base, extra = base[parent], extra[parent]
    return parent, number, starts[parent] + number * base + np.minimum(number, extra), base + (number < extra)


MOST_MOVED = 1 / 8
"""Where more than this part of a tensor would change hands (about two rows or fewer for each cell), it keeps explicit boxes."""
FAN_IN = 256
"""A small block goes whole to one rank only if at most this many hold parts of it: each of them sends that rank a message."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatGrid:
    """A regular grid each chunk of which is a contiguous range of the row-major flattening of the tensor.

    Chunk i is elements ``[edges[i], edges[i + 1])``. The holders of cell ``cell[i]`` write it: replica ``part[i]``, before the rotation.
    Cell c is elements ``[cell_edges[c], cell_edges[c + 1])``, and the ranks ``holders[c]`` have it; it may be empty.
    """

    cuts: tuple[tuple[int, ...], ...]
    edges: IntArray
    cell: IntArray
    part: IntArray
    cell_edges: IntArray
    holders: IntArray
    ranges: int
    """Flat ranges in one block: as many as ``Flat``'s mesh dimension has coordinates."""

    @cached_property
    def foreign(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """What other cells hold of each chunk: chunk, cell, start and stop in the flattening, by increasing start."""
        start = np.unique(np.concatenate([self.edges[:-1], self.cell_edges[:-1][np.diff(self.cell_edges) > 0]]))
        stop = np.append(start[1:], self.edges[-1])
        chunk = np.searchsorted(self.edges, start, side="right") - 1
        cell = np.searchsorted(self.cell_edges, start, side="right") - 1
        moves = np.flatnonzero(self.cell[chunk] != cell)
        return chunk[moves], cell[moves], start[moves], stop[moves]

    @property
    def moved(self) -> int:
        """Elements that change hands."""
        _, _, start, stop = self.foreign
        return int((stop - start).sum())

    @cached_property
    def load(self) -> IntArray:
        """Elements that each range and replica of the first block writes, ``[ranges, replicas]``, before the rotation."""
        replicas = self.holders.shape[1]
        first = np.flatnonzero(self.cell < self.ranges)
        slots = self.cell[first] * replicas + self.part[first]
        elements = np.zeros(self.ranges * replicas, dtype=np.int64)
        np.add.at(elements, slots, np.diff(self.edges)[first])
        return elements.reshape(self.ranges, replicas)


def _contiguous(blocks: FlatBlocks) -> bool:
    """Whether each block is one range of the tensor's flattening: nothing is cut below the first dimension of which one has several."""
    dim = next((d for d, w in enumerate(blocks.widths) if w.max() > 1), len(blocks.cuts))
    return all(len(c) == 2 for c in blocks.cuts[dim + 1 :])


def _cell_edges(blocks: FlatBlocks) -> IntArray:
    """Boundaries of the flat ranges of contiguous blocks, in the flattening of the tensor."""
    sizes = cells(blocks.cuts)[1].prod(axis=1)
    ranges = blocks.holders.shape[1]
    step = -(-sizes // ranges)
    local = np.minimum(np.arange(ranges, dtype=np.int64) * step[:, None], sizes[:, None])
    starts = np.cumsum(sizes) - sizes
    return np.append((starts[:, None] + local).ravel(), sizes.sum())


# ---------------------------------------------------------------------------------------------------------------- regular grids


def is_whole(layout: TensorLayout, shape: tuple[int, ...], itemsize: int, small: int) -> bool:
    """Whether the blocks are so small (below ``small`` bytes) that each is gathered by one of the ranks that hold parts of it."""
    blocks = flat_blocks(layout, shape)
    if blocks is None or blocks.largest * itemsize >= small or blocks.holders.shape[1] > FAN_IN:
        return False
    return _contiguous(blocks)


@lru_cache(maxsize=16384)
def whole_grid(layout: TensorLayout, shape: tuple[int, ...], number: int) -> FlatGrid:
    """Each block is one chunk, and the holders of its range ``number`` write it."""
    blocks = flat_blocks(layout, shape)
    if blocks is None:
        raise ValueError(f"a tensor of shape {shape} has no flat blocks in {layout}")
    count, ranges, replicas = blocks.holders.shape
    cell_edges = _cell_edges(blocks)
    return FlatGrid(
        cuts=blocks.cuts,
        edges=np.append(cell_edges[::ranges][:count], cell_edges[-1]),
        cell=np.arange(count, dtype=np.int64) * ranges + number,
        part=np.zeros(count, dtype=np.int64),
        cell_edges=cell_edges,
        holders=blocks.holders.reshape(-1, replicas),
        ranges=ranges,
    )


@lru_cache(maxsize=2048)
def row_grid(layout: TensorLayout, shape: tuple[int, ...], itemsize: int, max_chunk: int, small: int) -> FlatGrid | None:
    """A grid of whole rows, or None where there is none that moves at most ``MOST_MOVED`` and gives every replica a row.

    Rows are those of the first dimension of which a block has more than one. If they are so few that every range lies within one, and
    ranges and rows divide evenly, they are those of the next dimension: a row of 1 to n ranges is then cut like any other.
    """
    blocks = flat_blocks(layout, shape)
    if blocks is None or not _contiguous(blocks):
        return None
    ranges, widths = blocks.holders.shape[1], blocks.widths
    dim = next((d for d, w in enumerate(widths) if w.max() > 1), len(shape) - 1)
    lead = 1
    while True:
        rows = widths[dim]
        grid = _grid(blocks, shape, dim, lead, itemsize, max_chunk, small)
        if grid is not None and grid.moved <= MOST_MOVED * math.prod(shape):
            return grid
        lead *= int(rows[0])
        if dim + 1 == len(shape) or (rows != rows[0]).any() or ranges % lead or blocks.largest % ranges:
            return None
        dim += 1


def _grid(blocks: FlatBlocks, shape: tuple[int, ...], dim: int, lead: int, itemsize: int, max_chunk: int, small: int) -> FlatGrid | None:
    """Dimensions before ``dim`` are cut into single rows, of which a block has ``lead``, and ``dim`` between the ranges of one of them."""
    _, ranges, replicas = blocks.holders.shape
    row = math.prod(shape[dim + 1 :])
    bounds, interval, number = _homes(blocks.cuts[dim], row, ranges // lead)
    tallest = int(np.diff(bounds).max())
    divided = replicas > 1 and tallest * row * itemsize >= small
    if divided and tallest < replicas:
        return None
    most = caps([1] * dim + [tallest, *shape[dim + 1 :]], itemsize, max_chunk)
    rows, parent, part = refine(bounds, replicas if divided else 1, most[dim])
    tail = [refine((0, shape[d]), 1, most[d])[0] for d in range(dim + 1, len(shape))]
    cuts = (*(tuple(range(n + 1)) for n in shape[:dim]), rows, *tail)
    block, place = _lead_numbers(blocks, shape, dim)
    inner = math.prod(len(c) - 1 for c in tail)
    intervals = len(blocks.cuts[dim]) - 1
    cell = (block[:, None] * intervals + interval[parent]) * ranges + place[:, None] * (ranges // lead) + number[parent]
    return FlatGrid(
        cuts=cuts,
        edges=np.append(0, np.cumsum(cells(cuts)[1].prod(axis=1))),
        cell=np.repeat(cell.ravel(), inner),
        part=np.repeat(np.tile(part, len(block)), inner),
        cell_edges=_cell_edges(blocks),
        holders=blocks.holders.reshape(-1, replicas),
        ranges=ranges,
    )


def _homes(cuts: Sequence[int], row: int, ranges: int) -> tuple[IntArray, IntArray, IntArray]:
    """Cut each interval of one dimension into ``ranges``, at the rows nearest to where its flat ranges end (ties down).

    Returns:
        The new cuts; for each new interval the number of the old one, and of the flat range that it is nearest to. Ranges that become
        empty have none.
    """
    # Rows are whole, so a boundary can only be moved to a row boundary. With rows of 6 elements and flat ranges of 8,
    # the boundaries 8 and 16 become 6 (row 1) and 18 (row 3):
    #
    # elements   0     6  8   12   16 18     24
    # ranges     |--- 0 ---|--- 1 ---|-- 2 --|       as ranks hold them
    # rows       |- 0 -|----- 1 -----|-- 2 --|       as they are stored: 2 + 2 elements change hands
    starts: list[IntArray] = []
    owners: list[tuple[IntArray, IntArray]] = []
    for i, (a, b) in enumerate(itertools.pairwise(cuts)):
        # Rounding in integers, ties down: ``(2 f + row - 1) // (2 row)`` is f / row to the nearest whole number.
        # Floats would round the boundaries of tensors with more than 2**53 elements differently.
        flat = np.asarray(ceil_cuts((b - a) * row, ranges), dtype=np.int64)
        nearest = (2 * flat + row - 1) // (2 * row)
        # Two boundaries that move to the same row leave an empty range between them. It gets no chunk; what its rank
        # holds goes to the neighbours, as fragments.
        kept = np.flatnonzero(np.diff(nearest))
        starts.append(a + nearest[kept])
        owners.append((np.full(len(kept), i, dtype=np.int64), kept))
    bounds = np.append(np.concatenate(starts), cuts[-1])
    return bounds, np.concatenate([i for i, _ in owners]), np.concatenate([k for _, k in owners])


def _lead_numbers(blocks: FlatBlocks, shape: tuple[int, ...], dim: int) -> tuple[IntArray, IntArray]:
    """For each combination of single rows of the dimensions before ``dim``: the number of its block, and its number in that."""
    block = place = np.zeros(1, dtype=np.int64)
    for d in range(dim):
        rows = np.arange(shape[d], dtype=np.int64)
        edges = np.asarray(blocks.cuts[d], dtype=np.int64)
        parent = np.searchsorted(edges, rows, side="right") - 1
        width = int(edges[1])
        block = (block[:, None] * (len(edges) - 1) + parent).ravel()
        place = (place[:, None] * width + (rows - edges[parent])).ravel()
    return block, place
