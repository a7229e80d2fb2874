"""Trains with tensor parallelism inside FSDP2, and resumes with any other mesh sizes.

``torchrun --nproc-per-node 4 examples/tp_fsdp2.py runs/tp --tp 2``, then ``torchrun --nproc-per-node 2 ... --tp 1 --steps 40``.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckpt
from ckpt.policies import EverySteps, Latest

BATCH, DIM, HIDDEN, BLOCKS = 32, 32, 128, 2


class Block(nn.Module):
    """x + down(relu(up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def built(mesh: DeviceMesh) -> nn.Module:
    """The model, cut over ``tp`` and then over ``dp``."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(mesh.device_type)
    for block in model:
        # The norm is not cut by tensor parallelism: every tp rank has it. That is read from the tensors too.
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def train(run: str, steps: int, every: int, tp: int, device: str = "cpu") -> list[float]:
    """Train up to a step; gives the losses."""
    mesh = init_device_mesh(device, (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    model = built(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "mesh": str(dict(zip(("dp", "tp"), mesh.shape, strict=True)))}

    dp, losses = mesh["dp"], []
    with ckpt.Checkpointer(run, save=EverySteps(every), keep=Latest(2)) as c:
        now = state["mesh"]
        start = c.restore(state)
        if dist.get_rank() == 0 and start is not None:
            print(f"resuming after step {start}, saved from the mesh {state['mesh']}, on {now}", flush=True)
        state["mesh"] = now
        for step in range(1 if start is None else start + 1, steps + 1):
            # Ranks that differ in tp only get the same data.
            x = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(step)).chunk(dp.size())[dp.get_local_rank()].to(device)
            loss = (model(x) - x.roll(1, dims=1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=dp.get_group())
            losses.append(mean.item() / dp.size())
            if c.step(step, state) and dist.get_rank() == 0:
                print(f"step {step}: loss {losses[-1]:.6f}, saving", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", help="directory or URL of the run")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share each layer; the others share the data")
    parser.add_argument("--steps", type=int, default=20, help="train up to this step")
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        train(arguments.run, arguments.steps, arguments.every, arguments.tp, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
