"""How a tensor is cut into boxes. The one place that knows its two forms. Stored grids, layouts and assignments are of this kind. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .geometry import Box, IntArray, TilingFault, cell_box, cells, cells_overlapping, find_fault, intersect_all, row_major_strides

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
        """Whether the whole tensor is one box, and its cuts say so."""
        return self.cuts is not None and all(len(cuts) == 2 for cuts in self.cuts)

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


# Flat ranges as boxes, those of all ranks at once. Pure numpy.
#
# A rank's range of a row-major flattening is at most ``2·d − 1`` boxes, which ``geometry.flat_to_boxes`` gives one by one; a job has
# thousands of ranges.


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatBlocks:
    """What the splits before ``Flat`` leave: the cuts of the blocks, and the ranks ``[blocks, ranges, replicas]`` that hold each range of
    each."""

    cuts: tuple[tuple[int, ...], ...]
    holders: IntArray
    range_cuts: Callable[[int], IntArray]
    """Boundaries of the ranges of a block of so many elements."""

    @property
    def widths(self) -> list[IntArray]:
        """Sizes of the blocks along each dimension."""
        edges: list[IntArray] = [np.asarray(c, dtype=np.int64) for c in self.cuts]
        return [c[1:] - c[:-1] for c in edges]

    @cached_property
    def largest(self) -> int:
        """Elements of the largest block."""
        return math.prod(int(w.max()) for w in self.widths)

    def boxes(self) -> tuple[IntArray, IntArray, IntArray]:
        """The boxes that the ranges are made of, block by block: offsets, shapes, and the ranks that hold each."""
        origins, sizes = cells(self.cuts)
        offsets, shapes, holders = [], [], []
        known: dict[tuple[int, ...], tuple[IntArray, IntArray, IntArray]] = {}
        for origin, size, ranks in zip(origins, map(tuple, sizes.tolist()), self.holders, strict=True):
            if size not in known:
                known[size] = range_boxes(size, self.range_cuts(math.prod(size)))
            number, at, extent = known[size]
            offsets.append(at + origin)
            shapes.append(extent)
            holders.append(ranks[number])
        return np.concatenate(offsets), np.concatenate(shapes), np.concatenate(holders)


def range_boxes(shape: tuple[int, ...], cuts: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The fewest boxes that make up each of the flat ranges between ``cuts``: number of the range, offsets and shapes, in order."""
    number = np.flatnonzero(np.diff(cuts))
    which, offsets, sizes = _range_boxes(shape, cuts[number], cuts[number + 1])
    strides = np.append(np.cumprod(np.asarray(shape[:0:-1], dtype=np.int64))[::-1], 1)
    order = np.argsort(offsets @ strides, kind="stable")
    return number[which[order]], offsets[order], sizes[order]


