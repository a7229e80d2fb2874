"""``python -m benchmarks.memory_steps``: the speed of a training loop that saves every step into memory, over that of the loop without.

A perceptron with AdamW in one process with one computing thread. The two loops take turns, ``--rounds`` times ``--steps`` steps each, with
the same model. *wall* is what the mark is for; on a machine that others use it says little. *own* is the CPU time of the training's own
thread: what the calls compute in it. *all* is the CPU time of all threads of the process and of the daemon. *stall* is how long the loop
has waited for saves: in calls, and in steps of the optimizer for a capture.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import ckpt
from ckpt.memory import client
from ckpt.policies import EverySteps

MARK = 0.95
"""Least speed of the loop with saves, of that without."""


class Cost(NamedTuple):
    """Seconds of one turn of a loop."""

    wall: float
    own: float
    all: float


class Loop:
    """A model and its training."""

    def __init__(self, width: int, batch: int) -> None:
        self.model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(batch, width)
        self.steps = 0
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def run(self, steps: int, save: Callable[[int], object]) -> None:
        for _ in range(steps):
            self.model(self.batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
            save(self.steps)


def cpu_of(pid: int) -> float:
    """Seconds that another process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def cost(work: Callable[[], None], daemon: int) -> Cost:
    gc.collect()
    began = Cost(time.perf_counter(), time.thread_time(), time.process_time() + cpu_of(daemon))
    work()
    ended = Cost(time.perf_counter(), time.thread_time(), time.process_time() + cpu_of(daemon))
    return Cost(*(after - before for before, after in zip(began, ended, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024, help="of the 4 layers: 48 MiB of weights and moments at 1024")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=50, help="of one turn")
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loop = Loop(given.width, given.batch)
    daemon = client.connect()
    pid = int(daemon.status()["pid"])
    root = tempfile.mkdtemp()
    costs: dict[str, list[Cost]] = {"plain": [], "saves": []}
    try:
        with ckpt.Checkpointer(root, save=EverySteps(10**9), memory=ckpt.Memory(every=EverySteps(1), keep=2, copies=0)) as c:
            handles: list[ckpt.SaveHandle] = []

            def save(step: int) -> None:
                c.step(step, loop.state)
                if c.handle is not None:
                    handles.append(c.handle)

            loop.run(5, save)  # pages are made
            handles.clear()
            for _ in range(given.rounds):
                costs["plain"].append(cost(lambda: loop.run(given.steps, lambda step: None), pid))
                costs["saves"].append(cost(lambda: loop.run(given.steps, save), pid))
                c.wait()
            stall = sum(handle.stall.seconds for handle in handles)
        nbytes = sum(t.nbytes for t in (*loop.model.parameters(), *(t for s in loop.optimizer.state.values() for t in s.values())))
        print(f"{nbytes / 1e6:,.0f} MB of state, {given.rounds} × {given.steps} steps each; medians, ms a step")
        print(f"{'':8}{'wall':>9}{'own':>9}{'all':>9}")
        middle = {name: Cost(*(statistics.median(column) for column in zip(*rows, strict=True))) for name, rows in costs.items()}
        for name, row in middle.items():
            print(f"{name:8}" + "".join(f"{1e3 * seconds / given.steps:9.2f}" for seconds in row))
        speeds = [plain / saves for plain, saves in zip(middle["plain"], middle["saves"], strict=True)]
        print(f"{'speed':8}" + "".join(f"{speed:9.3f}" for speed in speeds) + f"   mark {MARK}")
        called = sum(handle.called for handle in handles)
        print(f"stall: {1e3 * stall / len(handles):.2f} ms a step, {1e3 * called / len(handles):.2f} of them in the call")
    finally:
        for known in daemon.list():
            if Path(root).name in known.path:
                daemon.delete(known.path)
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
