"""The scenario ``memory``: how much memory an operation takes beside the state, at its peak.

Each case runs in fresh processes, after a tiny save and load that bring in what is imported late. The peak is the kernel's high-water mark
of resident memory (``VmHWM``), set back before the operation: ``ru_maxrss`` of a process also has that of the program that started it.
"""

from __future__ import annotations

import ctypes
import gc
import os

import torch.distributed as dist

import ckpt

from . import tasks
from .findings import Finding, at_most
from .places import Place
from .pool import Pool, Rank
from .scenarios import Settings, Tell
from .states import Recipe

MIB = 1 << 20
TINY = 100_000
CASES = ("save", "async save", "load", "load, other layout")
MARKS = {"save": 256, "async save": 256, "load": 512, "load, other layout": 512}
"""Most MiB beside the state; for ``async save`` beside the copy of the rank's bytes too."""


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """Each case once, on ``settings.ranks`` fresh ranks; those of ``pool`` are not used."""
    del pool
    n = settings.ranks
    written = _write(settings, place)
    found = {case: _case(case, settings, written, place) for case in CASES}
    place.fresh("written")
    for case, (peak, nbytes) in found.items():
        tell(f"memory on {n}, {place.label}: {case} {peak / MIB:.0f} MiB beside {nbytes / MIB:.0f} MiB")
    where = f"ranks {n}, {place.label}"
    checks = []
    for case, (peak, nbytes) in found.items():
        beside = peak - (nbytes if case == "async save" else 0)
        what = f"memory of a {case} beside the state" + (" and its copy" if case == "async save" else "")
        checks.append(at_most(f"{what}: {where}", beside / MIB, MARKS[case], "MiB"))
    return [
        Finding(
            scenario="memory",
            title=f"most resident memory beside the state, of the rank that took most, {where}",
            columns=("", "state MiB", "beside it MiB"),
            rows=[(case, f"{nbytes / MIB:,.0f}", f"{peak / MIB:,.0f}") for case, (peak, nbytes) in found.items()],
            figures={"place": place.label, "bytes": {case: {"state": nbytes, "peak": peak} for case, (peak, nbytes) in found.items()}},
            checks=checks,
        )
    ]


def _case(case: str, settings: Settings, written: str, place: Place) -> tuple[int, int]:
    """Peak and state of one case, in bytes; loads read what is at ``written``."""
    n, operation = settings.ranks, case.split(",")[0]
    recipe = Recipe(kind="sharded", ranks=n, size=settings.size * n, dim=1 if case == "load, other layout" else 0)
    with Pool(n) as pool:
        pool.run(tasks.prepare, on=n, recipe=Recipe(kind="sharded", ranks=n, size=TINY))
        for first in dict.fromkeys(("save", "load", operation)):
            pool.run(peak_of, on=n, operation=first, directory=place.fresh("warm") if first != "load" else f"{place.path}/warm")
        nbytes = pool.run(tasks.prepare, on=n, recipe=recipe)[0][0]
        directory = written if operation == "load" else place.fresh("memory")
        peak = max(pool.run(peak_of, on=n, operation=operation, directory=directory))
    place.fresh("memory")
    place.fresh("warm")
    return peak, nbytes


def _write(settings: Settings, place: Place) -> str:
    """A checkpoint for the loads."""
    n, directory = settings.ranks, place.fresh("written")
    with Pool(n) as pool:
        pool.run(tasks.prepare, on=n, recipe=Recipe(kind="sharded", ranks=n, size=settings.size * n))
        pool.run(peak_of, on=n, operation="save", directory=directory)
    return directory


def peak_of(rank: Rank, *, operation: str, directory: str) -> int:
    """Bytes of resident memory at the peak of an operation, above those before it."""
    state, group = rank.kept["state"], rank.groups[rank.kept["recipe"].ranks]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier(group)
    before = reset_peak()
    if operation == "save":
        ckpt.save(directory, state.tree, job=ckpt.Job(process_group=group))
    elif operation == "load":
        ckpt.load(directory, state.tree, job=ckpt.Job(process_group=group))
    else:
        ckpt.save_async(directory, state.tree, job=ckpt.Job(process_group=group)).result()
    peak = resident("VmHWM")
    dist.barrier(group)
    return max(0, peak - before)


def reset_peak() -> int:
    """Set the high-water mark back to what is resident now; that, in bytes."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    with open(f"/proc/{os.getpid()}/status", encoding="ascii") as file:
        found = dict(line.split(":", 1) for line in file)
    return int(found[field].split()[0]) * 1024
