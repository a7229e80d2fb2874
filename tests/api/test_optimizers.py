"""Optimizers: state by parameter, created where it is not there yet; options follow parameters, however they are grouped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import MismatchError, NamesError, ShapeError, StateError, UsageError
from tests.api.checked import described, files_below, same, save
from tests.formats.oracle import read_state

Job = dict[str, Any]


def values(optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """All of an optimizer as torch gives it; the keys of a parameter's state have no order."""
    found = optimizer.state_dict()
    return {k: dict(sorted(v.items())) for k, v in found["state"].items()}, found["param_groups"]


def model(seed: int) -> nn.Sequential:
    """With a parameter of one element, of shape ``(1,)`` and ``(1, 1)``."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 1), nn.Tanh(), nn.Linear(1, 1), nn.Linear(1, 4, bias=False))


def grow(job: Job, steps: int) -> Job:
    """Train: every step depends on nothing but the state."""
    net, optimizer = job["model"], job["optimizer"]
    for i in range(steps):
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(i))

        def loss(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            found = net(inputs).square().sum()
            found.backward()
            return found  # type: ignore[no-any-return]

        loss()
        optimizer.step(loss)
    return job


Make = Callable[[nn.Module], torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "SGD momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1),
    "AdamW amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, amsgrad=True, betas=(0.5, 0.75)),
    "Adam tensor lr": lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1)),
    "Adam fused": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, fused=True),
    "Adam foreach": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, foreach=True),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.1, momentum=0.5, centered=True),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3),
    "LBFGS from a bias": lambda m: torch.optim.LBFGS(list(m.parameters())[::-1], lr=0.1, max_iter=3),
    **{
        name: lambda m, name=name: getattr(torch.optim, name)(m.parameters(), lr=0.1)  # type: ignore[misc]
        for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")
    },
}


def test_all_optimizers_of_torch_are_tried() -> None:
    """SparseAdam has the state of Adam, Muon that of SGD with momentum; both take special models."""
    classes = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name, None), type)} - {"Optimizer"}
    tried = {type(make(model(0))).__name__ for make in MAKERS.values()}
    assert classes - tried <= {"SparseAdam", "Muon"}


@pytest.mark.parametrize("steps", [0, 3], ids=["into none", "over old state"])
@pytest.mark.parametrize("kind", MAKERS)
def test_training_resumes_to_the_bit(url: str, kind: str, steps: int) -> None:
    def made(seed: int) -> Job:
        net = model(seed)
        return {"model": net, "optimizer": MAKERS[kind](net)}

    job = grow(made(0), 2)
    found = save(url, job)
    for name, param in job["model"].named_parameters():
        for key, value in job["optimizer"].state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                assert found[f"optimizer.state.model.{name}.{key}"] == described(value)
    other = grow(made(1), steps)
    report = ckpt.load(url, other)
    assert report.missing == report.unexpected == ()
    assert same(values(other["optimizer"]), values(job["optimizer"]))
    assert same(values(grow(other, 2)["optimizer"]), values(grow(job, 2)["optimizer"]))
    assert same(dict(other["model"].state_dict()), dict(job["model"].state_dict()))


def test_an_optimizer_without_state_stores_only_options(url: str) -> None:
    net = model(0)
    found = save(url, {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.25)})
    assert found.keys() == {f"model.{n}" for n in net.state_dict()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    ckpt.load(url, {"model": net, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.25 and not optimizer.state


def test_buffers_that_are_none(url: str) -> None:
    net = model(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    first, second, *_ = net.parameters()
    optimizer.state[first]["momentum_buffer"] = None
    optimizer.state[second]["momentum_buffer"] = torch.ones_like(second)
    save(url, {"m": net, "o": optimizer})
    late = torch.optim.SGD(net.parameters(), lr=0.1)
    ckpt.load(url, {"m": net, "o": late})
    assert late.state[first] == {"momentum_buffer": None}
    assert torch.equal(late.state[second]["momentum_buffer"], torch.ones_like(second))
    crossed = torch.optim.SGD(net.parameters(), lr=0.1)
    crossed.state[second]["momentum_buffer"] = None
    ckpt.load(url, {"m": net, "o": crossed})
    assert torch.equal(crossed.state[second]["momentum_buffer"], torch.ones_like(second))


class Factored(torch.optim.Optimizer):
    """Keeps rows and columns, tensors in lists and dicts, and plain values for each parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "schedule": {"kind": "cosine", "points": [1, 2]}, "warm": torch.tensor([0.5, 1.0])})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["rows"] = (
                    param.detach().float().flatten(1).mean(1, keepdim=True) if param.ndim > 1 else param.detach().clone().float()
                )
                state["columns"] = torch.arange(param.shape[-1] + 2, dtype=torch.float64)
                state["history"] = [torch.ones(2), (3, torch.zeros(1, dtype=torch.int8))]
                state["named"] = {"a": torch.tensor(1.5), 7: "seven", "b": {"c": None}}
                state["count"] = 3
                state["half"] = torch.ones_like(param, dtype=torch.bfloat16)


