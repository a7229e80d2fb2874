"""Cells cut into parts: one for each replica, and none larger than a chunk may be. Vectorised. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ckpt.layout.geometry import IntArray


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
