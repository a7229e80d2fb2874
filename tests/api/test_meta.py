"""Modules and tensors of the meta device get memory when they are loaded, and stay the same objects."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import NamesError, ShapeError, StateError
from tests.api.checked import described, same


def model(seed: int, *, tied: bool = False) -> nn.ModuleDict:
    torch.manual_seed(seed)
    made = nn.ModuleDict({"embed": nn.Embedding(5, 3), "norm": nn.BatchNorm1d(3), "head": nn.Linear(3, 5, bias=False)})
    if tied:
        made["head"].weight = made["embed"].weight
    return made


def meta(*, tied: bool = False) -> nn.ModuleDict:
    with torch.device("meta"):
        return model(0, tied=tied)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_meta_module_gets_memory_and_values(url: str, tied: bool) -> None:
    saved = model(0, tied=tied)
    ckpt.save(url, {"m": saved})
    empty = meta(tied=tied)
    held = {id(t): t for t in (*empty.parameters(), *empty.buffers())}
    ckpt.load(url, {"m": empty})
    assert {id(t) for t in (*empty.parameters(), *empty.buffers())} == held.keys()
    assert all(t.device.type == "cpu" for t in held.values())
    assert same(dict(empty.state_dict()), dict(saved.state_dict()))
    assert (empty["head"].weight is empty["embed"].weight) is tied
    assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf for p in empty.parameters())


def test_a_loaded_meta_module_can_be_trained(url: str) -> None:
    saved = model(0)
    ckpt.save(url, {"m": saved})
    empty = meta()
    optimizer = torch.optim.SGD(empty.parameters(), lr=0.5)
    ckpt.load(url, {"m": empty})
    for net, opt in ((saved, torch.optim.SGD(saved.parameters(), lr=0.5)), (empty, optimizer)):
        net["head"](net["norm"](net["embed"](torch.tensor([0, 1, 2])))).square().sum().backward()
        opt.step()
    assert same(dict(empty.state_dict()), dict(saved.state_dict()))


def test_an_optimizer_on_meta_parameters_gets_its_state(url: str) -> None:
    saved = model(0)
    optimizer = torch.optim.Adam(saved.parameters(), lr=0.1)
    saved["head"](saved["norm"](saved["embed"](torch.tensor([0, 1])))).sum().backward()
    optimizer.step()
    ckpt.save(url, {"m": saved, "o": optimizer})
    empty = meta()
    late = torch.optim.Adam(empty.parameters(), lr=0.9)
    ckpt.load(url, {"m": empty, "o": late})
    assert late.param_groups[0]["lr"] == 0.1
    assert [id(p) for p in late.param_groups[0]["params"]] == [id(p) for p in empty.parameters()]
    for mine, theirs in zip(empty.parameters(), saved.parameters(), strict=True):
        assert late.state[mine].keys() == optimizer.state[theirs].keys()
        for key, value in late.state[mine].items():
            assert described(value) == described(optimizer.state[theirs][key])


def test_what_python_knows_about_a_parameter_stays(url: str) -> None:
    ckpt.save(url, {"m": model(0)})
    empty = meta()
    empty["embed"].weight.sharded = "yes"  # type: ignore[assignment]
    empty["embed"].weight.requires_grad_(False)
    ckpt.load(url, {"m": empty})
    assert empty["embed"].weight.sharded == "yes"
    assert not empty["embed"].weight.requires_grad


def test_meta_tensors_outside_modules(url: str) -> None:
    ckpt.save(url, {"a": torch.arange(6).reshape(2, 3).t(), "list": [torch.ones(2)], "scalar": torch.tensor(3.0)})
    state: dict[str, Any] = {
        "a": torch.empty(3, 2, dtype=torch.int64, device="meta"),
        "list": [torch.empty(2, device="meta")],
        "scalar": torch.empty((), device="meta"),
    }
    held = state["a"]
    ckpt.load(url, state)
    assert state["a"] is held
    assert same(state, {"a": torch.arange(6).reshape(2, 3).t(), "list": [torch.ones(2)], "scalar": torch.tensor(3.0)})


def test_memory_format_of_a_meta_tensor(url: str) -> None:
    ckpt.save(url, {"w": torch.randn(2, 4, 3, 3)})
    weight = torch.empty(2, 4, 3, 3, device="meta").to(memory_format=torch.channels_last)
    ckpt.load(url, {"w": weight})
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(weight, ckpt.open(url)["w"].read())


def test_dtypes_are_cast_into_meta_parameters_only_if_asked(url: str) -> None:
    ckpt.save(url, {"w": torch.tensor([1.5, 2.25])})
    weight = nn.Parameter(torch.empty(2, dtype=torch.bfloat16, device="meta"))
    with pytest.raises(ShapeError, match="cast=True"):
        ckpt.load(url, {"w": weight})
    assert weight.device.type == "meta"
    ckpt.load(url, {"w": weight}, cast=True)
    assert (weight.dtype, weight.tolist()) == (torch.bfloat16, [1.5, 2.25])


def test_what_does_not_fit_leaves_everything_on_meta(url: str) -> None:
    ckpt.save(url, {"m": nn.Linear(3, 3)})
    with torch.device("meta"):
        layer = nn.Linear(3, 4)
    with pytest.raises(ShapeError):
        ckpt.load(url, {"m": layer})
    assert layer.weight.device.type == layer.bias.device.type == "meta"


def test_what_the_checkpoint_lacks_stays_on_meta(url: str) -> None:
    """Memory without values would be garbage that looks like weights."""
    ckpt.save(url, {"m": {"weight": torch.ones(2, 2)}})
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    with pytest.raises(NamesError):
        ckpt.load(url, {"m": layer})
    report = ckpt.load(url, {"m": layer}, strict=False)
    assert report.missing == ("m.bias",)
    assert torch.equal(layer.weight, torch.ones(2, 2)) and layer.bias.device.type == "meta"


def test_what_is_not_wanted_stays_on_meta(url: str) -> None:
    ckpt.save(url, {"m": nn.Linear(2, 2)})
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    ckpt.load(url, {"m": layer}, only="m.bias")
    assert (layer.weight.device.type, layer.bias.device.type) == ("meta", "cpu")


def test_a_parameter_that_torch_cannot_swap_is_named(url: str) -> None:
    ckpt.save(url, {"m": nn.Linear(2, 2)})
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    reference = weakref.ref(layer.weight)
    with pytest.raises(StateError, match=r"(?s)weakref.*m\.weight.*to_empty"):
        ckpt.load(url, {"m": layer})
    assert reference() is layer.weight
