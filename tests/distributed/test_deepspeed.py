"""DeepSpeed checkpoints of two ranks, loaded into FSDP2 on others, optimizer included."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt
from tests.distributed.ranks import Ranks
from tests.formats.reading import FIXTURES, same
from tests.formats.test_deepspeed import PREFIX, Net, by_hand

WANTED = ["model.*", "optimizer.*", "global_steps"]
ASIDE = {"optimizer.state.*.master": "masters.*"}
"""torch's optimizers keep no masters; a name that is not wanted is left alone."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def load(url: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    torch.manual_seed(0)
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    trained = [p for p in model.parameters() if p.requires_grad]
    decay, other = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": other}], lr=1.0)
    state = {"model": model, "optimizer": optimizer, "global_steps": 0}
    ckpt.load(url, state, only=WANTED, rename=ASIDE, cast=True)
    found = {f"model.{n}": whole(t).clone() for n, t in model.state_dict().items()}
    for name, param in model.named_parameters():
        found |= {f"{PREFIX}{name}.{key}": whole(t).clone() for key, t in optimizer.state.get(param, {}).items()}
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    optimizer.step()
    return found, [g["weight_decay"] for g in optimizer.param_groups] + [g["lr"] for g in optimizer.param_groups] + [state["global_steps"]]


@pytest.mark.parametrize("name", ["zero3", "zero1", "zero3/global_step3_universal"])
def test_into_fsdp_on_three_ranks(name: str, ranks: Ranks) -> None:
    tag = FIXTURES / "deepspeed" / name.partition("/")[0] / "global_step3"
    expected = by_hand(tag)
    for found, options in ranks.run(3, load, str(FIXTURES / "deepspeed" / name)):
        assert options == [0.01, 0.0, 0.01, 0.01, 3]
        moments = {n: t for n, t in expected.items() if not n.endswith(".master")}
        assert all(same(found[n], t) for n, t in moments.items())
        weights = {f"model.{n[len(PREFIX) : -len('.master')]}": t for n, t in expected.items() if n.endswith(".master")}
        rounded = name == "zero1"
        assert all(same(found[n], t.bfloat16().float() if rounded else t) for n, t in weights.items())
        assert same(found["model.frozen"], torch.arange(5.0)) and same(found["model.buf"], torch.arange(7.0))
        steps = [t for n, t in found.items() if n.endswith(".step")]
        assert not any(n.endswith(".master") for n in found)
        assert all(t == 3 for t in steps) and len(steps) == 7