@pytest.mark.parametrize("steps", [0, 1], ids=["into none", "over old state"])
def test_state_of_any_shape_and_kind(url: str, steps: int) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = Factored(net.parameters())
    optimizer.step()
    found = save(url, {"m": net, "o": optimizer})
    assert found["o.state.m.0.weight.history.0"] == described(torch.ones(2))
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    late = Factored(other.parameters(), lr=9)
    if steps:
        late.step()
    ckpt.load(url, {"m": other, "o": late})
    assert same(values(late), values(optimizer))
    state = ckpt.open(url).state()["o"]["state"]
    assert state.keys() == {f"m.{n}" for n, _ in net.named_parameters()}
    assert state["m.0.bias"].keys() == {"rows", "columns", "history", "named", "count", "half"}


def test_created_state_lies_like_its_parameter(url: str) -> None:
    net = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last, dtype=torch.bfloat16)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(net.parameters())
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    ckpt.save(url, {"m": net, "o": optimizer})
    late = torch.optim.Adam(net.parameters())
    ckpt.load(url, {"m": net, "o": late})
    assert same(values(late), values(optimizer))
    assert late.state[net.weight]["exp_avg"].stride() == net.weight.stride()


def test_parameters_without_gradient_and_frozen_ones(url: str) -> None:
    def made(seed: int) -> Job:
        torch.manual_seed(seed)
        net = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2), "frozen": nn.Linear(2, 2).requires_grad_(False)})
        return {"m": net, "o": torch.optim.Adam(net.parameters(), lr=0.5)}

    job, other = made(0), made(1)
    job["m"]["frozen"](job["m"]["used"](torch.ones(1, 2))).sum().backward()
    job["o"].step()
    found = save(url, job)
    assert {n.rpartition(".")[0] for n in found if n.startswith("o.")} == {"o.state.m.used.weight", "o.state.m.used.bias"}
    ckpt.load(url, other)
    assert same(values(other["o"]), values(job["o"]))
    assert len(other["o"].state) == 2


def test_an_optimizer_goes_back_to_before_its_first_step(url: str) -> None:
    net = model(0)
    job = {"model": net, "optimizer": torch.optim.Adam(net.parameters(), lr=0.1)}
    ckpt.save(url, job)
    grow(job, 2)
    after = values(job["optimizer"])
    ckpt.load(url, job)
    assert not job["optimizer"].state
    assert same(values(grow(job, 2)["optimizer"]), after)


def test_state_that_the_checkpoint_lacks_is_missing(url: str) -> None:
    """Where the optimizer has some: else it was saved before its first step."""
    net = model(0)
    job = grow({"model": net, "optimizer": torch.optim.Adam(net.parameters())}, 1)
    whole = dict(job["optimizer"].state)
    job["optimizer"].state.pop(net[0].weight)
    ckpt.save(url, job)
    job["optimizer"].state.update(whole)
    before = {k: v.clone() for k, v in whole[net[0].weight].items()}
    with pytest.raises(NamesError, match=r"optimizer\.state\.model\.0\.weight\.exp_avg_sq"):
        ckpt.load(url, job)
    report = ckpt.load(url, job, strict=False)
    assert set(report.missing) == {f"optimizer.state.model.0.weight.{key}" for key in ("exp_avg", "exp_avg_sq", "step")}
    assert same(dict(job["optimizer"].state[net[0].weight]), before)


def test_state_of_another_shape_does_not_fit(url: str) -> None:
    net = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.state[net.weight]["momentum_buffer"] = torch.ones(2, 2)
    ckpt.save(url, {"m": net, "o": optimizer})
    optimizer.state[net.weight]["momentum_buffer"] = torch.zeros(4)
    with pytest.raises(ShapeError, match=r"o\.state\.m\.weight\.momentum_buffer: shape \[2, 2\] in the checkpoint, \[4\]"):
        ckpt.load(url, {"m": net, "o": optimizer})
    assert torch.equal(optimizer.state[net.weight]["momentum_buffer"], torch.zeros(4))


