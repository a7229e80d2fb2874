"""How one piece of work is divided over processes, by bytes. Pure: every process computes the same, so no message says who does what."""

# Two ways, for two kinds of items:
#
#     balanced    files, in any order: the largest first, each to the process that has least so far
#
#                     sizes      9 7 5 4 3        process 0   9 . . 4 .    13
#                                                 process 1   . 7 5 . 3    15
#
#     runs        reads of the same files, which are best read one after another: each process has a run of neighbours
#
#                     reads        | a a a a | a a b b | b b b c | c c c c |
#                     process           0         1         2         3
#
# No process of ``balanced`` has more than 4/3 of the best there is (Graham's bound), and none of ``runs`` more than an even share and one
# item.

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import accumulate


def balanced(sizes: Sequence[int], processes: int) -> list[list[int]]:
    """The numbers of the items that each process does, in their order; ``sizes`` in bytes. An item of no bytes counts as one."""
    shares: list[list[int]] = [[] for _ in range(processes)]
    loads = [(0, process) for process in range(processes)]
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        load, process = heapq.heappop(loads)
        shares[process].append(number)
        heapq.heappush(loads, (load + max(1, sizes[number]), process))
    return [sorted(share) for share in shares]


def runs(sizes: Sequence[int], processes: int) -> list[range]:
    """The items of each process, where these are neighbours: an item belongs to the share in which its middle lies."""
    counted = [max(1, size) for size in sizes]
    total = sum(counted)
    owners = [(2 * end - count) * processes // (2 * total) for count, end in zip(counted, accumulate(counted), strict=True)]
    starts = [sum(owner < process for owner in owners) for process in range(processes)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def bytes_of(sizes: Sequence[int], shares: Iterable[Sequence[int]]) -> list[int]:
    """The bytes of each share. An item of no bytes counts as one, as it does in the division, so only a share without items has none."""
    return [sum(max(1, sizes[number]) for number in share) for share in shares]
