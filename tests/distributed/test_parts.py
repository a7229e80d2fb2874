"""A part of a sharded model loads over a base, on another number of ranks."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from tests.distributed.ranks import Ranks


def job(ranks: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": seed}


def full(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: t.full_tensor().detach() for name, t in state["model"].named_parameters()}


def save(url: str, ranks: int) -> dict[str, torch.Tensor]:
    state = job(ranks, 0)
    report = ckpt.save(url, state, trainable=True)
    dry = ckpt.save(url, state, trainable=True, dry_run=True)
    assert (dry.tensor_bytes, dry.rank_bytes) == (report.tensor_bytes, report.rank_bytes)
    return full(state)


def load(url: str, ranks: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    state = job(ranks, 1)
    before = full(state)
    try:
        ckpt.load(url, state)
    except ckpt.errors.NamesError as err:
        hint = str(err.hint)
    ckpt.load(url, state, trainable=True)
    assert state["step"] == 0
    return before, full(state), hint


def different(url: str) -> list[str]:
    rank = torch.distributed.get_rank()
    # A stage of a pipeline may be frozen as a whole.
    stage = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2).requires_grad_(rank == 1)])})
    stages = ckpt.Layout({"pp": 2}, rules=[("*", ckpt.Replicate())], numbered=[ckpt.pipeline("layers.{n}", layers=2, stages=2)])
    ckpt.save(f"{url}-stages", {"model": stage}, layout=stages, trainable=True)
    try:
        ckpt.save(url, job(2, 0), only="model.*" if rank else "model.1.*")
    except ckpt.errors.ConsistencyError as err:
        problems = [err.message]
    with suppress(ckpt.errors.ConsistencyError), ckpt.Checkpointer(f"{url}-reuse", reuse=rank == 1) as c:
        with pytest.raises(ckpt.errors.ConsistencyError, match="different options: .*reuse=True on rank 1") as refused:
            c.save(1, job(2, 0)).result()
        problems.append(refused.value.message)
    own = {"model": torch.nn.ModuleDict({f"layer{rank}": torch.nn.Linear(2, 2)})}  # as plain stages of a pipeline are named
    text = "2 parameters from model.layer1.weight to model.layer1.bias on rank 1"
    with ckpt.Checkpointer(f"{url}-stage") as c, pytest.raises(ckpt.errors.CoverageError, match=text):
        c.restore(own)
    layout = ckpt.Layout({"pp": 2}, rules=[(f"*layer{n}.*", ckpt.Stage("pp", n)) for n in range(2)])
    with ckpt.Checkpointer(f"{url}-stage", layout=layout) as c:
        assert c.restore(own) is None
        c.save(1, own)
    with ckpt.Checkpointer(f"{url}-stage") as c:
        assert c.restore(own) == 1
    return problems


def test_a_part_of_a_sharded_model(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    (saved, *_) = ranks.run(2, save, url, 2)
    assert not any("0." in name.removeprefix("model.")[:2] for name in ckpt.open(url) if name.startswith("model."))
    for before, after, hint in ranks.run(3, load, url, 3):
        for name, tensor in after.items():
            assert torch.equal(tensor, before[name] if name.startswith("0.") else saved[name])
        assert "trainable=True" in hint
    assert all("different options" in text for texts in ranks.run(2, different, str(tmp_path / "b")) for text in texts)
    assert not ckpt.list_steps(tmp_path / "b-reuse")
    assert set(ckpt.open(str(tmp_path / "b-stages"))) == {"model.layers.1.weight", "model.layers.1.bias"}
