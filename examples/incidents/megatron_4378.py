"""NVIDIA/Megatron-LM#4378: with --ckpt-assume-constant-structure, what comes into the state later is left out of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from outcome import Outcomes, on_ranks, show
from torch.distributed.checkpoint import CheckpointException

import ckpt


def state(value: float, *, fault: bool) -> dict[str, Any]:
    """Once a fault is noticed, there is an object more."""
    rerun = {"rerun": ShardedObject("rerun_state_machine_state", {"at": torch.full((1,), value)}, (1,), (0,))}
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value)), **(rerun if fault else {})}


def save(folder: Path) -> None:
    torch.cuda.synchronize = torch.cuda.current_device = lambda *_: None  # Megatron asks for a GPU
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
    for number in (1, 2, 3):
        (folder / f"megatron-{number}").mkdir()
        now = state(number, fault=number == 3)
        dist_checkpointing.save(now, str(folder / f"megatron-{number}"), strategy, validate_access_integrity=number == 1)
        ckpt.save(folder / f"ckpt-{number}", now)
    try:
        dist_checkpointing.load(state(0, fault=True), str(folder / "megatron-3"))
        outcome = "mended"
    except CheckpointException as err:
        outcome = "saved, no warning; the load fails: missing key" if "Missing key" in str(err) else f"the load fails: {err}"
    (folder / "outcome").write_text(outcome)
    loaded = state(0, fault=True)
    ckpt.load(folder / "ckpt-3", loaded)
    (folder / "ours").write_text("loaded" if torch.equal(loaded["rerun"].data["at"], torch.full((1,), 3.0)) else "")


def play(folder: Path) -> Outcomes:
    on_ranks(1, save, folder)
    return (folder / "outcome").read_text(), (folder / "ours").read_text()


if __name__ == "__main__":
    show(play, "megatron-core")
