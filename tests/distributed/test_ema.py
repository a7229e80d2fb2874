"""Moving averages on shards: the bits of one process, saved and loaded into other layouts, swapped in for an evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckpt
from ckpt.errors import StateError, UsageError
from ckpt.training import Average
from tests.distributed.models import mesh_of
from tests.distributed.ranks import Ranks

DECAY = 0.9


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Sizes that no number of ranks divides; a frozen layer and a buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5), nn.Linear(5, 5), nn.BatchNorm1d(5))
    model[3].requires_grad_(False)
    return model.to(dtype)


def step(model: nn.Module, n: int) -> None:
    """The same change of the parameters in every layout."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            if p.requires_grad:
                change = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * n + i)).to(p.dtype)
                p.add_(distribute_tensor(change, p.device_mesh, p.placements) if isinstance(p, DTensor) else change)


def oracle(steps: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """One process, plain tensors, by the formula."""
    model = network(dtype)
    average = {n: p.detach().float().clone() for n, p in model.named_parameters() if p.requires_grad}
    for n in range(steps):
        step(model, n)
        for name, p in model.named_parameters():
            if p.requires_grad:
                average[name] = average[name] * DECAY + p.detach().float() * (1.0 - DECAY)
    return average


def full(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}


def same(tensors: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    got = full(tensors)
    return got.keys() == wanted.keys() and all(torch.equal(got[n], t) for n, t in wanted.items())


def sharded(layout: str) -> nn.Module:
    model = network()
    if layout == "tp":
        parallelize_module(model, mesh_of(tp=dist.get_world_size()), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif layout == "fsdp":
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh_of(dp=dist.get_world_size()))
        fully_shard(model, mesh=mesh_of(dp=dist.get_world_size()))
    return model


def average_and_save(layout: str, url: str) -> list[object]:
    model = sharded(layout)
    ema = Average(model, DECAY)
    before = dist.distributed_c10d._world.group_count  # no group, and no collective below needs one
    for n in range(3):
        step(model, n)
        ema.update()
    placed = all(
        not isinstance(p, DTensor) or (isinstance(w := ema.weights[n], DTensor) and w.placements == p.placements)
        for n, p in model.named_parameters()
        if n in ema.weights
    )
    mine = full(dict(model.named_parameters()))
    with ema.swap():
        swapped = same({n: p for n, p in model.named_parameters() if n in ema.weights}, oracle(3))
    back = same(dict(model.named_parameters()), mine)
    ckpt.save(url, {"model": model, "ema": ema})
    return [same(ema.weights, oracle(3)), placed, swapped, back, dist.distributed_c10d._world.group_count == before]


def load_and_go_on(layout: str, url: str) -> list[object]:
    model = sharded(layout)
    ema = Average(model, DECAY)
    step(model, 50)
    ema.update()
    ckpt.load(url, {"model": model, "ema": ema})
    loaded, updates = same(ema.weights, oracle(3)), ema.updates
    step(model, 3)
    ema.update()
    return [loaded, updates == 3, same(ema.weights, oracle(4))]


def test_shards_have_the_bits_of_one_process_and_load_into_any_layout(ranks: Ranks, tmp_path: Path) -> None:
    for layout, count in (("fsdp", 3), ("tp", 2)):
        assert ranks.run(count, average_and_save, layout, str(tmp_path / layout)) == [[True] * 5] * count
    assert ranks.run(2, load_and_go_on, "fsdp", str(tmp_path / "fsdp")) == [[True] * 3] * 2
    assert ranks.run(2, load_and_go_on, "fsdp", str(tmp_path / "tp")) == [[True] * 3] * 2
    view = ckpt.open(tmp_path / "fsdp")
    assert all(torch.equal(view[f"ema.weights.{n}"].read(), t) for n, t in oracle(3).items())
    model = network()
    ckpt.load(tmp_path / "fsdp", {"model": model}, only="model.*", rename={"ema.weights.*": "model.*", "model.*": "raw.*"}, strict=False)
    assert all(torch.equal(p.detach(), t) for (n, p) in model.named_parameters() if (t := oracle(3).get(n)) is not None)


def test_parameters_of_16_bits_are_averaged_in_32() -> None:
    model = network(torch.bfloat16)
    ema = Average(model, lambda n: DECAY)
    for n in range(4):
        step(model, n)
        ema.update()
    assert same(ema.weights, oracle(4, torch.bfloat16))
    with ema.swap():
        assert torch.equal(model[0].weight, ema.weights["0.weight"].bfloat16())
    assert Average(model, 0.5, dtype=torch.bfloat16).weights["0.weight"].dtype == torch.bfloat16


def test_tied_parameters_are_averaged_once(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    ema, first = Average(model, 0.5), model["a"].weight.detach().clone()
    with torch.no_grad():
        model["a"].weight.add_(1)
    ema.update()
    assert torch.equal(ema.weights["b.weight"], first * 0.5 + (first + 1) * 0.5)
    ckpt.save(tmp_path / "s", {"model": model, "ema": ema})
    again = Average(model, 0.5)
    ckpt.load(tmp_path / "s", {"model": model, "ema": again})
    assert torch.equal(again.weights["a.weight"], ema.weights["a.weight"]) and again.updates == 1


def test_a_background_save_has_the_averages_of_its_moment(tmp_path: Path) -> None:
    """Without a fence in the loop: an update waits for the copy."""
    model = network()
    ema = Average(model, DECAY)
    step(model, 0)
    ema.update()
    handle = ckpt.save_async(tmp_path / "s", {"model": model, "ema": ema})
    ema.update()
    handle.result()
    view = ckpt.open(tmp_path / "s")
    assert all(torch.equal(view[f"ema.weights.{n}"].read(), t) for n, t in oracle(1).items())
    assert view.state()["ema"]["updates"] == 1


def test_averaged_weights_that_are_saved_in_the_background_are_whole(tmp_path: Path) -> None:
    """The model has its own weights again when they are copied, and not before."""
    model = network()
    average = Average(model, DECAY)
    step(model, 1)
    with average.swap():
        handle = ckpt.save_async(tmp_path / "averaged", {"model": model})
    handle.result()
    view = ckpt.open(tmp_path / "averaged")
    assert all(torch.equal(torch.as_tensor(view[f"model.{name}"][...]), weight) for name, weight in average.weights.items())


def test_what_is_refused(tmp_path: Path) -> None:
    model = network()
    for decay in (-0.1, 1.5, float("nan"), "0.9"):
        with pytest.raises(UsageError, match="a decay is from 0 to 1"):
            Average(model, decay)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes a module, not generator"):
        Average(model.parameters(), 0.9)  # type: ignore[arg-type]
    ema = Average(model, lambda n: 2.0)
    with pytest.raises(UsageError, match="not 2"):
        ema.update()
    with pytest.raises(UsageError, match="no parameter with requires_grad"):
        Average(nn.Linear(2, 2).requires_grad_(False), 0.9)
    own = model[0].weight.detach().clone()
    with pytest.raises(StateError, match="a save would store them"), ema.swap():
        ckpt.save(tmp_path / "s", {"model": model, "ema": ema})
    with ema.swap(), pytest.raises(UsageError, match="nothing to average"):
        ema.update()
    with ema.swap(), pytest.raises(UsageError, match="already"), ema.swap():
        pass
    assert torch.equal(model[0].weight, own)
