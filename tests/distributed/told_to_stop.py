"""The job of ``test_under_torchrun.py``: trains until it is told to stop, and ends with code 3 if it was not."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import ckpt
from ckpt.policies import AtSteps, OnPreemption


def main(run: str) -> int:
    dist.init_process_group("gloo")
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
