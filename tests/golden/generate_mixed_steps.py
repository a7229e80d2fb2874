"""Writes the golden run whose saves leave experts out: ``python -m tests.golden.generate_mixed_steps v1-mixed-steps``. Kept beside what it
wrote; run it for a new version only."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import ckpt
from ckpt.policies import EverySteps, PartialExperts

HERE = Path(__file__).parent
STEPS = (100, 200, 300)
STALE = {
    100: {},
    200: {"layers.0.experts.1.w": 100, "layers.0.experts.3.w": 100, "layers.1.experts.0.w": 100, "layers.1.experts.2.w": 100},
    300: {"layers.0.experts.0.w": 200, "layers.0.experts.2.w": 200, "layers.1.experts.1.w": 200, "layers.1.experts.3.w": 200},
}
"""Of each step, the tensors that are of an earlier one, and which."""
STALE_ROWS = {100: {}, 200: {"layers.1.moe.experts.w": [100, None, 100, None]}, 300: {"layers.1.moe.experts.w": [None, 200, None, 200]}}
"""The same of the rows of a tensor that has all experts of a layer."""


def tensors(step: int) -> dict[str, torch.Tensor]:
    """What the job has at each step."""
    experts = {f"layers.{i}.experts.{e}.w": torch.full((6, 5), 10.0 * i + e + step) for i in range(2) for e in range(4)}
    stacked = torch.arange(4.0)[:, None, None] + torch.full((4, 3, 2), 100.0 + step)
    return {"gate": torch.arange(20, dtype=torch.float32) + step, "layers.1.moe.experts.w": stacked, **experts}


def main(name: str) -> None:
    """Write the three steps."""
    state = tensors(0)
    policy = PartialExperts(names="layers.*.experts.{expert}.*", experts=4, per_save=2)
    with ckpt.Checkpointer(HERE / name, save=EverySteps(1), partial_experts=policy, run_log=False) as checkpointer:
        for step in STEPS:
            for key, tensor in tensors(step).items():
                state[key].copy_(tensor)
            checkpointer.save(step, state)
            checkpointer.wait()
    for spans in (HERE / name).glob("*/index-*/spans.json"):
        spans.unlink()


if __name__ == "__main__":
    main(sys.argv[1])
