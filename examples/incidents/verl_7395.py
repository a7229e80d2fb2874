"""verl-project/verl#7395: max_ckpt_to_keep=1 is forgotten when a job resumes: its old checkpoint stays, and with each restart one more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from outcome import Outcomes, on_ranks, show
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from ckpt.integrations.verl_checkpoints import CkptCheckpointManager

CONFIG = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


def resume_and_save(folder: Path, kind: type[Any], step: int) -> torch.Tensor:
    """As a new process does; returns a weight."""
    model = LlamaForCausalLM(CONFIG)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    manager = kind(model=model, optimizer=optimizer, lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer))
    if step > 1:
        manager.load_checkpoint(str(folder / f"global_step_{step - 1}"))
    manager.save_checkpoint(str(folder / f"global_step_{step}"), global_step=step, max_ckpt_to_keep=1)
    return model.lm_head.weight.full_tensor().detach()


def work(folder: Path) -> None:
    for kind in (FSDPCheckpointManager, CkptCheckpointManager):
        run = folder / kind.__name__
        weights = [resume_and_save(run, kind, step) for step in (1, 2, 3)]
        left = sorted(int(path.name[-1]) for path in run.glob("global_step_*"))
        same = all(torch.equal(weight, weights[0]) for weight in weights)
        (folder / f"{kind.__name__}.txt").write_text(f"steps {left} are left" if same else "")


def play(folder: Path) -> Outcomes:
    on_ranks(1, work, folder)
    elsewhere, ours = ((folder / f"{kind}CheckpointManager.txt").read_text() for kind in ("FSDP", "Ckpt"))
    return f"{'' if len(elsewhere) > len(ours) else 'mended: '}{elsewhere}", ours if ours == "steps [3] are left" else ""


if __name__ == "__main__":
    show(play, "verl")
