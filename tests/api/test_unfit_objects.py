"""Objects of other libraries that look as if a state could hold them: refused by name when saving, loading, moving and publishing.

The stand-ins have what the libraries themselves showed: DeepSpeed 0.19.8 marks parameters in ``initialize``; the adapter of accelerate
1.15 has ``state_dict`` by its class, and hands it on to a loader that may have none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt import live
from ckpt.errors import StateError


def of_deepspeed(name: str, base: type, **members: Any) -> Any:
    kind = type(name, (base,), {"__module__": "deepspeed.runtime.engine", **members})
    return type("OfTheUser", (kind,), {})()


def give(self: Any) -> dict[str, int]:
    return {"stage": 1}


def take(self: Any, state: Any) -> None:
    raise AssertionError("it is not loaded")


def engine() -> Any:
    def init(self: Any) -> None:
        nn.Linear.__init__(self, 3, 2)
        self.module, self.optimizer, self.mp_world_size = nn.Linear(3, 2), None, 2

    kind = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})
    return of_deepspeed("AnEngine", kind, __init__=init)


def zero12() -> dict[str, Any]:
    """Whole parameters; only those that are trained have the mark, and one that lies in another rank's partition has None."""
    model = nn.Linear(3, 2)
    model.weight._hp_mapping = None  # type: ignore[assignment]
    return {"model": model}


def zero3() -> dict[str, Any]:
    """Parameters are empty between steps."""
    model = nn.Linear(3, 2)
    for param in model.parameters():
        param.ds_shape = param.shape  # type: ignore[attr-defined]
        param.data = torch.empty(0)
    return {"model": model}


def zero3_gathered() -> dict[str, Any]:
    model = nn.Linear(3, 2)
    model.weight.ds_shape, model.weight._z3_optimizer = model.weight.shape, object()  # type: ignore[assignment]
    return {"model": model}


STATES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "stages 1 and 2": (zero12, "tensor model.weight"),
    "stage 3": (zero3, "tensor model.weight"),
    "stage 3, gathered": (zero3_gathered, "tensor model.weight"),
    "named parameters": (lambda: {"w": dict(zero3()["model"].named_parameters())}, "tensor w.weight"),
    "a module inside another": (lambda: {"m": nn.ModuleDict({"x": zero12()["model"]})}, "tensor m.x.weight"),
    "an engine of tensor parallelism": (lambda: {"e": engine()}, "(e)"),
    "an optimizer": (lambda: {"o": of_deepspeed("DeepSpeedOptimizer", object, state_dict=give, load_state_dict=take)}, "(o)"),
}


@pytest.mark.parametrize("case", STATES)
def test_what_zero_trains_is_refused_everywhere(url: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    make, where = STATES[case]
    whole: dict[str, Any] = {"model": nn.Linear(3, 2)}
    ckpt.save(url, whole)
    calls: list[Callable[[], Any]] = [
        lambda: ckpt.save(f"{url}-again", make()),
        lambda: ckpt.save_async(f"{url}-again", make()).result(),
        lambda: ckpt.load(url, make(), strict=False),
        lambda: live.reshard(make(), {}),
        lambda: live.reshard(whole, make(), strict=False),
    ]
    for call in calls:
        with pytest.raises(StateError, match=r"DeepSpeed[\s\S]*engine\.save_checkpoint") as caught:
            call()
        assert where in str(caught.value)
    with live.Source("tcp://127.0.0.1:0/s", make()) as source, pytest.raises(StateError, match=r"engine\.save_checkpoint"):
        source.publish(1).result()


def test_what_else_deepspeed_makes_is_taken(url: str) -> None:
    """Its optimizers that are torch's, its schedulers, and parameters that ``zero.Init`` made and somebody gathered."""
    model = nn.Linear(3, 2)
    model.weight.ds_shape = model.weight.shape  # type: ignore[assignment]
    fused = type("FusedAdam", (torch.optim.Adam,), {"__module__": "deepspeed.ops.adam.fused_adam"})(model.parameters())
    taken: list[Any] = []
    schedule = of_deepspeed("WarmupLR", object, state_dict=give, load_state_dict=lambda self, state: taken.append(state))
    state = {"model": model, "optimizer": fused, "schedule": schedule}
    ckpt.save(url, state)
    ckpt.load(url, state)
    assert taken == [{"stage": 1}]


class Shard:
    """As accelerate's DataLoaderShard around a loader that is not stateful."""

    def state_dict(self) -> dict[str, Any]:
        return self.dl_state_dict  # type: ignore[attr-defined,no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it is not loaded")


def test_an_object_whose_class_alone_has_a_state_is_named(url: str) -> None:
    ckpt.save(url, {"d": {"loaders": [1]}})
    for state in ({"d": {"loaders": [Shard()]}}, {"d": {"loaders": [ckpt.PerRank(Shard())]}}):
        with pytest.raises(StateError, match=r"state_dict\(\) of a Shard fails.*dl_state_dict.*\(d\.loaders\.0\)"):
            ckpt.save(f"{url}-again", state)
    with pytest.raises(StateError, match=r"state_dict\(\) of a Shard fails.*\(d\.loaders\.0\)"):
        ckpt.load(url, {"d": {"loaders": [Shard()]}})
