"""Flat ranges as boxes, those of all ranks at once. Pure numpy.

A rank's range of a row-major flattening is at most ``2·d − 1`` boxes, which ``geometry.flat_to_boxes`` gives one by one; a job has
thousands of ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .geometry import IntArray, cells


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
