"""The example of resumable data: over three lives on one and two ranks every sample is used once per epoch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "examples" / "resumable_data.py"
ALONE = [sys.executable, str(SCRIPT)]
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]


def train(command: list[str], run: Path, steps: int) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*command, str(run), "--steps", str(steps)], env=env, capture_output=True, text=True, timeout=120)
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
    for command, last in ((ALONE, 5), (TWO_RANKS, 15), (ALONE, 25)):
        said = train(command, tmp_path, last)
        assert f"step {last}," in said
    flat = [n for step in used(tmp_path) for n in step]
    assert len(flat) == 25 * 48
    assert sorted(flat[:500]) == sorted(flat[500:1000]) == list(range(500))
    assert len(set(flat[1000:])) == 200
    assert "epoch 2, 200 of its samples" in said
