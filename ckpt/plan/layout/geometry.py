"""Boxes, cuts and intersections: the arithmetic of where things are. Pure numpy; no torch, no I/O.

All offsets and sizes are in elements and in global coordinates unless said otherwise. Many boxes at once are two int64 arrays, ``offsets``
and ``shapes``, each ``[n, d]``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned block of a tensor: ``offset`` and ``shape``, one entry per dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape) or min((*self.offset, *self.shape), default=0) < 0:
            raise ValueError(f"not a box: offset {self.offset}, shape {self.shape}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of all elements of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last coordinate, per dimension."""
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What to index an array with to get this box."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None if no element is common."""
        offset, shape = [], []
        for start, size, other_start, other_size in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            first = start if start > other_start else other_start
            count = min(start + size, other_start + other_size) - first
            if count <= 0:
                return None
            offset.append(first)
            shape.append(count)
        return Box(tuple(offset), tuple(shape))

    def joined(self, other: Box) -> Box | None:
        """The box of both where ``other`` comes right after this one along one dimension, and is as wide in all others; else None."""
        apart = [d for d, (a, b) in enumerate(zip(self.offset, other.offset, strict=True)) if a != b]
        if len(apart) != 1:
            return None
        (dim,) = apart
        shape = (*self.shape[:dim], other.shape[dim], *self.shape[dim + 1 :])
        if shape != other.shape or self.offset[dim] + self.shape[dim] != other.offset[dim]:
            return None
        return self.narrowed(dim, self.offset[dim], other.offset[dim] + other.shape[dim])

    def contains(self, other: Box) -> bool:
        # A plain loop, as in ``intersect``: both are asked for every box of a plan, and generators take twice as long.
        for start, size, inner, count in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            if inner < start or inner + count > start + size:
                return False
        return True

    def without(self, other: Box) -> list[Box]:
        """Disjoint boxes of the elements that are not in ``other``: at most two per dimension."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.numel else []
        boxes, left = [], self
        for dim, (start, end) in enumerate(zip(common.offset, common.end, strict=True)):
            for lo, hi in ((left.offset[dim], start), (end, left.end[dim])):
                if hi > lo:
                    boxes.append(left.narrowed(dim, lo, hi))
            left = left.narrowed(dim, start, end)
        return boxes

    def narrowed(self, dim: int, start: int, end: int) -> Box:
        """The same box with other bounds in one dimension."""
        offset = (*self.offset[:dim], start, *self.offset[dim + 1 :])
        return Box(offset, (*self.shape[:dim], end - start, *self.shape[dim + 1 :]))

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same box in coordinates that start at ``origin``."""
        return Box(tuple(o - b for o, b in zip(self.offset, origin, strict=True)), self.shape)

    def shifted(self, by: Sequence[int]) -> Box:
        return Box(tuple(o + b for o, b in zip(self.offset, by, strict=True)), self.shape)

    def __str__(self) -> str:
        return "[" + ",".join(f"{o}:{o + s}" for o, s in zip(self.offset, self.shape, strict=True)) + "]"


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of ``shape``."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


# -------------------------------------------------------------------------------------------------------------------- cuts


class Cuts(tuple[int, ...]):
    """Boundaries along one dimension: a tuple, of which numpy gets the same array each time. Tensors that are cut alike share it, and a
    job of 16,384 ranks has as many entries: an array made anew for each tensor would be most of the work of a load's plan."""

    @cached_property
    def array(self) -> IntArray:
        """The boundaries; it cannot be written to."""
        made = np.fromiter(self, dtype=np.int64, count=len(self))
        made.flags.writeable = False
        return made

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:  # noqa: FBT001  numpy's signature
        return self.array.astype(dtype or np.int64, copy=bool(copy))

    @classmethod
    def of(cls, edges: IntArray) -> Cuts:
        """The boundaries that an array of int64 has, which nobody may write to afterwards."""
        made = cls(edges.tolist())
        edges.flags.writeable = False
        made.__dict__["array"] = edges
        return made


