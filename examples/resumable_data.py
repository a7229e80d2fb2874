"""Trains a small classifier with dropout on shuffled data; started again, on any number of ranks, it drops no sample and repeats none.

``python examples/resumable_data.py runs/a``, or ``torchrun --nproc-per-node 2 examples/resumable_data.py runs/a``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import ckpt
from ckpt.policies import EverySteps
from ckpt.training import Batches, Generators, ResumableLoader


class Points(Dataset[tuple[int, Tensor, Tensor]]):
    """Points of a plane, and in which quadrant each lies."""

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
        self.y = (self.x[:, 0] > 0).long() + 2 * (self.x[:, 1] > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]


def train(run: str, last: int, every: int, rank: int, world: int) -> None:
    torch.manual_seed(0)  # all ranks begin with the same model
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    trained = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = Points(500)
    batches = Batches(len(dataset), size=48, part=rank, parts=world)
    loader = ResumableLoader(DataLoader(dataset, batch_sampler=batches, generator=torch.Generator()))
    torch.manual_seed(100 + rank)  # each rank drops others
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "rng": Generators()}

    used = Path(run, f"used-{rank}.txt")
    with ckpt.Checkpointer(run, save=EverySteps(every)) as c:
        step = c.restore(state) or 0
        while step < last:
            for numbers, x, y in loader:
                step += 1
                loss = nn.functional.cross_entropy(trained(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with used.open("a") as file:
                    print(step, *numbers.tolist(), file=file)
                c.step(step, state)
                if step == last:
                    break
    if rank == 0:
        print(f"step {step}, epoch {loader.epoch}, {loader.taken} of its samples used: loss {loss.item():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", help="directory of the run; in used-<rank>.txt are the samples of each step")
    parser.add_argument("--steps", type=int, default=30, help="train up to this step")
    parser.add_argument("--every", type=int, default=5, help="steps between two saves")
    arguments = parser.parse_args()
    Path(arguments.run).mkdir(parents=True, exist_ok=True)
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
