"""Fits of Ray Train, sharded over their workers: one whose worker is killed, which four take up, and one that is saved since Ray says that
it loses a node. Each reports its checkpoints, after their commit."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.integrations.ray_train import RayCheckpointer
from ckpt.policies import AtSteps, SavePolicy

from .lives import SAVED, Job, digests

NEVER = 1000
WHOLE: dict[int, dict[str, str]] = {}
"""What a fit comes to that nothing interrupts, by its steps."""


def loop(config: dict[str, Any]) -> None:
    """What a worker does."""
    torch.manual_seed(3)
    model = torch.nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    if config["lost"]:  # as Ray says it on a cluster whose node is drained
        info = train.PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"node": [1]})
        train.get_preemption_info = lambda: info if len(steps) == SAVED else None
    policy: SavePolicy = AtSteps(NEVER if config["lost"] else SAVED)
    steps: list[int] = []
    with RayCheckpointer(config["root"], save=policy, look_every=1, job=ckpt.Job(timeout=60)) as c:
        start = c.restore(state)
        for n in range(1 if start is None else start + 1, config["steps"] + 1):
            model(torch.full((2, 8), float(n))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(n)
            c.step(n, state, metrics={"loss": float(n)})
            if n == config["dies"] and start is None:
                c.wait()
                torch.distributed.barrier()
                if torch.distributed.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
        c.wait()
        made = digests(state)
        if torch.distributed.get_rank() == 0:
            Path(config["result"]).write_text(json.dumps({"start": start, "digests": made, "steps": [s.number for s in c.steps()]}))


class Fit(Job):
    """``then``: workers that go on. ``lost``: a node is."""

    def __init__(self, seed: int, *, then: int = 2, lost: bool = False) -> None:
        self.folder, self.workers, self.steps, self.then, self.lost = tempfile.mkdtemp(), 2, 0, then, lost
        self.again = False
        if not ray.is_initialized():
            ray.init(num_cpus=6, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)

    def train(self, begin: int, end: int) -> None:
        self.steps = end

    def fit(self, kept: int | None = None, **config: Any) -> dict[str, Any]:
        root, result = f"{self.folder}/fit/steps", f"{self.folder}/result.json"
        fit = TorchTrainer(
            loop,
            train_loop_config={"root": root, "result": result, "steps": self.steps, "dies": 0, "lost": False, **config},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=train.ScalingConfig(num_workers=self.workers),
            run_config=train.RunConfig(
                storage_path=self.folder,
                name="fit",
                failure_config=train.FailureConfig(max_failures=1),
                checkpoint_config=train.CheckpointConfig(num_to_keep=kept),
            ),
        ).fit()
        made: dict[str, Any] = json.loads(Path(result).read_text())
        if fit.checkpoint is None:  # a worker that is killed takes with it what Ray has not heard yet
            assert self.then != 2 or not made["steps"], made
        elif made["steps"]:
            assert fit.checkpoint.path == f"{root}/step-{SAVED:08}", fit.checkpoint
            assert fit.metrics == {"loss": float(SAVED), "step": SAVED}, fit.metrics
        return made

    def digests(self) -> dict[str, str]:
        if self.again:
            return dict(self.fit()["digests"])
        if self.steps not in WHOLE:  # the same for all cases
            WHOLE[self.steps] = self.fit()["digests"]
        return WHOLE[self.steps]

    def save(self, url: str) -> None:
        self.folder = url
        if self.lost:
            with pytest.raises(train.TrainingFailedError, match="leave num_to_keep out"):
                self.fit(kept=2)
        made = self.fit(lost=self.lost, steps=SAVED + 1, dies=0 if self.lost else SAVED + 1)
        assert (made["start"], made["steps"]) == (None if self.lost else SAVED, [SAVED]), made

    def load(self, url: str) -> None:
        self.folder, self.workers, self.again = url, self.then, True


def job(**options: Any) -> Callable[[int], Job]:
    return lambda seed: Fit(seed, **options)


CASES = {"worker-killed": job(then=4), "node-lost": job(lost=True)}
