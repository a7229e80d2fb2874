"""pytorch/pytorch#156846: a job that resumes with another learning rate gets the saved one. ckpt does not help: the rate is state."""

from __future__ import annotations

from pathlib import Path

import torch
from outcome import Outcomes, show

import ckpt


def job(rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([("w", torch.nn.Parameter(torch.ones(4)))], lr=rate)


def outcome(optimizer: torch.optim.Optimizer) -> str:
    return "the saved rate, no warning" if optimizer.param_groups[0]["lr"] == 1e-3 else "mended"


def play(folder: Path) -> Outcomes:
    saved, state, ours = job(1e-3), job(1e-4), job(1e-4)
    torch.save(saved.state_dict(), folder / "optimizer.pt")
    state.load_state_dict(torch.load(folder / "optimizer.pt"))
    ckpt.save(folder / "ckpt", {"optimizer": saved})
    ckpt.load(folder / "ckpt", {"optimizer": ours})
    return outcome(state), outcome(ours)


if __name__ == "__main__":
    show(play, "torch")
