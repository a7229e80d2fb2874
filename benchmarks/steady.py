"""The scenario ``steady``: thousands of saves in one life of a job, on twice as many ranks: what its processes keep, and what is left.

A model of DTensors, half of it frozen, with AdamW. Each step is saved in the background, and the newest three stay. Each way of saving
has a run of its own, one after the other in the same processes. With a memory, each rank is a machine with a daemon of its own.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any

from .findings import Finding, at_most
from .measure import cpu_seconds
from .places import Place
from .pool import Pool, Rank
from .scenarios import Settings, Tell

if TYPE_CHECKING:
    import ckpt

WAYS = ("keep", "reuse", "anchor", "local", "memory, local")
SAMPLES = 40
"""Looks at the processes in one run."""
WIDTH, LAYERS, KEEP, EVERY = 64, 8, 3, 10
"""``KEEP`` steps stay. Of ``EVERY`` saves one is an anchor, or goes on from memory to the tiers behind it."""
LIMITS = {"resident": 4096.0, "heap": 512.0, "blocks": 0.2, "descriptors": 0.01, "threads": 0.01, "keys": 0.01, "daemon": 512.0}
"""Most that one save may leave in a process: resident bytes, bytes that C code has allocated, blocks that Python has, file descriptors,
threads, keys in the job's store, and resident bytes of the machine's memory daemon. What is resident and not allocated is what allocators
keep for later."""
SLOWER = 1.25
"""Most CPU time of a late save, of that of an early one."""

Samples = list[list[dict[str, float]]]
"""What each rank has, by the time of the look."""


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """All ways, in one place."""
    ranks, saves = 2 * settings.ranks, settings.steady_saves
    found: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        found[way] = measure(pool, ranks, saves, place.fresh("steady"), way)
        left = ", ".join(f"{found[way]['growth'][what]:.3g} {what}" for what in LIMITS)
        tell(f"steady, {way}, {saves} saves on {ranks} ranks, {place.label}: a save leaves {left}")
    most = {what: max(mine["growth"][what] for mine in found.values()) for what in LIMITS}
    return [
        Finding(
            scenario="steady",
            title=f"{saves:,} saves on {ranks} ranks, {place.label}: the rank that has most, after a fifth of the saves and after all",
            columns=(
                *("", "MB resident", "MB allocated", "bytes/save", "Python blocks", "descriptors", "threads", "keys", "MB daemon"),
                *("CPU ms/save", "steps", "in memory", "orphans"),
            ),
            rows=[_row(way, mine) for way, mine in found.items()],
            figures=found,
            checks=[
                *(at_most(f"{what} that a save leaves, {place.label}", most[what], limit) for what, limit in LIMITS.items()),
                at_most(f"CPU time of late saves over early ones, {place.label}", max(slower(m["cpu"]) for m in found.values()), SLOWER),
                at_most(f"files that no checkpoint has, {place.label}", sum(mine["orphans"] for mine in found.values()), 0),
            ],
        )
    ]


def measure(pool: Pool, ranks: int, saves: int, folder: str, way: str) -> dict[str, Any]:
    """One life of a job."""
    pool.run(begin, on=ranks, ranks=ranks, folder=folder, way=way)
    parts = [range(saves * i // SAMPLES + 1, saves * (i + 1) // SAMPLES + 1) for i in range(SAMPLES)]
    samples: Samples = [pool.run(save, on=ranks, steps=part) for part in parts if part]
    at = [part[-1] for part in parts if part]
    left = pool.run(end, on=ranks, folder=folder)
    return {
        "saves": at,
        **{what: [max(rank[what] for rank in sample) for sample in samples] for what in LIMITS},
        "cpu": [sum(rank["cpu"] for rank in sample) for sample in samples],
        "growth": growth(at, samples),
        **{what: max(rank[what] for rank in left) for what in left[0]},
    }


def growth(at: Sequence[int], samples: Samples) -> dict[str, float]:
    """What each save of the second half leaves, on the rank where that is most: the middle one of the slopes between all looks, which what
    comes and goes does not move."""
    late = [*zip(at, samples, strict=True)][len(at) // 2 :]
    return {what: max(_slope([(x, sample[rank][what]) for x, sample in late]) for rank in range(len(samples[0]))) for what in LIMITS}


def _slope(points: Sequence[tuple[float, float]]) -> float:
    slopes = [(y - b) / (x - a) for i, (x, y) in enumerate(points) for a, b in points[:i]]
    return max(0.0, median(slopes)) if slopes else 0.0


def slower(cpu: Sequence[float]) -> float:
    """CPU time of the saves of the last fifth over that of those between a tenth and three tenths."""
    early, late = _early_and_late(cpu)
    return late / early


def _early_and_late(cpu: Sequence[float]) -> tuple[float, float]:
    tenth = max(1, len(cpu) // 10)
    return median(cpu[tenth : 3 * tenth] or cpu), median(cpu[-2 * tenth :])


def _row(way: str, mine: dict[str, Any]) -> Sequence[str]:
    def two(what: str, scale: float = 1.0, digits: int = 0) -> str:
        return ", ".join(f"{value / scale:,.{digits}f}" for value in (mine[what][len(mine[what]) // 5], mine[what][-1]))

    return (
        *(way, two("resident", 1e6, 1), two("heap", 1e6, 2), f"{mine['growth']['heap']:,.0f}"),
        *(two("blocks"), two("descriptors"), two("threads"), two("keys"), two("daemon", 1e6, 1)),
        ", ".join(f"{1e3 * seconds:.0f}" for seconds in _early_and_late(mine["cpu"])),
        *(str(mine[what]) for what in ("steps", "in memory", "orphans")),
    )


# ---- in the ranks


def begin(rank: Rank, *, ranks: int, folder: str, way: str) -> None:
    """Make the model, and what saves it."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ.update(CKPT_DOMAIN=f"machine{rank.number}", CKPT_MEMORY_DIR=f"{folder}/daemon{rank.number}")
    logging.getLogger("ckpt").setLevel(logging.ERROR)  # saves without training between them raise alerts
    mesh = DeviceMesh.from_group(rank.groups[ranks], "cpu")
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    for n, layer in enumerate(model):
        for name, p in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]), requires_grad=n % 2 == 0))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    gc.collect()
    gc.freeze()  # what is there stays, and need not be looked at each time
    rank.kept["steady"] = _checkpointer(way, folder, rank.groups[ranks]), {"model": model, "optimizer": optimizer, "step": 0}


