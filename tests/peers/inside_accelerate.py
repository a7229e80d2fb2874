"""Loaded by accelerate's own checkpoint tests: ``Accelerator.save_state`` and ``load_state`` go through ckpt.save and ckpt.load.

``PEERS_MODE=off`` changes nothing.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Sequence
from typing import Any

import accelerate.accelerator as accelerator
import numpy as np
import torch

import ckpt

_models: dict[str, list[Any]] = {}
"""Those saved to a directory: accelerate hands on their state dicts, ckpt names the state of optimizers by the modules."""


def _state(models: Sequence[Any], optimizers: Sequence[Any], schedulers: Sequence[Any], scaler: Any, step: int) -> dict[str, Any]:
    rng = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "step": step}
    state = {
        "models": list(models),
        "optimizers": [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers],
        "schedulers": list(schedulers),
        "rng": ckpt.PerRank(rng),
    }
    return state if scaler is None else state | {"scaler": scaler}


def save(
    output_dir: Any, states: Any, optimizers: Any, schedulers: Any, dataloaders: Any, rank: int, step: int, scaler: Any, **options: Any
) -> Any:
    ckpt.save(str(output_dir), _state(_models.pop(str(output_dir)), optimizers, schedulers, scaler, step))
    return output_dir


def load(
    input_dir: Any, models: Any, optimizers: Any, schedulers: Any, dataloaders: Any, rank: int, scaler: Any, *args: Any, **options: Any
) -> dict[str, Any]:
    state = _state(models, optimizers, schedulers, scaler, 0)
    ckpt.load(str(input_dir), state)
    rng = state["rng"].value
    random.setstate(rng["python"])
    np.random.set_state(rng["numpy"])
    torch.set_rng_state(rng["torch"])
    return {"step": rng["step"]}


def replace() -> None:
    accelerator.save_accelerator_state, accelerator.load_accelerator_state = save, load
    made = accelerator.Accelerator.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.register_save_state_pre_hook(lambda models, weights, output_dir: _models.update({str(output_dir): list(models)}))

    accelerator.Accelerator.__init__ = init


if os.environ.get("PEERS_MODE") != "off" and not getattr(accelerator, "_peers", False):
    accelerator._peers = True
    replace()
