"""Averages of ema_pytorch: their updates write through ``.data``, which torch counts no change for."""

from __future__ import annotations

from typing import Any

import torch
from ema_pytorch import EMA, PostHocEMA

import ckpt

from .lives import SAVED, Job


def job(seed: int, make: Any, **options: Any) -> Job:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = make(model, **options)

    def step(number: int) -> None:
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()

    return Job({"model": model, "optimizer": optimizer, "ema": ema}, step)


def each_step(seed: int, **options: Any) -> Job:
    return job(seed, EMA, beta=0.9, update_after_step=0, update_every=1, **options)


def saved_in_the_background(seed: int) -> Job:
    """The average is updated before the save is done, between two steps: what is stored is of the moment of the call."""
    run = each_step(seed)

    def save(url: str) -> None:
        handle = ckpt.save_async(url, run.state)
        run.state["ema"].update()
        handle.result()

    run.save = save  # type: ignore[method-assign]
    return run


def post_hoc(seed: int) -> Job:
    return job(seed, PostHocEMA, sigma_rels=(0.05, 0.28), update_every=1, checkpoint_every_num_steps=10 * SAVED)


CASES = {
    "ema": each_step,
    "without-online-model": lambda seed: each_step(seed, include_online_model=False),
    "foreach": lambda seed: each_step(seed, use_foreach=True),
    "lazy-capture": saved_in_the_background,
    "post-hoc": post_hoc,
}