def _checkpointer(way: str, folder: str, group: Any) -> ckpt.Checkpointer:
    import ckpt
    from ckpt.policies import Anchor, EverySteps, Latest

    ways: dict[str, dict[str, Any]] = {
        "keep": {},
        "reuse": {"reuse": True},
        "anchor": {"reuse": Anchor(EVERY)},
        "local": {"local": f"{folder}/local"},
        "memory, local": {"memory": ckpt.Memory(keep=2), "local": f"{folder}/local", "save": EverySteps(EVERY)},
    }
    return ckpt.Checkpointer(f"{folder}/root", **{"save": EverySteps(1), **ways[way]}, keep=Latest(KEEP), job=ckpt.Job(process_group=group))


def save(rank: Rank, *, steps: range) -> dict[str, float]:
    """Train and save. What this process has afterwards, and the CPU seconds of a save."""
    import torch

    from ckpt.runs.checkpointer import job_of

    c, state = rank.kept["steady"]
    before = cpu_seconds()
    for n in steps:
        for p in state["model"].parameters():
            p.grad = torch.full_like(p, 1e-3) if p.requires_grad else None
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["step"] = n
        c.step(n, state)
    c.wait()
    return {"cpu": (cpu_seconds() - before) / len(steps), **now(job_of(c)[0].served if rank.number == 0 else None)}


def now(store: Any) -> dict[str, float]:
    """What this process has, as in ``LIMITS``. ``store``: the job's, on one rank."""
    gc.collect()
    daemon = _daemon()
    return {
        "resident": _resident("self"),
        "heap": _allocated(),
        "blocks": sys.getallocatedblocks(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "keys": store.num_keys() if store is not None else 0,
        "daemon": _resident(daemon.status()["pid"]) if daemon is not None else 0,
    }


def _resident(process: int | str) -> int:
    with open(f"/proc/{process}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Mallinfo(ctypes.Structure):
    """What glibc tells of its arenas, all together: ten numbers."""

    _fields_ = (("told", ctypes.c_size_t * 10),)


def _allocated() -> int:
    """Bytes that are allocated: in use, and mapped. 0 where nothing tells."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # of glibc 2.33
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    told = mallinfo().told
    return int(told[7] + told[4])


def _daemon() -> Any:
    """This machine's memory daemon, if one was started."""
    from ckpt.errors import CkptError
    from ckpt.nodes import memory_client

    with suppress(CkptError):
        return memory_client.connect(start=False)
    return None


def end(rank: Rank, *, folder: str) -> dict[str, int]:
    """Close, and look what is left: steps in all places, orphans among them, and checkpoints in this machine's memory."""
    from ckpt.io_backends import open_backend
    from ckpt.runs.orphans import find_orphans
    from ckpt.runs.step_listing import list_steps

    rank.kept.pop("steady")[0].close()
    places = [f"{folder}/{name}" for name in ("root", "local") if os.path.isdir(f"{folder}/{name}")] if rank.number == 0 else []
    left = {
        "steps": sum(len(list_steps(place)) for place in places),
        "orphans": sum(len(find_orphans(open_backend(place), older_than=0.0, now=0.0)) for place in places),
        "in memory": 0,
    }
    if (daemon := _daemon()) is not None:
        left["in memory"] = len(daemon.status()["by_checkpoint"])
        daemon.stop()
    return left
