"""pytorch/pytorch#191398: a save over a checkpoint, one rank of which dies, leaves half of the old one and half of the new one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from outcome import Outcomes, on_ranks, show
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import ckpt


def rows(value: float) -> dict[str, Any]:
    return {"w": DTensor.from_local(torch.full((4,), value), init_device_mesh("cpu", (2,)), [Shard(0)])}


def save_and_die(folder: Path) -> None:
    """Both ranks save; in the second save, rank 1 is killed before it writes."""

    def killed(*_: object) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    dcp.save(rows(1.0), checkpoint_id=folder / "dcp")
    ckpt.save(folder / "ckpt", rows(1.0))
    write_data = FileSystemWriter.write_data
    FileSystemWriter.write_data = lambda *args: (killed(), write_data(*args))[1]  # type: ignore[method-assign, assignment, return-value]
    if folder.name == "dcp":
        dcp.save(rows(2.0), checkpoint_id=folder / "dcp")
    killed()
    ckpt.save(folder / "ckpt", rows(2.0), job=ckpt.Job(timeout=20))


def play(folder: Path) -> Outcomes:
    outcomes = []
    for name, load in (("dcp", lambda path, state: dcp.load(state, checkpoint_id=path)), ("ckpt", ckpt.load)):
        (folder / name).mkdir()
        on_ranks(2, save_and_die, folder / name)
        state = {"w": torch.zeros(8)}
        load(folder / name / name, state)
        outcomes.append(f"loaded {sorted(set(state['w'].tolist()))}")
    elsewhere, ours = outcomes
    torn = elsewhere == "loaded [1.0, 2.0]"
    return f"{'' if torn else 'mended: '}{elsewhere}; the save warns that it overwrites", ours if ours == "loaded [1.0]" else ""


if __name__ == "__main__":
    show(play, "torch")
