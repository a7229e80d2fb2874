"""A campaign of saves in the background, each followed at once by a line that changes the state: the checkpoint has the state of the
call, bit for bit, or there is a ``ConsistencyError``, where one is due. ``python -m tests.engine.lost_fences 200 [name …]``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

import ckpt
from ckpt.errors import ConsistencyError

WIDTH = 1500


@dataclass
class Loop:
    """Four linears (36 MB of float32), what trains them, and what else the state has."""

    width: int = WIDTH
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        linears = [nn.utils.skip_init(nn.Linear, self.width, self.width, bias=False) for _ in range(4)]
        self.model = nn.Sequential(*linears)
        for linear in linears:
            linear.weight.data.copy_(_random(self.width))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def train(self) -> None:
        for p in self.model.parameters():
            p.grad = torch.full_like(p, 1e-3) if p.requires_grad else None
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, **self.more}

    def weights(self) -> list[torch.Tensor]:
        return list(self.model.parameters())


@cache
def _random(width: int) -> torch.Tensor:
    return torch.randn(width, width)


Change = Callable[[], object]
"""The line after the call."""


@dataclass(frozen=True)
class Case:
    """``start`` puts into the loop what it needs, and gives the line. ``must_pass``: an error would be needless."""

    start: Callable[[Loop], Change]
    must_pass: bool


def _ema(loop: Loop) -> nn.Module:
    loop.more["ema"] = ema = torch.optim.swa_utils.AveragedModel(loop.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    loop.train()
    return ema


def averaged_model(loop: Loop) -> Change:
    ema = _ema(loop)
    return lambda: ema.update_parameters(loop.model)  # type: ignore[operator]


def ema_by_data(loop: Loop) -> Change:
    pairs = list(zip(_ema(loop).parameters(), loop.weights(), strict=True))
    return lambda: [e.data.lerp_(p.data, 0.5) for e, p in pairs]


def manual_sgd(loop: Loop) -> Change:
    weights = loop.weights()
    del loop.optimizer
    loop.state = lambda: {"model": loop.model}  # type: ignore[method-assign]
    return torch.no_grad()(lambda: [p.sub_(0.01) for p in weights])


def manual_sgd_by_data(loop: Loop) -> Change:
    manual_sgd(loop)
    return lambda: [p.data.sub_(0.01) for p in loop.weights()]


class Partitioned:
    """An optimizer that torch does not know."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self.params, self.moments = params, [torch.zeros_like(p) for p in params]

    def step(self) -> None:
        for p, m in zip(self.params, self.moments, strict=True):
            m.data.add_(0.1)
            p.data.add_(m.data, alpha=-0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def foreign_optimizer(loop: Loop) -> Change:
    foreign = Partitioned([p.detach() for p in loop.weights()])
    loop.state = lambda: {"model": loop.model, "optimizer": foreign}  # type: ignore[method-assign]
    return foreign.step


def own_tensors(change: Callable[[list[torch.Tensor]], object]) -> Callable[[Loop], Change]:
    def start(loop: Loop) -> Change:
        loop.more["own"] = own = [_random(loop.width).clone() for _ in range(4)]
        return lambda: change(own)

    return start


def momentum_encoder(loop: Loop) -> Change:
    """Frozen, but in the optimizer's groups, as MoCo and codebooks of vector quantisers are; the forward pass writes it."""
    keys = nn.Sequential(*(nn.Linear(loop.width, loop.width) for _ in range(2))).requires_grad_(False)
    loop.optimizer.add_param_group({"params": [*keys.parameters()]})
    loop.model.extend(keys)
    loop.train()
    return lambda: [p.data.mul_(0.9) for p in keys.parameters()]


def freed(loop: Loop) -> Change:
    loop.more["own"] = own = _random(loop.width).clone()
    return lambda: own.untyped_storage().resize_(0)


def weights(change: Callable[[list[torch.Tensor]], object]) -> Callable[[Loop], Change]:
    def start(loop: Loop) -> Change:
        loop.train()
        changed = loop.weights()
        return lambda: change(changed)

    return start


def swapped(loop: Loop) -> Change:
    """Evaluation with averaged weights, as torch_ema and ema_pytorch do it."""
    average = [2 * p.detach() for p in loop.weights()]
    batch = torch.randn(256, loop.width)

    def evaluate() -> None:
        back = [p.data.clone() for p in loop.weights()]
        for p, e in zip(loop.weights(), average, strict=True):
            p.data.copy_(e)
        loop.model(batch)
        for p, b in zip(loop.weights(), back, strict=True):
            p.data.copy_(b)

    return evaluate


def _next_step(loop: Loop) -> Change:
    loop.train()
    return loop.train


CASES: dict[str, Case] = {
    "next step": Case(_next_step, must_pass=True),
    "AveragedModel.update_parameters": Case(averaged_model, must_pass=True),
    "EMA by .data.lerp_": Case(ema_by_data, must_pass=True),
    "manual SGD": Case(manual_sgd, must_pass=True),
    "manual SGD by .data": Case(manual_sgd_by_data, must_pass=True),
    "an optimizer that is none of torch's": Case(foreign_optimizer, must_pass=True),
    "a momentum encoder that the optimizer has": Case(momentum_encoder, must_pass=True),
    "own tensors, add_": Case(own_tensors(lambda own: [t.add_(1) for t in own]), must_pass=True),
    "own tensors, .data.add_": Case(own_tensors(lambda own: [t.data.add_(1) for t in own]), must_pass=True),
    "own tensors, numpy": Case(own_tensors(lambda own: [t.numpy().__iadd__(1) for t in own]), must_pass=True),
    "own tensors, freed": Case(freed, must_pass=True),
    "evaluation with swapped weights": Case(swapped, must_pass=False),
    "clipping, .data.clamp_": Case(weights(lambda w: [p.data.clamp_(-0.01, 0.01) for p in w]), must_pass=False),
    "_foreach_mul_": Case(weights(lambda w: torch._foreach_mul_([p.data for p in w], 0.5)), must_pass=False),
    "broadcast into .data": Case(weights(lambda w: [p.data.copy_(torch.zeros(())) for p in w]), must_pass=False),
    "weights, numpy": Case(weights(lambda w: [p.detach().numpy().__imul__(0.5) for p in w]), must_pass=False),
}


def clones(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of the modules' and own tensors that a checkpoint has of a state, by torch's own walk."""
    wanted: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, nn.Module):
            wanted |= {f"{key}.{n}": t.detach().clone() for n, t in value.state_dict().items()}
        elif isinstance(value, torch.optim.Optimizer):
            names = {p: f"{key}.state.model.{n}" for n, p in state["model"].named_parameters()}
            of_params = [(f"{names[p]}.{k}", t) for p, values in value.state.items() for k, t in values.items()]
            wanted |= {name: t.clone() for name, t in of_params if isinstance(t, torch.Tensor)}
        elif isinstance(value, Partitioned):
            wanted |= {f"{key}.moments.{i}": t.clone() for i, t in enumerate(value.moments)}
        else:
            wanted |= {f"{key}.{i}": t.clone() for i, t in enumerate(value)} if isinstance(value, list) else {key: value.clone()}
    return wanted


def outcome(url: str, state: dict[str, Any], change: Change, **options: Any) -> str:
    """Of one save: ``right``, ``error``, or ``wrong`` and the name of a tensor."""
    wanted = clones(state)
    handle = ckpt.save_async(url, state, **options)
    change()
    try:
        handle.result()
    except ConsistencyError as err:
        return "error" if "fence()" in str(err) else f"an error that does not help: {err}"
    view = ckpt.open(url)
    stored = {name: view[name].read() for name in view}
    for name, value in wanted.items():
        if not torch.equal(stored[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)):
            return f"wrong: {name}"
    return "right"


def campaign(name: str, saves: int, width: int = WIDTH) -> Counter[str]:
    """Outcomes of so many saves."""
    outcomes: Counter[str] = Counter()
    for turn in range(saves):
        loop = Loop(width)
        change = CASES[name].start(loop)
        outcomes[outcome(f"inprocess://lost-fences/{turn % 2}", loop.state(), change)] += 1
    return outcomes


def main() -> None:
    logging.getLogger("ckpt").setLevel(logging.CRITICAL)
    saves, names = int(sys.argv[1]), sys.argv[2:] or list(CASES)
    for name in names:
        began = time.monotonic()
        print(f"{name:40} {dict(campaign(name, saves))} {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