def ceil_cut(size: int, parts: int, number: int) -> int:
    """Boundary ``number`` of :func:`ceil_cuts`."""
    return min(number * -(-size // parts), size)


def ceil_cuts(size: int, parts: int) -> Cuts:
    """Boundaries of ``torch.chunk``: parts of ``ceil(size / parts)``, the last ones shorter or empty; ``parts + 1`` entries, from 0."""
    return Cuts.of(np.append(np.minimum(np.arange(parts, dtype=np.int64) * -(-size // parts), size), size))


def even_cuts(size: int, parts: int) -> tuple[int, ...]:
    """Boundaries of parts whose sizes differ by at most one, the larger ones first. ``parts + 1`` entries."""
    base, extra = divmod(size, parts)
    return tuple(i * base + min(i, extra) for i in range(parts + 1))


def merge_cuts(*cuts: Sequence[int] | IntArray) -> Cuts:
    """The union of several boundaries of one dimension, increasing, without repeats."""
    merged = np.sort(np.concatenate([np.asarray(c, dtype=np.int64) for c in cuts]))
    return Cuts.of(merged[np.append(True, merged[1:] != merged[:-1])])  # `np.unique` imports all of numpy.ma


def cells(cuts: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """Offsets and shapes ``[n, d]`` of the cells of a grid, row-major (the last dimension fastest). No dimensions: one cell."""
    inner = count = math.prod(len(c) - 1 for c in cuts)
    offsets, shapes = np.empty((count, len(cuts)), dtype=np.int64), np.empty((count, len(cuts)), dtype=np.int64)
    outer = 1
    for dim, c in enumerate(cuts if count else ()):  # no array of all dimensions: numpy knows 32 of them, a file may have more
        edges = np.asarray(c, dtype=np.int64)
        inner //= len(c) - 1
        offsets[:, dim] = np.tile(np.repeat(edges[:-1], inner), outer)
        shapes[:, dim] = np.tile(np.repeat(np.diff(edges), inner), outer)
        outer *= len(c) - 1
    return offsets, shapes


def cell_box(cuts: Sequence[Sequence[int]], number: int) -> Box:
    """The cell of this number, as :func:`cells` lists them."""
    rest, offset, shape = number, [], []
    for c in reversed(cuts):
        rest, i = divmod(rest, len(c) - 1)
        offset.append(c[i])
        shape.append(c[i + 1] - c[i])
    if rest:
        raise IndexError(f"a grid of {math.prod(len(c) - 1 for c in cuts)} cells has no cell {number}")
    return Box(tuple(reversed(offset)), tuple(reversed(shape)))


def cells_overlapping(cuts: Sequence[Sequence[int]], box: Box) -> IntArray:
    """Numbers of the cells of a grid that share an element with ``box``, increasing."""
    number = np.zeros(1, dtype=np.int64)
    for c, lo, hi in zip(cuts, box.offset, box.end, strict=True):
        if hi <= lo:
            return np.zeros(0, dtype=np.int64)
        first = int(np.searchsorted(c, lo, side="right")) - 1
        last = int(np.searchsorted(c, hi, side="left"))
        number = (number[:, None] * (len(c) - 1) + np.arange(first, last, dtype=np.int64)).ravel()
    return number


# -------------------------------------------------------------------------------------------------------- flat ranges


def flat_to_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The fewest boxes that make up elements ``[start, stop)`` of the row-major flattening of ``shape``, in order: at most ``2·d − 1``."""
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"flat range [{start}, {stop}) does not lie in a tensor of shape {tuple(shape)}")
    return list(_flat_boxes(tuple(shape), start, stop)) if stop > start else []


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if len(shape) <= 1:
        yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    # A range of the flattening is a partial first row, whole rows, and a partial last row; the partial rows are
    # ranges of a tensor with one dimension less:
    #
    # shape [4, 6], elements 4 to 20        row 0   ....##    1 box
    #                                       row 1   ######  ┐ 1 box
    #                                       row 2   ######  ┘
    #                                       row 3   ##....    1 box
    #
    # Each dimension but the last adds a head and a tail: at most 2·d − 1 boxes.
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        yield from _in_row(first, _flat_boxes(shape[1:], start - first * row, stop - first * row))
        return
    whole_first = first if start == first * row else first + 1
    whole_last = last + 1 if stop == (last + 1) * row else last
    if whole_first != first:
        yield from _in_row(first, _flat_boxes(shape[1:], start - first * row, row))
    if whole_last > whole_first:
        yield Box((whole_first, *(0,) * (len(shape) - 1)), (whole_last - whole_first, *shape[1:]))
    if whole_last != last + 1:
        yield from _in_row(last, _flat_boxes(shape[1:], 0, stop - last * row))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for b in boxes:
        yield Box((row, *b.offset), (1, *b.shape))


def box_to_flat(shape: Sequence[int], box: Box) -> tuple[int, int] | None:
    """The flat range of a box that is contiguous in a row-major tensor of ``shape``; None if it is not."""
    if box.numel == 0:
        return (0, 0)
    # Contiguous means: some inner dimensions are whole, one dimension is any interval, and all before it have a single coordinate.
    inner = len(shape)
    while inner > 0 and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    if any(s != 1 for s in box.shape[: max(inner - 1, 0)]):
        return None
    start = sum(o * s for o, s in zip(box.offset, row_major_strides(shape), strict=True))
    return start, start + box.numel


# ------------------------------------------------------------------------------------------------------ many boxes


def intersect_all(box: Box, offsets: IntArray, shapes: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Intersect one box with many.

    Returns:
        Indices ``[k]`` of the boxes that share an element with ``box``, and offsets and shapes ``[k, d]`` of what they share.
    """
    lo = np.maximum(offsets, np.asarray(box.offset, dtype=np.int64))
    hi = np.minimum(offsets + shapes, np.asarray(box.end, dtype=np.int64))
    hit = np.flatnonzero((hi > lo).all(axis=1))
    return hit, lo[hit], (hi - lo)[hit]


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """A canonical strided copy: ``counts`` runs of ``length`` contiguous elements, the outermost count first.

    Run ``(i₀, i₁, …)`` starts ``start + Σ iⱼ·strides[j]`` elements into the memory. ``counts`` has no entry of 1, and no two neighbours
    that could be one.
    """

    start: int
    length: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def runs(self) -> int:
        return math.prod(self.counts)

    @property
    def span(self) -> tuple[int, int]:
        """First element touched and one past the last, in elements of the memory."""
        reach = sum((c - 1) * s for c, s in zip(self.counts, self.strides, strict=True))
        return self.start, self.start + reach + self.length

    def starts(self) -> IntArray:
        """First element of every run, in order."""
        at = np.array([self.start], dtype=np.int64)
        for count, stride in zip(self.counts, self.strides, strict=True):
            at = (at[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
        return at


def strided_blocks(shape: Sequence[int], box: Box) -> Blocks:
    """The runs of contiguous memory that a box covers in a row-major tensor of ``shape``; ``box`` must not be empty."""
    strides = row_major_strides(shape)
    start = sum(o * s for o, s in zip(box.offset, strides, strict=True))
    # From the innermost dimension outwards: a dimension joins the run as long as its stride is the length of the run
    # so far, that is, as long as the box has all of what lies inside of it.
    length, dims = 1, list(zip(box.shape, strides, strict=True))
    while dims and (dims[-1][0] == 1 or dims[-1][1] == length):
        length *= dims.pop()[0]
    counts: list[int] = []
    steps: list[int] = []
    for count, stride in reversed(dims):
        if count == 1:
            continue
        if counts and counts[0] * steps[0] == stride:
            counts[0] *= count
        else:
            counts.insert(0, count)
            steps.insert(0, stride)
    return Blocks(start=start, length=length, counts=tuple(counts), strides=tuple(steps))


# ----------------------------------------------------------------------------------------------------------- tiling


@dataclass(frozen=True, slots=True)
class TilingFault:
    """Where boxes fail to tile a tensor: a box that none covers (``times`` 0) or that several cover."""

    box: Box
    times: int


def find_fault(shape: Sequence[int], offsets: IntArray, shapes: IntArray) -> TilingFault | None:
    """Check that boxes tile a tensor of ``shape`` exactly; None if they do. Empty boxes are ignored; boxes must lie inside."""
    if math.prod(shape) == 0:
        return None
    keep = (shapes > 0).all(axis=1)
    return _fault(Box.whole(shape), offsets[keep], shapes[keep])


_DENSE_CELLS = 1 << 22


def _fault(box: Box, offsets: IntArray, shapes: IntArray) -> TilingFault | None:
    if len(offsets) == 0:
        return TilingFault(box, 0)
    if not box.shape:
        return None if len(offsets) == 1 else TilingFault(box, len(offsets))
    ends = offsets + shapes
    # Coordinate compression: only the boundaries that occur matter, so a tensor of any size becomes a grid with one
    # cell between any two of them, and each cell is covered as a whole or not at all.
    cuts = [merge_cuts((lo, hi), offsets[:, i], ends[:, i]) for i, (lo, hi) in enumerate(zip(box.offset, box.end, strict=True))]
    if math.prod(len(c) - 1 for c in cuts) <= max(_DENSE_CELLS, 4 * len(offsets)):
        return _dense_fault(cuts, offsets, ends)
    return _split_fault(box, cuts, offsets, shapes)


def _dense_fault(cuts: Sequence[Sequence[int]], offsets: IntArray, ends: IntArray) -> TilingFault | None:
    """Count how many boxes cover each compressed cell with an n-dimensional difference array."""
    used = [i for i, c in enumerate(cuts) if len(c) > 2] or [0]
    d = len(used)
    lo = np.stack([np.searchsorted(cuts[i], offsets[:, i]) for i in used])
    hi = np.stack([np.searchsorted(cuts[i], ends[:, i]) for i in used])
    # A difference array: a box adds +1 or −1 at each of its 2^d corners, and a running sum along each dimension turns
    # the corners into the number of boxes over each cell. In one dimension:
    #
    # boxes [0, 2) and [2, 3) of 4     cells     [0, 2)  [2, 3)  [3, 4)
    #                                  corners     +1    −1 +1     −1
    #                                  sums         1       1       0     ← covered by none
    #
    # The cost is corners plus cells, whatever the sizes of the boxes. Dimensions that no box cuts have no part in it.
    count = np.zeros([len(cuts[i]) for i in used], dtype=np.int32)
    for corner in range(1 << d):
        at = tuple(hi[i] if corner >> i & 1 else lo[i] for i in range(d))
        np.add.at(count, at, -1 if corner.bit_count() & 1 else 1)
    for i in range(d):
        np.cumsum(count, axis=i, out=count)
    count = count[tuple(slice(0, -1) for _ in range(d))]
    bad = np.argwhere(count != 1)
    if len(bad) == 0:
        return None
    first = dict(zip(used, bad[0].tolist(), strict=True))
    at0 = tuple(first.get(i, 0) for i in range(len(cuts)))
    offset = tuple(int(c[i]) for c, i in zip(cuts, at0, strict=True))
    return TilingFault(Box(offset, tuple(int(c[i + 1]) - o for c, i, o in zip(cuts, at0, offset, strict=True))), int(count[tuple(bad[0])]))


def _split_fault(box: Box, cuts: Sequence[Sequence[int]], offsets: IntArray, shapes: IntArray) -> TilingFault | None:
    """Halve the box along its most cut dimension: the compressed grid of very many irregular boxes would not fit in memory."""
    # Each half sees only the boxes that reach into it, so its compressed grid is smaller; the recursion ends where it fits into memory.
    axis = max(range(len(cuts)), key=lambda i: len(cuts[i]))
    middle = int(cuts[axis][len(cuts[axis]) // 2])
    for lo, hi in ((box.offset[axis], middle), (middle, box.end[axis])):
        half = Box(
            tuple(lo if i == axis else o for i, o in enumerate(box.offset)),
            tuple(hi - lo if i == axis else s for i, s in enumerate(box.shape)),
        )
        _, part_offsets, part_shapes = intersect_all(half, offsets, shapes)
        fault = _fault(half, part_offsets, part_shapes)
        if fault is not None:
            return fault
    return None
