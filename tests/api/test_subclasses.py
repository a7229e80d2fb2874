"""Tensors that are made of others, as quantised weights are: stored as these, filled in place, compared by class, context and shape."""

from __future__ import annotations

import io
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ckpt
from ckpt import live
from ckpt.cli.main import cli
from ckpt.engine.verify import verify
from ckpt.errors import LayoutError, MismatchError, NamesError, StateError, UsageError
from ckpt.policies import EverySteps, TrustFrozen
from tests.fixtures.rows8 import Fp8, Rounding, Rows8
from tests.formats import oracle


class Quantised(nn.Module):
    """A layer whose weight is made of others; so are a buffer and what its optimizer keeps."""

    scales: torch.Tensor

    def __init__(self, seed: int, *, rows: int = 8, rounding: object = "up") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(Rows8.random(rows, 6, rounding=rounding))
        self.plain = nn.Parameter(torch.randn(3))
        self.register_buffer("scales", TwoTensor(Rows8.random(2, 2), torch.randn(2, 2)))


class Momentum8(torch.optim.Optimizer):
    """Keeps a moment in 8 bits, which it makes at its first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if not self.state[param]:
                self.state[param] = {"moment": Rows8.random(4, 2, rounding=True), "step": torch.zeros(())}
            with torch.no_grad():
                self.state[param]["moment"].add_(3)
                self.state[param]["step"] += 1
                param.add_(1)


def job(seed: int, *, steps: int = 1, **options: Any) -> dict[str, Any]:
    model = Quantised(seed, **options)
    optimizer = Momentum8(model.parameters())
    for _ in range(steps):
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "list": [Rows8.random(2, 2), 5], "seed": seed}


def inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [x for name in tensor.__tensor_flatten__()[0] for x in inner(getattr(tensor, name))]


def plain(state: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    tensors = dict(state["model"].state_dict())
    tensors |= {f"{i}.{k}": v for i, s in enumerate(state["optimizer"].state.values()) for k, v in s.items()}
    tensors["list.0"] = state["list"][0]
    return {name: [x.detach().clone() for x in inner(tensor)] for name, tensor in tensors.items()}


def assert_same(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> None:
    assert one.keys() == other.keys()
    for name, tensors in one.items():
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(tensors, other[name], strict=True)), name


@pytest.mark.parametrize("steps", [0, 2])
def test_all_comes_back_in_place(url: str, steps: int) -> None:
    state = job(1)
    before = plain(state)
    ckpt.save(url, state)
    again = job(2, steps=steps)
    weight, codes = again["model"].weight, again["model"].weight.codes
    ckpt.load(url, again)
    assert_same(plain(again), before)
    assert again["model"].weight is weight and weight.codes is codes
    again["optimizer"].step()
    state["optimizer"].step()
    assert_same(plain(again), plain(state))
    assert verify(url).ok


def test_the_files_have_plain_tensors_and_a_description(url: str) -> None:
    state = job(1)
    ckpt.save(url, state)
    read = oracle.read(url)
    assert read["model.weight#codes"] == ("uint8", (8, 6), state["model"].weight.codes.numpy().tobytes())
    fields = ("a#codes", "a#scale", "a#table", "b")
    assert {name for name in read if name.startswith("model.scales")} == {f"model.scales#{f}" for f in fields}
    opened = ckpt.open(url)
    described = {
        "__tensor_flatten__": "tests.fixtures.rows8.Rows8",
        "dtype": "float32",
        "shape": [8, 6],
        "context": {"shape": torch.Size([8, 6]), "rounding": "up"},
    }
    assert opened.state()["model"]["weight"] == described
    assert torch.equal(opened.state()["list"][0]["tensors"]["scale"].read(), state["list"][0].scale)
    with pytest.raises(NamesError, match="weight#codes, model.weight#scale"):
        opened["model.weight"]


def test_a_save_in_the_background_has_the_state_of_its_call(root: str) -> None:
    state = job(1)
    before = plain(state)
    saving = ckpt.save_async(f"{root}/a", state)
    state["optimizer"].step()  # waits for what is not captured yet
    saving.result()
    again = job(2)
    ckpt.load(f"{root}/a", again)
    assert_same(plain(again), before)


def test_what_is_written_through_the_class_is_noticed(root: str) -> None:
    """The inner tensors' own version counters do not count it."""
    state = job(1)
    state["model"].weight.requires_grad_(False)
    run = ckpt.Checkpointer(root, save=EverySteps(1), reuse=TrustFrozen(hash_every=100))
    for step in range(3):
        run.save(step, state)
    with torch.no_grad():
        state["model"].weight.add_(1)
    assert state["model"].weight.codes._version == 0
    before = plain(state)
    run.save(3, state)
    run.close()
    again = job(2)
    assert ckpt.Checkpointer(root).restore(again) == 3
    assert_same(plain(again), before)


