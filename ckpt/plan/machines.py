"""Which ranks are on one machine and which files are near them, in a few bytes, as every rank of a job reads both; and how work is divided
by bytes. Pure.

Ranks of one machine have the same files near, and most of these have neighbouring numbers. So a set of files is spelled as runs of numbers,
and once for all ranks that have it. Where each machine has the files of its own ranks, a set is the one before it, shifted; a whole job is
one row then.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.plan.layout.geometry import IntArray
from ckpt.plan.layout.partition import Runs

# Which ranks are on one machine, in a few bytes: every rank of a job reads them. Pure.
#
# Launchers give a machine neighbouring ranks, as many as each other machine, or deal ranks out in turns: both are two numbers, however many
# ranks there are. What is otherwise takes more.


def spell(machines: Sequence[Hashable]) -> Any:
    """JSON for the machines of ranks, by their places: ``[size, count]`` if blocks of ``size`` ranks go to ``count`` machines in turns;
    ``{"runs": [[size, times], ...]}`` if each machine has one block; else ``{"each": [...]}``, a number for each rank."""
    # Machines are numbered in the order in which their first rank comes, so that the common patterns become
    # arithmetic: with ``size`` ranks per machine, rank r is on machine r // size (mod count).
    numbers = {name: i for i, name in enumerate(dict.fromkeys(machines))}
    each = np.array([numbers[name] for name in machines], dtype=np.int64)
    runs = [len(list(members)) for _, members in groupby(machines)]
    size, count = runs[0], len(numbers)
    if np.array_equal(each, np.arange(len(each)) // size % count):
        return [size, count]
    if len(runs) == count:
        return {"runs": [[length, len(list(alike))] for length, alike in groupby(runs)]}
    return {"each": each.tolist()}


def numbers_of(spelled: Any, count: int) -> npt.NDArray[np.int64]:
    """The machine of each of ``count`` ranks, by their places: what :func:`spell` numbered, in the order of the first rank on each."""
    if isinstance(spelled, list):
        size, machines = spelled
        return np.arange(count, dtype=np.int64) // int(size) % int(machines)
    if "each" in spelled:
        return np.array(spelled["each"], dtype=np.int64)
    sizes = [size for size, times in spelled["runs"] for _ in range(times)]
    return np.repeat(np.arange(len(sizes)), sizes)


def neighbours(spelled: Any, place: int, ranks: Sequence[int]) -> frozenset[int]:
    """Those of ``ranks`` that are on the machine of the one at ``place``, itself among them."""
    machine_of = numbers_of(spelled, len(ranks))
    return frozenset(ranks[at] for at in np.flatnonzero(machine_of == machine_of[place]).tolist())


def ancestors(place: int, machine_of: npt.NDArray[np.int64], fan: int) -> list[int]:
    """The ranks, by their places, through which what the first one has comes to the one at ``place``, the nearest first and the first one
    last: ``fan`` others of a machine get it from one, and the first ranks of ``fan`` machines from the first of another. ``machine_of`` as
    :func:`numbers_of` gives it."""
    members = np.flatnonzero(machine_of == machine_of[place])
    at, machine, above = int(np.searchsorted(members, place)), int(machine_of[place]), []
    while at:
        at = (at - 1) // fan
        above.append(int(members[at]))
    while machine:
        machine = (machine - 1) // fan
        above.append(int(np.argmax(machine_of == machine)))
    return above


def has_descendants(place: int, machine_of: npt.NDArray[np.int64], fan: int) -> bool:
    """Whether anything comes to another rank through this one."""
    members = np.flatnonzero(machine_of == machine_of[place])
    at = int(np.searchsorted(members, place))
    return fan * at + 1 < len(members) or (at == 0 and fan * int(machine_of[place]) + 1 <= int(machine_of.max()))


def spelled(runs: Sequence[Runs]) -> Any:
    """JSON for the files that each rank has near, by the places of the ranks: the number of its set, and rows ``[runs, shift, times]`` of
    so many sets, each with the numbers of the one before it and ``shift`` more."""
    rows: list[list[Any]] = []
    last: Runs | None = None
    for files in dict.fromkeys(runs):
        shift = _shift(last, files)
        if rows and shift is not None and (rows[-1][2] == 1 or rows[-1][1] == shift):
            rows[-1][1:] = [shift, rows[-1][2] + 1]
        else:
            rows.append([files, 0, 1])
        last = files
    return {"sets": spell(runs), "files": rows}


def _shift(before: Runs | None, after: Runs) -> int | None:
    """What was added to each number of a set to make it another; None if it was made otherwise."""
    if not before or len(before) != len(after):
        return None
    shift = after[0][0] - before[0][0]
    return shift if after == tuple((first + shift, count) for first, count in before) else None


class NearFiles:
    """Who has a file near, and who gets it from whom. ``spelled`` as :func:`spelled` gives it, ``machines`` as ``machines.spell`` does."""

    def __init__(self, spelled: Mapping[str, Any], machines: Any, ranks: Sequence[int]) -> None:
        self._ranks = np.asarray(ranks, dtype=np.int64)
        self._machines = numbers_of(machines, len(ranks))
        set_of = numbers_of(spelled["sets"], len(ranks))
        files_of = [(runs, shift * i) for runs, shift, times in spelled["files"] for i in range(times)]
        self._by_set = np.split(np.argsort(set_of, kind="stable"), np.cumsum(np.bincount(set_of, minlength=len(files_of)))[:-1])
        sets_with: dict[int, list[int]] = {}
        for number, (runs, shift) in enumerate(files_of):
            for first, count in runs:
                for file in range(first + shift, first + shift + count):
                    sets_with.setdefault(file, []).append(number)
        numbers: dict[tuple[int, ...], int] = {(): 0}
        self._kind_of = {file: numbers.setdefault(tuple(sets), len(numbers)) for file, sets in sets_with.items()}
        self._sets = list(numbers)
        self._near: dict[int, IntArray] = {}
        self._among: dict[bytes, dict[int, NearShares]] = {}

    def among(self, ranks: IntArray) -> Callable[[int], NearShares]:
        """How ``ranks``, which increase, are divided by who reads a file for whom: one object for all files that the same ranks have."""
        known = self._among.setdefault(ranks.tobytes(), {})

        def shares(file: int) -> NearShares:
            kind = self._kind_of.get(file, 0)
            return known[kind] if kind in known else known.setdefault(kind, self._shares(kind, ranks))

        return shares

    def _shares(self, kind: int, ranks: IntArray) -> NearShares:
        if kind not in self._near:
            self._near[kind] = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *(self._by_set[s] for s in self._sets[kind])]))
        near = self._near[kind]
        places = np.searchsorted(ranks, self._ranks[near])
        wanting = places < len(ranks)
        wanting[wanting] = ranks[places[wanting]] == self._ranks[near[wanting]]
        order = np.flatnonzero(wanting)[np.argsort(places[wanting])]
        return NearShares(count=len(ranks), near=places[order], machines=self._machines[near[order]])


@dataclass(frozen=True, kw_only=True, eq=False)
class NearShares:
    """``count`` ranks, by their places, divided by who reads a file for whom: a group for each machine that has it near, whose ranks, those
    at the places ``near``, read it from there. The other ranks are dealt out to these groups. One group of all if nobody has it near."""

    #   places        0 1 2 3 4 5 6 7 8       near 1 2 6, on two machines
    #   groups          A A       B           A: 1 2 and every second of the others, B: 6 and the rest of them,
    #   dealt out     A     B A B   A B       from one of the two on that differs from chunk to chunk
    #
    # A rank asks for its own group, and of it for a few neighbours: both follow by arithmetic, whatever the number of ranks.
    count: int
    near: IntArray
    machines: IntArray
    """Of each that is near."""

    @cached_property
    def group_of(self) -> IntArray:
        """The group of each that is near, numbered in the order of the first of each."""
        _, first, group = np.unique(self.machines, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first))[group.reshape(-1)]

    @cached_property
    def groups(self) -> list[IntArray]:
        """The places of each group that have it near."""
        by_group = np.argsort(self.group_of, kind="stable")
        return np.split(self.near[by_group], np.cumsum(np.bincount(self.group_of))[:-1]) if len(by_group) else []

    def turns(self) -> int:
        """How many ways there are to deal out the others: chunks of numbers that differ by a multiple are dealt out alike."""
        return max(len(self.groups), 1) if len(self.near) < self.count else 1

    def block(self, place: int, turn: int, most: int) -> tuple[IntArray, int]:
        """The places in the block of ``most`` of its group that has ``place``, and how many of them, the first, have the file near.
        ``turn`` says to which group the first of the others goes."""
        groups = self.groups
        if not groups:
            first = place // most * most
            return np.arange(first, min(first + most, self.count)), 0
        at = int(np.searchsorted(self.near, place))
        if at < len(self.near) and self.near[at] == place:
            number = int(self.group_of[at])
            index = int(np.searchsorted(groups[number], place))
        else:
            number = (turn + place - at) % len(groups)
            index = len(groups[number]) + (place - at) // len(groups)
        mine = groups[number]
        first = index // most * most
        own = mine[first : first + most]
        # Of the others, numbered by themselves, a group has every len(groups)-th; those before one of them that is
        # near are as many as its place less the near ones before it.
        start = max(first - len(mine), 0)
        dealt = (number - turn) % len(groups) + len(groups) * np.arange(start, start + most - len(own))
        dealt = dealt[dealt < self.count - len(self.near)]
        skipped = np.searchsorted(self.near - np.arange(len(self.near)), dealt, side="right")
        return np.concatenate([own, dealt + skipped]), len(own)


# How one piece of work is divided over processes, by bytes. Pure: every process computes the same, so no message says who does what.

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
