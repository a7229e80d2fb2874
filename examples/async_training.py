"""Trains a small regression and saves in the background; started again, on any number of ranks, it resumes from the newest checkpoint.

``python examples/async_training.py runs/a``, or ``torchrun --nproc-per-node 2 examples/async_training.py runs/a``.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ckpt

BATCH = 64


def batch_of(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the batch of a step: the same numbers whenever the step is run."""
    x = torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(step))
    y = x.square().mean(dim=1, keepdim=True)
    return x.chunk(world)[rank], y.chunk(world)[rank]


def resume(run: str, state: dict[str, Any]) -> None:
    steps = [s for s in ckpt.list_steps(run) if s.committed]
    if steps:
        ckpt.load(max(steps, key=lambda s: s.number or 0).url, state)


def train(run: str, last: int, every: int, rank: int, world: int) -> None:
    torch.manual_seed(0)  # all ranks begin with the same model
    model = nn.Sequential(nn.Linear(32, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 1))
    averaged = copy.deepcopy(model)
    trained = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state: dict[str, Any] = {"model": model, "averaged": averaged, "optimizer": optimizer, "step": 0}
    resume(run, state)

    saving: ckpt.SaveHandle | None = None
    for step in range(state["step"] + 1, last + 1):
        x, y = batch_of(step, rank, world)
        loss = (trained(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # waits until a running save has its copy of the state
        ckpt.fence()  # the same for what is changed by hand; nothing is left to wait for here
        with torch.no_grad():
            for mean, now in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.1)
        if step % every == 0:
            state["step"] = step
            saving = ckpt.save_async(f"{run}/step-{step:08d}", state)  # waits for the save before this one, if that is not done
    if saving is not None:
        report = saving.result()  # raises what went wrong
        if rank == 0:
            print(f"saved {report.url}: {report.tensor_bytes:,} bytes of tensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", help="directory or URL of the run")
    parser.add_argument("--steps", type=int, default=40, help="train up to this step")
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    arguments = parser.parse_args()
    if not dist.is_torchelastic_launched():
        train(arguments.run, arguments.steps, arguments.every, 0, 1)
        return
    dist.init_process_group("gloo")
    try:
        train(arguments.run, arguments.steps, arguments.every, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
