"""huggingface/accelerate#3996: a job that resumes after an epoch gets the order of epoch 0 again. With a stateful loader ckpt does not
help: the loader's own state lacks the epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState, PartialState
from outcome import Outcomes, refused, show
from torch.utils.data import DataLoader

import ckpt


def job(*, stateful: bool) -> tuple[Accelerator, dict[str, Any]]:
    """As in a new process."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    torch.manual_seed(0)
    loading = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=stateful)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(range(100), shuffle=True))
    return accelerator, {"model": model, "loader": loader}


def order(state: dict[str, Any]) -> list[int]:
    """The samples of the next epoch."""
    return [int(sample) for sample in state["loader"]]


def play(folder: Path) -> Outcomes:
    accelerator, state = job(stateful=False)
    first = order(state)
    accelerator.save_state(folder / "accelerate")
    plain = refused(lambda: ckpt.save(folder / "plain", state))
    second = order(state)
    resumed, state = job(stateful=False)
    resumed.load_state(folder / "accelerate")
    elsewhere = "epoch 0 again, no warning" if first != second and order(state) == first else "mended"

    _, state = job(stateful=True)
    first = order(state)
    ckpt.save(folder / "stateful", state)
    _, state = job(stateful=True)
    ckpt.load(folder / "stateful", state)
    stateful = "epoch 0 again" if order(state) == first else "the next epoch"
    return elsewhere, plain and f"{plain}\n  a stateful loader: {stateful}"


if __name__ == "__main__":
    show(play, "accelerate", "torchdata")
