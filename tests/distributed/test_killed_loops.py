"""A training job that is killed at random moments, again and again, on one to three ranks: it goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from ckpt.policies import EverySteps, Latest
from tests.distributed.ranks import Lost, Ranks

STEPS = 40
KILLS = 14


def model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def one_step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, n: int) -> float:
    """The same on all ranks, whatever their number, so that the losses can be compared."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(n))
    loss = (net(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def reference() -> list[float]:
    net, optimizer = model()
    return [one_step(net, optimizer, n) for n in range(STEPS)]


def job(root: str, log: str, kill_after: float | None, victim: int) -> int:
    """Go on from the newest checkpoint; leave each loss in a file of its own. Gives the step that it went on from."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if kill_after is not None and rank == victim:
        threading.Timer(kill_after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    net, optimizer = model()
    state: dict[str, Any] = {"model": net, "optimizer": optimizer, "samples": []}
    with ckpt.Checkpointer(root, save=EverySteps(3), keep=Latest(2), timeout=8) as c:
        start = c.restore(state)
        first = 0 if start is None else start + 1
        assert state["samples"] == list(range(first))
        for n in range(first, STEPS):
            loss = one_step(net, optimizer, n)
            state["samples"].append(n)
            if rank == 0:
                Path(log, f"{n}").write_text(repr(loss))
            c.step(n, state)
    return first


def test_killed_again_and_again(ranks: Ranks, tmp_path: Path) -> None:
    chance = random.Random(11)
    root, log = str(tmp_path / "run"), tmp_path / "log"
    log.mkdir()
    died, starts = 0, []
    for _ in range(KILLS):
        world = chance.choice([1, 1, 2, 3])
        found = ranks.run(world, job, root, str(log), chance.uniform(0.02, 0.5), chance.randrange(world), allow_death=True, timeout=60)
        died += any(isinstance(f, Lost) for f in found)
        starts += [f for f in found if isinstance(f, int)]
        steps = ckpt.list_steps(root)
        for step in steps:
            assert step.committed or not step.damaged
        if len([s for s in steps if s.committed]) and steps[-1].number == STEPS - 1:
            break
    (last, *_) = ranks.run(1, job, root, str(log), None, 0)
    assert died >= 1, "the test was meant to kill"
    assert last > 0 or not starts
    assert [float((log / f"{n}").read_text()) for n in range(STEPS)] == reference()
