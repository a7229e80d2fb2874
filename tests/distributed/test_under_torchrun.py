"""One job under a real torchrun: a command divides its work, an example trains on while it saves, and what is told to stop saves once more,
the same on all ranks, with the exit code of the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import ckpt
from tests.distributed.ranks import Ranks
from tests.test_examples import go_on_in_background

SLOW = pytest.mark.slow
JOB = Path(__file__).parent / "told_to_stop.py"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def told_to_stop(run: Path, log: Path, number: int, *, launcher: bool) -> int:
    """Run the job, give the signal to the launcher or to one rank; the launcher's exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(JOB), str(run)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(JOB.parents[2])}
    with log.open("wb") as out, subprocess.Popen(command, env=env, stdout=out, stderr=out) as job:
        try:
            end = time.monotonic() + 120
            while "training" not in log.read_text():
                assert job.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            os.kill(job.pid if launcher else children(job.pid)[-1], number)
            return job.wait(120)
        finally:
            for pid in [*children(job.pid), job.pid] if job.poll() is None else []:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the ranks")
@pytest.mark.parametrize(("number", "launcher", "code"), [(signal.SIGTERM, True, 1), pytest.param(signal.SIGUSR1, False, 0, marks=SLOW)])
def test_a_command_an_example_and_one_last_save(ranks: Ranks, tmp_path: Path, number: int, launcher: bool, code: int) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    tensors = {f"t{i}": torch.full((40, i + 1), float(i)) for i in range(6)}
    ckpt.save(str(tmp_path / "verified"), tensors)
    assert told_to_stop(run, log, number, launcher=launcher) == code, log.read_text()
    assert json.loads((tmp_path / "verified.json").read_text())["chunks"] == len(tensors)
    go_on_in_background(ranks, tmp_path)
    first, last = (s.number for s in ckpt.list_steps(str(run)) if s.committed)
    assert first == 7 and last is not None and last >= 10
    for rank in (0, 1):
        assert f"rank {rank} ends after step {last}" in log.read_text()
    view = ckpt.open(f"{run}/step-{last:08d}")
    assert view["x"].read().unique().tolist() == [sum(range(last + 1)) * 2]
