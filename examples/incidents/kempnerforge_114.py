"""KempnerInstitute/KempnerForge#114: AdamW of a job that resumes has no moments yet, so DCP loads none: they begin at zero again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from outcome import Outcomes, show

import ckpt


def job() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def step(job: dict[str, Any]) -> torch.Tensor:
    job["model"](torch.ones(4)).square().sum().backward()
    job["optimizer"].step()
    job["optimizer"].zero_grad()
    return job["model"].weight.detach().clone()


def state_of(job: dict[str, Any]) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in job.items()}


def play(folder: Path) -> Outcomes:
    saved, resumed, ours = job(), job(), job()
    step(saved)
    dcp.save(state_of(saved), checkpoint_id=folder / "dcp")
    ckpt.save(folder / "ckpt", saved)
    state = state_of(resumed)
    with warnings.catch_warnings(record=True) as caught:
        dcp.load(state, checkpoint_id=folder / "dcp")
    for name, part in resumed.items():
        part.load_state_dict(state[name])
    ckpt.load(folder / "ckpt", ours)
    lost = not resumed["optimizer"].state and not any("optimizer" in str(warning.message) for warning in caught)
    weights = step(saved)
    same = torch.equal(step(ours), weights)
    return "moments lost, no warning" if lost and not torch.equal(step(resumed), weights) else "mended", (
        "the next step is the same to the last bit" if same else ""
    )


if __name__ == "__main__":
    show(play, "torch")
