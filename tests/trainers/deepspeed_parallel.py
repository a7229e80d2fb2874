"""DeepSpeed's experts on ranks of their own, and its pipeline: four ranks, each state on two of them, then on two ranks and on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import distributed as dist

from .deepspeed import Engine
from .lives import Job


class Expert(torch.nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 17), torch.nn.Linear(17, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Experts(torch.nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.inp = torch.nn.Linear(8, 8)
        self.moe = MoE(8, Expert(), num_experts=4, ep_size=ranks, k=1, use_rts=False, use_residual=True)
        for number, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):  # copies of one
            torch.nn.init.normal_(expert.up.weight, std=0.1 * (1 + number + dist.get_rank()))
            expert.down.bias.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, loss, _ = self.moe(self.inp(x))
        return y + 0.01 * loss.to(y.dtype)  # type: ignore[no-any-return]


class Scaled(torch.nn.Linear):
    """With a buffer, that only a stage has."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x).relu()


class Parallel(Engine):
    def digests(self) -> dict[str, str]:
        """Of all ranks, which have to have the same under the same name."""
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, super().digests())
        joined: dict[str, str] = {}
        for name, value in (pair for row in rows for pair in row.items()):
            joined[name] = value if joined.get(name, value) == value else f"{joined[name]} or {value}"
        return joined


class Expertly(Parallel):
    def made(self, config: dict[str, Any]) -> Any:
        ranks = {4: 2, 2: 2, 1: 1}[dist.get_world_size()]
        model = Experts(ranks)
        groups = {"params": [p for p in model.parameters() if p.requires_grad], "name": "parameters"}
        optimizer = torch.optim.AdamW(split_params_into_different_moe_groups_for_optimizer(groups), lr=1e-2)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def in_whole(self, name: str) -> str:
        prefix, own, rest = name.partition("deepspeed_experts.")
        if not own:
            return name
        moe = self.engine.module.moe
        number, _, rest = rest.partition(".")
        first = dist.get_rank(self.engine.expert_parallel_group[moe.expert_group_name]) * moe.num_local_experts
        return f"{prefix}{own}{first + int(number)}.{rest}"


class Piped(Parallel):
    """Two stages of two layers and a tied one, or one of all."""

    def made(self, config: dict[str, Any]) -> Any:
        def tied(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            return x @ module.weight

        layers = [
            TiedLayerSpec("ends", torch.nn.Linear, 8, 17, bias=False),
            LayerSpec(Scaled, 17, 8),
            LayerSpec(Scaled, 8, 17),
            TiedLayerSpec("ends", torch.nn.Linear, 8, 17, bias=False, forward_fn=tied),
        ]
        stages = {4: 2, 2: 2, 1: 1}[dist.get_world_size()]
        model = PipelineModule(layers, num_stages=stages, loss_fn=lambda y, _: y.float().square().sum(), partition_method="uniform")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        config |= {"gradient_accumulation_steps": 2}
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=scheduler)[0]

    def one(self, number: int) -> None:
        def batches() -> Iterator[Any]:
            generator = torch.Generator().manual_seed(10 * number + self.engine.grid.get_data_parallel_rank())
            while True:
                yield torch.randn(4, 8, generator=generator).to(self.dtype), torch.zeros(4)

        self.engine.train_batch(batches())


def job(kind: type[Any], stage: int, dtype: str, **zero: Any) -> Callable[[int], Job]:
    def made(seed: int) -> Job:
        torch.manual_seed(seed)
        return kind(stage, dtype, **zero)  # type: ignore[no-any-return]

    return made


CASES: dict[str, Any] = {
    "experts-stage-0": job(Expertly, 0, "fp32"),
    "experts-stage-1": job(Expertly, 1, "bf16"),
    "experts-stage-2": job(Expertly, 2, "fp32", offload_optimizer={"device": "cpu"}),
    "pipeline-stage-0": job(Piped, 0, "fp32"),
    "pipeline-stage-1": job(Piped, 1, "bf16"),
}
