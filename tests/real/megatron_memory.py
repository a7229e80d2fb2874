"""Which gradients a job of megatron_writer.py takes, and what its ranks hold after some steps, as the objects of Megatron-Core say."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def placed(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters by the names that they have in the whole model: the modules themselves know the numbers of their layers and experts."""
    layers = [layer.layer_number - 1 for layer in model.decoder.layers]
    for name, p in model.named_parameters():
        if m := re.match(r"decoder\.layers\.(\d+)\.", name):
            mlp = model.decoder.layers[int(m[1])].mlp
            name = f"decoder.layers.{layers[int(m[1])]}.{name[m.end() :]}"
            if e := re.search(r"local_experts\.(\d+)", name):
                name = name.replace(e[0], f"local_experts.{mlp.local_expert_indices[int(e[1])]}")
        yield name, p


def gradient(name: str, p: torch.nn.Parameter, step: int) -> torch.Tensor:
    """Random, and different for every parameter and tensor-parallel part; equal on all ranks that have the same part, copies on other
    stages included."""
    name = "embedding.word_embeddings.weight" if getattr(p, "shared_embedding", False) else name
    part = tensor_rank(name) if getattr(p, "tensor_model_parallel", False) else 0
    seed = zlib.crc32(f"{name}/{part}/{step}".encode())
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))


def tensor_rank(name: str) -> int:
    from megatron.core import parallel_state as ps

    return ps.get_expert_tensor_parallel_rank() if ".local_experts." in name else ps.get_tensor_model_parallel_rank()


def save_memory(folder: Path, models: list[Any], optimizer: Any, *, gated: bool) -> None:
    """For each parameter of this rank its weight, how tensor parallelism cuts it, and the ranges of its flattened states that are here."""
    held: dict[str, dict[str, Any]] = {}
    for name, p in (found for m in models for found in placed(m)):
        axis = p.partition_dim if getattr(p, "tensor_model_parallel", False) else None
        held[name] = {
            "weight": p.detach().clone(),
            "axis": axis,
            "part": tensor_rank(name),
            "gated": gated and "linear_fc1" in name,
            "states": [],
        }
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            if not hasattr(one, "model_param_group_index_map"):
                master = p if p.dtype == torch.float32 else p.main_param
                states = {k: t.detach().flatten().clone() for k, t in one.optimizer.state[master].items() if k.startswith("exp_avg")}
                full = {} if master is p else {"master": master.detach().flatten().clone()}
                held[name]["states"].append((0, p.numel(), full | states))
                held[name]["step"] = one.optimizer.state[master]["step"].item()
            elif p in one.model_param_group_index_map:
                at = one._get_model_param_range_map(p)["param"]
                group, order = one.model_param_group_index_map[p]
                master = one.optimizer.param_groups[group]["params"][order]
                states = {k: t for k, t in one.optimizer.state[master].items() if k.startswith("exp_avg")}
                flat = {k: t.detach().flatten().clone() for k, t in {"master": master, **states}.items()}
                held[name]["states"].append((at.start, at.end, flat))
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(held, folder / f"rank_{dist.get_rank()}.pt")
