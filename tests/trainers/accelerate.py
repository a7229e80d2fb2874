"""What ``Accelerator.prepare`` gives, on two ranks, then on one and three: in a state, and by ``ckpt.integrations.accelerate.use``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

from ckpt.integrations.accelerate import use

from .lives import Job


class Counted:
    """For ``register_for_checkpointing``."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def prepared(seed: int, plugin: Any = None) -> Job:
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    if plugin is not None:  # accelerate leaves it out on CPUs
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    counted = Counted()
    accelerator.register_for_checkpointing(counted)

    def step(number: int) -> None:
        accelerator.backward(model(torch.randn(4, 8) + accelerator.process_index).square().sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counted.steps += 1

    job = Job({"model": model, "optimizer": optimizer, "scheduler": scheduler, "counted": counted}, step)
    job.accelerator = accelerator  # type: ignore[attr-defined]
    return job


class Used(Job):
    """Saved and loaded by the accelerator's own methods; the random numbers go on too, so nothing is drawn anew."""

    def train(self, begin: int, end: int) -> None:
        for number in range(begin, end):
            self.step(number)

    def save(self, url: str) -> None:
        self.accelerator.save_state(url if self.named else None)  # type: ignore[attr-defined]
        self.checkpoints.checkpointer.wait()  # type: ignore[attr-defined]
        files = {file for _, _, files in os.walk(url) for file in files}
        assert not [file for file in files if file.endswith((".bin", ".pkl", ".pt", ".distcp"))], files

    def load(self, url: str) -> None:
        self.accelerator.load_state(url if self.named else None)  # type: ignore[attr-defined]


def used(*, named: bool, fsdp: bool = False) -> Callable[[int], Job]:
    """``named``: the call names the directory; else it is numbered, below the root."""

    def made(seed: int) -> Job:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True) if fsdp else None
        job = prepared(seed, plugin)
        assert isinstance(next(job.state["model"].parameters()), DTensor) == fsdp
        job.__class__, job.named = Used, named  # type: ignore[attr-defined]
        job.checkpoints = use(job.accelerator, f"used-{fsdp}")  # type: ignore[attr-defined]
        return job

    return made


CASES = {
    "prepared": prepared,
    "use-named": used(named=True),
    "use-numbered": used(named=False),
    "use-fsdp2": used(named=False, fsdp=True),
}
