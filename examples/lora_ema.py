"""Trains a low-rank adapter over a frozen base and averages it; saves only what changes, and resumes over the base.

``python examples/lora_ema.py runs/lora``. Start it again and it goes on; the frozen base is written once.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import ckpt
from ckpt.io_backends.registry import join_url
from ckpt.policies import EverySteps, Latest
from ckpt.training import Average


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained product of low rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.lora_B(self.lora_A(x))
        return out


def batch_of(step: int) -> Tensor:
    return torch.randn(32, 128, generator=torch.Generator().manual_seed(step))


def train(run: str, steps: int, every: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LoraLinear(nn.Linear(128, 256), 4), nn.ReLU(), LoraLinear(nn.Linear(256, 128), 4))
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    ema = Average(model, 0.9)
    state = {"model": model, "optimizer": optimizer, "ema": ema}

    base = join_url(run, "base")
    with ckpt.Checkpointer(join_url(run, "steps"), save=EverySteps(every), keep=Latest(2), trainable=True) as c:
        if c.latest is None:
            ckpt.save(base, {"model": model}, only="*.base.*")
        ckpt.load(base, {"model": model}, only="*.base.*")  # the base first,
        start = c.restore(state) or 0  # then the newest part over it
        print(f"going on after step {start}")
        for step in range(start + 1, steps + 1):
            x = batch_of(step)
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update()
            c.step(step, state)
        c.wait()
        sizes = [saved.tensor_bytes for saved in c.steps() if saved.tensor_bytes is not None]

    with ema.swap(), torch.no_grad():  # evaluate with the averaged weights
        averaged = (model(batch_of(0)) - batch_of(0)).square().mean().item()
    whole = sum(p.nbytes for p in model.parameters())
    print(f"loss with the averaged weights {averaged:.6f}")
    print(f"parameters {whole:,} bytes; each checkpoint {max(sizes):,} bytes, with the optimizer and the average")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", help="directory or URL of the run")
    parser.add_argument("--steps", type=int, default=40, help="train up to this step")
    parser.add_argument("--every", type=int, default=10, help="steps between two saves")
    arguments = parser.parse_args()
    train(arguments.run, arguments.steps, arguments.every)


if __name__ == "__main__":
    main()
