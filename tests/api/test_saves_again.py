"""What a save keeps for the next one is used only as long as it is right: each change of a state shows in the next checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt

State = dict[str, Any]


def made() -> State:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, 3), "a.b": torch.zeros(2)}
    return {"model": model, "optimizer": optimizer, "tensors": tensors, "step": 1, "seed": ckpt.PerRank(5)}


def _free(state: State) -> None:
    state["tensors"]["a"].untyped_storage().resize_(0)
    state["tensors"]["a"].untyped_storage().resize_(24)
    state["tensors"]["a"].fill_(9)


def _set(key: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], None]:
    def change(state: State) -> None:
        state["tensors"][key] = value(state["tensors"][key])

    return change


def _data(value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], None]:
    def change(state: State) -> None:
        state["tensors"]["a"].data = value(state["tensors"]["a"])

    return change


CHANGES: dict[str, Callable[[State], object]] = {
    "value in place": lambda s: s["tensors"]["a"].add_(1),
    "replaced": _set("a", lambda t: t + 1),
    "other shape": _set("a", lambda t: t[:4].clone()),
    "same elements, other shape": _set("a", lambda t: t.view(2, 3)),
    "other dtype": _set("a", lambda t: t.to(torch.float64)),
    "same bytes, other dtype": _set("a", lambda t: t.view(torch.int32)),
    "other strides": _set("b", lambda t: torch.arange(6.0).view(3, 2).T),
    "a part of a larger one": _set("a", lambda t: torch.arange(20.0)[7:13]),
    "negated view": _set("a", lambda t: torch.view_as_complex(torch.arange(12.0).view(6, 2)).conj().imag),
    "a parameter": _set("a", lambda t: nn.Parameter(t + 2)),
    "requires_grad": lambda s: s["tensors"]["a"].requires_grad_(),
    "other memory": _data(lambda t: t + 3),
    "resized": lambda s: s["tensors"]["a"].resize_(8).fill_(4),
    "freed and back": _free,
    "tied": lambda s: s["tensors"].update(b=s["tensors"]["a"]),
    "added": lambda s: s["tensors"].update(c=torch.ones(5)),
    "removed": lambda s: s["tensors"].pop("b"),
    "other order": lambda s: s.update(tensors=dict(reversed(s["tensors"].items()))),
    "True for 1": lambda s: s.update(step=True),
    "1.0 for 1": lambda s: s.update(step=1.0),
    "other step": lambda s: s.update(step=2),
    "other value of a rank": lambda s: s.update(seed=ckpt.PerRank(6)),
    "True of a rank": lambda s: s.update(seed=ckpt.PerRank(True)),
    "a number for a tensor": lambda s: s["tensors"].update(a=3),
    "param group": lambda s: s["optimizer"].param_groups[0].update(lr=0.5),
    "frozen parameter": lambda s: s["model"][0].weight.requires_grad_(False),
    "parameter's data": lambda s: setattr(s["model"][0].weight, "data", torch.full((4, 3), 7.0)),
    "optimizer's state": lambda s: s["optimizer"].state[s["model"][0].weight].update(exp_avg=torch.full((4, 3), 8.0)),
    "step of the optimizer": lambda s: s["optimizer"].state[s["model"][0].bias]["step"].add_(1),
}


@pytest.mark.parametrize("way", ["save", "lazy"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows_in_the_next_checkpoint(tmp_path: Path, change: str, way: str) -> None:
    state = made()
    urls = [str(tmp_path / name) for name in "abcd"]
    for url in urls[:2]:
        _save(url, state, way)
    CHANGES[change](state)
    _save(urls[2], state, way)
    _save(urls[3], state, "save")
    assert told(ckpt.open(urls[2])) == told(ckpt.open(urls[3])) == expected(state)


def _save(url: str, state: State, way: Any) -> None:
    if way == "save":
        ckpt.save(url, state)
    else:
        ckpt.save_async(url, state, capture=way).result(30)


def told(view: ckpt.View) -> dict[str, str]:
    """Everything in a checkpoint, as text that tells 1 from True."""
    values = view.state()
    a = values["tensors"].get("a")
    found = {name: _text(view[name][...]) for name in view}
    lr = [group["lr"] for group in values["optimizer"]["param_groups"]]
    return {
        **found,
        "step": repr(values["step"]),
        "a": repr(a) * isinstance(a, int),
        "seed": repr(view.per_rank("seed", 0)),
        "lr": repr(lr),
    }


def expected(state: State) -> dict[str, str]:
    """The same, from the state itself."""
    model, optimizer, tensors = state["model"], state["optimizer"], state["tensors"]
    found: dict[str, torch.Tensor] = {f"model.{n}": p for n, p in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"optimizer.state.model.{name}.{key}": value for key, value in optimizer.state[param].items()}
    found |= {f"tensors.{n}": t for n, t in tensors.items() if isinstance(t, torch.Tensor)}
    a, seed = tensors.get("a"), state["seed"].value
    lr = [group["lr"] for group in optimizer.param_groups]
    texts = {name: _text(t) for name, t in found.items()}
    return {**texts, "step": repr(state["step"]), "a": repr(a) * isinstance(a, int), "seed": repr(seed), "lr": repr(lr)}


def _text(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} {tensor.tolist()}"
