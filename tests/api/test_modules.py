"""Modules: what of them is stored, under which names, whatever wraps them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.errors import NamesError, ShapeError, StateError
from tests.api.checked import described, same, save, save_exactly
from tests.formats.oracle import read_state


class Counted(nn.Module):
    """A module with an extra state of its own, a persistent buffer and one that is not."""

    total: torch.Tensor
    cache: torch.Tensor

    def __init__(self, seed: int, extra: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), float(seed)))
        self.register_buffer("total", torch.tensor(seed))
        self.register_buffer("cache", torch.full((4,), float(seed)), persistent=False)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def net(seed: int) -> nn.ModuleDict:
    """Nested in every way that torch has."""
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {
            "layers": nn.ModuleList([nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Conv2d(2, 3, 3)]),
            "odd names/ü": nn.ParameterDict({"x y": nn.Parameter(torch.randn(2)), "0": nn.Parameter(torch.randn(1))}),
            "list": nn.ParameterList([torch.randn(2, 2), torch.randn(())]),
            "none": nn.Linear(2, 2, bias=False),
        }
    )


def test_everything_in_state_dict_is_stored_and_loaded(url: str) -> None:
    model = net(0)
    model["layers"][0](torch.randn(5, 3))  # BatchNorm counts
    expected = {f"model.{name}": t for name, t in model.state_dict().items()}
    assert int(expected["model.layers.0.1.num_batches_tracked"]) == 1
    save_exactly(url, {"model": model}, expected)
    other = net(1)
    ckpt.load(url, {"model": other})
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_buffers_that_are_not_persistent_are_left_out(url: str) -> None:
    save_exactly(url, {"m": Counted(1)}, {"m.weight": torch.ones(2, 3), "m.total": torch.tensor(1)})
    other = Counted(5)
    ckpt.load(url, {"m": other})
    assert (other.weight.tolist(), int(other.total), other.cache.tolist()) == ([[1] * 3] * 2, 1, [5] * 4)


@pytest.mark.parametrize(
    "extra", [None, 5, {"a": [1, (2, 3)]}, torch.arange(4), {"t": torch.ones(2), "n": {"u": torch.zeros(0)}}, "text", [], {}], ids=repr
)
def test_extra_state(url: str, extra: Any) -> None:
    model = nn.ModuleDict({"inner": Counted(1, extra)})
    save(url, {"model": model})
    other = nn.ModuleDict({"inner": Counted(2, "old")})
    ckpt.load(url, {"model": other})
    assert same(other["inner"].extra, extra)


def test_a_missing_extra_state_is_reported(url: str) -> None:
    ckpt.save(url, {"m": {"weight": torch.ones(2, 3), "total": torch.tensor(7)}})
    model = Counted(1, "kept")
    assert ckpt.load(url, {"m": model}, strict=False).missing == ("m._extra_state",)
    assert (model.extra, int(model.total)) == ("kept", 7)


def test_a_module_and_its_state_dict_give_the_same_names(url: str) -> None:
    model = nn.Sequential(Counted(1, {"k": 1}), nn.BatchNorm1d(2))
    by_module = save(url, {"model": model})
    by_dict = save(url + "b", {"model": model.state_dict()})
    assert by_module == by_dict
    for saved in (url, url + "b"):
        other = nn.Sequential(Counted(2, "old"), nn.BatchNorm1d(2))
        ckpt.load(saved, {"model": other})
        assert same(dict(other.state_dict()), dict(model.state_dict()))
        third = nn.Sequential(Counted(3, "old"), nn.BatchNorm1d(2))
        state = third.state_dict()
        ckpt.load(saved, {"model": state})
        assert same(dict(third.state_dict()) | {"0._extra_state": {"k": 1}}, dict(model.state_dict()))
        assert state["0._extra_state"] == {"k": 1}


def test_lists_and_dicts_of_modules(url: str) -> None:
    state: dict[str, Any] = {"experts": [nn.Linear(2, 2), nn.Linear(2, 1)], "by": {0: nn.Linear(1, 1), "pair": (nn.Linear(3, 1), 5)}}
    found = save(url, state)
    assert found.keys() == {f"{p}.{x}" for p in ("experts.0", "experts.1", "by.0", "by.pair.0") for x in ("weight", "bias")}
    target: dict[str, Any] = {"experts": [nn.Linear(2, 2), nn.Linear(2, 1)], "by": {0: nn.Linear(1, 1), "pair": (nn.Linear(3, 1), 0)}}
    modules = [*target["experts"], target["by"][0], target["by"]["pair"][0]]
    ckpt.load(url, target)
    assert target["by"]["pair"][1] == 5
    for now, module in zip([*target["experts"], target["by"][0], target["by"]["pair"][0]], modules, strict=True):
        assert now is module
    for now, saved in zip(modules, [*state["experts"], state["by"][0], state["by"]["pair"][0]], strict=True):
        assert same(dict(now.state_dict()), dict(saved.state_dict()))


def test_frozen_parameters_stay_frozen(url: str) -> None:
    ckpt.save(url, {"m": nn.Linear(2, 2)})
    model = nn.Linear(2, 2).requires_grad_(False)
    ckpt.load(url, {"m": model})
    assert not model.weight.requires_grad and not model.bias.requires_grad


@pytest.mark.parametrize("kind", ["weight_norm", "orthogonal"])
def test_parametrised_weights(url: str, kind: str) -> None:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return getattr(nn.utils.parametrizations, kind)(nn.Linear(3, 3))  # type: ignore[no-any-return]

    model, other = made(0), made(1)
    save(url, {"m": model})
    ckpt.load(url, {"m": other})
    x = torch.randn(2, 3)
    assert torch.equal(other(x), model(x))


# ------------------------------------------------------------------------------------------------------------ wrapped


@pytest.fixture
def process_group() -> Iterator[None]:
    """A world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _checkpointed(model: nn.Module) -> nn.Module:
    return nn.Sequential(*(checkpoint_wrapper(child) for child in model.children()))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.compile": torch.compile,  # type: ignore[dict-item]
    "activation checkpoints": _checkpointed,
    "all checkpointed": checkpoint_wrapper,
    "DDP": DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "compiled DDP": lambda m: torch.compile(DistributedDataParallel(m)),  # type: ignore[return-value]
    "DDP of compiled": lambda m: DistributedDataParallel(torch.compile(m)),  # type: ignore[arg-type]
    "compiled children": lambda m: nn.Sequential(*(torch.compile(c) for c in m.children())),  # type: ignore[arg-type]
}


