"""Mistakes that are easily made: each is told, none loads or saves something else in silence."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt import live
from ckpt.converters.importer import import_checkpoint
from ckpt.errors import LayoutError, MismatchError, NamesError, NotFoundError, StateError, UsageError


def test_a_layout_for_another_number_of_ranks(url: str) -> None:
    ckpt.save(url, {"w": torch.arange(8)})
    layout = ckpt.Layout({"tp": 2}, [("*", ckpt.Shard(0, "tp"))])
    for call in (ckpt.save, ckpt.load):
        with pytest.raises(LayoutError, match=r"is for 2 ranks \(0, 1\), the call is made by 1"):
            call(url, {"w": torch.zeros(4, dtype=torch.int64)}, layout=layout)


@pytest.mark.parametrize("layout", [{"tp": 1}, "tp"])
def test_what_is_no_layout(url: str, layout: Any) -> None:
    with pytest.raises(UsageError, match="must be a ckpt.Layout"):
        ckpt.save(url, {"w": torch.zeros(4)}, layout=layout)


@pytest.mark.parametrize("progress", [True, "yes", 3])
def test_progress_that_cannot_be_called(url: str, progress: Any) -> None:
    ckpt.save(url, {"w": torch.zeros(4)})
    calls: list[Callable[[], object]] = [
        lambda: ckpt.verify(url, progress=progress),
        lambda: ckpt.copy(url, f"{url}-copy", progress=progress),
        lambda: ckpt.convert(url, f"{url}-copy", to="native", progress=progress),
        lambda: ckpt.merge(f"{url}-copy", [url, url], progress=progress),
        lambda: import_checkpoint(url, f"{url}-copy", progress=progress),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=f"progress= takes a function of bytes done and bytes in all, not {progress!r}"):
            call()
    with pytest.raises(NotFoundError):
        ckpt.open(f"{url}-copy")


def test_rules_may_be_a_dict_and_must_be_rules() -> None:
    layout = ckpt.Layout({"tp": 2}, {"*": ckpt.Shard(0, "tp")})  # type: ignore[arg-type]
    assert layout.place("w", (2,), 0).shape == (4,)
    assert repr(layout) == "Layout({tp: 2}, 1 rules)"
    with pytest.raises(LayoutError, match="not a rule"):
        ckpt.Layout({"tp": 2}, [ckpt.Replicate()])  # type: ignore[list-item]


@pytest.mark.parametrize("given", [{"only": "modle.*"}, {"only": ["model.w", "model.bais"]}, {"rename": {"modle.*": "net.*"}}])
def test_a_pattern_that_no_name_fits(url: str, given: dict[str, Any]) -> None:
    ckpt.save(url, {"model": {"w": torch.ones(2), "bias": torch.ones(2)}, "n": 1})
    state = {"model": {"w": torch.zeros(2), "bias": torch.zeros(2)}, "n": 0}
    with pytest.raises(NamesError, match=r"match no name \(1\)"):
        ckpt.load(url, state, **given)
    assert state["model"]["w"].sum() == 0  # type: ignore[index]
    ckpt.load(url, state, strict=False, **given)


@pytest.mark.parametrize(
    "only",
    [
        "model.*",
        "model",
        "n",
        "optimizer.*",
        "optimizer.state.*",
        "optimizer.model.weight*",
        "*",
        "cfg.*",
        "cfg.a",
        "optimizer.param_groups",
    ],
)
def test_patterns_that_fit(url: str, only: str) -> None:
    def state() -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "n": 1, "cfg": {"a": 1, "b": 2}}

    ckpt.save(url, state())
    ckpt.load(url, state(), only=only)


def test_another_kind_of_optimizer(url: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    ckpt.save(url, {"model": model, "optimizer": optimizer})
    other = torch.optim.AdamW(model.parameters())
    with pytest.raises(MismatchError, match="another kind of optimizer"):
        ckpt.load(url, {"model": model, "optimizer": other})
    assert not other.state and "momentum" not in other.param_groups[0]


def test_interleaved_groups_must_be_equal() -> None:
    layout = ckpt.Layout({"tp": 1}, [("*", ckpt.Interleaved(0, "tp", 2))])
    with pytest.raises(LayoutError, match="not 2 equal groups"):
        layout.place("w", (5,), 0)


def test_three_tied_names_of_which_the_first_is_not_stored(url: str) -> None:
    ckpt.save(url, {"b": torch.ones(2), "c": torch.full((2,), 2.0)})
    w = torch.zeros(2)
    with pytest.raises(MismatchError, match="the state ties it to b"):
        ckpt.load(url, {"a": w, "b": w, "c": w})
    assert w.tolist() == [0, 0]


def test_autograd_notices_a_load(url: str) -> None:
    ckpt.save(url, {"w": torch.ones(2)})
    w = torch.zeros(2)
    before = w._version
    ckpt.load(url, {"w": w})
    assert w._version > before


def misfit(url: str, saved: dict[str, Any], state: dict[str, Any], **options: Any) -> tuple[str, str]:
    """The message and the hint of a load that does not fit."""
    ckpt.save(url, saved)
    with pytest.raises(MismatchError) as raised:
        ckpt.load(url, state, **options)
    return raised.value.message, str(raised.value.hint)


@pytest.mark.parametrize(
    ("saved", "state", "ways"),
    [
        ({"w": torch.ones(8, 4)}, {"w": torch.ones(4, 4)}, {"layout="}),
        ({"w": torch.ones(8, 4)}, {"w": torch.ones(7, 4)}, {"ckpt inspect", "only="}),
        ({"w": torch.ones(8)}, {"w": torch.ones(8, dtype=torch.float64)}, {"cast="}),
        ({"w": torch.ones(8), "v": torch.ones(1)}, {"w": torch.ones(8)}, {"only=", "strict="}),
        ({"w": torch.ones(8)}, {"v": torch.ones(8)}, {"rename=", "only=", "strict="}),
        ({"w": torch.ones(8), "v": torch.ones(1)}, {"w": torch.ones(8, dtype=torch.float64)}, {"only=", "strict=", "cast="}),
    ],
)
def test_the_hint_is_about_what_was_found(url: str, saved: dict[str, Any], state: dict[str, Any], ways: set[str]) -> None:
    _, hint = misfit(url, saved, state)
    assert {way for way in ("rename=", "only=", "strict=", "cast=", "layout=", "PerRank", "ckpt inspect") if way in hint} == ways


@pytest.mark.parametrize(
    ("saved", "state", "said"),
    [
        (ckpt.PerRank(3), 4, "x: a PerRank in the checkpoint, a plain value in the state"),
        (ckpt.PerRank([3]), [4], "x: a PerRank in the checkpoint, a plain value in the state"),
        (ckpt.PerRank(torch.ones(2)), torch.ones(2), "x: a PerRank in the checkpoint, a tensor in the state"),
        (3, ckpt.PerRank(4), "x: one value of all ranks in the checkpoint, a tensor or a PerRank in the state"),
        (torch.ones(2), ckpt.PerRank(torch.ones(2)), "x: one tensor of all ranks in the checkpoint, a PerRank in the state"),
    ],
)
def test_a_value_per_rank_on_one_side_only(url: str, saved: object, state: object, said: str) -> None:
    message, hint = misfit(url, {"x": saved, "y": 1}, {"x": state, "y": 1})
    assert said in message and "ckpt.PerRank on both sides" in hint


# ------------------------------------------------------------------------------------------------------------------------------------------
# Objects of other libraries that look as if a state could hold them: refused by name when saving, loading, moving and publishing. The
# stand-ins have what the libraries themselves showed: DeepSpeed 0.19.8 marks parameters in ``initialize``; the adapter of accelerate 1.15
# has ``state_dict`` by its class, and hands it on to a loader that may have none.


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


_alive = zero3()["model"]

STATES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "state_dict() of stage 3": (lambda: {"w": _alive.state_dict()}, "tensor w.weight"),
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
    partitioned = SimpleNamespace(Init=SimpleNamespace(param_id=2))
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.zero.partition_parameters", partitioned)
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


def test_what_else_deepspeed_makes_is_taken(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its optimizers that are torch's, its schedulers, parameters that ``zero.Init`` made and somebody gathered; and empty tensors."""
    partitioned = SimpleNamespace(Init=SimpleNamespace(param_id=2))
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.zero.partition_parameters", partitioned)
    model = nn.Linear(3, 2)
    model.weight.ds_shape = model.weight.shape  # type: ignore[assignment]
    fused = type("FusedAdam", (torch.optim.Adam,), {"__module__": "deepspeed.ops.adam.fused_adam"})(model.parameters())
    taken: list[Any] = []
    schedule = of_deepspeed("WarmupLR", object, state_dict=give, load_state_dict=lambda self, state: taken.append(state))
    state = {"model": model, "optimizer": fused, "schedule": schedule, "empty": [torch.empty(0), torch.ones(3)[:0]]}
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


