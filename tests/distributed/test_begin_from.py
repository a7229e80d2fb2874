"""A sharded run of DCP goes on with a Checkpointer, on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt.errors import CkptError
from tests.distributed.ranks import Ranks


def job() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters())


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors: list[Any] = [p.detach() for p in model.parameters()]
    tensors += [optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
    return [t.full_tensor().clone() for t in tensors]


def save_with_dcp(url: str) -> list[torch.Tensor]:
    model, optimizer = job()
    for n in range(2):
        model(torch.full((4, 6), float(n + 1))).square().mean().backward()
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": 2}, checkpoint_id=url)
    return whole(model, optimizer)


def go_on(root: str, url: str) -> tuple[list[torch.Tensor], list[Any]]:
    model, optimizer = job()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with ckpt.Checkpointer(root) as c:
        errors: list[Any] = []
        try:
            c.restore(state, begin_from=f"{url}-is-not-there")
        except CkptError as err:
            errors.append(type(err).__name__)
        start = c.restore(state, begin_from=url)
        c.save(3, state)
        c.wait()
        return whole(model, optimizer), [start, state["step"], errors, c.restore(state, begin_from=url)]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_sharded_run_of_dcp_goes_on_on_three_ranks(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "dcp" / "step-2")
    (expected, _) = ranks.run(2, save_with_dcp, url)
    for tensors, outcome in ranks.run(3, go_on, str(tmp_path / "run"), url):
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
        assert outcome == [2, 2, ["NotFoundError"], 3]
