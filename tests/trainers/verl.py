"""A job of FSDP2 with ckpt's manager where verl's engine makes its own, called as the engine calls it: saved at once and in the background,
and from files that verl's own manager wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils.checkpoint import fsdp_checkpoint_manager
from verl.workers.engine.fsdp import transformer_impl

from ckpt.integrations.verl_checkpoints import use

from .failing import failing, raising
from .lives import SAVED, Job

SIZES: dict[str, Any] = {"vocab_size": 34, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
OWN = fsdp_checkpoint_manager.FSDPCheckpointManager
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


class Saved(Job):
    """``own``: verl's own manager writes. ``elsewhere``: to a root, and the step before goes."""

    def __init__(self, seed: int, *, own: bool = False, elsewhere: bool = False, **config: Any) -> None:
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
        given = {"model": self.model, "optimizer": optimizer, "lr_scheduler": schedule}
        self.manager: Any = transformer_impl.FSDPCheckpointManager(**given, checkpoint_config=config or None)
        self.elsewhere, self.background = elsewhere, "async_save" in config
        self.writer = OWN(**given) if own else self.manager

    def one(self, number: int) -> None:
        tokens = torch.arange(number, number + 16).remainder(34).reshape(2, 8)  # the same on every rank, so on every number of ranks
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        for part in ("optimizer", "schedule"):
            self.state[part].step()
        self.state["optimizer"].zero_grad()

    def path(self, url: str, step: int) -> str:
        use(root=f"{url}/elsewhere" if self.elsewhere else None)
        return f"{url}/global_step_{step}/actor"

    def save(self, url: str) -> None:
        for step in (SAVED - 1, SAVED, SAVED) if self.background else (SAVED - 1, SAVED):  # a step that is saved again is one to keep
            self.writer.save_checkpoint(local_path=self.path(url, step), hdfs_path=None, global_step=step, max_ckpt_to_keep=1)
        if self.writer is not self.manager:
            return
        self.manager.wait()
        dist.barrier()
        actor = "elsewhere/global_step_{}/actor/checkpoint.json" if self.elsewhere else "global_step_{}/actor/checkpoint.json"
        assert [Path(url, actor.format(step)).exists() for step in (SAVED - 1, SAVED)] == [False, True]
        tracker = Path(url, "latest_checkpointed_iteration.txt")
        assert (tracker.read_text() if tracker.exists() else None) == (str(SAVED) if self.background else None)

    def load(self, url: str) -> None:
        self.manager.load_checkpoint(local_path=self.path(url, SAVED), hdfs_path=None, del_local_after_load=True)


def job(**options: Any) -> Callable[[int], Job]:
    return lambda seed: Saved(seed, **options)


CASES = {
    "fsdp2": job(),
    "fsdp2-in-the-background": job(async_save=True, elsewhere=True),
    "fsdp2-files-of-verl": job(own=True),
    "fsdp2-one-rank-fails": failing(job(), lambda job: raising(job.state["schedule"], "state_dict")),
}
