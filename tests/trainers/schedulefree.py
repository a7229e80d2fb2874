"""Optimizers of schedulefree: the weights that are saved are those of the mode, ``train()`` or ``eval()``, which is a part of the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from schedulefree import AdamWScheduleFree, RAdamScheduleFree, SGDScheduleFree

from .lives import Job


def job(make: Callable[..., Any], *, evaluated: bool = False, **options: Any) -> Callable[[int], Job]:
    def made(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.Linear(8, 8)
        optimizer = make(model.parameters(), lr=1e-2, **options)

        def step(number: int) -> None:
            optimizer.train()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluated:
                optimizer.eval()

        return Job({"model": model, "optimizer": optimizer}, step)

    return made


CASES = {
    "adamw": job(AdamWScheduleFree, warmup_steps=3),
    "adamw-saved-in-eval": job(AdamWScheduleFree, evaluated=True),
    "radam": job(RAdamScheduleFree),
    "sgd": job(SGDScheduleFree, momentum=0.9),
}
