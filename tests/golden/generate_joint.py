"""Writes the golden run of two members: ``python -m tests.golden.generate_joint v1-joint``. Kept beside what it wrote; run it for a new
version only."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import ckpt

HERE = Path(__file__).parent
MEMBERS = ("trainer", "buffer")


def state(member: str, step: int) -> dict[str, Any]:
    """What a member has saved at steps 1 and 2."""
    return {"own": torch.arange(6, dtype=torch.int32) * step + len(member), "name": member, "queue": [step, b"\x00\xff", "é"]}


def write(root: str, member: str) -> None:
    with ckpt.Checkpointer(root, member=ckpt.Member(member, of=MEMBERS), job=ckpt.Job(timeout=60)) as c:
        c.restore(state(member, 0))
        for step in (1, 2):
            c.save(step, state(member, step))
            c.wait()


def main(name: str) -> None:
    """Save both steps, and leave out what no reader needs."""
    root = HERE / name
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda member: write(str(root), member), MEMBERS))
    for path in (*root.glob("*/*/index-*/spans.json"), *root.glob("*/ckpt-log.json"), root / "requested.json"):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1])