@pytest.mark.parametrize(
    ("saved", "loaded", "text"),
    [
        ({}, {"rounding": "down"}, 'context.rounding "up" in the checkpoint, "down" in the state'),
        ({"rounding": Rounding.DOWN}, {"rounding": Rounding.NEAREST}, "context.rounding.object .*Rounding.DOWN.*Rounding.NEAREST"),
        ({}, {"rows": 4}, r"shape \[8,6\] in the checkpoint, \[4,6\] in the state"),
    ],
)
def test_another_context_or_shape_is_named_and_nothing_changes(url: str, saved: Any, loaded: Any, text: str) -> None:
    ckpt.save(url, job(1, **saved))
    again = job(2, **loaded)
    before = plain(again)
    with pytest.raises(MismatchError, match=f"model.weight: {text}"):
        ckpt.load(url, again)
    assert_same(plain(again), before)


def test_a_plain_tensor_and_one_made_of_others_do_not_fit(root: str) -> None:
    made, dense = {"w": Rows8.random(2, 2), "o": TwoTensor(torch.ones(2), torch.ones(2))}, {"w": torch.ones(2, 2), "o": torch.ones(2)}
    ckpt.save(f"{root}/made", made)
    ckpt.save(f"{root}/dense", dense)
    with pytest.raises(MismatchError, match="w: a tensor made of codes, scale, table in the checkpoint, a plain tensor in the state"):
        ckpt.load(f"{root}/made", dense)
    with pytest.raises(
        MismatchError, match="w: a tests.fixtures.rows8.Rows8 in the state, and its inner tensors are not in the checkpoint"
    ):
        ckpt.load(f"{root}/dense", made)
    with pytest.raises(MismatchError, match=r"w: class .*Rows8.* in the checkpoint, .*TwoTensor.* in the state"):
        ckpt.load(f"{root}/made", {"w": made["o"], "o": made["o"]})
    with pytest.raises(MismatchError, match="x"):
        ckpt.load(f"{root}/made", {**made, "x": Rows8.random(2, 2)})


def test_parts_go_by_the_name_of_the_whole(root: str) -> None:
    state, again = job(1), job(2)
    before = plain(again)
    ckpt.save(f"{root}/part", state, only="*.weight")
    assert all(name.startswith(("model.weight#", "optimizer.state.model.weight.")) for name in ckpt.open(f"{root}/part"))
    ckpt.load(f"{root}/part", again, only="*.weight")
    assert torch.equal(again["model"].weight.codes, state["model"].weight.codes)
    assert_same({"plain": plain(again)["plain"]}, {"plain": before["plain"]})
    ckpt.save(f"{root}/whole", state)
    frozen = job(3)
    frozen["model"].weight.requires_grad_(False)
    before = plain(frozen)
    ckpt.load(f"{root}/whole", frozen, trainable=True)  # the frozen weight keeps its values
    assert_same({"weight": plain(frozen)["weight"]}, {"weight": before["weight"]})
    moved = Rows8.random(8, 6, rounding="up")
    ckpt.load(f"{root}/whole", {"base": {"w": moved}}, only="base.w", rename={"model.weight": "base.w"})
    assert torch.equal(moved.codes, state["model"].weight.codes)


@dataclass
class Meta:
    shape: torch.Size
    device: torch.device


def test_a_context_is_the_same_on_every_device(url: str) -> None:
    ckpt.save(url, {"w": Rows8.random(2, 2, rounding=Meta(torch.Size((2, 2)), torch.device("cuda", 1)))})
    assert ckpt.open(url).state()["w"]["context"]["rounding"] == {
        "object": f"{__name__}.Meta",
        "fields": {"shape": torch.Size((2, 2)), "device": torch.device("cuda")},
    }


