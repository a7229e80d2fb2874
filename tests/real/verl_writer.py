"""Writes ``tests/fixtures/verl``: verl's own manager of a job of two ranks, a tiny Llama with tied embeddings and a buffer.

torchrun --nproc-per-node 2 -m tests.real.verl_writer FOLDER    # with verl 0.9.1: the environment of `make trainers`
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sizes = {"vocab_size": 18, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    model.register_buffer("scale", torch.arange(3.0))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    for number in range(2):
        tokens = torch.arange(number, number + 8).remainder(18).reshape(1, 8)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    manager = FSDPCheckpointManager(model=model, optimizer=optimizer, lr_scheduler=schedule)
    manager.save_checkpoint(local_path=folder, hdfs_path=None, global_step=2, max_ckpt_to_keep=None)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
