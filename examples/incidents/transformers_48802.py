"""huggingface/transformers#48802: tensor parallelism cuts a fused weight, so a rank's rows are not contiguous, and DCP cannot save them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from outcome import Outcomes, on_ranks, show
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

import ckpt


def save_strided(folder: Path) -> None:
    """Each rank has its rows of the gate and its rows of the up projection."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    own = torch.arange(8.0).view(2, 2, 2)[:, rank].flatten()
    state = {"gate_up": DTensor.from_local(own, mesh, [_StridedShard(0, split_factor=2)])}
    try:
        dcp.save(state, checkpoint_id=folder / "dcp")
        outcome = "mended"
    except CheckpointException as err:
        outcome = "the save fails: overlapping chunks" if "overlapping chunks" in str(err) else f"the save fails: {err}"
    ckpt.save(folder / "ckpt", state)
    if rank == 0:
        (folder / "outcome").write_text(outcome)


def play(folder: Path) -> Outcomes:
    on_ranks(2, save_strided, folder)
    state = {"gate_up": torch.zeros(8)}
    ckpt.load(folder / "ckpt", state)
    return (folder / "outcome").read_text(), "saved, each row in its place" if torch.equal(state["gate_up"], torch.arange(8.0)) else ""


if __name__ == "__main__":
    show(play, "torch")
