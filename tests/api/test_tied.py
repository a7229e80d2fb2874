"""Tied tensors: stored once, loaded once, whatever is tied on the other side."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ckpt
from ckpt.errors import MismatchError, StateError
from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec
from ckpt.state.targets import overlaps_itself, shared_elements
from ckpt.state.tensors import LocalShard, LocalTensor, dtype_of
from tests.api.checked import data_files, described, pattern, same, save, save_exactly


class Tied(nn.Module):
    """An embedding and a head that share their weight, or do not."""

    def __init__(self, seed: int, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_a_tied_weight_is_stored_once_under_both_names(url: str) -> None:
    model = Tied(0, tied=True)
    weight = model.embed.weight.detach()
    report = ckpt.save(url, {"m": model})
    assert report.tensor_bytes == 5 * 3 * 4
    save_exactly(url, {"m": model}, {"m.embed.weight": weight, "m.head.weight": weight})
    (path,) = data_files(url)
    assert path.read_bytes().count(described(weight)[2]) == 1


@pytest.mark.parametrize("into", [True, False], ids=["into tied", "into untied"])
def test_a_tied_checkpoint(url: str, into: bool) -> None:
    model = Tied(0, tied=True)
    ckpt.save(url, {"m": model})
    other = Tied(1, tied=into)
    report = ckpt.load(url, {"m": other})
    assert torch.equal(other.embed.weight, model.embed.weight) and torch.equal(other.head.weight, model.embed.weight)
    assert (other.embed.weight is other.head.weight) is into
    assert report.bytes_needed == 60 * (1 if into else 2)


def test_an_untied_checkpoint_of_equal_tensors_into_a_tied_model(url: str) -> None:
    model = Tied(0, tied=False)
    with torch.no_grad():
        model.head.weight.copy_(model.embed.weight)
    ckpt.save(url, {"m": model})
    other = Tied(1, tied=True)
    report = ckpt.load(url, {"m": other})
    assert torch.equal(other.head.weight, model.embed.weight)
    assert report.unexpected == report.missing == ()


def test_different_tensors_into_a_tied_model(url: str) -> None:
    """They are cut alike, so their digests tell before anything is changed."""
    ckpt.save(url, {"m": Tied(0, tied=False)})
    other = Tied(1, tied=True)
    before = other.embed.weight.detach().clone()
    with pytest.raises(MismatchError, match=r"m\.head\.weight.*ties it to m\.embed\.weight"):
        ckpt.load(url, {"m": other})
    assert torch.equal(other.embed.weight, before)
    ckpt.load(url, {"m": other}, only="m.embed.*")
    assert torch.equal(other.embed.weight, Tied(0, tied=False).embed.weight)


@pytest.mark.parametrize("equal", [True, False])
def test_tensors_that_are_cut_otherwise_are_compared_when_they_are_read(url: str, chunks_of: Callable[[int], None], equal: bool) -> None:
    values = pattern(torch.int32, 6, 4, seed=1)
    second = values if equal else pattern(torch.int32, 6, 4, seed=2)
    chunks_of(40)  # bytes: the two have other rows in a chunk
    ckpt.save(url, {"a": values, "b": second.to(torch.int64)})
    weight = torch.zeros(6, 4, dtype=torch.int32)
    state = {"a": weight, "b": weight}
    if equal:
        ckpt.load(url, state, cast=True)
        assert torch.equal(weight, values)
    else:
        with pytest.raises(MismatchError, match=r"(?s)different values.*overwritten"):
            ckpt.load(url, state, cast=True)


def test_one_name_is_enough_for_a_tied_model(url: str) -> None:
    weight = torch.randn(5, 3)
    for name in ("embed", "head"):
        ckpt.save(url, {"m": {name: {"weight": weight}}})
        other = Tied(1, tied=True)
        report = ckpt.load(url, {"m": other})
        assert torch.equal(other.embed.weight, weight) and report.missing == ()


def test_tied_in_other_ways(url: str) -> None:
    """The same tensor twice, a detached one, a view of all of it; what differs in shape, strides, dtype or memory is not tied."""
    base = pattern(torch.float32, 4, 4, seed=3)
    state = {"a": base, "b": base, "c": base.detach(), "d": base.view(4, 4), "list": [base, {"e": base}]}
    alone = {"t": base.t(), "flat": base.view(16), "part": base[:2], "bits": base.view(torch.int32), "copy": base.clone()}
    expected = dict.fromkeys(("a", "b", "c", "d", "list.0", "list.1.e"), base) | alone
    save_exactly(url, state | alone, expected)
    assert ckpt.save(url, state | alone).tensor_bytes == 64 * 5 + 32
    target: dict[str, Any] = {n: torch.zeros(4, 4) for n in ("a", "b", "c", "d")} | {"list": [torch.zeros(4, 4), {"e": torch.zeros(4, 4)}]}
    ckpt.load(url, target, only=["a", "b", "c", "d", "list*"])
    assert same(target, state)


def test_modules_in_the_state_twice(url: str) -> None:
    inner = nn.Linear(2, 2)
    found = save(url, {"a": inner, "b": nn.Sequential(inner)})
    assert found.keys() == {"a.weight", "a.bias", "b.0.weight", "b.0.bias"}
    assert ckpt.save(url, {"a": inner, "b": nn.Sequential(inner)}).tensor_bytes == 24
    apart: dict[str, nn.Module] = {"a": nn.Linear(2, 2), "b": nn.Sequential(nn.Linear(2, 2))}
    ckpt.load(url, apart)
    assert same(dict(apart["a"].state_dict()), dict(inner.state_dict()))
    assert same(dict(apart["b"][0].state_dict()), dict(inner.state_dict()))  # type: ignore[index]


def test_the_state_of_a_tied_parameter_is_stored_once(url: str) -> None:
    def made(seed: int, steps: int) -> dict[str, Any]:
        model = Tied(seed, tied=True)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model.head(model.embed(torch.tensor([1, 2]))).sum().backward()
            optimizer.step()
        return {"m": model, "o": optimizer}

    state = made(0, 2)
    found = save(url, state)
    assert found.keys() == {"m.embed.weight", "m.head.weight", *(f"o.state.m.embed.weight.{k}" for k in ("step", "exp_avg", "exp_avg_sq"))}
    other = made(1, 0)
    ckpt.load(url, other)
    before, after = state["o"].state_dict()["state"][0], other["o"].state_dict()["state"][0]
    assert same(dict(sorted(before.items())), dict(sorted(after.items())))


def test_empty_tensors_are_tied_only_if_they_are_one_object(url: str) -> None:
    one = torch.empty(0, 3)
    assert save(url, {"a": one, "b": one, "c": torch.empty(0, 3)}).keys() == {"a", "b", "c"}
    view = ckpt.open(url)
    assert all(view[n].shape == (0, 3) for n in "abc")


# ------------------------------------------------------------------------------------------------------------------------------------------
# States whose tensors share some of their elements: loaded where the checkpoint has one value for each, refused where it has two.


def views(memory: torch.Tensor) -> dict[str, torch.Tensor]:
    """Three tensors: the second shares elements with both others, and those with none of each other."""
    return {"a": memory[:5], "b": memory[3:8], "c": memory[7:]}


def test_elements_that_have_one_value_are_loaded(tmp_path: Path) -> None:
    source = torch.arange(12.0)
    ckpt.save(tmp_path / "c", views(source))
    target = torch.zeros(12)
    ckpt.load(tmp_path / "c", views(target))
    assert torch.equal(target, source)


@pytest.mark.parametrize("changed", ["a", "b", "c"])
def test_elements_that_have_two_values_are_refused_by_name(tmp_path: Path, changed: str) -> None:
    state = {name: view.clone() for name, view in views(torch.arange(12.0)).items()}
    state[changed] += 1
    ckpt.save(tmp_path / "c", state)
    with pytest.raises(MismatchError, match="share elements") as caught:
        ckpt.load(tmp_path / "c", views(torch.zeros(12)))
    assert f"tensor {changed}" in str(caught.value) or f"and {changed}" in str(caught.value)


def test_the_same_in_memory() -> None:
    memory = torch.zeros(10)
    with pytest.raises(MismatchError, match="share elements"):
        ckpt.live.reshard({"a": torch.ones(5), "b": torch.full((5,), 2.0)}, {"a": memory[:5], "b": memory[3:8]})


def test_a_flat_buffer_beside_its_views(tmp_path: Path) -> None:
    source, target = torch.arange(20.0), torch.zeros(20)
    ckpt.save(tmp_path / "c", {"flat": source, "w": source[:12].view(3, 4), "b": source[12:]})
    ckpt.load(tmp_path / "c", {"flat": target, "w": target[:12].view(3, 4), "b": target[12:]})
    assert torch.equal(target, source)


def test_views_between_each_others_rows_share_nothing(tmp_path: Path) -> None:
    source, target = torch.arange(24.0).view(4, 6), torch.zeros(4, 6)
    ckpt.save(tmp_path / "c", {"left": source[:, :2], "right": source[:, 2:]})
    state = {"left": target[:, :2], "right": target[:, 2:]}
    assert shared_elements([_local(name, memory) for name, memory in state.items()]) == []
    ckpt.load(tmp_path / "c", state)
    assert torch.equal(target, source)


def test_pairs_are_those_that_numpy_finds() -> None:
    memory = torch.zeros(60)
    tensors = [
        memory[i : i + n : step] for i, n, step in ((0, 20, 1), (1, 30, 3), (2, 30, 3), (25, 10, 1), (40, 20, 2), (41, 19, 2), (0, 60, 1))
    ]
    elements = [
        {int(p) for p in torch.arange(60)[i : i + n : step]}
        for i, n, step in ((0, 20, 1), (1, 30, 3), (2, 30, 3), (25, 10, 1), (40, 20, 2), (41, 19, 2), (0, 60, 1))
    ]
    expected = [(i, j) for i in range(7) for j in range(i + 1, 7) if elements[i] & elements[j]]
    assert shared_elements([_local(str(i), tensor) for i, tensor in enumerate(tensors)]) == expected


def _local(name: str, memory: torch.Tensor) -> LocalTensor:
    info = TensorSpec(name, dtype_of(memory, name), tuple(memory.shape), TensorLayout.replicated((0,)))
    return LocalTensor(info, [LocalShard(Box.whole(tuple(memory.shape)), memory)], name)


@given(
    st.lists(st.integers(0, 5), max_size=4).flatmap(
        lambda shape: st.tuples(st.just(shape), st.lists(st.integers(0, 30), min_size=len(shape), max_size=len(shape)))
    )
)
def test_a_view_overlaps_itself_if_two_of_its_elements_have_one_address(view: tuple[list[int], list[int]]) -> None:
    shape, strides = view
    memory = torch.zeros(500).as_strided(shape, strides)
    addresses = [sum(i * step for i, step in zip(at, strides, strict=True)) for at in itertools.product(*map(range, shape))]
    assert overlaps_itself(memory) is (len(set(addresses)) < len(addresses))


@pytest.mark.parametrize("strides", [(2, 1), (1, 1), (3, 1), (0, 1)])
def test_a_target_that_overlaps_itself_is_refused(tmp_path: Path, strides: tuple[int, int]) -> None:
    source = {"x": torch.arange(16.0).view(4, 4)}
    ckpt.save(tmp_path / "c", source)
    memory = torch.zeros(20)
    target = {"x": memory.as_strided((4, 4), strides)}
    for load in (lambda: ckpt.load(tmp_path / "c", target), lambda: ckpt.live.reshard(source, target)):
        with pytest.raises(StateError, match=r"strided over itself.*\(tensor x\)"):
            load()
    assert not memory.any()


def test_views_of_any_order_and_step_are_loaded(tmp_path: Path) -> None:
    source = {name: torch.randn(2, 3, 4, 4) for name in ("transposed", "stepped", "channels_last", "strided")}
    ckpt.save(tmp_path / "c", source)
    target = {
        "transposed": torch.zeros(4, 4, 3, 2).permute(3, 2, 1, 0),
        "stepped": torch.zeros(4, 3, 8, 12)[::2, :, 1::2, ::3],
        "channels_last": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "strided": torch.zeros(200).as_strided((2, 3, 4, 4), (1, 2, 30, 6)),  # no stride is beyond all that the smaller ones reach
    }
    ckpt.load(tmp_path / "c", target)
    assert all(torch.equal(target[name], tensor) for name, tensor in source.items())
