"""ZeRO's flat partitions: which elements of which parameter the flat tensors of each rank hold. Pure arithmetic.

(Source of the layouts: ``deepspeed/runtime/zero/stage_1_and_2.py``, ``stage3.py`` and ``runtime/bf16_optimizer.py`` of DeepSpeed 0.19.)
"""

#     ZeRO-1, 2    a group's parameters one after another, cut into equal partitions that do not respect them
#
#                  |------ a ------|-- b --|gap|---- c ----|pad|
#                  |.. rank 0 ..|.. rank 1 ..|.. rank 2 .....|
#
#     ZeRO-3       each parameter is cut into equal parts, the last one padded; a rank has its part of a, then of b, then of c
#
#                  rank 0   |a0|b0|c0|      rank 1   |a1|b1|c1|      rank 2   |a2|b2|c2|
#                  groups   '--0--'1-'      with several sub-groups a part may be cut where one of them ends
#
# Either way the result is for each parameter a list of runs: which rank, which flat tensor, from where, how many elements.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

Numels = Mapping[str, int]
"""Elements of each parameter, in the order in which they were flattened."""


class FlatRun(NamedTuple):
    """Elements ``[start, start + length)`` of a parameter's row-major flattening: they lie at element ``at`` of flat tensor ``group`` of
    rank ``rank``."""

    rank: int
    group: int
    at: int
    start: int
    length: int


def split_evenly(numels: Numels, gaps: Sequence[int], group: int, partition: int, ranks: Sequence[int]) -> dict[str, list[FlatRun]]:
    """ZeRO-1 and 2: the parameters of a group one after another, ``gaps`` elements of padding after each, cut into partitions of equal
    length for ``ranks``."""
    # Walk the concatenation of the parameters once; a run ends where the parameter does or where the partition does.
    runs: dict[str, list[FlatRun]] = {}
    offset = 0
    for (name, numel), gap in zip(numels.items(), gaps, strict=True):
        runs[name] = []
        at = offset
        while at < offset + numel and partition and at // partition < len(ranks):
            owner = at // partition
            stop = min(offset + numel, (owner + 1) * partition)
            runs[name].append(FlatRun(ranks[owner], group, at - owner * partition, at - offset, stop - at))
            at = stop
        offset += numel + gap
    return runs


def split_each(numels: Numels, lengths: Sequence[int], ranks: int) -> dict[str, list[FlatRun]]:
    """ZeRO-3: every parameter is cut into ``ranks`` parts of ``ceil(numel / ranks)`` elements, the last ones padded; a rank has its parts
    of all parameters one after another, in flat tensors of ``lengths`` elements, whose bounds may lie inside of a part."""
    # ``offset`` is where the part of this parameter begins in a rank's flat tensors, the same on every rank, since
    # all have equal parts (the last ones padded).
    ends = list(accumulate(lengths))
    runs: dict[str, list[FlatRun]] = {name: [] for name in numels}
    offset = group = 0
    for name, numel in numels.items():
        part = -(-numel // ranks)
        for rank in range(ranks):
            start, stop = min(rank * part, numel), min((rank + 1) * part, numel)
            runs[name] += _in_groups(rank, group, offset, start, stop, ends)
        offset += part
        while group < len(ends) and ends[group] <= offset:
            group += 1
    return runs


def _in_groups(rank: int, group: int, offset: int, start: int, stop: int, ends: Sequence[int]) -> list[FlatRun]:
    """A part that begins ``offset`` elements into the flat tensors, cut where these end."""
    groups = []
    while start < stop and group < len(ends):
        begins = ends[group - 1] if group else 0
        count = min(stop - start, ends[group] - offset)
        if count > 0:
            groups.append(FlatRun(rank, group, offset - begins, start, count))
        offset, start, group = offset + count, start + count, group + 1
    return groups


def padded(numels: Numels, ranks: int) -> int:
    """Elements of a rank's parts in ZeRO-3, padding included."""
    return sum(-(-numel // ranks) for numel in numels.values())
