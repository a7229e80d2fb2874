"""Modules: what of them is stored, under which names, whatever wraps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.errors import StateError
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