def two(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Counted(seed, {"seed": seed}), nn.Linear(2, 1))


@pytest.mark.filterwarnings("ignore:.*pin_memory.*", "ignore:.*deprecated.*")
@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrappers_leave_no_trace_in_the_names(url: str, kind: str, process_group: None) -> None:
    plain = save(url + "plain", {"model": two(1)})
    model = two(1)
    wrapped = WRAPPERS[kind](model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.25)
    found = save(url, {"model": wrapped, "optimizer": optimizer})
    assert found == plain
    groups = read_state(url)["state"]["optimizer"]["param_groups"]["$param_groups"]
    assert groups[0]["params"] == ["model.0.weight", "model.1.weight", "model.1.bias"]
    inner = two(2)
    ckpt.load(url, {"model": WRAPPERS[kind](inner)}, only="model.*")
    assert inner[0].extra == {"seed": 1}
    assert same(dict(inner.state_dict()), dict(two(1).state_dict()))


def test_a_wrapped_checkpoint_loads_into_a_plain_model_and_back(url: str) -> None:
    save(url, {"model": _checkpointed(two(1))})
    plain = two(2)
    ckpt.load(url, {"model": plain})
    assert same(dict(plain.state_dict()), dict(two(1).state_dict()))


# ------------------------------------------------------------------------------------------------- state_dict() of its own


class Copies(nn.Module):
    """Its state_dict gives a copy of its weight."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(value)))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name: t.clone() for name, t in super().state_dict(*args, **kwargs).items()}


def test_a_state_dict_of_copies_can_be_saved_but_not_loaded_in_place(url: str) -> None:
    """Filling the copies would leave the module as it was, without a word."""
    save_exactly(url, {"m": Copies(1)}, {"m.weight": torch.ones(2)})
    model = Copies(0)
    with pytest.raises(StateError, match=r"(?s)copies.*m\.weight.*load_state_dict") as caught:
        ckpt.load(url, {"m": model})
    assert torch.equal(model.weight.detach(), torch.zeros(2)) and caught.value.hint
    values = model.state_dict()
    ckpt.load(url, {"m": values})
    model.load_state_dict(values)
    assert torch.equal(model.weight.detach(), torch.ones(2))


class Attribute(nn.Module):
    """Its state_dict has a tensor that is neither parameter nor buffer, but is its own all the same."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.scale = torch.full((3,), float(value))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale


def test_a_tensor_that_a_state_dict_gives_besides_is_filled_in_place(url: str) -> None:
    save_exactly(url, {"m": Attribute(1)}, {"m.scale": torch.ones(3)})
    model = Attribute(0)
    ckpt.load(url, {"m": model})
    assert model.scale.tolist() == [1, 1, 1]


def test_names_of_submodules_may_start_with_a_dollar(url: str) -> None:
    model = nn.Module()
    model.add_module("$a", Counted(1, {"x": 1}))
    assert save(url, {"$m": model}).keys() == {"$m.$a.weight", "$m.$a.total"}
    other = nn.Module()
    other.add_module("$a", Counted(2, None))
    ckpt.load(url, {"$m": other})
    assert other.get_submodule("$a").extra == {"x": 1}
    assert described(other.get_submodule("$a").weight) == described(torch.ones(2, 3))


# --------------------------------------- Modules and tensors of the meta device get memory when they are loaded, and stay the same objects.


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