def _range_boxes(shape: tuple[int, ...], start: IntArray, stop: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The same for ranges that are not empty, in any order: whole rows are boxes, and what is left is ranges within one row."""
    if len(shape) == 1:
        return np.arange(len(start)), start[:, None], (stop - start)[:, None]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    inside = (first == last) & (stop - start < row)
    above, below = -(-start // row), stop // row
    body = np.flatnonzero(~inside & (below > above))
    head = np.flatnonzero(inside | (start % row != 0))
    tail = np.flatnonzero(~inside & (stop % row != 0))
    inner_start = np.concatenate([start[head] - first[head] * row, np.zeros(len(tail), dtype=np.int64)])
    inner_stop = np.concatenate([np.where(inside[head], stop[head] - first[head] * row, row), stop[tail] - last[tail] * row])
    which, at, size = _range_boxes(shape[1:], inner_start, inner_stop)
    part = np.concatenate([head, tail])[which]
    rows = np.concatenate([first[head], last[tail]])[which]
    body_at = np.zeros((len(body), len(shape)), dtype=np.int64)
    body_at[:, 0] = above[body]
    body_size = np.tile(np.asarray(shape, dtype=np.int64), (len(body), 1))
    body_size[:, 0] = below[body] - above[body]
    offsets = np.concatenate([body_at, np.column_stack([rows, at])])
    sizes = np.concatenate([body_size, np.column_stack([np.ones(len(rows), dtype=np.int64), size])])
    return np.concatenate([body, part]), offsets, sizes


# Intervals along one dimension: what one holder has (tuples), or what many have (:class:`Shares`, numpy). Pure.

Interval = tuple[int, int]
"""First element and one past the last, along one dimension."""


def slice_of(intervals: tuple[Interval, ...], start: int, stop: int) -> tuple[Interval, ...]:
    """Elements ``[start, stop)`` of the concatenation of intervals."""
    # ``at`` is where the interval begins in the concatenation, ``a`` where it begins in the tensor: a part of it is
    # moved by the difference of the two.
    parts, at = [], 0
    for a, b in intervals:
        lo, hi = max(start, at), min(stop, at + b - a)
        if hi > lo:
            parts.append((a + lo - at, a + hi - at))
        at += b - a
    return tuple(parts)


def joined(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """The same elements in the same order, neighbours as one interval."""
    merged: list[Interval] = []
    for a, b in intervals:
        if merged and merged[-1][1] == a:
            merged[-1] = (merged[-1][0], b)
        else:
            merged.append((a, b))
    return tuple(merged)


@dataclass(frozen=True, kw_only=True, eq=False)
class Shares:
    """The intervals of many holders, none empty: holder ``row[i]`` of ``rows`` has ``[start[i], stop[i])``. By row, and in its local
    order."""

    rows: int
    row: IntArray
    start: IntArray
    stop: IntArray

    @classmethod
    def all_of(cls, size: int) -> Shares:
        """One holder, of everything."""
        some = min(size, 1)
        return cls(rows=1, row=np.zeros(some, np.int64), start=np.zeros(some, np.int64), stop=np.full(some, size, np.int64))

    def sizes(self) -> IntArray:
        """Elements that each row has."""
        size = np.zeros(self.rows, dtype=np.int64)
        np.add.at(size, self.row, self.stop - self.start)
        return size

    def divided(self, first: IntArray, last: IntArray) -> Shares:
        """Cut each row into parts: part i of row r becomes row ``r * parts + i``.

        ``first`` and ``last`` are ``[rows, ranges, parts]``: the ranges that each part has of the concatenation of its row's intervals, in
        its local order; empty ones count for nothing.

        A job that cuts a tensor over 16,384 ranks has as many rows: nothing here may be done for each of them in Python, nor for each part
        over all parts. Each interval is intersected with each range of its own row: intervals × parts × ranges numbers, of which most are
        kept where a row has one interval.
        """
        parts = first.shape[2]
        length = self.stop - self.start
        size = self.sizes()
        at = np.cumsum(length) - length - (np.cumsum(size) - size)[self.row]  # where each interval begins in its row
        low = np.maximum(first[self.row], at[:, None, None])  # [intervals, ranges, parts]
        high = np.minimum(last[self.row], (at + length)[:, None, None])
        interval, group, part = np.nonzero(high > low)
        row = self.row[interval] * parts + part
        order = np.lexsort((interval, group, row))
        interval, shift = interval[order], (self.start - at)[interval[order]]
        kept = interval, group[order], part[order]
        return Shares(rows=self.rows * parts, row=row[order], start=low[kept] + shift, stop=high[kept] + shift)._joined()

    def _joined(self) -> Shares:
        """Neighbours in one row as one."""
        begins = np.ones(len(self.row), dtype=np.bool_)
        begins[1:] = (self.row[1:] != self.row[:-1]) | (self.start[1:] != self.stop[:-1])
        ends = np.append(begins[1:], True)[: len(begins)]
        return Shares(rows=self.rows, row=self.row[begins], start=self.start[begins], stop=self.stop[ends])


# Sets of numbers (ranks, files) as runs, in few bytes where most of them follow each other. Pure.

Runs = tuple[tuple[int, int], ...]
"""Increasing: the first number of each run, and how many follow each other."""


def runs_of(numbers: Iterable[int]) -> Runs:
    """Numbers as runs."""
    runs: list[list[int]] = []
    for number in sorted({*numbers}):
        if runs and number == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return tuple((first, count) for first, count in runs)


def numbers_in(runs: Iterable[Iterable[int]]) -> list[int]:
    """The numbers of runs."""
    return [number for first, count in runs for number in range(first, first + count)]


# Which boxes of a row-major tensor a strided view of it is made of. Pure.
#
# A program that takes a part of a tensor by ``narrow``, ``view``, ``transpose`` and the like ends with a shape, strides and an offset. Each
# dimension of such a view walks along one dimension of the tensor, along a part of one, or along several::
#
#     tensor (6, 4), strides (4, 1)
#
#     view                    its strides   walks along
#     t()                     (1, 4)        dimension 1, dimension 0
#     [2:4]                   (4, 1)        dimension 0 from 2, dimension 1: the box [2:4, 0:4]
#     view(2, 3, 4)[:, 0]     (12, 1)       every third row: the boxes [0:1, 0:4] and [3:4, 0:4]
#     view(24)                (1,)          both: 6 × 4 by strides (4, 1)
#
# So a dimension that runs over the end of the tensor's is divided there, and those that walk along one dimension of the tensor are joined
# again. What cannot be joined, because elements lie between or because the other side of a copy lies otherwise, is listed step by step.

MOST_BOXES = 4096
"""A view of more boxes than this is none that anybody wants box by box."""


@dataclass(frozen=True, slots=True)
class StridedView:
    """Elements of a memory: sizes and strides per dimension, and the first one's offset, all in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def is_within(self, numel: int) -> bool:
        """Whether a memory of so many elements has all of it."""
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return math.prod(self.shape) == 0 or (self.offset >= 0 and self.offset + reach < numel)


@dataclass(frozen=True, slots=True)
class _Walk:
    """``count`` steps of ``stride`` in the tensor, and of ``beside`` in the memory on the other side."""

    count: int
    stride: int
    beside: int


def boxes_of_view(shape: tuple[int, ...], view: StridedView, beside: StridedView | None = None) -> list[tuple[Box, StridedView]] | None:
    """The boxes of a row-major tensor of ``shape`` whose elements ``view`` shows, each once.

    Args:
        beside: another memory, viewed with the same shape: what a copy between the two pairs with the view's elements. By default the
            tensor itself.

    Returns:
        Each box, and what of ``beside`` goes with it, in the box's shape. None if the view shows an element twice, walks across rows
        without covering them, reaches out of the tensor, or is made of more than ``MOST_BOXES`` boxes.
    """
    beside = beside or view
    if math.prod(view.shape) == 0:
        return []
    if not view.is_within(math.prod(shape)):
        return None
    strides = row_major_strides(shape)
    start = [view.offset // stride % size for size, stride in zip(shape, strides, strict=True)]
    walks = _divided(shape, strides, start, view, beside)
    if walks is None:
        return None
    sides: list[_Walk] = []
    steps: list[tuple[int, _Walk]] = []
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        along = _joined(walks[dim])
        if along is None or start[dim] + sum((w.count - 1) * w.stride for w in along) // stride >= size:
            return None
        side = along.pop() if along and along[-1].stride == stride else _Walk(1, stride, 1)
        sides.append(side)
        steps += [(dim, walk) for walk in along]
    if math.prod(walk.count for _, walk in steps) > MOST_BOXES:
        return None
    boxes = []
    for numbers in itertools.product(*(range(walk.count) for _, walk in steps)):
        offset, there = list(start), beside.offset
        for (dim, walk), number in zip(steps, numbers, strict=True):
            offset[dim] += number * walk.stride // strides[dim]
            there += number * walk.beside
        sizes = tuple(side.count for side in sides)
        boxes.append((Box(tuple(offset), sizes), StridedView(sizes, tuple(side.beside for side in sides), there)))
    return boxes


def _divided(
    shape: tuple[int, ...], strides: tuple[int, ...], start: list[int], view: StridedView, beside: StridedView
) -> list[list[_Walk]] | None:
    """The walks of a view by the dimension of the tensor that each goes along, divided where they run over its end."""
    walks: list[list[_Walk]] = [[] for _ in shape]
    left = [_Walk(*row) for row in zip(view.shape, view.strides, beside.strides, strict=True) if row[0] > 1]
    while left:
        walk = left.pop()
        dim = next((d for d, (n, s) in enumerate(zip(shape, strides, strict=True)) if n > 1 and s <= walk.stride < s * n), None)
        if dim is None or walk.stride % strides[dim]:
            return None
        step, size = walk.stride // strides[dim], shape[dim]
        if start[dim] + (walk.count - 1) * step < size:
            walks[dim].append(walk)
            continue
        inner = size // step
        if size % step or start[dim] >= step or walk.count % inner:
            return None
        if inner > 1:
            walks[dim].append(replace(walk, count=inner))
        left.append(_Walk(walk.count // inner, walk.stride * inner, walk.beside * inner))
    return walks


def _joined(walks: list[_Walk]) -> list[_Walk] | None:
    """Walks along one dimension, the widest steps first, those that make up one as one; None if they meet an element twice."""
    joined: list[_Walk] = []
    for walk in sorted(walks, key=lambda w: w.stride):
        if joined and walk.stride < joined[-1].stride * joined[-1].count:
            return None
        last = joined[-1] if joined else None
        if last and walk.stride == last.stride * last.count and walk.beside == last.beside * last.count:
            joined[-1] = replace(last, count=last.count * walk.count)
        else:
            joined.append(walk)
    return joined[::-1]
