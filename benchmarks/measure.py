"""What an operation costs: wall time, CPU time and bytes of each rank, and the work that the machine did for others meanwhile."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCost:
    """One operation on one rank.

    ``began`` and ``ended`` are on the machine's monotonic clock, in seconds. ``cpu`` is user and system time of the process, its
    threads and its ended children. ``read`` and ``written`` are bytes through read and write calls, page cache included.
    ``machine`` is the CPU time that all processes of the machine used meanwhile. ``said`` is what the operation itself reports.
    """

    began: float
    ended: float
    cpu: float
    read: int
    written: int
    machine: float
    said: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One operation of all ranks.

    ``wall`` is from the first rank's begin to the last one's end, ``cpu`` the sum over ranks, both in seconds. ``elsewhere`` is the
    fraction of the machine's CPU time that went to other processes. ``read`` and ``written`` are bytes, by rank.
    """

    wall: float
    cpu: float
    elsewhere: float
    read: tuple[int, ...]
    written: tuple[int, ...]
    said: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, costs: Sequence[RankCost]) -> Sample:
        wall = max(c.ended for c in costs) - min(c.began for c in costs)
        cpu = sum(c.cpu for c in costs)
        others = max(0.0, costs[0].machine - cpu)
        return cls(
            wall=wall,
            cpu=cpu,
            elsewhere=min(1.0, others / (wall * (os.cpu_count() or 1))),
            read=tuple(c.read for c in costs),
            written=tuple(c.written for c in costs),
            said=tuple(c.said for c in costs),
        )


def cost_of(operation: Callable[[], dict[str, Any]]) -> RankCost:
    """Run an operation on this rank and say what it cost."""
    machine, io, cpu = machine_seconds(), transferred(), cpu_seconds()
    began = time.monotonic()
    said = operation()
    ended = time.monotonic()
    cpu = cpu_seconds() - cpu
    read, written = (after - before for after, before in zip(transferred(), io, strict=True))
    return RankCost(began=began, ended=ended, cpu=cpu, read=read, written=written, machine=machine_seconds() - machine, said=said)


def cpu_seconds() -> float:
    """User and system time of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def transferred() -> tuple[int, int]:
    """Bytes that this process has read and written so far, by read and write calls."""
    with open("/proc/self/io", encoding="ascii") as file:
        fields = dict(line.split(": ") for line in file.read().splitlines())
    return int(fields["rchar"]), int(fields["wchar"])


def machine_seconds() -> float:
    """CPU time that the machine has spent on anything so far."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _iowait, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def peak_of(operation: Callable[[], object]) -> int:
    """Most bytes of resident memory during an operation, beyond those before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = reset_peak()
    operation()
    return max(0, resident("VmHWM") - before)


def reset_peak() -> int:
    """Set the high-water mark back to what is resident now; that, in bytes."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        found = dict(line.split(":", 1) for line in file)
    return int(found[field].split()[0]) * 1024