class Fp8Linear(nn.Module):
    """As a module of TransformerEngine: its extra state are bytes that it makes and reads itself, with its scales."""

    def __init__(self, seed: int, state: object, **options: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight, self.state = nn.Parameter(Fp8.random(4, 6, **options)), state

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


def test_weights_and_extra_state_as_those_of_transformer_engine(root: str) -> None:
    state, other = torch.arange(9, dtype=torch.uint8), io.BytesIO(b"of TE 1.x")
    for number, value in enumerate((state, other)):
        ckpt.save(f"{root}/{number}", {"m": (saved := Fp8Linear(1, value))})
    described = ckpt.open(f"{root}/0").state()["m"]["weight"]["context"]
    assert described["nontensor_kwargs"]["quantizer"] == {"object": "tests.fixtures.rows8.Quantizer"}
    frozen = Fp8Linear(2, torch.empty(0, dtype=torch.uint8))
    frozen.weight.requires_grad_(False)
    weight, data, quantizer = frozen.weight, frozen.weight._data, frozen.weight._quantizer  # type: ignore[attr-defined]
    ckpt.load(f"{root}/0", {"m": frozen})
    assert all(torch.equal(a, b) for a, b in zip(inner(frozen.weight), inner(saved.weight), strict=True))
    assert frozen.weight is weight and weight._data is data and weight._quantizer is quantizer  # type: ignore[attr-defined]
    assert isinstance(frozen.state, torch.Tensor) and torch.equal(frozen.state, state)
    ckpt.load(f"{root}/1", {"m": (again := Fp8Linear(2, io.BytesIO()))})
    assert isinstance(again.state, io.BytesIO) and again.state.getvalue() == b"of TE 1.x"
    stale = Fp8Linear(2, state, stale=True)
    stale.weight.stale = True  # type: ignore[attr-defined]
    before = [x.clone() for x in inner(stale.weight)]
    with pytest.raises(MismatchError, match="m.weight: context.nontensor_kwargs.transpose_invalid false in the checkpoint, true in the"):
        ckpt.load(f"{root}/0", {"m": stale})
    assert all(torch.equal(a, b) for a, b in zip(inner(stale.weight), before, strict=True))


class Guarded(Fp8Linear):
    """As TransformerEngine from 2.18 on: a pickle of a recipe with state is taken only on request, one of another recipe is ignored."""

    __module__ = "transformer_engine.pytorch.module.base"

    def set_extra_state(self, state: object) -> None:
        assert isinstance(state, torch.Tensor)
        if b"scale_fwd" not in state.numpy().tobytes():
            return
        if os.environ.get("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "0") != "1":
            raise RuntimeError("Refusing to load pickled extra state for Linear. Set NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1")
        self.state = state


def test_a_pickle_that_transformer_engine_refuses_is_refused_before_anything_changes(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("transformer_engine")
    package.__version__ = "2.18.0+a1b2c3"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.delenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", raising=False)
    for name, recipe in (("delayed", b"recipe scale_fwd"), ("current", b"recipe")):
        ckpt.save(f"{root}/{name}", {"a": torch.ones(3), "m": Guarded(1, torch.frombuffer(bytearray(recipe), dtype=torch.uint8))})
    model, a = Guarded(2, None), torch.zeros(3)
    model.state = torch.empty(0, dtype=torch.uint8)
    before = [x.clone() for x in inner(model.weight)]
    for dry_run in (False, True):
        with pytest.raises(MismatchError, match=r"nothing in the state was changed\n[^$]*m\._extra_state: Refusing .* NVTE_ALLOW_UNSAFE"):
            ckpt.load(f"{root}/delayed", {"a": a, "m": model}, dry_run=dry_run)
        assert not a.any() and all(torch.equal(x, y) for x, y in zip(inner(model.weight), before, strict=True))
    source = Guarded(1, torch.frombuffer(bytearray(b"recipe scale_fwd"), dtype=torch.uint8))
    with pytest.raises(MismatchError, match=r"nothing in the new state was changed\n[^$]*m\._extra_state: .* only with NVTE_ALLOW_UNSAFE"):
        live.reshard({"a": torch.ones(3), "m": source}, {"a": a, "m": model})
    assert not a.any()
    with live.Source("tcp://127.0.0.1:0/a", {"a": torch.ones(3), "m": source}) as served, live.Sink(served.address, {"m": model}) as sink:
        served.publish(1)
        with pytest.raises(MismatchError, match=r"m\._extra_state: .* only with NVTE_ALLOW_UNSAFE"):
            sink.take()
    assert not a.any() and all(torch.equal(x, y) for x, y in zip(inner(model.weight), before, strict=True))
    ckpt.load(f"{root}/current", {"a": a, "m": model})
    assert a.all() and model.state.numel() == 0
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    ckpt.load(f"{root}/delayed", {"a": a, "m": model})
    assert model.state.numpy().tobytes() == b"recipe scale_fwd"
    live.reshard({"m": source}, {"m": (taken := Guarded(3, None))})
    assert taken.state.numpy().tobytes() == b"recipe scale_fwd"  # type: ignore[attr-defined]


class Holder:
    """An object whose ``state_dict`` has a tensor made of others."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.tensor = Rows8.random(4, 4, rounding=seed > 5)

    def state_dict(self) -> dict[str, Any]:
        return {"inside": [self.tensor]}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        (self.tensor,) = values["inside"]


def test_an_object_is_given_a_tensor_of_the_class(url: str) -> None:
    one, other = Holder(1), Holder(2)
    ckpt.save(url, {"holder": one})
    ckpt.load(url, {"holder": other})
    assert type(other.tensor) is Rows8
    assert all(torch.equal(a, b) for a, b in zip(inner(one.tensor), inner(other.tensor), strict=True))


def test_a_class_is_made_only_if_the_program_has_it_and_its_context_is_plain(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = job(1)
    ckpt.save(url, state)
    monkeypatch.setattr("tests.fixtures.rows8.Rows8", int)
    with pytest.raises(StateError, match="no module of this program has the tensor class tests.fixtures.rows8.Rows8"):
        ckpt.load(url, job(2, steps=0))
    monkeypatch.undo()
    ckpt.save(f"{url}-2", {"holder": _with(Rounding.DOWN)})
    with pytest.raises(StateError, match="has objects, which are not made from a checkpoint"):
        ckpt.load(f"{url}-2", {"holder": Holder(2)})


def _with(rounding: object) -> Holder:
    holder = Holder(1)
    holder.tensor.rounding = rounding
    return holder


def test_values_of_one_rank_and_contexts_of_other_objects_are_refused_by_name(url: str) -> None:
    with pytest.raises(StateError, match=r"Rows8 cannot be stored.*own"):
        ckpt.save(url, {"own": ckpt.PerRank(Rows8.random(2, 2))})
    with pytest.raises(StateError, match=r"w \(context\).rounding"):
        ckpt.save(url, {"w": Rows8.random(2, 2, rounding=object())})


def test_an_export_has_what_they_stand_for(root: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(Rows8.random(4, 6))
            self.head, self.bias = self.weight, nn.Parameter(torch.randn(4))

    model = Tied()
    with pytest.raises(UsageError, match="model.weight is a tests.fixtures.rows8.Rows8, whose inner tensors"):
        ckpt.export(f"{root}/a", model)
    assert not Path(f"{root}/a").exists()
    ckpt.export(f"{root}/a", {"net": model, "step": 3}, dequantize=True, dtype="bfloat16")
    read = load_file(f"{root}/a/model.safetensors")
    assert torch.equal(read["weight"], model.weight.dequantize().bfloat16()) and torch.equal(read["bias"], model.bias.bfloat16())
    ckpt.save(f"{root}/b", {"net": model})
    result = CliRunner().invoke(cli, ["convert", "--to", "hf", "--no-config", f"{root}/b", f"{root}/c"])
    assert result.exit_code == 2 and "net.weight is a tests.fixtures.rows8.Rows8" in result.output
    assert CliRunner().invoke(cli, ["convert", "--to", "native", f"{root}/b", f"{root}/d"]).exit_code == 0
    again = Tied()
    ckpt.load(f"{root}/d", {"net": again})
    assert all(torch.equal(a, b) for a, b in zip(inner(again.weight), inner(model.weight), strict=True))


def test_a_layout_leaves_them_whole_or_refuses_them(root: str) -> None:
    state, again = job(1), job(2)
    ckpt.save(f"{root}/a", state, layout=ckpt.Layout({"dp": 1}, rules=[("*", ckpt.Replicate())]))
    ckpt.load(f"{root}/a", again, layout=ckpt.Layout({"dp": 1}, rules=[("*", ckpt.Replicate())]))
    assert_same(plain(again), plain(state))
    with pytest.raises(LayoutError, match=r"model.weight"):
        ckpt.save(f"{root}/b", state, layout=ckpt.Layout({"dp": 1}, rules=[("model.weight", ckpt.Shard(0, "dp"))]))
