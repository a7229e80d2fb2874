"""Loaded by each file of Lightning's own checkpoint tests: every Trainer that is given no CheckpointIO has ckpt's.

What the tests themselves open with ``torch.load`` or Lightning's loader is a directory here, so both read that too: the tests look into the
checkpoints. ``PEERS_MODE=off`` changes nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.fabric.utilities.cloud_io as cloud_io
import lightning.pytorch.core.saving as saving
import lightning.pytorch.strategies.strategy as strategy
import torch

from ckpt.integrations.lightning import CkptIO


def is_ours(path: Any) -> bool:
    return isinstance(path, str | Path) and Path(path, "checkpoint.json").is_file()


def replace() -> None:
    load, load_file = torch.load, cloud_io._load

    def torch_load(path: Any, *args: Any, **kwargs: Any) -> Any:
        return CkptIO().load_checkpoint(path) if is_ours(path) else load(path, *args, **kwargs)

    def lightning_load(path: Any, *args: Any, **kwargs: Any) -> Any:
        return CkptIO().load_checkpoint(path) if is_ours(path) else load_file(path, *args, **kwargs)

    torch.load, cloud_io._load = torch_load, lightning_load
    saving.pl_load = lightning_load
    strategy.TorchCheckpointIO = CkptIO


if os.environ.get("PEERS_MODE") != "off" and not getattr(strategy, "_peers", False):
    strategy._peers = True
    replace()
