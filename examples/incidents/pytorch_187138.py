"""pytorch/pytorch#187138: a load into a narrower dtype rounds the values."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from outcome import Outcomes, refused, show

import ckpt


def play(folder: Path) -> Outcomes:
    saved = {"w": torch.full((4,), 1 / 3)}
    state = {"w": torch.zeros(4, dtype=torch.bfloat16)}
    dcp.save(saved, checkpoint_id=folder / "dcp")
    dcp.load(state, checkpoint_id=folder / "dcp")
    ckpt.save(folder / "ckpt", saved)
    lost = not torch.equal(state["w"].float(), saved["w"])
    return "rounded, no warning" if lost else "mended", refused(lambda: ckpt.load(folder / "ckpt", state))


if __name__ == "__main__":
    show(play, "torch")