# ------------------------------------------------------------------------------------------------------------------------------------------
# Plain values by the thousand: they are taken together, and a checkpoint that does not fit is refused as if they were taken one by one.

T = torch.zeros(2)


def loaded(tmp_path: Path, stored: Any, state: Any, **options: Any) -> Any:
    ckpt.save(str(tmp_path / "a"), stored)
    ckpt.load(str(tmp_path / "a"), state, **options)
    return state


@pytest.mark.parametrize("n", [2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**40, -(10**4000)])
def test_ints_of_any_size_come_back_as_keys_and_as_values(tmp_path: Path, n: int) -> None:
    stored = {"v": {n: n, "k": [n, (n, {n: n})]}}
    assert loaded(tmp_path, stored, {"v": {n: 0}}) == {"v": {n: n, "k": [n, (n, {n: n})]}}


def test_floats_come_back_bit_by_bit(tmp_path: Path) -> None:
    values = [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.pi, 2.0, math.inf, -math.inf, math.nan]
    stored = {"v": {f"k{i}": v for i, v in enumerate(values)} | {"list": values, "tuple": tuple(values)} | dict(enumerate(values))}
    state = loaded(tmp_path, stored, {"v": {"k0": 1.0, "list": [0.0], 3: 1}})
    assert repr(state) == repr(
        {"v": {"k0": 0.1, "list": values, 3: values[3], **{k: v for k, v in stored["v"].items() if k not in ("k0", "list", 3)}}}
    )


