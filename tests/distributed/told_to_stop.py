"""The job of ``test_under_torchrun.py``: a command and an example as torchrun starts them, then it trains until it is told to stop, and
ends with code 3 if it was not."""

from __future__ import annotations

import runpy
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

import ckpt
from ckpt.policies import AtSteps, OnPreemption

EXAMPLE = Path(__file__).parents[2] / "examples" / "async_training.py"


def others_first(folder: Path) -> None:
    """``ckpt verify`` divides its work over the processes; the example runs as its docstring has it, and its process group stays."""
    command = [sys.executable, "-m", "ckpt", "verify", "--json", str(folder / "verified")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    if done.stdout:
        (folder / "verified.json").write_text(done.stdout)
    arguments = [str(EXAMPLE), str(folder / "a"), "--steps", "8", "--every", "4"]
    with patch.object(sys, "argv", arguments), patch.object(dist, "destroy_process_group"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def main(run: str) -> int:
    others_first(Path(run).parent)
    state = {"x": torch.zeros(1000), "rank": ckpt.PerRank(dist.get_rank())}
    with ckpt.Checkpointer(run, save=AtSteps(7) | OnPreemption(), job=ckpt.Job(timeout=30)) as c:
        for step in range(1, 3000):
            part = torch.full((1000,), float(step))
            dist.all_reduce(part)
            state["x"] += part
            c.step(step, state)
            if c.preempted:
                print(f"rank {dist.get_rank()} ends after step {step}", flush=True)
                break
            if step == 10 and dist.get_rank() == 0:
                print("training", flush=True)
            time.sleep(0.02)
    left = not c.preempted
    dist.destroy_process_group()
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
