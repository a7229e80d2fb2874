"""What a user is told about a state that cannot be saved, or that a checkpoint cannot be loaded into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import MismatchError, StateError, UsageError
from tests.failures.states import blank, state, stored


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    ckpt.save(str(tmp_path / "c"), state(1))
    return tmp_path / "c"


# ------------------------------------------------------------------------------------------------------------------- save


class Opaque:
    """An object without a state."""


class Careless:
    """An object whose state cannot be stored."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": Opaque()}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        raise NotImplementedError


def circle() -> dict[str, Any]:
    found: dict[str, Any] = {"x": 1}
    found["again"] = found
    return found


def circular_list() -> list[Any]:
    found: list[Any] = [1]
    found.append([found])
    return found


def deep(levels: int = 5000, inside: Any = 1) -> Any:
    for _ in range(levels):
        inside = {"k": inside}
    return inside


class Deep(Careless):
    """An object with a state that is nested as deep as it may be."""

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = deep(98)
        return found


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


VALUES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "object": (Opaque, ("'bad.value'", "Opaque")),
    "class": (lambda: Opaque, ("'bad.value'", "type")),
    "function": (lambda: circle, ("'bad.value'", "function")),
    "function in a list": (lambda: [0, [len]], ("'bad.value.1.0'", "function")),
    "iterator": (lambda: iter([1]), ("'bad.value'", "iterator")),
    "generator of random numbers": (torch.Generator, ("'bad.value'", "Generator")),
    "key": (lambda: {Opaque(): 1}, ("'bad.value.(key)'", "Opaque")),
    "not Unicode": (lambda: "\ud800", ("'bad.value'", "Unicode")),
    "tensor in a set": (lambda: {torch.ones(1)}, ("'bad.value.(element)'", "Tensor")),
    "state of an object": (Careless, ("'bad.value.inner'", "Opaque")),
    "per rank": (lambda: ckpt.PerRank({"x": Opaque()}), ("'bad.value.x'", "Opaque")),
    "circle": (circle, ("'bad.value.again'", "contains itself")),
    "circular list": (circular_list, ("'bad.value.1.0'", "contains itself")),
    "deep": (deep, ("bad.value.k.k", "containers deep")),
    "deep in an object": (lambda: deep(95, Deep()), ("nested more than 150 deep",)),
    "sparse": (lambda: torch.eye(3).to_sparse(), ("tensor bad.value", "sparse_coo")),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), ("tensor bad.value", "sparse_csr")),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), ("tensor bad.value", "qint8")),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), ("tensor bad.value", "nested")),
    "jagged": (jagged, ("tensor bad.value", "nested", "values and offsets")),
    "fake": (fake, ("tensor bad.value", "FakeTensor")),
    "meta": (lambda: torch.empty(3, device="meta"), ("tensor bad.value", "meta")),
    "meta per rank": (lambda: ckpt.PerRank(torch.empty(3, device="meta")), ("tensor bad.value", "meta")),
    "meta module": (lambda: torch.nn.Linear(2, 2, device="meta"), ("tensor bad.value.weight", "meta")),
    "lazy module": (lambda: torch.nn.LazyLinear(2), ("tensor bad.value.weight", "lazy")),
    "optimizer of nobody's parameters": (lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]), ("bad.value", "no name")),
    "long name": (lambda: {"k" * 5000: torch.ones(1)}, ("bad.value.kkkk", "4096")),
    "NUL in a name": (lambda: {"\0": torch.ones(1)}, ("bad.value.", "NUL")),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning", "ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning", "ignore:.*[Qq]uantiz:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz:UserWarning")
@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_cannot_be_stored(name: str, checkpoint: Path) -> None:
    make, says = VALUES[name]
    before = sorted(checkpoint.rglob("*"))
    for layout in (None, ckpt.Layout({"dp": 1}, rules=[("*", ckpt.Replicate())])):
        with pytest.raises(StateError) as caught:
            ckpt.save(str(checkpoint), {**state(2), "bad": {"value": make()}}, layout=layout)
        assert caught.value.exit_code == 2 and caught.value.hint
        assert [text for text in says if text not in str(caught.value)] == [], str(caught.value)[:1000]
    assert sorted(checkpoint.rglob("*")) == before and stored(str(checkpoint)) == 1


