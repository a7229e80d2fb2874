"""Ways to cut a tensor over one mesh dimension, and what each does to the intervals of one tensor dimension."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.errors import LayoutError

from .geometry import IntArray, ceil_cut, ceil_cuts

Interval = tuple[int, int]
"""First element and one past the last, along one dimension."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Dimension ``dim`` is cut over mesh dimension ``over``: parts of ``ceil(size / n)`` as ``torch.chunk`` makes them, or of the
    given ``sizes``."""

    dim: int
    over: str
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Dimension ``dim`` is made of groups, each of which is cut over ``over``; a rank holds its part of every group, one after another.

    ``groups`` are the groups' sizes (fused QKV with the three parts one below the other), or their number if they are equal (2 for
    gate/up). Group sizes refer to what earlier splits left of the dimension.
    """

    dim: int
    over: str
    groups: tuple[int, ...] | int


@dataclass(frozen=True, slots=True)
class Flat:
    """What earlier splits left is flattened (row-major) and cut into contiguous ranges of ``ceil(numel / n)`` elements; the last
    may be shorter or empty. Or into ranges of the given ``sizes``, any of which may be empty.

    The layout of ZeRO and of FSDP1. Must come last; a rank's memory is one-dimensional.
    """

    over: str
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Boxes:
    """Each coordinate of ``over`` holds the boxes that are listed for it, as pairs of offset and shape, each with memory of its own.

    The layout of a ``ShardedTensor`` that is cut along several dimensions. Must be the only split.
    """

    over: str
    held: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...]


@dataclass(frozen=True, slots=True)
class Replicate:
    """No split: every rank of the mesh holds the whole tensor."""


Split = Shard | Interleaved | Flat | Boxes


def split_from_json(data: Any) -> Split:
    kind, *args = data
    fields: list[Any] = [_tuples(a) for a in args]
    if kind == "Shard":
        return Shard(*fields)
    if kind == "Boxes":
        return Boxes(*fields)
    return Interleaved(*fields) if kind == "Interleaved" else Flat(*fields)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def part_of(split: Shard | Interleaved, held: tuple[Interval, ...], parts: int, index: int) -> tuple[Interval, ...]:
    """Apply one split to the intervals held so far; returns those of part ``index``."""
    size = sum(b - a for a, b in held)
    if isinstance(split, Shard) and split.sizes is not None:
        cuts = given_cuts(split.sizes, size, parts)
        return slice_of(held, cuts[index], cuts[index + 1])
    found: list[Interval] = []
    for a, b in itertools.pairwise(_group_cuts(split, size)):
        found += slice_of(held, a + ceil_cut(b - a, parts, index), a + ceil_cut(b - a, parts, index + 1))
    return joined(found)


def _group_cuts(split: Shard | Interleaved, size: int) -> Sequence[int]:
    """Boundaries of the groups that are cut one by one."""
    if isinstance(split, Shard):
        return 0, size
    return given_cuts(split.groups, size, len(split.groups)) if isinstance(split.groups, tuple) else ceil_cuts(size, split.groups)


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

    def divided(self, split: Shard | Interleaved, parts: int) -> Shares:
        """What one split makes of it: part i of row r becomes row ``r * parts + i``. For all of them what :func:`part_of` is for one.

        A job that cuts a tensor over 16,384 ranks has as many rows: nothing here may be done for each of them in Python, nor for each part
        over all parts. Rows of one size are cut alike, so their boundaries are made once. Each interval is intersected with each part's
        range of its own row, group by group: intervals × parts × groups numbers, of which most are kept where a row has one interval.
        """
        length = self.stop - self.start
        before = np.cumsum(length) - length
        size = np.zeros(self.rows, dtype=np.int64)
        np.add.at(size, self.row, length)
        at = before - (np.cumsum(size) - size)[self.row]  # where each interval begins in its row
        sizes, kind = np.unique(size, return_inverse=True)
        first, last = (np.stack(edges)[kind.reshape(-1)] for edges in zip(*(_ranges(split, n, parts) for n in sizes.tolist()), strict=True))
        low = np.maximum(first[self.row], at[:, None, None])  # [intervals, groups, parts]
        high = np.minimum(last[self.row], (at + length)[:, None, None])
        interval, group, part = np.nonzero(high > low)
        row = self.row[interval] * parts + part
        order = np.lexsort((interval, group, row))
        interval, shift = interval[order], (self.start - at)[interval[order]]
        kept = interval, group[order], part[order]
        found = Shares(rows=self.rows * parts, row=row[order], start=low[kept] + shift, stop=high[kept] + shift)
        return found._joined()

    def _joined(self) -> Shares:
        """Neighbours in one row as one."""
        begins = np.ones(len(self.row), dtype=np.bool_)
        begins[1:] = (self.row[1:] != self.row[:-1]) | (self.start[1:] != self.stop[:-1])
        ends = np.append(begins[1:], True)[: len(begins)]
        return Shares(rows=self.rows, row=self.row[begins], start=self.start[begins], stop=self.stop[ends])


def _ranges(split: Shard | Interleaved, size: int, parts: int) -> tuple[IntArray, IntArray]:
    """Where each part of each group begins and ends in a row of ``size`` elements, ``[groups, parts]`` each."""
    if isinstance(split, Shard) and split.sizes is not None:
        edges = np.asarray([given_cuts(split.sizes, size, parts)], dtype=np.int64)
    else:
        edges = np.stack([a + ceil_cuts(b - a, parts).array for a, b in itertools.pairwise(_group_cuts(split, size))])
    return edges[:, :-1], edges[:, 1:]


def given_cuts(sizes: tuple[int, ...], size: int, parts: int) -> tuple[int, ...]:
    if len(sizes) != parts or sum(sizes) != size:
        raise LayoutError(f"sizes {sizes} must be {parts} numbers that add up to {size}")
    return tuple(itertools.accumulate(sizes, initial=0))


def slice_of(held: tuple[Interval, ...], start: int, stop: int) -> tuple[Interval, ...]:
    """Elements ``[start, stop)`` of the concatenation of intervals."""
    found, at = [], 0
    for a, b in held:
        lo, hi = max(start, at), min(stop, at + b - a)
        if hi > lo:
            found.append((a + lo - at, a + hi - at))
        at += b - a
    return tuple(found)


def joined(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    found: list[Interval] = []
    for a, b in intervals:
        if found and found[-1][1] == a:
            found[-1] = (found[-1][0], b)
        else:
            found.append((a, b))
    return tuple(found)
