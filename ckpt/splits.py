"""Ways to cut a tensor over one mesh dimension, and what each does to the intervals of one tensor dimension."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import LayoutError
from .geometry import ceil_cuts

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
    if isinstance(split, Shard):
        cuts = ceil_cuts(size, parts) if split.sizes is None else given_cuts(split.sizes, size, parts)
        return slice_of(held, cuts[index], cuts[index + 1])
    groups = given_cuts(split.groups, size, len(split.groups)) if isinstance(split.groups, tuple) else ceil_cuts(size, split.groups)
    found: list[Interval] = []
    for a, b in itertools.pairwise(groups):
        cuts = ceil_cuts(b - a, parts)
        found += slice_of(held, a + cuts[index], a + cuts[index + 1])
    return joined(found)


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
