"""Trains with FSDP2 on 4 ranks, goes on with 3 and then with 6, and hands the state over in memory: no storage takes part.

``torchrun --nproc-per-node 6 examples/elastic_live.py``; with ``--through runs/elastic`` the same job saves and loads a checkpoint
instead. Both print the same losses, to the last bit.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ckpt
import ckpt.training

SIZES = (4, 3, 6)
"""How many ranks train, one after another. Ranks beyond wait, as spare machines do."""
BATCH = 48  # of all ranks together, so that a sample is the same whatever the number of ranks


@dataclass
class Training:
    """What a rank that trains has. ``taught`` counts samples; ``noise`` gives each rank numbers of its own."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    noise: torch.Generator
    taught: int = 0

    @classmethod
    def new(cls, mesh: DeviceMesh, seed: int) -> Training:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 250), nn.Tanh(), nn.Linear(250, 250), nn.Tanh(), nn.Linear(250, 1))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)  # 250 rows over 3, 4 and 6 ranks: parts of different sizes
        fully_shard(model, mesh=mesh)
        noise = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        return cls(model, torch.optim.AdamW(model.parameters(), lr=1e-3), noise)

    def state(self) -> dict[str, Any]:
        # A rank that is new draws from a stream derived of those that there were.
        noise = ckpt.training.Generators({"noise": self.noise})
        return {"model": self.model, "optimizer": self.optimizer, "noise": noise, "taught": self.taught}

    def step(self, mesh: DeviceMesh) -> str:
        """One step of all that train; the loss of the whole batch, exactly."""
        rank, count = mesh.get_local_rank(), mesh.size()
        data = torch.Generator().manual_seed(self.taught)
        x: Tensor = torch.randn(BATCH, 32, generator=data).chunk(count)[rank]
        noisy = x + 0.01 * torch.randn(x.shape, generator=self.noise)
        loss = (self.model(noisy) - x.square().mean(dim=1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.taught += BATCH
        mean = loss.detach().double() / count
        dist.all_reduce(mean, group=mesh.get_group())
        return float(mean).hex()


def train(steps: int, through: str | None = None) -> tuple[list[str], int]:
    """Train so many steps with each number of ranks; the losses, on ranks that trained last, and the bytes that ranks have sent."""
    # Process groups are made by all ranks together, whoever is in them.
    meshes = [DeviceMesh("cpu", torch.arange(count), mesh_dim_names=("dp",)) for count in SIZES]
    training: Training | None = None
    losses: list[str] = []
    sent = 0
    for number, mesh in enumerate(meshes):
        trains = dist.get_rank() < mesh.size()
        fresh = Training.new(mesh, seed=number) if trains else None
        if number > 0:
            # Ranks that leave have only an old state, newcomers only a new one; spare ranks have neither.
            old, new = (None if t is None else t.state() for t in (training, fresh))
            if through is None:
                sent += ckpt.live.reshard(old, new).bytes_sent
            else:
                _through_storage(f"{through}/{number}", old, new, meshes[number - 1], mesh)
            if fresh is not None and new is not None:
                fresh.taught = new["taught"]
        training = fresh
        if training is not None:
            losses += [training.step(mesh) for _ in range(steps)]
    return losses, sent


def _through_storage(url: str, old: dict[str, Any] | None, new: dict[str, Any] | None, before: DeviceMesh, after: DeviceMesh) -> None:
    if old is not None:
        ckpt.save(url, old, job=ckpt.Job(process_group=before.get_group()))
    dist.barrier()
    if new is not None:
        ckpt.load(url, new, job=ckpt.Job(process_group=after.get_group()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=5, help="steps with each number of ranks")
    parser.add_argument("--through", help="directory or URL: save and load there instead")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        losses, sent = train(given.steps, given.through)
        if dist.get_rank() == 0:
            for number, loss in enumerate(losses):
                print(f"step {number} on {SIZES[number // given.steps]} ranks: loss {float.fromhex(loss):.6f} ({loss})")
            print(f"rank 0 sent {sent:,} bytes to others" if given.through is None else f"went through {given.through}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
