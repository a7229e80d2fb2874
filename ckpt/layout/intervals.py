"""Intervals along one dimension: what one holder has (tuples), or what many have (:class:`Shares`, numpy). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .geometry import IntArray

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
