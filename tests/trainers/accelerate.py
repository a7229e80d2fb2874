"""What ``Accelerator.prepare`` gives, on two ranks, then on one and three."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from .lives import Job


def prepared(seed: int) -> Job:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def step(number: int) -> None:
        accelerator.backward(model(torch.randn(4, 8) + accelerator.process_index).square().sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return Job({"model": model, "optimizer": optimizer, "scheduler": scheduler}, step)


CASES = {"prepared": prepared}
