"""For how long a save in the background keeps the trainer from going on, and what it costs a training loop. Runs on the ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ckpt

from .findings import medians
from .measure import cpu_seconds
from .pool import Rank
from .states import State

When = Literal["lazy", "eager"]
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
        "ckpt eager": lambda: ckpt.save_async(directory, state.tree, capture="eager", process_group=group),
        "ckpt lazy": lambda: ckpt.save_async(directory, state.tree, process_group=group),
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
            handle = ckpt.save_async(f"{directory}-{number}", tree, capture="lazy", process_group=group)
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
