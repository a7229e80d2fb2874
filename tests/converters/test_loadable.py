"""What another library saved and ``convert --to native`` wrote loads into that library's objects without ``rename=``, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpt
from tests.formats.megatron_files import unpacked
from tests.formats.reading import FIXTURES, same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01 * (seed + 1))
    for _ in range(seed + 1):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def assert_same(model: nn.Module, optimizer: torch.optim.Optimizer, other: nn.Module, other_optimizer: torch.optim.Optimizer) -> None:
    state, expected = model.state_dict(), other.state_dict()
    assert state.keys() == expected.keys() and all(same(state[n], expected[n]) for n in expected)
    mine, theirs = optimizer.state_dict(), other_optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == theirs["state"].keys()
    for number, values in theirs["state"].items():
        assert mine["state"][number].keys() == values.keys()
        assert all(same(mine["state"][number][key], value) for key, value in values.items()), number


def dcp_saved(path: Path, make: Any) -> tuple[str, nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained(1)
    weights, states = get_state_dict(model, optimizer)
    dcp.save(make(weights, states), checkpoint_id=str(path), no_dist=True)
    return str(path), model, optimizer


SHAPES = {
    "beside each other": (
        lambda weights, states: {"model": weights, "optim": states, "step": 7},
        lambda model, optimizer: {"model": model, "optim": optimizer, "step": 0},
    ),
    "in one object, as the tutorial has it": (
        lambda weights, states: {"app": {"model": weights, "optimizer": states}, "epoch": 3},
        lambda model, optimizer: {"app": {"model": model, "optimizer": optimizer}, "epoch": 0},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_dcp_into_a_module_and_its_optimizer(shape: str, tmp_path: Path) -> None:
    make, into = SHAPES[shape]
    url, model, optimizer = dcp_saved(tmp_path / "dcp", make)
    report = ckpt.convert(url, str(tmp_path / "native"), to="native", verify=True)
    assert report.left_out == ()
    again, other = trained()
    state = into(again, other)
    ckpt.load(str(tmp_path / "native"), state)
    assert_same(again, other, model, optimizer)
    assert state.get("step", 7) == 7 and state.get("epoch", 3) == 3
    ckpt.convert(str(tmp_path / "native"), str(tmp_path / "copy"), to="native")  # ours already: nothing gets another name
    assert set(ckpt.open(str(tmp_path / "copy"))) == set(ckpt.open(str(tmp_path / "native")))


def test_parts_and_values_go_with_their_parameters(tmp_path: Path) -> None:
    url, model, _ = dcp_saved(tmp_path / "dcp", SHAPES["beside each other"][0])
    ckpt.convert(url, str(tmp_path / "native"), to="native", exclude=["optim.state.model.0.*"])
    names = {n for n in ckpt.open(str(tmp_path / "native")) if n.startswith("optim.")}
    assert names and all(n.startswith(("optim.state.model.1.", "optim.state.model.2.")) for n in names)
    ckpt.convert(url, str(tmp_path / "weights"), to="native", optimizer=False)
    again, _ = trained()
    ckpt.load(str(tmp_path / "weights"), {"model": again, "step": 0})
    assert all(same(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))


def test_what_is_ambiguous_keeps_its_names(tmp_path: Path) -> None:
    """A moving average has the names of the model: nobody knows whose states they are."""

    def with_average(weights: Any, states: Any) -> Any:
        return {"model": weights, "ema": copy.deepcopy(weights), "optim": states}

    url, _, _ = dcp_saved(tmp_path / "dcp", with_average)
    ckpt.convert(url, str(tmp_path / "native"), to="native")
    assert set(ckpt.open(str(tmp_path / "native"))) == set(ckpt.open(url))
    assert ckpt.open(str(tmp_path / "native")).state()["optim"]["param_groups"] == ckpt.open(url).state()["optim"]["param_groups"]


def test_parameters_by_number_keep_their_numbers(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    ckpt.convert(str(tmp_path / "x.pt"), str(tmp_path / "native"), to="native")
    assert "optimizer.state.0.exp_avg" in ckpt.open(str(tmp_path / "native"))


def test_learning_rates_that_are_tensors_stay_options(tmp_path: Path) -> None:
    model, _ = trained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25), foreach=False)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert ckpt.convert(str(tmp_path / "dcp"), str(tmp_path / "native"), to="native").left_out == ()
    again, _ = trained(1)
    other = torch.optim.AdamW(again.parameters(), lr=torch.tensor(9.0), foreach=False)
    ckpt.load(str(tmp_path / "native"), {"model": again, "optim": other})
    assert_same(again, other, model, optimizer)
    assert other.param_groups[0]["lr"] == 0.25


def test_deepspeed_into_a_module_and_its_optimizer(tmp_path: Path) -> None:
    """As the source itself does (docs/formats.md): the states of the copy are those of the source."""
    from tests.formats.test_deepspeed import Net

    source = str(FIXTURES / "deepspeed/zero3")
    ckpt.convert(source, str(tmp_path / "native"), to="native")
    loaded = []
    for url in (source, str(tmp_path / "native")):
        torch.manual_seed(len(loaded))
        model = Net()
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": [p for p in parameters if p.ndim > 1]}, {"params": [p for p in parameters if p.ndim == 1]}]
        optimizer = torch.optim.AdamW(groups, lr=9.0)
        ckpt.load(url, {"model": model, "optimizer": optimizer}, only=["model.*", "optimizer.*"], strict=False, cast=True)
        loaded.append((model, optimizer))
    assert loaded[1][1].state and loaded[1][1].param_groups[0]["lr"] == 0.01
    assert_same(*loaded[1], *loaded[0])


def test_megatron_into_a_module_and_its_optimizer(tmp_path: Path) -> None:
    """A job on tensor and pipeline parallelism: its native copy loads as the source does, masters, moments and steps included."""
    source = str(unpacked(tmp_path) / "tp2pp2vpp2" / "legacy")
    ckpt.convert(source, str(tmp_path / "native"), to="native")
    loaded = []
    for url in (source, str(tmp_path / "native")):
        model = nn.Module()
        model.output_layer = nn.Linear(24, 42, bias=False, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
        ckpt.load(url, {"model": model, "optimizer": optimizer}, strict=False)
        loaded.append((model, optimizer))
    assert {"exp_avg", "exp_avg_sq", "master", "step"} == loaded[1][1].state[loaded[1][0].output_layer.weight].keys()
    assert_same(*loaded[1], *loaded[0])
