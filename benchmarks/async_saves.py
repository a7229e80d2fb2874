"""The scenario ``async``: for how long saves in the background keep a trainer waiting, and how much they slow a training loop down."""

from __future__ import annotations

import gc
import glob
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ckpt

from . import tasks
from .findings import Finding, at_most, medians
from .measure import cpu_seconds
from .places import Place
from .pool import Pool, Rank
from .scenarios import Settings, Tell, turns
from .states import Recipe, State

EAGER = 1.15
"""Most that an eager call may take, in copies of the same bytes into warm memory."""
LAZY = 0.010
"""Most seconds of a lazy call."""
GAIN = 5.0
"""How many times as long DCP's saves must block a training loop."""
STEPS, EVERY = 12, 2
CONTESTANTS = ("memcpy", "ckpt eager", "ckpt lazy", "dcp")
LOOPS = ("none", "ckpt lazy", "dcp")

Samples = dict[str, list[dict[str, float]]]


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """All parts, in one place."""
    return [blocked(settings, pool, place, tell), slowed(settings, pool, place, tell)]


def blocked(settings: Settings, pool: Pool, place: Place, tell: Tell) -> Finding:
    """Seconds that the trainer waits for a save, beside one copy of the rank's bytes into memory that is warm."""
    n = settings.ranks
    pool.run(tasks.prepare, on=n, recipe=Recipe(kind="sharded", ranks=n, size=settings.size * n))
    pool.run(settle, on=n)
    samples: Samples = {c: [] for c in CONTESTANTS}
    for repetition, contestant in turns(CONTESTANTS, settings.repeat):
        directory = place.fresh(contestant)
        found = _slowest(pool.run(block, on=n, contestant=contestant, directory=directory))
        tell(f"async on {n}, {place.label}: {contestant} call {found['call']:.3f} s, blocked {found['blocked']:.3f} s")
        place.fresh(contestant)
        if repetition > 0:
            samples[contestant].append(found)
    pool.run(close, on=n)
    mine = {c: medians(s) for c, s in samples.items()}
    copy = mine["memcpy"]
    rows = [
        (c, *(cell for key in ("call", "cpu", "blocked") for cell in (f"{m[key]:.4f}", f"{m[key] / copy[key]:.2f}")), f"{m['durable']:.2f}")
        for c, m in mine.items()
    ]
    where = f"ranks {n}, {place.label}"
    checks = (
        at_most(f"eager call in copies of the same bytes: {where}", mine["ckpt eager"]["call"] / copy["call"], EAGER),
        at_most(f"CPU time of an eager call in copies of the same bytes: {where}", mine["ckpt eager"]["cpu"] / copy["cpu"], EAGER),
        at_most(f"lazy call: {where}", 1000 * mine["ckpt lazy"]["call"], 1000 * LAZY, "ms"),
    )
    return Finding(
        scenario="async",
        title=f"the trainer waits, ranks {n}, {place.label}, {settings.size / 1e6:,.0f} MB per rank",
        columns=("", "call s", "copies", "CPU s", "copies", "call and step s", "copies", "durable s"),
        rows=rows,
        figures={"place": place.label, "medians": mine, "samples": samples},
        checks=checks,
    )


