"""Which ranks are on one machine, in a few bytes: every rank of a job reads them. Pure.

Launchers give a machine neighbouring ranks, as many as each other machine, or deal ranks out in turns: both are two numbers, however many
ranks there are. What is otherwise takes more.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt


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
