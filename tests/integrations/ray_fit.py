"""A fit of Ray Train that fails, goes on, and loses a node, on two workers and then on three: ``python ray_fit.py FOLDER``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer

import ckpt
from ckpt.integrations.ray_train import RayCheckpointer
from ckpt.policies import EverySteps


def loop(config: dict[str, Any]) -> None:
    rank = torch.distributed.get_rank()
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    if config["preempted"]:  # as Ray says it on a cluster whose node is drained
        info = train.PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"node": [1]})
        train.get_preemption_info = lambda: info
    with RayCheckpointer(config["root"], save=EverySteps(3), look_every=1 if config["preempted"] else 2, job=ckpt.Job(timeout=60)) as c:
        start = c.restore(state)
        for n in range(1 if start is None else start + 1, config["steps"] + 1):
            model(torch.full((2, 4), float(n))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            c.step(n, state, metrics={"loss": float(n)})
            if n == config["fails"] and start is None:
                c.wait()
                raise RuntimeError("this worker fails")
        c.wait()
        if rank == 0:
            told = {"start": start, "weight": model.weight.tolist(), "steps": [s.number for s in c.steps()]}
            Path(config["told"]).write_text(json.dumps(told))


def fit(folder: str, name: str, workers: int, **config: Any) -> dict[str, Any]:
    settings = {"root": f"{folder}/{name}/steps", "told": f"{folder}/{name}.json", "fails": 0, "preempted": False, **config}
    result = TorchTrainer(
        loop,
        train_loop_config=settings,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(storage_path=folder, name=name, failure_config=train.FailureConfig(max_failures=1)),
    ).fit()
    told: dict[str, Any] = json.loads(Path(settings["told"]).read_text())
    return {**told, "checkpoint": result.checkpoint and result.checkpoint.path, "metrics": result.metrics}


def main(folder: str) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    whole = fit(folder, "whole", 2, steps=8)
    failed = fit(folder, "failed", 2, steps=8, fails=7)
    assert (whole["start"], failed["start"]) == (None, 6)
    assert whole["weight"] == failed["weight"], "to the last bit"
    for told, name in ((whole, "whole"), (failed, "failed")):
        assert told["checkpoint"] == f"{folder}/{name}/steps/step-00000006" and told["metrics"] == {"loss": 6.0, "step": 6}, told
    more = fit(folder, "failed", 3, steps=10)
    assert more["start"] == 6 and more["steps"] == [3, 6, 9]
    lost = fit(folder, "lost", 2, steps=4, preempted=True)
    assert lost["steps"] == [1, 3] and lost["checkpoint"].endswith("step-00000003"), "saved once for the node, then by the policy"
    print("HELD", flush=True)
    ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