def slowed(settings: Settings, pool: Pool, place: Place, tell: Tell) -> Finding:
    """A training loop without saves, with ckpt's lazy saves and with DCP's: for how long each save blocks it, and what it computes.

    Not by how much the loop takes longer: with as many ranks as cores that is noise, and what runs in the background takes from training.
    """
    n = settings.ranks
    nbytes = pool.run(build_training, on=n, ranks=n, size=settings.size // 4)[0]
    samples: Samples = {c: [] for c in LOOPS}
    for repetition, contestant in turns(LOOPS, min(settings.repeat, 3)):
        directory = place.fresh(f"loop-{contestant}")
        found = _slowest(pool.run(train, on=n, contestant=contestant, directory=directory, steps=STEPS, every=EVERY))
        tell(f"async on {n}, {place.label}: {STEPS} steps, saves {contestant}: {found['seconds']:.2f} s")
        for made in glob.glob(f"{glob.escape(directory)}-*"):
            shutil.rmtree(made)
        if repetition > 0:
            samples[contestant].append(found)
    pool.run(close, on=n)
    mine = {c: medians(s) for c, s in samples.items()}
    saves = -(-STEPS // EVERY)
    ours, dcp = mine["ckpt lazy"], mine["dcp"]
    beyond = {c: (m["cpu"] - mine["none"]["cpu"]) / saves for c, m in mine.items()}
    where = f"ranks {n}, {place.label}"
    rows = [
        (
            c,
            *(f"{1000 * m[key]:.1f}" for key in ("computed", "call", "blocked")),
            f"{m['computed'] / dcp['computed']:.2f}",
            f"{m['blocked'] / dcp['blocked']:.2f}",
            f"{beyond[c]:.3f}",
            f"{m['seconds']:.2f}",
            f"{m['ended']:.2f}",
        )
        for c, m in mine.items()
    ]
    return Finding(
        scenario="async",
        title=f"{STEPS} steps of training, a save every {EVERY}, ranks {n}, {place.label}, {nbytes / 1e6:,.0f} MB per rank",
        columns=("saves", "computed ms", "call ms", "blocked ms", "of dcp's", "of dcp's", "more CPU s", "loop s", "durable s"),
        rows=rows,
        figures={"place": place.label, "medians": mine, "beyond": beyond, "samples": samples},
        checks=(
            at_most(f"what the trainer computes for a save, over DCP's: {where}", ours["computed"] / dcp["computed"], 1 / GAIN),
            at_most(f"what a save blocks training for, over DCP's: {where}", ours["blocked"] / dcp["blocked"], 1 / GAIN),
        ),
        notes=(
            "per save: computed, CPU time of the trainer's thread in the call; blocked, the call and the next step's wait for the capture; "
            "then both over DCP's; more CPU, what all threads of a rank compute beyond the loop without saves",
        ),
    )


def _slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {key: max(r[key] for r in ranks) for key in ranks[0]}


# ---------------------------------------------------------------------------------------------------------------- on the ranks

WIDTH = 1024
BATCH = 64


@dataclass(eq=False)
class DcpSaver:
    """DCP's ``async_save`` in a thread, with a group of its own, and a stager that keeps its memory: one save at a time."""

    group: dist.ProcessGroup | None
    stager: DefaultStager = field(default_factory=lambda: DefaultStager(StagingOptions(False, False, False, False)))
    last: Future[Any] | None = None

    def save(self, directory: str, tree: dict[str, Any]) -> Future[Any]:
        if self.last is not None:
            self.last.result()
        found = async_save(tree, checkpoint_id=directory, process_group=self.group, async_stager=self.stager)
        self.last = found if isinstance(found, Future) else found.upload_completion
        return self.last

    def close(self) -> None:
        if self.last is not None:
            self.last.result()
        self.stager.close()


def settle(rank: Rank) -> None:
    """Make what the contestants keep between saves; collective over the ranks of the state that was prepared."""
    state: State = rank.kept["state"]
    rank.kept["dcp"] = DcpSaver(rank.second[rank.kept["recipe"].ranks])
    rank.kept["warm"] = {name: t.clone() for name, t in state.local.items()}
    rank.kept["optimizer"] = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


def block(rank: Rank, *, contestant: str, directory: str) -> dict[str, float]:
    """Seconds: ``call`` alone; ``cpu``, of all threads of this process in the call; ``blocked``, the call and an optimizer's step right
    after it; ``durable`` until the save is over."""
    state: State = rank.kept["state"]
    group = rank.groups[rank.kept["recipe"].ranks]
    acts: dict[str, Callable[[], Any]] = {
        "memcpy": lambda: _copy(state, rank.kept["warm"]),
        "ckpt eager": lambda: ckpt.save_async(directory, state.tree, capture="eager", job=ckpt.Job(process_group=group)),
        "ckpt lazy": lambda: ckpt.save_async(directory, state.tree, job=ckpt.Job(process_group=group)),
        "dcp": lambda: rank.kept["dcp"].save(directory, state.tree),
    }
    gc.collect()
    dist.barrier(group)
    began, cpu = time.perf_counter(), time.process_time()
    handle = acts[contestant]()
    called, cpu = time.perf_counter(), time.process_time() - cpu
    rank.kept["optimizer"].step()
    stepped = time.perf_counter()
    if handle is not None:
        handle.result()
    ended = time.perf_counter()
    dist.barrier(group)
    return {"call": called - began, "cpu": cpu, "blocked": stepped - began, "durable": ended - began}


def _copy(state: State, warm: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.local.items():
        warm[name].copy_(tensor)


def close(rank: Rank) -> None:
    """End what ``settle`` or ``build_training`` made."""
    rank.kept["dcp"].close()
    rank.kept.clear()
    gc.collect()


# ------------------------------------------------------------------------------------------------------------ a training loop


def build_training(rank: Rank, *, ranks: int, size: int) -> int:
    """A perceptron under FSDP2 with AdamW that together take about ``size`` bytes on each rank; what they take."""
    rank.kept.clear()
    torch.manual_seed(0)
    width = min(WIDTH, max(16, int((size * ranks / 12 / 4) ** 0.5)))
    layers = max(1, round(size * ranks / 12 / width**2))
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(layers)))
    mesh = DeviceMesh.from_group(rank.groups[ranks], "cpu")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    background = DcpSaver(rank.second[ranks])
    rank.kept.update(model=model, optimizer=optimizer, ranks=ranks, dcp=background)
    rank.kept["batch"] = torch.randn(BATCH, width)
    _step(rank)
    return 12 * layers * width**2 // ranks


def train(rank: Rank, *, contestant: str, directory: str, steps: int, every: int) -> dict[str, float]:
    """Seconds of ``steps`` steps with a save before every ``every``-th; medians over the saves of what each costs the trainer.

    ``call``: the saver's call. ``blocked``: that, and what the next step waits for the capture: all that training loses where the
    background has cores of its own. ``computed``: CPU time of the trainer's thread in the call. ``cpu``: of the whole process, until the
    last save is over.
    """
    group, saver = rank.groups[rank.kept["ranks"]], rank.kept["dcp"]
    tree = {"model": rank.kept["model"], "optimizer": rank.kept["optimizer"]}
    handle: Any = None
    costs: list[dict[str, float]] = []
    gc.collect()
    dist.barrier(group)
    cpu, began = cpu_seconds(), time.perf_counter()
    for number in range(steps):
        saves = number % every == 0 and contestant != "none"
        called, computed = time.perf_counter(), time.thread_time()
        if saves and contestant == "dcp":
            model, optimizer = get_state_dict(tree["model"], tree["optimizer"])
            handle = saver.save(f"{directory}-{number}", {"model": model, "optimizer": optimizer})
        elif saves:
            handle = ckpt.save_async(f"{directory}-{number}", tree, capture="lazy", job=ckpt.Job(process_group=group))
        call, computed = time.perf_counter() - called, time.thread_time() - computed
        blocked = call + _step(rank)
        if saves or contestant == "none":
            costs.append({"call": call, "blocked": blocked, "computed": computed})
    dist.barrier(group)
    seconds = time.perf_counter() - began
    if handle is not None:
        handle.result()
    ended = time.perf_counter() - began
    cpu = cpu_seconds() - cpu
    dist.barrier(group)
    return {"seconds": seconds, "cpu": cpu, "ended": ended, **medians(costs)}


def _step(rank: Rank) -> float:
    """One step of training; seconds that it waited for a capture."""
    loss = rank.kept["model"](rank.kept["batch"]).square().mean()
    loss.backward()
    began = time.perf_counter()
    ckpt.fence()  # the optimizer's step does it by itself; here it is timed
    waited = time.perf_counter() - began
    rank.kept["optimizer"].step()
    rank.kept["optimizer"].zero_grad()
    return waited
