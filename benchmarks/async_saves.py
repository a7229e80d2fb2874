"""The scenario ``async``: for how long saves in the background keep a trainer waiting, and how much they slow a training loop down."""

from __future__ import annotations

import gc
import importlib
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
from .contestants import CONTESTANTS as KNOWN
from .contestants import Job
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
CONTESTANTS = ("memcpy", "ckpt eager", "ckpt lazy", "dcp")

Samples = dict[str, list[dict[str, float]]]


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """Seconds that the trainer waits for a save, beside one copy of the rank's bytes into memory that is warm."""
    n = settings.ranks
    pool.run(tasks.prepare, on=n, recipe=Recipe(kind="sharded", ranks=n, size=settings.size * n))
    pool.run(settle, on=n)
    samples: Samples = {c: [] for c in CONTESTANTS}
    for repetition, contestant in turns(CONTESTANTS, settings.repeat):
        directory = place.fresh(contestant)
        ranks = pool.run(block, on=n, contestant=contestant, directory=directory)
        found = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
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
    title = f"the trainer waits, ranks {n}, {place.label}, {settings.size / 1e6:,.0f} MB per rank"
    columns = ("", "call s", "copies", "CPU s", "copies", "call and step s", "copies", "durable s")
    figures = {"place": place.label, "medians": mine, "samples": samples}
    return [Finding(scenario="async", title=title, columns=columns, rows=rows, figures=figures, checks=checks)]


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
    if "manager" in rank.kept:
        rank.kept["manager"].close()
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
    local_job(rank)
    return 12 * layers * width**2 // ranks


def train(rank: Rank, *, contestant: str, directory: str, steps: int, every: int) -> dict[str, float]:
    """Seconds of ``steps`` steps with a save before every ``every``-th; medians over the saves of what each costs the trainer.

    ``call``: the saver's call. ``blocked``: that, and what the next step waits for the capture: all that training loses where the
    background has cores of its own. ``computed``: CPU time of the trainer's thread in the call. ``cpu``: of the whole process, until the
    last save is over.
    """
    group, saver = rank.groups[rank.kept["ranks"]], rank.kept["dcp"]
    tree = {"model": rank.kept["model"], "optimizer": rank.kept["optimizer"]}
    acts: dict[str, Callable[[str], Any]] = {
        "ckpt lazy": lambda directory: ckpt.save_async(directory, tree, capture="lazy", job=ckpt.Job(process_group=group)),
        "dcp": lambda directory: saver.save(directory, dcp_state(rank)),
        "raw": lambda directory: KNOWN["raw"].save(local_job(rank), directory) or None,
        "torch_checkpointing": lambda directory: manager(rank).save(directory, {"state": local_job(rank).state.local}),
    }
    handle: Any = None
    costs: list[dict[str, float]] = []
    gc.collect()
    dist.barrier(group)
    cpu, began = cpu_seconds(), time.perf_counter()
    for number in range(steps):
        saves = number % every == 0 and contestant != "none"
        called, computed = time.perf_counter(), time.thread_time()
        if saves:
            handle = acts[contestant](f"{directory}-{number}")
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


def dcp_state(rank: Rank) -> dict[str, Any]:
    """The training as DCP takes it."""
    model, optimizer = get_state_dict(rank.kept["model"], rank.kept["optimizer"])
    return {"model": model, "optimizer": optimizer}


def local_job(rank: Rank) -> Job:
    """The training as contestants take it that know this rank's memory alone."""
    names = {param: name for name, param in rank.kept["model"].named_parameters()}
    local = {name: param.detach().to_local() for param, name in names.items()}
    for param, values in rank.kept["optimizer"].state.items():
        local |= {f"{names[param]}.{key}": values[key].to_local() for key in ("exp_avg", "exp_avg_sq")}
    if "sizes" not in rank.kept:
        rank.kept["sizes"] = [0] * rank.kept["ranks"]
        dist.all_gather_object(rank.kept["sizes"], sum(tensor.nbytes for tensor in local.values()), group=rank.groups[rank.kept["ranks"]])
    sizes = rank.kept["sizes"]
    state = State(tree={}, local=local, replicated=False, start=sum(sizes[: rank.number]), total=sum(sizes), digests={})
    return Job(state=state, group=rank.groups[rank.kept["ranks"]], rank=rank.number, ranks=rank.kept["ranks"])


def manager(rank: Rank) -> Any:
    """torch_checkpointing's, which writes in a process of its own; without ``O_DIRECT``."""
    if "manager" not in rank.kept:
        tc = importlib.import_module("torch_checkpointing")
        config = tc.CheckpointManager.Config.with_async_save()
        storage = importlib.import_module("torch_checkpointing.storage.filesystem")
        config.storage_config = storage.LocalFileSystemStorageConfig(use_direct_io=False)
        rank.kept["manager"] = config.build()
    return rank.kept["manager"]


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
