"""Loaders that ``Accelerator.prepare`` gives: one has a place in the data only if accelerate was told to keep it."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

from .lives import Job


def with_loader(seed: int, *, stateful: bool) -> Job:
    """The batches that are drawn go into the weights, so that losing the place in the data shows."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=stateful))
    data = torch.arange(64.0).reshape(64, 1)
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=2))
    weight = torch.full((2, 1), float(seed))
    batches = None

    def step(number: int) -> None:
        nonlocal batches
        batches = batches or iter(loader)
        weight.mul_(0.5).add_(next(batches))

    job = Job({"weight": weight, "loader": loader}, step)
    job.digests = lambda: {"weight": repr(weight.tolist())}  # type: ignore[method-assign]
    return job


CASES = {"loader": lambda seed: with_loader(seed, stateful=False), "stateful-loader": lambda seed: with_loader(seed, stateful=True)}
