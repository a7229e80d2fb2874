"""A small DeepSpeed job on CPUs that trains a few steps and saves a checkpoint, and beside it what the ranks themselves hold.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 3 tests/real/deepspeed_job.py --out DIR --stage 3 --dtype bf16
"""

from __future__ import annotations

import argparse
import json
import os
import re
from typing import Any

import torch
from torch import nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_optimizer_state, zero_to_fp32

VOCABULARY, WIDTH = 33, 16


class Model(nn.Module):
    """Odd sizes, a tied weight, a frozen parameter and a buffer."""

    def __init__(self, experts: int, mixed: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.fc1 = nn.Linear(WIDTH, 23)
        self.fc2 = nn.Linear(23, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.moe = None
        self.more = nn.ModuleList()
        if experts:
            from deepspeed.moe.layer import MoE

            self.moe = MoE(WIDTH, nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, WIDTH)), experts, ep_size=experts // 2, k=1)
            if mixed:
                self.more.extend(MoE(WIDTH, nn.Linear(WIDTH, WIDTH), count, ep_size=size, k=1) for count, size in ((2, 2), (8, 4)))
        self.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.register_buffer("buf", torch.arange(7.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.fc2(torch.relu(self.fc1(self.emb(x))))) * self.scale
        if self.moe is not None:
            h = h + self.moe(h)[0]
        for layer in self.more:
            h = h + layer(h)[0]
        return nn.functional.cross_entropy(self.head(h).float().flatten(0, 1), y.flatten())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(torch.relu(self.fc(x)))


def head(layer: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.T


def loss_of(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.float().flatten(0, 1), y.flatten())


def pipeline(stages: int, tied: bool) -> PipelineModule:
    if tied:
        first: Any = TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH)
        last: Any = TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=head)
    else:
        first, last = LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False)
    layers = [first, *(LayerSpec(Layer) for _ in range(4)), last]
    return PipelineModule(layers, num_stages=stages, loss_fn=loss_of, partition_method="uniform")


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, y = (torch.randint(0, VOCABULARY, (2, 8), generator=generator) for _ in range(2))
    return x, y


def config_of(a: argparse.Namespace) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": a.stage}
    if a.stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0}
    zero |= json.loads(a.zero)
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}},
    }
    found |= {a.dtype: {"enabled": True}} if a.dtype != "fp32" else {}
    if a.grads:
        found["data_types"] = {"grad_accum_dtype": a.grads}
    return found


def optimizer_of(groups: list[dict[str, Any]], kind: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2) if kind == "adamw" else torch.optim.SGD(groups, lr=1e-2, momentum=0.9)


def groups_of(model: nn.Module, experts: int) -> list[dict[str, Any]]:
    named = [p for p in model.parameters() if p.requires_grad]
    decay = [p for p in named if len(getattr(p, "ds_shape", p.shape)) > 1]
    other = [p for p in named if len(getattr(p, "ds_shape", p.shape)) <= 1]
    groups = [{"params": decay, "weight_decay": 0.01, "name": "decay"}, {"params": other, "weight_decay": 0.0, "name": "other"}]
    if experts:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        return split_params_into_different_moe_groups_for_optimizer(groups)
    return [{k: v for k, v in g.items() if k != "name"} for g in groups]


