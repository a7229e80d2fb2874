"""verl's Megatron engine: its manager is ckpt's, made and called as the engine does. In the background, too, and from files that verl's
own manager wrote. The model and the ranks are those of ``megatron.py``."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from omegaconf import OmegaConf
from transformers import LlamaConfig
from verl.trainer.config import CheckpointConfig
from verl.utils.checkpoint import megatron_checkpoint_manager
from verl.workers.engine.megatron import transformer_impl

from ckpt.errors import CkptError, UsageError
from ckpt.integrations.verl_checkpoints import use

from .lives import SAVED, Job, digest
from .megatron import Model

from megatron_reader import with_steps  # isort: skip

with_steps()

OWN = megatron_checkpoint_manager.MegatronCheckpointManager
PARTS = ("model", "optimizer", "extra")


class Saved(Model):
    """``own``: verl's own manager writes. ``sharding``: of a distributed optimizer, as verl's configuration has it."""

    def __init__(self, seed: int, *, own: bool = False, sharding: str | None = None, background: bool = False) -> None:
        self.sharding = sharding and "fully_reshardable"
        super().__init__(seed)
        self.random = {}  # the generators are verl's to save
        torch.manual_seed(seed)
        random.seed(seed)
        tensor_parallel.get_cuda_rng_tracker().set_states({"model-parallel-rng": torch.full((2,), seed)})
        warm = {"init_lr": 0.0, "max_lr": 1e-2, "min_lr": 0.0, "lr_warmup_steps": seed, "lr_decay_steps": 9, "lr_decay_style": "linear"}
        decay = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 9, "wd_incr_style": "constant"}
        self.schedule = OptimizerParamScheduler(self.optimizer, **warm, **decay, use_checkpoint_opt_param_scheduler=True)
        use(codec="zstd")
        self.background = background
        self.manager = self.made(transformer_impl.MegatronCheckpointManager, sharding)
        self.writer = self.made(OWN, sharding) if own else self.manager

    def made(self, kind: type, sharding: str | None) -> Any:
        """As the engine makes it."""
        sizes = {
            "dist_ckpt_optim_fully_reshardable": sharding == "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
        contents = PARTS if dist.get_world_size() == 2 else PARTS[:2]  # generators keep the parallel sizes of their save
        return kind(
            config=OmegaConf.create({"model": {"path": "tiny"}, "megatron": sizes}),
            checkpoint_config=CheckpointConfig(save_contents=[*PARTS], load_contents=[*contents], async_save=self.background),
            model_config=LlamaConfig(),
            transformer_config=self.models[0].config,
            role="actor",
            model=self.wrapped,
            arch="LlamaForCausalLM",
            hf_config=LlamaConfig(),
            param_dtype=torch.bfloat16,
            share_embeddings_and_output_weights=False,
            processing_class=None,
            optimizer=self.optimizer,
            optimizer_scheduler=self.schedule,
            use_distributed_optimizer=sharding is not None,
            use_checkpoint_opt_param_scheduler=True,
            use_dist_checkpointing=True,
        )

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            super().train(step, step + 1)
            self.schedule.step(1)
            torch.rand(1), random.random()

    def save(self, url: str) -> None:
        own = self.writer is not self.manager
        for step in (SAVED - 1, SAVED) if own else (SAVED - 1, SAVED, SAVED):  # a step that is saved again is one to keep
            path = f"{url}/global_step_{step}/actor"
            self.writer.save_checkpoint(local_path=path, hdfs_path=None, global_step=step, max_ckpt_to_keep=1)
            dist.barrier()
        if own:
            return
        self.manager.wait()
        dist.barrier()
        assert not Path(url, f"global_step_{SAVED - 1}/actor").exists()
        for part in PARTS:
            assert {"checkpoint.json", "metadata.json", "common.pt"} <= {f.name for f in Path(path, part, "dist_ckpt").iterdir()}
        assert json.loads(Path(path, "ckpt_contents.json").read_text())["saved_any_dist_ckpt"]
        tracker = Path(url, "latest_checkpointed_iteration.txt")
        assert (tracker.read_text() if tracker.exists() else None) == (str(SAVED) if self.background else None)

    def load(self, url: str) -> None:
        if self.sharding:  # torch's own Adam: Megatron wants a number of steps before it loads, and gives all parameters one tensor of it
            super().train(0, SAVED)
            for state in self.states():
                state["exp_avg"].add_(1), state["exp_avg_sq"].add_(1)
        self.manager.load_checkpoint(local_path=f"{url}/global_step_{SAVED}/actor", hdfs_path=None, del_local_after_load=True)
        for state in self.states() if self.sharding else ():
            state["step"] = state["step"].clone()
        if dist.get_world_size() != 2:
            torch.manual_seed(1)
            random.seed(1)
            for _ in range(SAVED):
                torch.rand(1), random.random()
            tensor_parallel.get_cuda_rng_tracker().set_states({"model-parallel-rng": torch.ones(2, dtype=torch.int64)})

    def states(self) -> list[dict[str, torch.Tensor]]:
        return [state for one in self.optimizer.chained_optimizers for state in one.optimizer.state.values()]

    def digests(self) -> dict[str, str]:
        tracked = tensor_parallel.get_cuda_rng_tracker().get_states()["model-parallel-rng"]
        values = {"torch": torch.get_rng_state(), "python": torch.tensor(random.getstate()[1]), "tracker": tracked}
        values |= {"schedule": repr(self.schedule.state_dict())}
        return super().digests() | {name: digest(value) for name, value in values.items()}


class Fails(Saved):
    """A save of which one part of one rank cannot be stored: all ranks raise, and the step before stays."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, background=True)

    def save(self, url: str) -> None:
        use(root=url)
        with pytest.raises(UsageError, match="is not for Megatron engines"):
            self.made(transformer_impl.MegatronCheckpointManager, None)
        use(codec="zstd")
        self.manager.save_checkpoint(f"{url}/global_step_0/actor", None, 0, 1)
        spoiled = mock.patch.object(random, "getstate", object) if dist.get_rank() == 1 else nullcontext()
        with spoiled:
            self.manager.save_checkpoint(f"{url}/global_step_1/actor", None, 1, 1)
        with pytest.raises(CkptError, match="rank 1" if dist.get_rank() == 0 else "object"):
            self.manager.wait()
        dist.barrier()
        assert Path(url, "latest_checkpointed_iteration.txt").read_text() == "0"
        with pytest.raises(Exception, match="is not a distributed checkpoint"):
            self.manager.load_checkpoint(f"{url}/global_step_1/actor")
        assert len([*Path(url, "global_step_0/actor").glob("*/dist_ckpt/metadata.json")]) == len(PARTS)
        super().save(url)


def job(**options: Any) -> Callable[[int], Job]:
    return lambda seed: Saved(seed, **options)


CASES = {
    "at-once": job(),
    "in-the-background": job(background=True),
    "distributed-in-the-background": job(background=True, sharding="fully_reshardable"),
    "distributed-for-these-ranks": job(sharding="dp_reshardable"),
    "files-of-verl": job(own=True, sharding="fully_reshardable"),
    "one-rank-fails": Fails,
}
