"""A model sharded by hand, like Megatron-LM: its tensors are plain, and a ckpt.Layout describes how they are sharded.

``torchrun --nproc-per-node 4 examples/megatron_style.py runs/m --tp 2``, then ``torchrun --nproc-per-node 1 ... --tp 1 --steps 40``.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ckpt
from ckpt import Layout, Padded, Replicate, Shard
from ckpt.policies import EverySteps, Latest

VOCABULARY, DIM, HIDDEN, BATCH = 50, 16, 64, 32


def layout_of(mesh: DeviceMesh) -> Layout:
    """Where the parts belong. The first rule that matches a name decides; the optimizer's state follows its parameters."""
    dp, tp = mesh.shape
    return Layout(
        {"dp": dp, "tp": tp},
        rules=[
            ("*embedding", Shard(0, "tp"), Padded(0, VOCABULARY)),  # rows of the vocabulary, padded so that every rank has as many
            ("*up.*", Shard(0, "tp")),  # column-parallel: weight and bias are cut along the outputs
            ("*down.weight", Shard(1, "tp")),  # row-parallel: cut along the inputs
            ("*", Replicate()),  # all else is whole on every rank
        ],
    )


class SumOverRanks(torch.autograd.Function):
    """Adds the parts of an output that the ranks of a group have; each part's gradient is the whole one."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class SameOnRanks(torch.autograd.Function):
    """Passes on an input that all ranks of a group have; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class Part(nn.Module):
    """This rank's part of: embedding, up, relu, down."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group, self.rank = mesh.get_group("tp"), mesh.get_local_rank("tp")
        tp = mesh.size(1)
        generator = torch.Generator().manual_seed(0)  # the same whole weights, whatever the number of ranks
        whole = {"embedding": (VOCABULARY, DIM), "up": (HIDDEN, DIM), "down": (DIM, HIDDEN)}
        drawn = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in whole.items()}
        rows = -(-VOCABULARY // tp)
        padded = torch.cat([drawn["embedding"], torch.zeros(rows * tp - VOCABULARY, DIM)])
        self.embedding = nn.Parameter(padded.chunk(tp)[self.rank].clone())
        self.up, self.down = nn.Linear(DIM, HIDDEN // tp), nn.Linear(HIDDEN // tp, DIM)
        with torch.no_grad():
            self.up.weight.copy_(drawn["up"].chunk(tp)[self.rank])
            self.down.weight.copy_(drawn["down"].chunk(tp, dim=1)[self.rank])
            self.up.bias.zero_()
            self.down.bias.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        mine = tokens - self.rank * len(self.embedding)
        held = (mine >= 0) & (mine < len(self.embedding))
        x = SumOverRanks.apply(self.embedding[mine.where(held, 0)] * held.unsqueeze(1), self.group)
        y = torch.relu(self.up(SameOnRanks.apply(x, self.group))) @ self.down.weight.T
        return SumOverRanks.apply(y, self.group) + self.down.bias


def train(run: str, steps: int, every: int, tp: int) -> list[float]:
    """Train up to a step; gives the losses."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    model = Part(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}

    losses = []
    with ckpt.Checkpointer(run, save=EverySteps(every), keep=Latest(2), layout=layout_of(mesh)) as c:
        start = c.restore(state)
        if dist.get_rank() == 0 and start is not None:
            print(f"resuming after step {start} with tp={tp}: {len(model.embedding)} of {VOCABULARY} words on each rank", flush=True)
        for step in range(1 if start is None else start + 1, steps + 1):
            # Every data-parallel rank takes the same batch here, so there are no gradients to add up.
            tokens = torch.randint(VOCABULARY, (BATCH,), generator=torch.Generator().manual_seed(step))
            loss = (model(tokens) - torch.sin(tokens.unsqueeze(1) * torch.arange(1, DIM + 1) / 7)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if c.step(step, state) and dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.6f}, saving", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", help="directory or URL of the run")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share each layer")
    parser.add_argument("--steps", type=int, default=20, help="train up to this step")
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        train(arguments.run, arguments.steps, arguments.every, arguments.tp)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
