"""verl's FSDP2 job with ckpt's manager in place of verl's, called as its engine calls it: saved at once and in the background, and from
files that verl's own manager wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.workers.engine.fsdp import transformer_impl

from ckpt.integrations.verl_checkpoints import use

from .lives import SAVED, Job

SIZES: dict[str, Any] = {"vocab_size": 34, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
OWN = (FSDPCheckpointManager,)  # ``use`` replaces the name, here too
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


class Saved(Job):
    """``own``: verl's own manager writes."""

    def __init__(self, seed: int, *, own: bool = False, **config: Any) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        torch.manual_seed(seed)
        self.model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True))
        self.model.register_buffer("drawn", torch.rand(3))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
        super().__init__({"model": self.model, "optimizer": optimizer, "schedule": schedule}, self.one)
        use()
        engine, given = transformer_impl.FSDPCheckpointManager, {"model": self.model, "optimizer": optimizer, "lr_scheduler": schedule}
        self.manager = engine(**given, checkpoint_config=config or None)
        self.writer = OWN[0](**given) if own else self.manager

    def one(self, number: int) -> None:
        tokens = torch.arange(number, number + 16).remainder(34).reshape(2, 8)  # the same on every rank, so on every number of ranks
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        for part in ("optimizer", "schedule"):
            self.state[part].step()
        self.state["optimizer"].zero_grad()

    def save(self, url: str) -> None:
        path = f"{url}/global_step_{SAVED}/actor"
        self.writer.save_checkpoint(local_path=path, hdfs_path=None, global_step=SAVED, max_ckpt_to_keep=1)
        if self.writer is self.manager:
            self.manager.wait()

    def load(self, url: str) -> None:
        self.manager.load_checkpoint(local_path=f"{url}/global_step_{SAVED}/actor", hdfs_path=None, del_local_after_load=True)


def job(**options: Any) -> Callable[[int], Job]:
    return lambda seed: Saved(seed, **options)


CASES = {"fsdp2": job(), "fsdp2-in-the-background": job(async_save=True), "fsdp2-files-of-verl": job(own=True)}
