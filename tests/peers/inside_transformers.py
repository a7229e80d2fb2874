"""Loaded by transformers' own checkpoint tests: every Trainer that trains is given to ``use``, with its ``output_dir`` as the root.

What the tests look up in a checkpoint directory is asked of ckpt. ``PEERS_MODE=off`` changes nothing.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import torch
from transformers import Trainer, TrainerState

import ckpt
from ckpt.engine.verify import verify
from ckpt.integrations.transformers import use


def check_saved(output_dir: str, freq: int, total: int, *args: Any, **kwargs: Any) -> None:
    """In place of ``check_saved_checkpoints``, which lists files: each step is there, and every byte of it is right."""
    there = {step.number: step for step in ckpt.list_steps(str(output_dir))}
    for number in range(freq, total, freq):
        assert verify(there[number].url).ok
        saved = ckpt.open(there[number].url).state()
        assert {"model", "optimizer", "scheduler", "rng", "trainer"} <= saved.keys()


def trainer_state(url: str) -> TrainerState:
    """In place of ``TrainerState.load_from_json`` of a file in the checkpoint."""
    return TrainerState(**json.loads(ckpt.open(url).state()["trainer"]))


def last_step(output_dir: str) -> str:
    """In place of ``get_last_checkpoint``."""
    return str(ckpt.list_steps(str(output_dir))[-1].url)


def weights(path: str) -> dict[str, torch.Tensor]:
    """In place of ``load_file`` of a checkpoint's ``model.safetensors``."""
    view = ckpt.open(os.path.dirname(path))
    return {name.removeprefix("model."): view[name].read() for name in view if name.startswith("model.")}


def replace() -> None:
    own = Trainer.train

    @functools.wraps(own)
    def train(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self, "_peers"):
            return own(self, *args, **kwargs)
        self._peers = use(self, str(self.args.output_dir))
        return self.train(*args, **kwargs)

    Trainer.train = train


if os.environ.get("PEERS_MODE") != "off" and not hasattr(Trainer, "_peers_replaced"):
    Trainer._peers_replaced = True
    replace()
