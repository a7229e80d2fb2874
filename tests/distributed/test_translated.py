"""A checkpoint of another framework in the names of this one's model, sharded over other ranks, without a step in between."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt
from ckpt import translated
from tests.distributed.ranks import Ranks
from tests.formats.reading import FIXTURES, same
from tests.formats.test_deepspeed import PREFIX, by_hand

RULES = """
left = "mine"
right = "deepspeed"
[[term]]
left = ["gate.weight", "up.weight"]
right = "fc1.weight"
steps = [{ concat = 0, sizes = [11, 12] }]
"""


def load(url: str, rules: str) -> tuple[dict[str, torch.Tensor], float, int]:
    model = torch.nn.Module()
    model.gate, model.up = torch.nn.Linear(16, 11, bias=False), torch.nn.Linear(16, 12, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    state = {"model": model, "optimizer": optimizer, "global_steps": 0}
    others = [f"*{name}*" for name in ("emb", "fc2", "head", "norm", "fc1.bias", "frozen", "buf", "master")]
    made = translated(url, ckpt.Translation(names=rules, convention="mine"), skip=others)
    ckpt.load(made, state, only=["model.*", "optimizer.*", "global_steps"])
    found = {}
    for name, param in model.named_parameters():
        held = {"weight": param, **optimizer.state[param]}
        found |= {f"{name}.{k}": t.detach().full_tensor() if isinstance(t, DTensor) else t for k, t in held.items()}
    return found, optimizer.param_groups[0]["lr"], state["global_steps"]


def test_into_fsdp(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(RULES)
    held = by_hand(FIXTURES / "deepspeed" / "zero3" / "global_step3")
    for found, rate, steps in ranks.run(3, load, str(FIXTURES / "deepspeed" / "zero3"), str(tmp_path / "mine.toml")):
        assert (rate, steps) == (0.01, 3)
        for key, ours in (("master", "weight"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            gate, up = held[f"{PREFIX}fc1.weight.{key}"].split([11, 12])
            assert same(found[f"gate.weight.{ours}"], gate) and same(found[f"up.weight.{ours}"], up)
        assert found["gate.weight.step"] == found["up.weight.step"] == 3
