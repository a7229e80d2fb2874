"""NeMo Automodel's own ``Checkpointer`` on a sharded, tied Llama, patched as docs/integrations.md says: at once, in its process
in the background, with safetensors of Hugging Face for the model, and from files that DCP has written for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nemo_automodel.components.checkpoint import checkpointing as automodel
from nemo_automodel.components.checkpoint.config import CheckpointingConfig
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt.integrations.dcp import CkptReader, CkptWriter

from .lives import SAVED, Job

_OWN = {name: getattr(automodel, name) for name in ("FileSystemReader", "_maybe_msc_reader", "_maybe_msc_writer")}


# torch stages by streams of an accelerator alone, unless it is told otherwise.
automodel.DefaultStager = partial(DefaultStager, StagingOptions(use_pinned_memory=False, use_non_blocking_copy=False))


def patch() -> None:
    automodel.FileSystemReader = CkptReader
    automodel._maybe_msc_reader = lambda path, reader: reader or CkptReader(path)
    automodel._maybe_msc_writer = lambda path, writer: writer or CkptWriter(path)


class Run(Job):
    """``own``: Automodel's own files, without ckpt. ``options``: of its configuration."""

    def __init__(self, seed: int, *, own: bool = False, **options: Any) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        torch.manual_seed(seed)
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.own = own
        self.config = {"model_save_format": "torch_save", "save_consolidated": False, **options}
        super().__init__({"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}, self.one)

    def one(self, number: int) -> None:
        tokens = torch.arange(number, number + 12).reshape(1, 12)  # the same on every rank, so on every number of ranks
        self.model(tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def checkpointer(self, url: str) -> Any:
        return CheckpointingConfig(checkpoint_dir=url, **self.config).build(dp_rank=dist.get_rank(), tp_rank=0, pp_rank=0)

    def save(self, url: str) -> None:
        """Several times, as its planners keep their plans, those of model and optimizer apart."""
        if self.own:
            vars(automodel).update(_OWN)
        else:
            patch()
        checkpointer = self.checkpointer(url)
        for number in range(SAVED - 3, SAVED + 1):
            folder = os.path.join(url, f"epoch_0_step_{number}")
            checkpointer.lifecycle.reserve(folder)
            checkpointer.save_model(self.model, folder)
            checkpointer.save_optimizer(self.optimizer, self.model, folder, self.schedule)
            checkpointer.async_wait()
            checkpointer.lifecycle.publish(folder, best_val_metric=None, metric_key=None)
        checkpointer.close()
        for part in ("optim",) if self.config["model_save_format"] == "safetensors" else ("model", "optim"):
            assert Path(folder, part, ".metadata" if self.own else "checkpoint.json").exists(), folder

    def load(self, url: str) -> None:
        patch()
        checkpointer, folder = self.checkpointer(url), os.path.join(url, f"epoch_0_step_{SAVED}")
        checkpointer.load_model(self.model, os.path.join(folder, "model"))
        checkpointer.load_optimizer(self.optimizer, self.model, folder, self.schedule)
        checkpointer.close()


def job(**options: Any) -> Callable[[int], Job]:
    return lambda seed: Run(seed, **options)


CASES = {
    "at-once": job(),
    "in-the-background": job(is_async=True),
    "model-as-safetensors": job(model_save_format="safetensors"),
    "files-of-automodel": job(own=True),
}
