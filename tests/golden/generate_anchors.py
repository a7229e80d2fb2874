"""Writes the golden run with a checkpoint that is stored as differences: ``python -m tests.golden.generate_anchors v1-anchors``. Kept
beside what it wrote; run it for a new version only."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import ckpt

HERE = Path(__file__).parent


def tensors(step: int) -> dict[str, torch.Tensor]:
    """What steps 1 and 2 hold. Step 2 differs from 1 in the last bits of ``moved``, in nothing of ``same``, and in all of ``other``."""
    numbers = (torch.arange(12_000, dtype=torch.int32) * 40_503) % 9973
    return {
        "moved": (numbers.reshape(100, 120) * 3 + step * (numbers.reshape(100, 120) % 2)).to(torch.float32),
        "half": (numbers % 251 + (numbers % 5 == step).int()).to(torch.bfloat16),
        "same": numbers.to(torch.int64),
        "other": (numbers * 7919 % 60_013).to(torch.float64) / (step + 6),
        "small": torch.tensor([1.0, float(step)]),
    }


def main(name: str) -> None:
    """Write the anchor and the step after it."""
    state = tensors(1)
    ckpt.save(HERE / name / "step-1", state, codec="xor-planes-zstd")
    for key, tensor in tensors(2).items():
        state[key].copy_(tensor) if key != "same" else None
    ckpt.save(HERE / name / "step-2", state, codec="xor-planes-zstd", reuse=HERE / name / "step-1")
    for spans in (HERE / name).glob("*/index-*/spans.json"):
        spans.unlink()


if __name__ == "__main__":
    main(sys.argv[1])
