"""Writes the golden run with a checkpoint that refers to another: ``python -m tests.golden.generate_references v1-references``. Kept
beside what it wrote; run it for a new version only."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import ckpt

HERE = Path(__file__).parent


def tensors(step: int) -> dict[str, torch.Tensor]:
    """What each of the steps 1 to 3 holds: the codec of its save is in ``CODECS``."""
    return {
        "frozen": torch.arange(3000, dtype=torch.float32).reshape(50, 60) % 17,
        "half": (torch.arange(400) % 9).to(torch.bfloat16),
        "trained": torch.full((7, 3), float(step)),
        "scalar": torch.tensor(5, dtype=torch.int64),
    }


CODECS = {1: "zstd", 2: None, 3: "zstd"}


def main(name: str) -> None:
    """Write the three steps, each with the one before as its base."""
    state = tensors(1)
    for step, codec in CODECS.items():
        state["trained"].fill_(step)
        ckpt.save(HERE / name / f"step-{step}", state, codec=codec, reuse=step == 1 or HERE / name / f"step-{step - 1}")
        for spans in (HERE / name).glob("*/index-*/spans.json"):
            spans.unlink()


if __name__ == "__main__":
    main(sys.argv[1])
