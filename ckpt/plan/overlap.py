"""Overlap: which stored chunks hold which parts of a wanted box. Every reader plans with it; there is no second one.

    a grid of 2 × 3 chunks          the wanted box       its copies: one for each chunk that it touches
    ┌─────┬─────┬─────┐                                   ┌──┬─────┐
    │  0  │  1  │  2  │             ┌────────┐            │0 │  1  │
    ├─────┼─────┼─────┤     ∩       │        │     =      ├──┼─────┤
    │  3  │  4  │  5  │             └────────┘            │3 │  4  │
    └─────┴─────┴─────┘                                   └──┴─────┘

Most grids are products of cuts along each dimension. There, the cells that a box touches are a range in each dimension, found by
bisection, and the copies are the product of these ranges: the cost follows the number of copies, not of chunks. Grids of boxes at any place
are intersected with the box as columns. Invariant: if the chunks tile the tensor, the copies tile the wanted box.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import sub

from ckpt.layout.geometry import Box, IntArray, intersect_all, row_major_strides
from ckpt.layout.partition import BoxPartition


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """What one chunk has of one target, in elements and global coordinates."""

    chunk: int
    """Number of the chunk in its grid."""
    chunk_box: Box
    """All of the chunk."""
    box: Box
    """What chunk and target have in common; never empty."""


def overlapping_chunks(grid: BoxPartition, box: Box) -> list[Copy]:
    """The chunks of ``grid`` that hold parts of the target ``box``, by increasing chunk number.

    An empty box gives no copies; so does a part of the box that no chunk holds. Raises nothing.
    """
    if box.numel == 0:
        return []
    if grid.cuts is not None:
        return _regular(grid.cuts, box)
    return _irregular(*grid.all_boxes(), box)


Bounds = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A wanted box as :func:`common_boxes` takes it: a number that the caller knows it by, its first coordinate and one past its last."""


def common_boxes(stored: Box, wanted: Sequence[Bounds]) -> Iterator[tuple[Bounds, Box]]:
    """What one chunk has of each wanted box that it touches, as bounds with that box's number and as a box: the same overlap, from the
    chunk's side.

    A load that gathers what thousands of ranks wrote asks it for each chunk, so that it needs no copies of all chunks at once.
    """
    # Tuples and ``map`` instead of Box methods: an intermediate Box for each intersection would take most of the time.
    low, high = stored.offset, stored.end
    for number, first, last in wanted:
        start = tuple(map(max, low, first))
        stop = tuple(map(min, high, last))
        shape = tuple(map(sub, stop, start))
        if min(shape, default=1) > 0:
            yield (number, start, stop), Box(start, shape)


def _regular(cuts: Sequence[Sequence[int]], box: Box) -> list[Copy]:
    if not cuts:
        return [Copy(chunk=0, chunk_box=box, box=box)]
    steps = row_major_strides([len(c) - 1 for c in cuts])
    axes = [_pieces(*at) for at in zip(cuts, box.offset, box.end, steps, strict=True)]
    copies = []
    # A grid is a product, so only whole tuples are built per chunk; a box that lies in one cell has one combination.
    for combination in product(*axes):
        numbers, chunk_offset, chunk_shape, offset, shape = zip(*combination, strict=True)
        copies.append(Copy(chunk=sum(numbers), chunk_box=Box(chunk_offset, chunk_shape), box=Box(offset, shape)))
    return copies


def _pieces(cuts: Sequence[int], lo: int, hi: int, step: int) -> list[tuple[int, int, int, int, int]]:
    """The cells of one dimension that overlap ``[lo, hi)``: number times ``step``, start and size of the cell, start and size in common."""
    # ``cuts`` may contain equal neighbours: a dimension of which some rank has nothing. bisect_right skips such empty
    # cells at the start, and the comparison below drops those in the middle.
    first, last = max(bisect_right(cuts, lo) - 1, 0), min(bisect_left(cuts, hi), len(cuts) - 1)
    cells = []
    for i in range(first, last):
        start, stop = cuts[i], cuts[i + 1]
        low, high = max(start, lo), min(stop, hi)
        if low < high:
            cells.append((i * step, start, stop - start, low, high - low))
    return cells


def _irregular(offsets: IntArray, shapes: IntArray, box: Box) -> list[Copy]:
    hit, common_offsets, common_shapes = intersect_all(box, offsets, shapes)
    columns = (offsets[hit], shapes[hit], common_offsets, common_shapes)
    rows = zip(hit.tolist(), *(map(tuple, c.tolist()) for c in columns), strict=True)
    return [Copy(chunk=n, chunk_box=Box(o, s), box=Box(low, size)) for n, o, s, low, size in rows]
