"""Lightning Fabric on two ranks: what ``setup`` gives, saved by ckpt; and ``fabric.save`` with the plugin."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric

from ckpt.integrations.lightning import CkptIO

from .lives import Job, world


def job(seed: int, *, plugin: bool) -> Job:
    fabric = Fabric(accelerator="cpu", devices=world(), strategy="ddp" if world() > 1 else "auto", plugins=[CkptIO()] if plugin else None)
    fabric.launch()
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 8)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def step(number: int) -> None:
        fabric.backward(model(torch.randn(4, 8) + fabric.global_rank).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    made = Job({"model": model, "optimizer": optimizer}, step)
    if plugin:
        made.save = lambda url: fabric.save(url, made.state)  # type: ignore[method-assign]
        made.load = lambda url: fabric.load(url, made.state)  # type: ignore[assignment,method-assign,return-value]
    return made


CASES = {"setup": lambda seed: job(seed, plugin=False), "plugin": lambda seed: job(seed, plugin=True)}
