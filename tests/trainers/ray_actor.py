"""A run of two jobs: a trainer, and a replay buffer that is a Ray actor. After a save the actor's worker is killed, and the step that comes
then is given up; a new actor and the trainer go on from the one before, and so does a new Ray."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import ray
import torch

import ckpt
from ckpt.errors import ConflictError

from .lives import SAVED, Job, digests

MEMBERS = ("trainer", "buffer")


def member(url: str, name: str) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(url, member=ckpt.Member(name, of=MEMBERS), job=ckpt.Job(timeout=30))


class Buffer:
    """The buffer's side, in a worker of Ray."""

    def __init__(self, seed: int) -> None:
        self.state = {"prompts": [f"prompt {seed}"], "rewards": torch.full((4,), float(seed))}

    def pid(self) -> int:
        return os.getpid()

    def sample(self, n: int) -> torch.Tensor:
        self.state["prompts"].append(f"prompt {len(self.state['prompts'])} of step {n}")
        self.state["rewards"] = self.state["rewards"] * 0.5 + n
        return self.state["rewards"]

    def restore(self, url: str) -> int | None:
        self.c = member(url, "buffer")
        return self.c.restore(self.state)

    def save(self) -> int:
        while (n := self.c.requested()) is None:
            time.sleep(0.05)
        self.c.save(n, self.state)
        self.c.wait()
        return n

    def digests(self) -> dict[str, str]:
        return digests(self.state)


class Run(Job):
    """The trainer's side."""

    def __init__(self, seed: int) -> None:
        if not ray.is_initialized():
            ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        super().__init__({"model": self.model, "optimizer": self.optimizer}, self.learn)
        self.buffer: Any = ray.remote(Buffer).options(num_cpus=0).remote(seed)

    def learn(self, n: int) -> None:
        self.model(ray.get(self.buffer.sample.remote(n))).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digests(self) -> dict[str, str]:
        return super().digests() | {f"buffer{name}": text for name, text in ray.get(self.buffer.digests.remote()).items()}

    def _restored(self, url: str) -> tuple[ckpt.Checkpointer, list[int | None]]:
        c, theirs = member(url, "trainer"), self.buffer.restore.remote(url)
        return c, [c.restore(self.state), ray.get(theirs)]

    def save(self, url: str) -> None:
        c, steps = self._restored(url)
        assert steps == [None, None]
        theirs = self.buffer.save.remote()
        c.save(SAVED, self.state)
        c.wait()
        assert ray.get(theirs) == SAVED
        before = self.digests()
        self.learn(SAVED + 1)
        os.kill(ray.get(self.buffer.pid.remote()), signal.SIGKILL)
        c.save(SAVED + 1, self.state)
        with pytest.raises(ConflictError, match="buffer did not save it within 30 s"):
            c.close()
        assert [s.number for s in ckpt.list_steps(url) if s.committed] == [SAVED]
        self.buffer = ray.remote(Buffer).options(num_cpus=0).remote(0)
        self.load(url)
        assert self.digests() == before

    def load(self, url: str) -> None:
        c, steps = self._restored(url)
        assert steps == [SAVED, SAVED]
        c.close()


CASES = {"buffer-killed": Run}