def gathered(engine: Any, keys: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """What DeepSpeed itself says every parameter's master and state are."""
    found: dict[str, torch.Tensor] = {}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        values = {"master": safe_get_full_fp32_param(param)}
        values |= {key: safe_get_full_optimizer_state(param, key) for key in keys}
        found |= {f"{name}.{key}": value.detach().clone() for key, value in values.items() if value is not None}
    return found


def merged(tag: str) -> dict[str, torch.Tensor]:
    """Masters and moments as DeepSpeed's ``zero_to_fp32`` merges flat partitions."""
    model = zero_to_fp32.parse_model_states(zero_to_fp32.get_model_state_files(tag))
    ranks = [torch.load(f, weights_only=False)["optimizer_state_dict"] for f in zero_to_fp32.get_optim_files(tag)]
    each = "fp32_flat_groups" in ranks[0]
    flat: dict[str, list[list[torch.Tensor]]] = {
        "master": [r["fp32_flat_groups" if each else "single_partition_of_fp32_groups"] for r in ranks]
    }
    states = [r["optimizer_state_dict" if each else "base_optimizer_state"] for r in ranks]
    listed = [s if isinstance(s, list) else list(s["state"].values()) for s in states]
    moments = [key for key, value in listed[0][0].items() if torch.is_tensor(value) and value.dim() == 1]
    flat |= {key: [[group[key] for group in of] for of in listed] for key in moments}
    found = {}
    for key, partitions in flat.items():
        if each:
            made = zero_to_fp32._get_fp32_state_dict_from_zero3_checkpoint(len(ranks), partitions, model, False)
        else:
            gaps = ranks[0].get("param_alignment_paddings")
            made = zero_to_fp32._get_fp32_state_dict_from_zero2_checkpoint(len(ranks), partitions, model, False, gaps)
        found |= {f"{name}.{key}": made[name].contiguous().clone() for group in model[0].param_shapes for name in group}
    return found


def save_memory(engine: Any, path: str) -> None:
    """For each parameter that this rank trains its weight, and the ranges of its flattened master and moments that are here, as DeepSpeed
    links them. Experts get their numbers in the whole model."""
    held: dict[str, dict[str, Any]] = {}
    of_zero = engine.optimizer
    partitions = getattr(of_zero, "single_partition_of_fp32_groups", None) or of_zero.fp32_groups_flat_partition
    experts = {n: m for n, m in engine.module.named_modules() if hasattr(m, "num_local_experts")}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        for prefix, layer in experts.items():
            if m := re.match(rf"{re.escape(prefix)}\.(.*deepspeed_experts\.)(\d+)\.", name):
                number = groups._get_expert_parallel_rank(layer.expert_group_name) * layer.num_local_experts + int(m[2])
                name = f"{prefix}.{m[1]}{number}.{name[m.end() :]}"
                break
        held[name] = {"weight": param.detach().clone(), "axis": None, "part": 0, "states": []}
        if (here := param._hp_mapping) is not None:
            flat = partitions[here.param_group_index]  # linked are the moments of the first group alone
            keys = {k: t for k, t in of_zero.optimizer.state[flat].items() if torch.is_tensor(t) and t.shape == flat.shape}
            at, of = here.lp_fragment_address, here.hp_fragment_address
            parts = {key: t.detach().narrow(0, of.start, of.numel).clone() for key, t in {"master": flat, **keys}.items()}
            held[name]["states"].append((at.start, at.start + at.numel, parts))
    os.makedirs(path, exist_ok=True)
    torch.save(held, os.path.join(path, f"rank_{torch.distributed.get_rank()}.pt"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--grads", default="")
    parser.add_argument("--zero", default="{}", help="more of zero_optimization, as JSON")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--pipeline", type=int, default=0)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--mixed", action="store_true", help="more layers of experts, with other expert parallelism")
    parser.add_argument("--local_rank", type=int, default=0)
    a = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    config = config_of(a)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=a.stage == 3):
        model = pipeline(a.pipeline, a.tied) if a.pipeline else Model(a.experts, a.mixed)
    optimizer = optimizer_of(groups_of(model, a.experts), a.optimizer)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(3):
        x, y = batch(step)
        if a.pipeline:
            engine.train_batch(iter([(x, y)]))
        else:
            engine.backward(engine(x, y))
            engine.step()
    engine.save_checkpoint(a.out, tag=f"global_step{engine.global_steps}", client_state={"mine": {"rank": torch.distributed.get_rank()}})
    torch.distributed.barrier()
    if a.stage in (1, 2) and not json.loads(a.zero).get("round_robin_gradients"):
        save_memory(engine, os.path.join(a.out, "memory"))
    if not a.pipeline and not a.experts and a.stage:
        whole = gathered(engine, ("exp_avg", "exp_avg_sq") if a.stage == 3 else ())
        if torch.distributed.get_rank() == 0:
            torch.save(whole, os.path.join(a.out, "gathered.oracle"))
            torch.save(merged(os.path.join(a.out, f"global_step{engine.global_steps}")), os.path.join(a.out, "merged.oracle"))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
