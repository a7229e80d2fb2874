"""Averages of weights of real libraries, updated right after a save in the background, and an optimizer that changes weights outside of its
step: the checkpoint has the bytes of the call. ``python -m tests.integrations.test_averages_of_libraries 200`` for a campaign."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.engine.save.capture import Capture
from tests.engine.lost_fences import Change, Loop, outcome


def ema_pytorch(loop: Loop) -> Change:
    """It writes through ``.data``."""
    ema = import_module("ema_pytorch").EMA(loop.model, beta=0.5, update_every=1, update_after_step=0, include_online_model=False)
    for _ in range(3):
        ema.update()
    loop.train()
    loop.more["ema"] = ema.ema_model
    return ema.update  # type: ignore[no-any-return]


def torch_ema(loop: Loop) -> Change:
    ema = import_module("torch_ema").ExponentialMovingAverage(loop.weights(), decay=0.5)
    loop.train()
    loop.more["ema"] = ema.shadow_params
    return ema.update  # type: ignore[no-any-return]


def torch_ema_evaluation(loop: Loop) -> Change:
    ema = import_module("torch_ema").ExponentialMovingAverage(loop.weights(), decay=0.5)
    loop.train()
    batch = torch.randn(8, loop.width)

    def evaluate() -> None:
        with ema.average_parameters():
            loop.model(batch)

    return evaluate


def diffusers(loop: Loop) -> Change:
    ema = import_module("diffusers.training_utils").EMAModel(loop.weights(), decay=0.5)
    loop.train()
    loop.more["ema"] = ema.shadow_params
    return lambda: ema.step(loop.weights())


def timm(loop: Loop) -> Change:
    spec = find_spec("timm")  # importing it needs torchvision, its averages need nothing
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "utils" / "model_ema.py"
    ema = SourceFileLoader("model_ema", str(path)).load_module().ModelEmaV3(loop.model, decay=0.5)
    loop.train()
    loop.more["ema"] = ema.module
    return lambda: ema.update(loop.model)


def schedulefree(loop: Loop) -> Change:
    """Its ``eval`` and ``train`` change the weights by counted operations."""
    optimizer = loop.optimizer = import_module("schedulefree").AdamWScheduleFree(loop.weights(), lr=0.1)
    optimizer.train()
    for _ in range(2):
        loop.train()

    def evaluate() -> None:
        optimizer.eval()
        optimizer.train()

    return evaluate


LIBRARIES: dict[Callable[[Loop], Change], str] = {
    ema_pytorch: "right",
    torch_ema: "right",
    diffusers: "right",
    timm: "right",
    torch_ema_evaluation: "right",  # swapped back by then
    schedulefree: "error",
}
"""Of each what a save gives whose capture begins after the change."""


@pytest.mark.parametrize("start", LIBRARIES)
def test_a_save_before_the_line_of_a_library(start: Callable[[Loop], Change], monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(start.__name__.removesuffix("_evaluation")) is None:
        pytest.skip("not installed")
    loop, over, fill = Loop(600), threading.Event(), Capture._fill
    change = start(loop)

    def late(self: Capture, *args: Any) -> None:
        over.wait(30)
        fill(self, *args)

    def line() -> None:
        change()
        over.set()

    monkeypatch.setattr(Capture, "_fill", late)
    assert outcome("inprocess://averages/a", loop.state(), line) == LIBRARIES[start]


def main() -> None:
    logging.getLogger("ckpt").setLevel(logging.CRITICAL)
    for start in LIBRARIES:
        outcomes: Counter[str] = Counter()
        for turn in range(int(sys.argv[1])):
            loop = Loop()
            change = start(loop)
            outcomes[outcome(f"inprocess://averages/{turn % 2}", loop.state(), change)] += 1
        print(f"{start.__name__:40} {dict(outcomes)}", flush=True)


if __name__ == "__main__":
    main()
