"""Plain values by the thousand: they are taken together, and a checkpoint that does not fit is refused as if they were taken one by one."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import MismatchError

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