# ------------------------------------------------------------------------------------------------------------- groups


def grouped(net: nn.Sequential, *groups: tuple[list[str], dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer with parameters by name."""
    named = dict(net.named_parameters())
    return torch.optim.AdamW([{"params": [named[n] for n in names], **options} for names, options in groups], lr=1.0)


WEIGHTS, BIASES = ["0.weight", "2.weight", "3.weight"], ["0.bias", "2.bias"]
SAVED = [(WEIGHTS, {"lr": 0.25, "weight_decay": 0.5}), (BIASES, {"lr": 0.125, "weight_decay": 0.0, "tag": {"kind": "bias", "n": (1, 2)}})]
REGROUPED: dict[str, list[list[str]]] = {
    "as saved": [WEIGHTS, BIASES],
    "other order": [BIASES, WEIGHTS],
    "reversed within": [WEIGHTS[::-1], BIASES[::-1]],
    "one each": [[n] for n in BIASES + WEIGHTS],
    "split": [WEIGHTS[:1], BIASES, WEIGHTS[1:]],
    "only some": [WEIGHTS[1:], BIASES[:1]],
}


@pytest.mark.parametrize("groups", REGROUPED.values(), ids=REGROUPED.keys())
def test_options_follow_their_parameters(url: str, groups: list[list[str]]) -> None:
    net = model(0)
    job = grow({"model": net, "optimizer": grouped(net, *SAVED)}, 2)
    save(url, job)
    other = model(1)
    late = grouped(other, *((names, {}) for names in groups))
    ckpt.load(url, {"model": other, "optimizer": late}, strict=groups != REGROUPED["only some"])
    for names, group in zip(groups, late.param_groups, strict=True):
        wanted = dict(SAVED)[()] if not names else next(o for saved, o in SAVED if names[0] in saved)
        options = {k: v for k, v in group.items() if k != "params"}
        original = next(g for g in job["optimizer"].param_groups if g["lr"] == wanted["lr"])
        assert same(options, {k: v for k, v in original.items() if k != "params"})
        for name, param in zip(names, group["params"], strict=True):
            assert param is dict(other.named_parameters())[name]
            mine, theirs = late.state[param], job["optimizer"].state[dict(net.named_parameters())[name]]
            assert same(dict(sorted(mine.items())), dict(sorted(theirs.items())))


def test_a_group_whose_parameters_have_different_options_is_an_error(url: str) -> None:
    net = model(0)
    ckpt.save(url, {"model": net, "optimizer": grouped(net, *SAVED)})
    late = grouped(net, (WEIGHTS + BIASES, {}))
    with pytest.raises(
        MismatchError,
        match=r"optimizer\.param_groups: .*different options.*: lr \(0\.25 and 0\.125\), .*tag.*; give the optimizer another group",
    ):
        ckpt.load(url, {"model": net, "optimizer": late})
    assert late.param_groups[0]["lr"] == 1.0


def test_groups_with_equal_options_may_be_joined(url: str) -> None:
    net = model(0)
    ckpt.save(url, {"model": net, "optimizer": grouped(net, (WEIGHTS, {"lr": 0.5}), (BIASES, {"lr": 0.5}))})
    late = grouped(net, (BIASES + WEIGHTS, {}))
    ckpt.load(url, {"model": net, "optimizer": late})
    assert late.param_groups[0]["lr"] == 0.5


def test_a_parameter_that_no_saved_group_had_is_missing(url: str) -> None:
    net = model(0)
    ckpt.save(url, {"model": net, "optimizer": grouped(net, (WEIGHTS, {"lr": 0.5}))})
    late = grouped(net, (WEIGHTS, {}), (BIASES, {}))
    with pytest.raises(NamesError, match=r"optimizer\.param_groups of model\.0\.bias"):
        ckpt.load(url, {"model": net, "optimizer": late})
    assert [g["lr"] for g in late.param_groups] == [1.0, 1.0]
    report = ckpt.load(url, {"model": net, "optimizer": late}, strict=False)
    assert report.missing == ("optimizer.param_groups of model.0.bias", "optimizer.param_groups of model.2.bias")
    assert [g["lr"] for g in late.param_groups] == [0.5, 1.0]


@pytest.mark.parametrize("part", [{}, {"trainable": True}, {"only": ["optimizer*"]}], ids=str)
def test_groups_without_parameters_have_options_of_their_own(url: str, part: dict[str, Any]) -> None:
    """As the group without weight decay of a model with adapters only: schedules compute its next rate from the one it has."""
    net = model(0)
    empty: list[str] = []
    ckpt.save(url, {"model": net, "optimizer": grouped(net, (empty, {"lr": 0.5}), (WEIGHTS, {"lr": 0.25}), (empty, {"lr": 0.125}))}, **part)
    late = grouped(net, (WEIGHTS, {}), (empty, {}), (empty, {"tag": 1}))
    ckpt.load(url, {"model": net, "optimizer": late}, **part)
    assert [g["lr"] for g in late.param_groups] == [0.25, 0.5, 0.125]
    for groups in ([(WEIGHTS, {}), (empty, {})], [(WEIGHTS, {})]):  # which of the two it is, nobody can tell
        late = grouped(net, *groups)
        ckpt.load(url, {"model": net, "optimizer": late}, **part)
        assert [g["lr"] for g in late.param_groups] == [0.25, 1.0][: len(groups)]
    if not part:
        late = grouped(net, (WEIGHTS, {}), (empty, {}), (empty, {}))
        ckpt.load(url, {"model": net, "optimizer": late}, only=["model*"])
        assert [g["lr"] for g in late.param_groups] == [1.0] * 3


def test_options_that_the_checkpoint_lacks_are_kept(url: str) -> None:
    net = model(0)
    ckpt.save(url, {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.5)})
    late = torch.optim.SGD(net.parameters(), lr=1.0)
    torch.optim.lr_scheduler.StepLR(late, 1)
    ckpt.load(url, {"model": net, "optimizer": late})
    assert (late.param_groups[0]["lr"], late.param_groups[0]["initial_lr"]) == (0.5, 1.0)


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor(url: str) -> None:
    net = model(0)
    for number, saved in enumerate((0.5, torch.tensor(0.5), torch.tensor([0.5, 9.0, 9.0])[::2][:1].squeeze())):
        ckpt.save(f"{url}{number}", {"model": net, "optimizer": torch.optim.Adam(net.parameters(), lr=saved)})
        rate = torch.tensor(1.0, dtype=torch.float64)
        late = torch.optim.Adam(net.parameters(), lr=rate)
        place = rate.data_ptr()
        ckpt.load(f"{url}{number}", {"model": net, "optimizer": late})
        assert late.param_groups[0]["lr"] is rate
        assert (rate.item(), rate.data_ptr()) == (0.5, place)


def test_a_learning_rate_that_was_a_tensor_becomes_one(url: str) -> None:
    net = model(0)
    ckpt.save(url, {"model": net, "optimizer": torch.optim.Adam(net.parameters(), lr=torch.tensor(0.5))})
    late = torch.optim.Adam(net.parameters(), lr=1.0)
    ckpt.load(url, {"model": net, "optimizer": late})
    assert same(late.param_groups[0]["lr"], torch.tensor(0.5))


def test_options_may_be_small_tensors_of_any_stride_but_not_large_ones(url: str) -> None:
    net = nn.Linear(1, 1)
    small = {"lr": 0.1, "one": torch.arange(10.0)[::5][:1], "t": torch.arange(6.0).reshape(2, 3).t(), "none": torch.empty(0, 200)}
    optimizer = torch.optim.Optimizer(net.parameters(), small)
    save(url, {"m": net, "o": optimizer})
    late = torch.optim.Optimizer(net.parameters(), {"lr": 5.0})
    ckpt.load(url, {"m": net, "o": late})
    assert same({k: late.param_groups[0][k] for k in small}, small)
    with pytest.raises(StateError, match=r"(?s)65 elements.*at most 64"):
        ckpt.save(url, {"m": net, "o": torch.optim.Optimizer(net.parameters(), {"big": torch.zeros(65)})})


# -------------------------------------------------------------------------------------------------------------- names


def test_an_optimizer_without_its_module_has_no_names(url: str) -> None:
    net = model(0)
    with pytest.raises(
        StateError, match=r"(?s)parameter 0 of group 0 \(shape \(1, 3\)\) has no name \(optimizer\).*named_parameters"
    ) as caught:
        ckpt.save(url, {"optimizer": torch.optim.Adam(net.parameters())})
    assert isinstance(caught.value, TypeError)
    ckpt.save(url, {"model": net, "optimizer": torch.optim.Adam(net.parameters())})
    before = files_below(url)
    with pytest.raises(StateError, match="has no name"):
        ckpt.load(url, {"optimizer": torch.optim.Adam(net.parameters())}, only="optimizer*")
    assert files_below(url) == before


def test_an_optimizer_of_named_parameters_needs_no_module(url: str) -> None:
    net = model(0)
    job = {"model": net, "optimizer": torch.optim.Adam(net.named_parameters(), lr=0.5)}
    grow(job, 2)
    found = save(url, {"o": job["optimizer"]})
    assert "o.state.0.weight.exp_avg" in found and not any("model" in name for name in found)
    other = model(1)
    late = torch.optim.Adam(list(other.named_parameters())[::-1])
    ckpt.load(url, {"o": late})
    assert late.param_groups[0]["lr"] == 0.5
    for name, param in other.named_parameters():
        assert same(
            dict(sorted(late.state[param].items())), dict(sorted(job["optimizer"].state[dict(net.named_parameters())[name]].items()))
        )


def test_the_names_of_the_module_come_before_those_of_the_optimizer(url: str) -> None:
    net = model(0)
    job = grow({"model": net, "optimizer": torch.optim.Adam(net.named_parameters())}, 1)
    assert "optimizer.state.model.0.weight.exp_avg" in save(url, job)
    other = model(1)
    late = torch.optim.Adam(other.parameters())
    ckpt.load(url, {"model": other, "optimizer": late})
    assert same(values(late)[0], values(job["optimizer"])[0])


def test_two_networks_and_their_optimizers(url: str) -> None:
    def gan(seed: int) -> Job:
        generator, critic = model(seed), model(seed + 10)
        return {
            "nets": {"generator": generator, "critic": critic},
            "optimizers": [torch.optim.Adam(generator.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.2, momentum=0.9)],
            "both": torch.optim.Adagrad([*generator.parameters(), *critic.parameters()], lr=0.3),
        }

    job, other = gan(0), gan(1)
    for net, optimizer in zip(job["nets"].values(), job["optimizers"], strict=True):
        grow({"model": net, "optimizer": optimizer}, 2)
    found = save(url, job)
    assert "optimizers.0.state.nets.generator.0.weight.exp_avg" in found
    assert "optimizers.1.state.nets.critic.0.weight.momentum_buffer" in found
    ckpt.load(url, other)
    for mine, theirs in zip([*other["optimizers"], other["both"]], [*job["optimizers"], job["both"]], strict=True):
        assert same(values(mine), values(theirs))


def test_the_groups_in_the_file_name_their_parameters(url: str) -> None:
    net = model(0)
    save(url, {"model": net, "optimizer": grouped(net, *SAVED)})
    groups = read_state(url)["state"]["optimizer"]["param_groups"]["$param_groups"]
    assert [g["params"] for g in groups] == [[f"model.{n}" for n in WEIGHTS], [f"model.{n}" for n in BIASES]]
    assert [g["options"]["lr"] for g in groups] == [0.25, 0.125]
    assert groups[1]["options"]["tag"] == {"kind": "bias", "n": {"$tuple": [1, 2]}}


# ------------------------------------------------------------------------------------------------------------ refused


def test_state_that_belongs_to_no_parameter_is_refused(url: str) -> None:
    """Left out without a word, it would be lost."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state["all"] = {"count": 1}  # type: ignore[index]
    with pytest.raises(StateError, match="'all', which is in none of its groups"):
        ckpt.save(url, {"m": net, "o": optimizer})
    del optimizer.state["all"]  # type: ignore[arg-type]
    optimizer.state[torch.zeros(5)]["x"] = torch.ones(1)
    with pytest.raises(StateError, match=r"a parameter of shape \(5,\)"):
        ckpt.save(url, {"m": net, "o": optimizer})


@pytest.mark.parametrize("key", [1, "a.b", "$x", "", ("a",)], ids=repr)
def test_keys_of_state_that_give_no_names_are_refused(url: str, key: Any) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[net.weight][key] = torch.ones(1)
    with pytest.raises(StateError, match="gives no name") as caught:
        ckpt.save(url, {"m": net, "o": optimizer})
    assert repr(key) in str(caught.value)


def test_options_that_cannot_be_stored_are_named(url: str) -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"o\.param_groups\.hook"):
        ckpt.save(url, {"m": net, "o": torch.optim.Optimizer(net.parameters(), {"hook": print})})
