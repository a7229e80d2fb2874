"""States whose tensors share some of their elements: loaded where the checkpoint has one value for each, refused where it has two."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.errors import MismatchError, StateError
from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec
from ckpt.state.targets import overlaps_itself, shared_elements
from ckpt.state.tensors import LocalShard, LocalTensor, dtype_of


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