def test_keys_are_told_apart_as_in_a_dict(tmp_path: Path) -> None:
    stored = {"v": {1: "int", "one": "str", (1, 2): "tuple", 1.5: "float", None: "none", "": "empty", "a.b": "dot", False: "bool"}}
    assert loaded(tmp_path, stored, {"v": dict.fromkeys(reversed(stored["v"]), 0)}) == stored
    state = loaded(tmp_path, stored, {"v": {}})
    assert list(state["v"].items()) == list(stored["v"].items())


def test_new_keys_come_in_the_order_of_the_checkpoint(tmp_path: Path) -> None:
    stored = {"v": {"a": 1, "b": [1], "c": 2, "d": 3, "e": {"x": 1}, "f": 4}}
    state = loaded(tmp_path, stored, {"v": {"d": 0}})
    assert state == stored and list(state["v"]) == ["d", "a", "b", "c", "e", "f"]


def test_nan_is_no_key_that_is_found(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="missing"):
        loaded(tmp_path, {"v": {math.nan: 1, "b": 2}}, {"v": {math.nan: 0, "b": 0}})


@pytest.mark.parametrize(
    ("stored", "state", "named"),
    [
        ({"v": {"a": 1, "b": 2}}, {"v": {"a": 0, "b": 0, "c": 0, "d": 0}}, ["v.c", "v.d"]),
        ({"v": {"a": 1}, "w": {"x": 1, "y": 2}}, {"v": {"a": 0}}, ["w.x", "w.y"]),
        ({"v": {"a": 1, "n": {"t": T, "x": 5}}}, {"v": {"a": 0}}, ["v.n.t", "v.n.x"]),
        ({"v": {"s": 1, "a": {"b": {"t": T, "n": 5}}}}, {"v": {"s": 0, "a": {}}}, ["v.a.b.t", "v.a.b.n"]),
        ({"v": {"a": T, "b": 1}}, {"v": {"a": 1, "b": 1}}, ["v.a"]),
        ({"v": {"a": 1}, "m": T}, {"v": {"a": 0}, "m": 1}, ["m"]),
        ({"a": 1, "b": 2}, {"a": 0}, ["b"]),
        ({"v": {"t": T, "a": 1, "b": 2}}, {"v": {"t": T, "a": 0}}, ["v.b"]),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, stored: Any, state: Any, named: list[str]) -> None:
    before = repr(state)
    with pytest.raises(MismatchError) as caught:
        loaded(tmp_path, stored, state)
    assert all(name in str(caught.value) for name in named) and repr(state) == before
    if "do not fit (" not in str(caught.value):
        assert loaded(tmp_path, stored, state, strict=False) is state


def test_parts_and_renames_go_value_by_value(tmp_path: Path) -> None:
    stored = {"v": {"a": 1, "b": 2, "c": 3}}
    assert loaded(tmp_path, stored, {"v": {"a": 0, "b": 0}}, only="v.a") == {"v": {"a": 1, "b": 0}}
    assert loaded(tmp_path, stored, {"w": {"a": 0, "b": 0, "c": 0}}, rename={"v.*": "w.*"}) == {"w": {"a": 1, "b": 2, "c": 3}}


def test_the_cost_of_int_keys_grows_with_their_number(tmp_path: Path) -> None:
    """They are stored as pairs, and each is looked for."""

    def seconds(count: int) -> float:
        ckpt.save(str(tmp_path / "a"), {"v": {i: i for i in range(count)}})
        state = {"v": dict.fromkeys(range(count), 0)}
        begin = time.process_time()
        ckpt.load(str(tmp_path / "a"), state)
        taken = time.process_time() - begin
        assert state["v"][count - 1] == count - 1
        return taken

    assert min(seconds(24_000) for _ in range(2)) < 20 * (min(seconds(3000) for _ in range(3)) + 0.01)  # 64 if it were quadratic


def test_the_memory_of_a_load_is_that_of_its_values(tmp_path: Path) -> None:
    import tracemalloc

    count = 20_000
    ckpt.save(str(tmp_path / "a"), {"v": {f"key{i}": i + 0.5 for i in range(count)}})
    state = {"v": {f"key{i}": 0.0 for i in range(count)}}
    ckpt.load(str(tmp_path / "a"), state)
    tracemalloc.start()
    try:
        ckpt.load(str(tmp_path / "a"), state)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 300 * count  # bytes; keys, floats and the text of both take 190
