"""A training job that resumes exactly, and copies of it with one mistake each."""

from __future__ import annotations

import copy
import os
import random
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import ckpt
from ckpt.testing import observe
from ckpt.training import Average, Batches, Generators, ResumableLoader

LAST = 1000


class Samples(Dataset[tuple[int, torch.Tensor]]):
    """Numbered samples; ``noisy``: with noise of a generator that nobody has seeded, as a worker may have one."""

    def __init__(self, *, noisy: bool = False) -> None:
        self.noise = np.random.default_rng() if noisy else None

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        x = torch.full((4,), i / 10)
        return i, x if self.noise is None else x + torch.from_numpy(self.noise.normal(size=4).astype(np.float32))


def train(mistake: str = "") -> None:
    """Train until somebody ends it, or for ``LAST`` steps."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    model: torch.nn.Module = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    average = copy.deepcopy(model) if mistake == "average" else Average(model, 0.9)
    batches = Batches(24, size=6, part=rank, parts=world)
    loader: Any = ResumableLoader(DataLoader(Samples(noisy=mistake == "worker"), batch_sampler=batches, generator=torch.Generator()))
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "rng": Generators(mesh={"dp": world}, distinct=()),
    }
    if isinstance(average, Average):
        state["average"] = average
    for key in {"scheduler": ["scheduler"], "rng": ["rng"], "loader": ["loader"], "optimizer": ["optimizer"]}.get(mistake, []):
        del state[key]
    step_model = DistributedDataParallel(model) if world > 1 else model
    with ckpt.Checkpointer("runs/a") as c:
        n = 0 if mistake == "restore" else c.restore(state) or 0
        while n < LAST:
            for numbers, x in loader:
                n += 1
                random.random()  # nobody has seeded it
                x = x + 0.01 * torch.randn(1)
                loss = (step_model(x) - x.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                if isinstance(average, Average):
                    average.update()
                else:
                    with torch.no_grad():
                        for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                            mean.lerp_(p, 0.1)
                observe("samples", numbers)
                c.step(n, state, metrics={"loss": loss.item()})
                if n >= LAST:
                    break


def silent() -> None:
    """Goes wrong on two ranks, and has no metrics that would show it."""
    with ckpt.Checkpointer("run") as c:
        begin = c.restore(state := {"x": torch.zeros(2)}) or 0
        for n in range(begin + 1, 4):
            state["x"] += 9 if os.environ["WORLD_SIZE"] == "2" else 1
            c.step(n, state)


def failing() -> None:
    raise OSError("no such data")


job = {mistake: partial(train, mistake) for mistake in ("", "scheduler", "rng", "loader", "optimizer", "average", "worker", "restore")}


if __name__ == "__main__":
    import sys

    train(*sys.argv[1:])
