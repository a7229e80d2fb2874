"""Which ranks have which files on their machines, in a few bytes: every rank of a job reads them. Pure.

Ranks of one machine have the same files near, and most of these have neighbouring numbers. So a set of files is spelled as runs of numbers,
and once for all ranks that have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .machines import numbers_of, spell


class SharingRanks(NamedTuple):
    """Ranks that share reads of a file, and those of them that may be the ``readers``; these come first."""

    readers: tuple[int, ...]
    ranks: tuple[int, ...]


Runs = tuple[tuple[int, int], ...]
"""Numbers of files, increasing: the first of each run, and how many follow each other."""


def runs_of(files: Iterable[int]) -> Runs:
    """Numbers of files as runs."""
    runs: list[list[int]] = []
    for file in sorted({*files}):
        if runs and file == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([file, 1])
    return tuple((first, count) for first, count in runs)


def spelled(runs: Sequence[Runs]) -> Any:
    """JSON for the files that each rank has near, by the places of the ranks."""
    return {"sets": spell(runs), "files": list(dict.fromkeys(runs))}


class NearFiles:
    """Who has a file near, and who gets it from whom. ``spelled`` as :func:`spelled` gives it, ``machines`` as ``machines.spell`` does."""

    def __init__(self, spelled: Mapping[str, Any], machines: Any, ranks: Sequence[int]) -> None:
        self._set_of = dict(zip(ranks, numbers_of(spelled["sets"], len(ranks)).tolist(), strict=True))
        self._machine_of = dict(zip(ranks, numbers_of(machines, len(ranks)).tolist(), strict=True))
        self._sets_with: dict[int, set[int]] = {}
        for number, runs in enumerate(spelled["files"]):
            for first, count in runs:
                for file in range(first, first + count):
                    self._sets_with.setdefault(file, set()).add(number)

    def groups(self, file: int, ranks: Sequence[int], turn: int) -> list[SharingRanks]:
        """``ranks``, divided by who reads a file for whom: a group for each machine that has it near, whose ranks read it from there. The
        other ranks are dealt out to these groups, ``turn`` says to which the first goes. One group of all if nobody has it near."""
        sets = self._sets_with.get(file, ())
        near: dict[int, list[int]] = {}
        far: list[int] = []
        for rank in ranks:
            (near.setdefault(self._machine_of[rank], []) if self._set_of[rank] in sets else far).append(rank)
        if not near:
            return [SharingRanks(tuple(ranks), tuple(ranks))]
        readers = list(near.values())
        dealt: list[list[int]] = [[] for _ in readers]
        for i, rank in enumerate(far, turn):
            dealt[i % len(readers)].append(rank)
        return [SharingRanks(tuple(mine), (*mine, *others)) for mine, others in zip(readers, dealt, strict=True)]
