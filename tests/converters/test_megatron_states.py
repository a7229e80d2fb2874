"""Which states of optimizers Megatron can be given: all tensors of all parameters, of their shapes, and one step for a group."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt.converters.selection import OutputTensor
from ckpt.converters.targets.megatron_optimizer import STATES, optimizer_of
from ckpt.dtypes import dtype
from ckpt.plan.views import whole


def wanted(name: str, shape: tuple[int, ...]) -> OutputTensor:
    return OutputTensor(name=name, view=whole(name, shape), dtype=dtype("float32"))


PARAMETERS = {"a": wanted("model.a", (4, 2)), "b": wanted("model.b", (3,)), "mlp.router.expert_bias": wanted("model.bias", (2,))}
GROUP = {"wd_mult": 1.0}


def states(**other: tuple[int, ...]) -> dict[str, OutputTensor]:
    names = {f"optimizer.state.model.{n}.{key}": other.get(n, PARAMETERS[n].shape) for n in ("a", "b") for key in STATES.values()}
    return {name: wanted(name, shape) for name, shape in names.items()}


def node(steps: dict[str, Any], *groups: list[str]) -> dict[str, Any]:
    said = {"": {"$tensors": "optimizer.state"}, **{f"model.{n}": {"step": step} for n, step in steps.items()}}
    return {"optimizer": {"state": said, "param_groups": {"$param_groups": [{"params": p, "options": GROUP} for p in groups]}}}


@pytest.mark.parametrize("step", [7, 7.0, {"$inline": ["float32", [], "AADgQA=="]}])
def test_what_is_whole_is_taken(step: Any) -> None:
    found = optimizer_of(states(), PARAMETERS, node({"a": step, "b": 7}, ["model.a", "model.b"], []), root="model", fits=lambda g: True)
    assert found is not None and list(found.groups) == [{**GROUP, "step": 7}] * 2 and type(found.groups[0]["step"]) is int
    assert {(key, n): w.name for key, own in found.states.items() for n, w in own.items()} == {
        (key, n): f"optimizer.state.model.{n}.{called}" for key, called in STATES.items() for n in "ab"
    }


@pytest.mark.parametrize(
    ("tensors", "state"),
    [
        ({n: w for n, w in states().items() if n != "optimizer.state.model.b.master"}, node({"a": 7, "b": 7}, ["model.a", "model.b"])),
        (states(a=(8,)), node({"a": 7, "b": 7}, ["model.a", "model.b"])),
        (states(), node({"a": 7, "b": 8}, ["model.a", "model.b"])),
        (states(), node({"a": 7, "b": 8}, ["model.a"], ["model.b"], [])),
        (states(), node({}, ["model.a", "model.b"])),
        (states(), node({"a": 7, "b": 7})),
        (states(), {}),
    ],
    ids=["tensor missing", "flat", "two steps in a group", "which step", "no step", "no group", "nothing"],
)
def test_what_is_not_is_left_out(tensors: dict[str, OutputTensor], state: dict[str, Any]) -> None:
    assert optimizer_of(tensors, PARAMETERS, state, root="model", fits=lambda g: True) is None


def test_groups_that_do_not_fit() -> None:
    assert optimizer_of(states(), PARAMETERS, node({"a": 7}, ["model.a"]), root="model", fits=lambda g: "lr_mult" in g) is None
