"""The scenario ``background``: how fast the main thread goes on while a save of many small tensors runs in the background.

The loop is of small torch operations, so it needs the interpreter's lock as often as a training loop that launches kernels.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import ckpt

from .blocking import DcpSaver
from .findings import Finding, at_least, medians
from .places import Place
from .pool import Pool, Rank
from .scenarios import Settings, Tell, turns

SHAPE = (4096,)
"""16 KiB of float32."""
IDLE = 0.5
"""Seconds of the loop without a save, before and after each save."""
FRACTION = 0.8
"""Of its idle speed that the loop must keep."""
CONTESTANTS = ("ckpt", "dcp")


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """Both contestants, in turns, on one rank."""
    pool.run(prepare, on=1, tensors=settings.small_tensors)
    samples: dict[str, list[dict[str, float]]] = {c: [] for c in CONTESTANTS}
    for repetition, contestant in turns(CONTESTANTS, min(settings.repeat, 3)):
        directory = place.fresh(contestant)
        found = pool.run(beside, on=1, contestant=contestant, directory=directory)[0]
        place.fresh(contestant)
        tell(f"background, {place.label}: {contestant} {found['fraction']:.0%} of idle speed for {found['seconds']:.2f} s")
        if repetition > 0:
            samples[contestant].append(found)
    pool.run(close, on=1)
    mine = {c: medians(s) for c, s in samples.items()}
    rows = [
        (c, f"{m['fraction']:.0%}", f"{m['seconds']:.2f}", f"{m['seconds'] * (1 - m['fraction']):.2f}", f"{m['call']:.3f}")
        for c, m in mine.items()
    ]
    return [
        Finding(
            scenario="background",
            title=f"small operations while {settings.small_tensors:,} tensors of 16 KiB are saved, 1 rank, {place.label}",
            columns=("", "of idle speed", "for s", "lost s", "call s"),
            rows=rows,
            figures={"place": place.label, "medians": mine, "samples": samples},
            checks=(at_least(f"speed beside a save, of idle speed: {place.label}", mine["ckpt"]["fraction"], FRACTION),),
        )
    ]


def prepare(rank: Rank, *, tensors: int) -> None:
    """Many tensors of 16 KiB."""
    warnings.filterwarnings("ignore")
    rank.kept.clear()
    rank.kept["state"] = {"model": {f"t{i:06d}": torch.full(SHAPE, float(i)) for i in range(tensors)}}
    rank.kept["dcp"] = DcpSaver(rank.groups[1])
    gc.collect()
    gc.freeze()


def beside(rank: Rank, *, contestant: str, directory: str) -> dict[str, float]:
    """Loops a second beside a save over those without (``fraction``), how long the save went on after its ``call``."""
    state = rank.kept["state"]
    operate = _operations()
    before = _speed(operate, _for(IDLE))
    began = time.perf_counter()
    handle: Any = (
        rank.kept["dcp"].save(directory, state) if contestant == "dcp" else ckpt.save_async(directory, state, process_group=rank.groups[1])
    )
    call = time.perf_counter() - began
    during = _speed(operate, handle.done)
    seconds = time.perf_counter() - began - call
    handle.result()
    after = _speed(operate, _for(IDLE))
    return {"fraction": during / ((before + after) / 2), "seconds": seconds, "call": call}


def _operations() -> Callable[[], None]:
    a, b = torch.ones(32, 32), torch.full((32, 32), 0.01)

    def operate() -> None:
        c = torch.relu(a @ b + 1)
        c.mul_(0.5).add_(a)

    return operate


def _for(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


def _speed(operate: Callable[[], None], done: Callable[[], bool]) -> float:
    """Loops a second until ``done``."""
    began, loops = time.perf_counter(), 0
    while not done() or loops == 0:
        for _ in range(20):
            operate()
        loops += 20
    return loops / (time.perf_counter() - began)


def close(rank: Rank) -> None:
    """Free what was prepared."""
    rank.kept["dcp"].close()
    rank.kept.clear()
    gc.collect()
