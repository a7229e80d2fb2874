"""``python -m benchmarks.references DIRECTORY``: what a save with references costs, in one process, contestants in turns.

*frozen*: a frozen model and a small adapter with AdamW; the second save of ``base=`` against a whole save. *trusted*: the same with
``TrustFrozen``, so that no frozen tensor is hashed. *full*: everything is trained; a
save with ``base=`` against one without. *load*, *verify*: of the checkpoint with references against a whole one of the same state. Ratios
within one run count: medians of the seconds of CPU, and bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import ckpt
from ckpt.coordination.group import current_group
from ckpt.engine.save.job import SaveOptions
from ckpt.engine.save.save import save_state
from ckpt.engine.verify.verify import verify
from ckpt.policies import TrustFrozen
from ckpt.text import units

from .measure import cost_of

MARKS = {"bytes": 1.05, "frozen": 0.05, "trusted": 0.05, "full": 1.01, "load": 1.05, "verify": 1.05}
"""Most that each ratio may be."""
WIDTH = 2048


class Adapted(nn.Module):
    """``layers`` square weights, frozen or not, with an adapter of rank 8 each."""

    def __init__(self, layers: int, *, frozen: bool) -> None:
        super().__init__()
        self.base = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=not frozen) for _ in range(layers)])
        self.adapters = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, 8)) for _ in range(layers)])


def job(layers: int, *, frozen: bool) -> tuple[dict[str, Any], Callable[[], None]]:
    """A state, and a step of its training."""
    model = Adapted(layers, frozen=frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)

    def step() -> None:
        for p in trained:
            p.grad = torch.full_like(p, 1e-3)
        optimizer.step()
        optimizer.zero_grad()

    step()
    return {"model": model, "optimizer": optimizer}, step


def save_trusting(url: Path, state: dict[str, Any], base: Path) -> object:
    """A save with ``base=`` that trusts all frozen tensors, as those of a ``Checkpointer`` do between two that hash them."""
    options = replace(SaveOptions.of(base=str(base)), trust=TrustFrozen(hash_every=10_000))
    return save_state(str(url), state, current_group(), options)


def stored(directory: Path) -> int:
    """Bytes of all files of a checkpoint's own."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def measure(root: Path, layers: int, repeat: int) -> dict[str, float]:
    """The ratios of ``MARKS``."""
    ratios: dict[str, float] = {}
    for kind in ("frozen", "full"):
        shutil.rmtree(root, ignore_errors=True)
        state, step = job(layers, frozen=kind == "frozen")
        ckpt.save(root / "first", state, reusable=True)
        ckpt.save(root / "second", state, base=root / "first")  # what stays as it is, is known from here on
        ways: dict[str, Callable[[Path], object]] = {
            "whole": lambda url, state=state: ckpt.save(url, state),
            "based": lambda url, state=state: ckpt.save(url, state, base=root / "first"),
            "trusted": lambda url, state=state: save_trusting(url, state, root / "first"),
        }
        save_trusting(root / "trusted", state, root / "first")  # knows the digests from here on
        cpu: dict[str, list[float]] = {way: [] for way in ways if way != "trusted" or kind == "frozen"}
        for _ in range(repeat):
            step()
            for way in cpu:
                gc.collect()
                shutil.rmtree(root / way, ignore_errors=True)
                cpu[way].append(cost_of(lambda url=root / way, save=ways[way]: {"report": save(url)}).cpu)
        ratios[kind] = median(cpu["based"]) / median(cpu["whole"])
        if kind == "frozen":
            ratios["trusted"] = median(cpu["trusted"]) / median(cpu["whole"])
            tensors = [*state["model"].adapters, *(t for s in state["optimizer"].state.values() for t in s.values())]
            ratios["bytes"] = stored(root / "based") / sum(t.nbytes for t in tensors)
            ratios |= readings(root, state, repeat)
    shutil.rmtree(root, ignore_errors=True)
    return ratios


def readings(root: Path, state: dict[str, Any], repeat: int) -> dict[str, float]:
    """Load and verify with references over the same without."""
    ways: dict[str, Callable[[Path], object]] = {"load": lambda url: ckpt.load(url, state), "verify": lambda url: verify(str(url))}
    ratios = {}
    for name, read in ways.items():
        cpu: dict[str, list[float]] = {"whole": [], "based": []}
        for _ in range(repeat):
            for way in cpu:
                gc.collect()
                cpu[way].append(cost_of(lambda url=root / way, read=read: {"read": read(url)}).cpu)
        ratios[name] = median(cpu["based"]) / median(cpu["whole"])
    return ratios


def main() -> None:
    """Measure, and say what misses its mark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="an empty place of its own on the storage to be measured")
    parser.add_argument("--layers", type=int, default=64, help="16 MiB each (64)")
    parser.add_argument("--repeat", type=int, default=7)
    given = parser.parse_args()
    torch.manual_seed(0)
    ratios = measure(given.directory / "references", given.layers, given.repeat)
    print(f"{units.size(given.layers * WIDTH * WIDTH * 4)} of frozen weights, {given.repeat} repetitions")
    for name, ratio in ratios.items():
        print(f"{name:8} {ratio:.3f}  {'ok' if ratio <= MARKS[name] else 'MISSED'}: at most {MARKS[name]}")
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
