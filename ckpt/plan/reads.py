"""From wanted boxes to reads: which stored chunks overlap a box, their byte ranges, and neighbours joined into reads. Pure.

Everything that handles many small ranges groups them with the functions here, so that "near" and "too long" mean one thing:

* :func:`group_sorted` is the rule: ranges of one address space, in order, are cut into groups;
* :func:`group_ranges` applies it to ranges of many files, in any order;
* :func:`group_sizes` is the rule for things that have a size but no address yet: chunks that will follow one another in a file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import lt, sub
from typing import NamedTuple, Protocol

import numpy as np

from ckpt.catalog import Extent, TensorEntry
from ckpt.errors import CorruptError
from ckpt.plan.layout.geometry import Box, intersect_all, row_major_strides
from ckpt.plan.layout.partition import BoxPartition

from .ownership import TensorSpec

# Overlap: which stored chunks hold which parts of a wanted box. Every reader plans with it; there is no second one.
#
#     a grid of 2 × 3 chunks          the wanted box       its copies: one for each chunk that it touches
#     ┌─────┬─────┬─────┐                                   ┌──┬─────┐
#     │  0  │  1  │  2  │             ┌────────┐            │0 │  1  │
#     ├─────┼─────┼─────┤     ∩       │        │     =      ├──┼─────┤
#     │  3  │  4  │  5  │             └────────┘            │3 │  4  │
#     └─────┴─────┴─────┘                                   └──┴─────┘
#
# Most grids are products of cuts along each dimension. There, the cells that a box touches are a range in each dimension, found by
# bisection, and the copies are the product of these ranges: the cost follows the number of copies, not of chunks. Grids of boxes at any
# place are intersected with the box as columns. Invariant: if the chunks tile the tensor, the copies tile the wanted box.


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """What one chunk has of one target, in elements and global coordinates."""

    chunk: int
    """Number of the chunk in its grid."""
    chunk_box: Box
    """All of the chunk."""
    box: Box
    """What chunk and target have in common; never empty."""


def common_box(wanted: TensorSpec, entry: TensorEntry) -> Box:
    """The part of a wanted tensor that the stored one gives: all of it, padding included, if both are padded alike, else what is
    not padding.

    The rest is padding, which a load fills with zeros.
    """
    return Box.whole(wanted.shape if wanted.shape == entry.shape else wanted.logical or wanted.shape)


def overlapping_chunks(grid: BoxPartition, box: Box) -> list[Copy]:
    """The chunks of ``grid`` that hold parts of the target ``box``, by increasing chunk number.

    An empty box gives no copies; so does a part of the box that no chunk holds. Raises nothing.
    """
    if box.numel == 0:
        return []
    if grid.cuts is None:
        offsets, shapes = grid.all_boxes()
        hit, common_offsets, common_shapes = intersect_all(box, offsets, shapes)
        columns = (offsets[hit], shapes[hit], common_offsets, common_shapes)
        rows = zip(hit.tolist(), *(map(tuple, c.tolist()) for c in columns), strict=True)
        return [Copy(chunk=n, chunk_box=Box(o, s), box=Box(low, size)) for n, o, s, low, size in rows]
    if not grid.cuts:
        return [Copy(chunk=0, chunk_box=box, box=box)]
    steps = row_major_strides([len(c) - 1 for c in grid.cuts])
    axes = [_cells(*at) for at in zip(grid.cuts, box.offset, box.end, steps, strict=True)]
    copies = []
    # A grid is a product, so only whole tuples are built per chunk; a box that lies in one cell has one combination.
    for combination in product(*axes):
        numbers, chunk_offset, chunk_shape, offset, shape = zip(*combination, strict=True)
        copies.append(Copy(chunk=sum(numbers), chunk_box=Box(chunk_offset, chunk_shape), box=Box(offset, shape)))
    return copies


def _cells(cuts: Sequence[int], lo: int, hi: int, step: int) -> list[tuple[int, int, int, int, int]]:
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


class ByteRange(Protocol):
    """Bytes of a file; an ``Extent`` is one."""

    @property
    def path(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...


class RangeGroup(NamedTuple):
    """Ranges that are read at once: ``length`` bytes of a file, from ``offset`` on. ``members`` are their numbers, in the order of their
    bytes; each lies inside."""

    path: str
    offset: int
    length: int
    members: Sequence[int]


# ---- grouping
#
# Ranges that lie near each other are cheaper to read in one call, up to a length that still fits a buffer or the cache. The rule, for
# ranges by increasing start, is greedy and needs one pass:
#
#     file     ..[ a ][ b ]...[ c ]................[ d ][   e   ]......
#     groups     |------- 1 ------|  gap > max_gap  | 2 ||-- 3 --|   d + e would be longer than max_bytes
#
# A range joins the group before it if at most ``max_gap`` unneeded bytes lie between them and the group stays within ``max_bytes``. It
# always joins if the group covers it already: a chunk that several targets want is read once. A range that is longer than ``max_bytes``
# is a group of its own, shared only with ranges inside it.
#
# Bytes that a group reads: those of its members, and at most ``max_gap`` for each member but one. No byte is in two groups, with one
# exception: two ranges overlap, neither covers the other, and together they are longer than ``max_bytes``.


def group_sorted(
    starts: Sequence[int], stops: Sequence[int], *, max_bytes: int | None = None, max_gap: int = 0
) -> Iterator[tuple[int, int, int]]:
    """Groups of ranges of one address space, sorted by start: the first range, one past the last, and where the group's bytes end.

    Ranges that start at the same byte have to come longest first. ``max_bytes`` None means no limit. A plain loop, since it is faster
    than numpy for the few ranges that most calls have, and takes 0.1 µs for each of many.
    """
    if not len(starts):
        return
    first, start, reach = 0, starts[0], stops[0]
    for i, (low, high) in enumerate(zip(starts, stops, strict=True)):
        if high <= reach:
            continue
        if low - reach > max_gap or (max_bytes is not None and high - start > max_bytes):
            yield first, i, reach
            first, start = i, low
        reach = high
    yield first, len(starts), reach


def group_ranges(ranges: Sequence[ByteRange], *, max_bytes: int | None = None, max_gap: int = 0) -> list[RangeGroup]:
    """Groups of ranges of any files in any order, by path and offset. Each range is in exactly one."""
    by_path: dict[str, list[int]] = {}
    for i, wanted in enumerate(ranges):
        by_path.setdefault(wanted.path, []).append(i)
    groups: list[RangeGroup] = []
    for path in sorted(by_path):
        members = by_path[path]
        starts = [ranges[i].offset for i in members]
        if not all(map(lt, starts, starts[1:])):  # mostly they are sorted: as files are written
            members.sort(key=lambda i: (ranges[i].offset, -ranges[i].length))
            starts = [ranges[i].offset for i in members]
        stops = [start + ranges[i].length for start, i in zip(starts, members, strict=True)]
        groups += [
            RangeGroup(path, starts[first], stop - starts[first], members[first:last])
            for first, last, stop in group_sorted(starts, stops, max_bytes=max_bytes, max_gap=max_gap)
        ]
    return groups


def group_sizes(sizes: Sequence[int], max_bytes: int, max_count: int | None = None) -> list[range]:
    """Neighbours of these sizes together, up to ``max_bytes`` and ``max_count`` of them; one that is longer is alone."""
    groups: list[range] = []
    first = total = 0
    for i, size in enumerate(sizes):
        if i > first and (total + size > max_bytes or i - first == max_count):
            groups.append(range(first, i))
            first, total = i, 0
        total += size
    return [*groups, range(first, len(sizes))] if len(sizes) else []


# ---- what copies need


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Contiguous file bytes that give a box of one copy; ``offset`` and ``length`` in bytes, ``offset`` from the start of the file.

    Where the wanted elements lie follows from the chunk. With ``blocks = strided_blocks(chunk_box.shape,
    box.relative_to(chunk_box.offset))``, run ``r`` starts at byte ``extent.offset + blocks.starts()[r] * itemsize`` of the file,
    ``part.offset`` less in the part.
    """

    path: str
    offset: int
    length: int
    copy: int
    """Number of the copy, as the caller counts them."""
    box: Box
    """Global coordinates; a sub-box of the copy's box. The parts of a copy tile it."""

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.length


