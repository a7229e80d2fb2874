"""Trains a tiny Llama with FSDP2 and writes it for ``from_pretrained`` from the running job, without a gather.

``torchrun --nproc-per-node 2 examples/export_hf.py exported/llama``. Needs transformers. Started again, it replaces what it wrote.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ckpt import export

VOCABULARY, LENGTH, BATCH = 64, 16, 4


def trained(steps: int, device: str) -> LlamaForCausalLM:
    """The model after a few steps, cut over all ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator).to(device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def run(url: str, steps: int, device: str = "cpu") -> float:
    """Train and export; how far the answers of what was exported, in bfloat16, are from those of the trained model."""
    model = trained(steps, device)
    report = export(url, model, dtype="bfloat16", config=model.config, shard_size="40KB", overwrite=True)
    line = f"rank {dist.get_rank()} wrote {report.rank_bytes:,} of {report.tensor_bytes:,} bytes in {report.writes} calls"
    print(f"{line}, into {len(report.files)} files, and sent {report.sent_bytes:,} to other ranks")
    tokens = torch.arange(LENGTH).reshape(1, LENGTH)
    with torch.no_grad():
        expected = model.eval()(input_ids=tokens.to(device)).logits.cpu()
        served = AutoModelForCausalLM.from_pretrained(url, dtype=torch.bfloat16)  # every rank looks
        return float((served(input_ids=tokens).logits.float() - expected).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("url", help="directory for the model; all ranks must see the same storage")
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        distance = run(given.url, given.steps, device)
        if dist.get_rank() == 0:
            print(f"from_pretrained reads it; its answers differ by at most {distance:.4f}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
