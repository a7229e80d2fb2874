"""The example of resumable data: over three lives on one and two ranks every sample is used once per epoch."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from tests.distributed.ranks import Ranks

SCRIPT = Path(__file__).parent.parent / "examples" / "resumable_data.py"


def train(run: str, last: int) -> str:
    """On a rank: what the script does under torchrun; gives what it prints."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(SCRIPT))["train"](run, last, 5, rank, world)
    return out.getvalue()


def run_script(run: Path, last: int) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(run), "--steps", str(last)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def used(run: Path) -> list[list[int]]:
    """The samples of each step, of all ranks."""
    steps: dict[int, dict[str, list[int]]] = {}
    for path in sorted(run.glob("used-*.txt")):
        for line in path.read_text().splitlines():
            step, *samples = map(int, line.split())
            steps.setdefault(step, {})[path.name] = samples
    return [[n for part in steps[step].values() for n in part] for step in sorted(steps)]


def test_every_sample_once(tmp_path: Path) -> None:
    ranks = Ranks(2)
    assert "step 5," in run_script(tmp_path, 5)
    assert "step 15," in ranks.run(2, train, str(tmp_path), 15)[0]
    last = ranks.run(1, train, str(tmp_path), 25, process_group=False)[0]
    assert "step 25, epoch 2, 200 of its samples" in last
    flat = [n for step in used(tmp_path) for n in step]
    assert len(flat) == 25 * 48
    assert sorted(flat[:500]) == sorted(flat[500:1000]) == list(range(500))
    assert len(set(flat[1000:])) == 200