def parts_of(copy_number: int, copy: Copy, extent: Extent, itemsize: int, *, whole_chunks: bool, max_gap: int) -> list[Part]:
    """The byte ranges to read for one copy, by increasing offset.

    ``extent`` holds the copy's chunk; ``itemsize`` and ``max_gap`` are in bytes. With ``whole_chunks`` the answer is the whole extent,
    which is needed to verify its digest. Without, it is the runs of the box: neighbours at most ``max_gap`` bytes apart share a part, and
    where they are further apart the box is cut along its outermost dimensions, so that each part is a box. Then no byte outside of the
    box's span is read, and at most ``max_gap`` bytes more than needed for each pair of neighbours that share a part.
    """
    if copy.box.numel == 0:
        return []
    if whole_chunks:
        return [Part(path=extent.path, offset=extent.offset, length=extent.length, copy=copy_number, box=copy.box)]
    chunk_box = copy.chunk_box
    if extent.length != chunk_box.numel * itemsize:
        raise CorruptError(
            f"chunk {chunk_box} takes {chunk_box.numel * itemsize} bytes, but bytes {extent.offset} to {extent.offset + extent.length}"
            f" are listed for it ({extent.length} bytes)",
            where=extent.path,
            hint="check the checkpoint with `ckpt verify`",
        )
    box, origin = copy.box, copy.chunk_box.offset
    strides = row_major_strides(copy.chunk_box.shape)
    cut, span = _cut_dims(box.shape, strides, max_gap // itemsize)
    start = np.array([sum((o - b) * s for o, b, s in zip(box.offset, origin, strides, strict=True))], dtype=np.int64)
    for count, stride in zip(box.shape[:cut], strides[:cut], strict=True):
        start = (start[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    offsets = (extent.offset + start * itemsize).tolist()
    shape, tail = (1,) * cut + box.shape[cut:], box.offset[cut:]
    corners = product(*[range(o, o + n) for o, n in zip(box.offset[:cut], box.shape[:cut], strict=True)])
    return [
        Part(path=extent.path, offset=at, length=span * itemsize, copy=copy_number, box=Box(corner + tail, shape))
        for at, corner in zip(offsets, corners, strict=True)
    ]


def _cut_dims(shape: Sequence[int], strides: Sequence[int], max_gap: int) -> tuple[int, int]:
    """How many leading dimensions to cut into single rows, and the span in elements of what is left. ``max_gap`` is in elements.

    The gap between neighbours never shrinks from the inner dimensions to the outer ones, so the first one that is too wide ends the search.
    """
    span = 1
    for i in range(len(shape) - 1, -1, -1):
        if shape[i] > 1 and strides[i] - span > max_gap:
            return i + 1, span
        span += (shape[i] - 1) * strides[i]
    return 0, span


# A chunk in pieces that are small enough to stay in the cache while they are hashed and copied. Pure.


@dataclass(frozen=True, slots=True)
class CacheBlock:
    """A box, in global coordinates, and the contiguous elements of its chunk that hold it: ``start`` counts from the chunk's first one."""

    box: Box
    start: int
    length: int


def pieces(chunk: Box, cover: Box, limit: int) -> Iterator[CacheBlock]:
    """Cut ``cover``, a part of the row-major ``chunk``, into boxes that lie within at most ``limit`` elements of the chunk each.

    By increasing start. They tile ``cover``; those of the whole chunk follow one another without a gap. A limit below 1 counts as 1.
    """
    if cover.numel == 0:
        return
    strides = row_major_strides(chunk.shape)
    if not cover.shape:
        yield CacheBlock(cover, 0, 1)
        return
    # The first dimension whose single rows span at most ``limit`` elements, and what one of them spans.
    row = 1 + sum((n - 1) * s for n, s in zip(cover.shape, strides, strict=True))
    for lead, (count, stride) in enumerate(zip(cover.shape, strides, strict=True)):  # noqa: B007  it is what the loop looks for
        row -= (count - 1) * stride
        if row <= limit:
            break
    # Dimensions before ``lead`` are walked one row at a time, ``lead`` itself ``rows`` at a time, and those after it are taken whole:
    #
    # chunk [4, 3, 5], limit 10 elements     lead = 1, since one row of dimension 0 spans 15
    # block 0: [0, 0:2, :]   block 1: [0, 2:3, :]   block 2: [1, 0:2, :]   …
    size, stride, inner = cover.shape[lead], strides[lead], cover.shape[lead + 1 :]
    rows = max((limit - row) // stride, 0) + 1
    tail = cover.offset[lead + 1 :]
    base = sum((o - b) * s for o, b, s in zip(tail, chunk.offset[lead + 1 :], strides[lead + 1 :], strict=True))
    for corner in product(*(range(o, o + n) for o, n in zip(cover.offset[:lead], cover.shape[:lead], strict=True))):
        first = base + sum((o - b) * s for o, b, s in zip(corner, chunk.offset, strides, strict=False))
        for at in range(0, size, rows):
            count, offset = min(rows, size - at), cover.offset[lead] + at
            box = Box((*corner, offset, *tail), (*(1,) * lead, count, *inner))
            yield CacheBlock(box, first + (offset - chunk.offset[lead]) * stride, (count - 1) * stride + row)
