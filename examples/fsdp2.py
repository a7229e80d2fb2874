"""Trains with FSDP2 and saves in the background; started again, on any number of ranks, it resumes from the newest checkpoint.

``torchrun --nproc-per-node 2 examples/fsdp2.py runs/fsdp2``, then the same with ``--nproc-per-node 3 ... --steps 80``.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.policies import EverySteps, Latest, OnPreemption

BATCH = 48  # of all ranks together, so that a job on other ranks sees the same data


def batch_of(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the batch of a step."""
    x = torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(step))
    return x.chunk(world)[rank], x.square().mean(dim=1, keepdim=True).chunk(world)[rank]


def built(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose parameters lie in parts on all ranks, and its optimizer."""
    torch.manual_seed(0)  # all ranks begin with the same weights
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(run: str, steps: int, every: int, device: str = "cpu", pause: float = 0.0) -> float | None:
    """Train up to a step; gives the last loss of all ranks, or None if the run is at that step already."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = built(device)
    # Nothing says here how the tensors are cut: that is read from the DTensors which FSDP2 makes.
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "ranks": world}

    last = None
    with ckpt.Checkpointer(run, save=EverySteps(every) | OnPreemption(), keep=Latest(2)) as c:
        start = c.restore(state)  # each rank reads only what it needs, whatever ranks have saved it
        if rank == 0 and start is not None:
            print(f"resuming after step {start}: world size {state['ranks']} -> {world}", flush=True)
        state["ranks"] = world
        for step in range(1 if start is None else start + 1, steps + 1):
            x, y = (t.to(device) for t in batch_of(step, rank, world))
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(mean := loss.detach() / world)
            last = mean.item()
            if c.step(step, state, metrics={"loss": last}) and rank == 0:
                print(f"step {step}: loss {last:.6f}, saving", flush=True)
            if c.preempted:  # on all ranks after the same step, whichever rank got the signal
                if rank == 0:
                    print(f"stopping: step {step} is saved", flush=True)
                break
            time.sleep(pause)
    return last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", help="directory or URL of the run; all ranks must see the same storage")
    parser.add_argument("--steps", type=int, default=40, help="train up to this step")
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to rest after each step, to have time to kill it")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        loss = train(arguments.run, arguments.steps, arguments.every, device, arguments.pause)
        if dist.get_rank() == 0:
            print(f"last loss {loss:.6f}" if loss is not None else f"no steps left: --steps is {arguments.steps}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
