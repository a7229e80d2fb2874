"""What a rank does in ``test_killed_loops.py``: a small deterministic training job that the kernel ends at a moment chosen beforehand.

Its samples come from shuffled epochs, so that a position that is off by one shows; ranks share each batch and add up their gradients.
"""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist

import ckpt
from ckpt.policies import All, AtSteps, Best, EveryMinutes, EverySteps, KeepPolicy, Latest, OnPreemption, SavePolicy

STEPS = 48
SAMPLES, BATCH = 50, 4
"""Of an epoch; of all ranks together."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a run saves. All of its lives do alike."""

    save: SavePolicy
    keep: KeepPolicy
    options: dict[str, Any]

    @classmethod
    def at_random(cls, chance: random.Random) -> Plan:
        at = AtSteps(sorted(chance.sample(range(STEPS), 9)))
        save = chance.choice([EverySteps(1), EverySteps(3), EverySteps(7), at, EveryMinutes(0.0005), EverySteps(5) | EveryMinutes(0.0008)])
        keep = chance.choice([All(), Latest(1), Latest(2), Latest(1) | EverySteps(10), Best("loss", mode="min") | Latest(1)])
        options = {"capture": chance.choice(["lazy", "eager"]), "codec": chance.choice([None, "zstd"])}
        return cls(save=save | OnPreemption(), keep=keep, options=options)


@dataclass(frozen=True, kw_only=True)
class Life:
    """One start of the job: the step that it must go on from, when each rank is killed, and when one is told to stop (seconds)."""

    newest: int | None
    killed: tuple[float, ...] = ()
    told: float | None = None


def samples_of(step: int) -> list[int]:
    """Which samples make the batch of a step."""
    found = []
    for position in range(step * BATCH, (step + 1) * BATCH):
        epoch, place = divmod(position, SAMPLES)
        found.append(random.Random(epoch).sample(range(SAMPLES), SAMPLES)[place])
    return found


def expected() -> list[int]:
    """All samples of a whole run, in order."""
    return [sample for step in range(STEPS) for sample in samples_of(step)]


class Sampler:
    """Keeps its own place, as a data loader does: it is lost unless it is saved."""

    def __init__(self) -> None:
        self.epoch, self.place = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]

    def take(self, count: int) -> list[int]:
        found = []
        for _ in range(count):
            found.append(random.Random(self.epoch).sample(range(SAMPLES), SAMPLES)[self.place])
            self.place += 1
            if self.place == SAMPLES:
                self.epoch, self.place = self.epoch + 1, 0
        return found


def live(root: str, log: str, plan: Plan, life: Life) -> int:
    """Train, going on from the newest checkpoint; every loss goes into the log. Gives the last step that was trained."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if life.killed:
        signal.setitimer(signal.ITIMER_REAL, life.killed[rank])  # nothing handles it, so the process ends at whatever instruction it is
    if life.told is not None and rank == world - 1:
        Timer(life.told, os.kill, (os.getpid(), signal.SIGTERM)).start()
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(8, 200), torch.nn.Dropout(0.2), torch.nn.Linear(200, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler, seen = Sampler(), ckpt.PerRank([])
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler, "seen": seen, "losses": []}
    torch.manual_seed(100 + rank)
    state["rng"] = ckpt.PerRank(torch.get_rng_state())
    n = -1
    with ckpt.Checkpointer(root, save=plan.save, keep=plan.keep, job=ckpt.Job(timeout=8), **plan.options) as c:
        start = c.restore(state)
        assert start == life.newest, f"went on from {start}, but {life.newest} is the newest that is committed"
        torch.set_rng_state(state["rng"].value)
        for n in range(0 if start is None else start + 1, STEPS):
            mine = sampler.take(BATCH)[rank::world]
            loss = _train(model, optimizer, mine, world)
            seen.value = [*seen.value, *mine]
            state["rng"].value = torch.get_rng_state()
            state["losses"] = [*state["losses"], loss]
            if rank == 0:
                with Path(log).open("a") as file:
                    file.write(f"{n} {loss!r}\n")
            c.step(n, state, metrics={"loss": loss})
            if c.preempted:
                break
    signal.setitimer(signal.ITIMER_REAL, 0)
    return n


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: list[int], world: int) -> float:
    x = torch.stack([torch.randn(8, generator=torch.Generator().manual_seed(s)) for s in samples])
    loss = (model(x) - x).square().mean() / world
    optimizer.zero_grad()
    loss.backward()
    whole = loss.detach().clone()
    if world > 1:  # sums of two numbers: the same in any order
        for tensor in (whole, *(p.grad for p in model.parameters())):
            dist.all_reduce(tensor)
    optimizer.step()
    return float(whole)
