"""DeepSpeed on two ranks: stage 0 resumes. ZeRO's modules and optimizers are refused: what the module has is not what is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch

import ckpt

from .lives import Job

deepspeed.comm.torch.build_shm_op = lambda: None  # it compiles one for minutes, to be faster on one machine


def job(stage: int, *parts: str) -> Callable[[int], Job]:
    """``parts`` of the state: module, optimizer, engine."""

    def made(seed: int) -> Job:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": stage > 0},
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        kind = next(engine.module.parameters()).dtype

        def step(number: int) -> None:
            engine.backward(engine((torch.randn(4, 8) + torch.distributed.get_rank()).to(kind)).float().square().sum())
            engine.step()

        whole = {"module": engine.module, "optimizer": engine.optimizer, "engine": engine}
        made = Job({name: whole[name] for name in parts}, step)
        made.digests = lambda: Job({"module": engine.module}, step).digests() if stage == 0 else {}  # type: ignore[method-assign]
        return made

    return made


def loaded_into(stage: int) -> Callable[[int], Job]:
    """The module alone, loaded from the checkpoint of a plain one: ZeRO's next step would undo it."""

    def made(seed: int) -> Job:
        run = job(stage, "module")(seed)

        def save(url: str) -> None:
            plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)).bfloat16()
            ckpt.save(url, {"module": plain}, check_replicas=False)

        run.save = save  # type: ignore[method-assign]
        return run

    return made


CASES: dict[str, Any] = {"stage-0": job(0, "module", "optimizer")}
CASES |= {f"stage-{stage}-{part}": job(stage, part) for stage in (1, 2, 3) for part in ("module", "optimizer", "engine")}
CASES |= {f"load-into-stage-{stage}": loaded_into(stage) for stage in (1, 2, 3)}