def test_an_option_of_an_optimizer_that_is_no_tensor_any_more(tmp_path: Path) -> None:
    saved = optimizer(lr=0.5)
    saved.param_groups[0]["lr"] = "fast"
    ckpt.save(str(tmp_path / "c"), {"optimizer": saved})
    with pytest.raises(MismatchError, match="'lr'.*'fast'") as caught:
        ckpt.load(str(tmp_path / "c"), {"optimizer": optimizer(lr=torch.tensor(0.1))})
    assert caught.value.hint


def test_a_dict_that_only_looks_like_an_optimizer_can_be_viewed(tmp_path: Path) -> None:
    ckpt.save(str(tmp_path / "c"), {"state": {"": torch.nn.Linear(2, 3)}, "param_groups": 3})
    assert ckpt.open(str(tmp_path / "c")).state()["param_groups"] == 3


def test_two_tensors_of_one_name(checkpoint: Path) -> None:
    with pytest.raises(StateError, match=r"a\.b") as caught:
        ckpt.save(str(checkpoint), {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}})
    assert caught.value.hint and stored(str(checkpoint)) == 1


def test_a_state_to_load_into_may_not_contain_itself(checkpoint: Path) -> None:
    with pytest.raises(StateError, match="contains itself"):
        ckpt.load(str(checkpoint), {**blank(), "bad": circle()})


def test_a_state_is_a_dict(checkpoint: Path) -> None:
    for call in (ckpt.save, ckpt.load):
        with pytest.raises(UsageError, match="not list") as caught:
            call(str(checkpoint), [1])  # type: ignore[operator]
        assert caught.value.exit_code == 2 and caught.value.hint
    assert stored(str(checkpoint)) == 1


# ------------------------------------------------------------------------------------------------------------------- load


class Simple:
    """An object with a state that can be stored."""

    def __init__(self) -> None:
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"x": torch.ones(2), "n": 1}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.loaded = values


def optimizer(**options: Any) -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    return torch.optim.SGD([("weight", weight)], **options)


THINGS: dict[str, Callable[[], Any]] = {
    "module": lambda: torch.nn.Linear(2, 3),
    "optimizer": optimizer,
    "object": Simple,
    "per rank": lambda: ckpt.PerRank(3),
    "tensor": lambda: torch.zeros(3),
    "value": lambda: 7,
    "list": lambda: [1, torch.zeros(3)],
    "dict": lambda: {"a": 1, "b": torch.zeros(3)},
}


@pytest.mark.parametrize("stored_as", THINGS)
@pytest.mark.parametrize("loaded_as", THINGS)
def test_a_checkpoint_of_one_thing_and_a_state_of_another(tmp_path: Path, stored_as: str, loaded_as: str) -> None:
    ckpt.save(str(tmp_path / "c"), {"thing": THINGS[stored_as](), "other": torch.ones(2)})
    target = {"thing": THINGS[loaded_as](), "other": torch.zeros(2)}
    if stored_as == loaded_as:
        ckpt.load(str(tmp_path / "c"), target)
        assert torch.equal(target["other"], torch.ones(2))
        return
    if loaded_as == "object" and stored_as in ("tensor", "value", "list", "dict"):  # it is for the object to say what it takes
        ckpt.load(str(tmp_path / "c"), target)
        assert target["thing"].loaded is not None
        return
    with pytest.raises(MismatchError, match="thing") as caught:
        ckpt.load(str(tmp_path / "c"), target)
    assert caught.value.exit_code in (21, 22) and caught.value.hint and "nothing in the state was changed" in str(caught.value)
    assert torch.equal(target["other"], torch.zeros(2))
