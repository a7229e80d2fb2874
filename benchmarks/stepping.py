"""The scenario ``step``: what ``Checkpointer.step`` costs a loop when nothing is due, beside an empty call and a look at the clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import ckpt
from ckpt.policies import EveryMinutes, EverySteps, OnPreemption

from .findings import Finding, at_most, medians
from .places import Place
from .pool import Pool, Rank
from .report import Check
from .scenarios import Settings, Tell

CALLS = 10_000
"""Of each kind in one repetition."""
LIMIT = 50.0
"""Microseconds that a step may take when nothing is due."""
POLICY = EverySteps(10**12) | EveryMinutes(10**6) | OnPreemption()
"""One of each kind: looks at step numbers, at a clock, and listens for signals."""


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """On one rank and on all."""
    rows, figures, checks = [], {}, []
    for n in sorted({1, settings.ranks}):
        found = [pool.run(measure, on=n, ranks=n, root=place.fresh("step")) for _ in range(settings.repeat + 1)][1:]
        slowest = [max(ranks, key=lambda r: r["step"]) for ranks in found]
        mine = medians(slowest)
        asked = max(r["messages"] for ranks in found for r in ranks)
        tell(f"step, {n} ranks: {mine['step']:.2f} µs, {asked:.0f} messages")
        for what, label in (("empty", "empty call"), ("clock", "time.monotonic()"), ("step", "step(), nothing due")):
            rows.append(
                (label, str(n), f"{mine[what]:.2f}", f"{mine[what] / mine['clock']:.1f}", f"{asked:.0f}" if what == "step" else "-")
            )
        figures[str(n)] = mine | {"messages": asked, "samples": found}
        checks.append(at_most(f"a step when nothing is due, ranks {n}", mine["step"], LIMIT, "µs"))
        checks.append(Check(name=f"messages of idle steps, ranks {n}: none", ok=asked == 0, detail=f"{asked:.0f} in {CALLS:,} steps"))
    return [
        Finding(
            scenario="step",
            title=f"Checkpointer.step when nothing is due, {POLICY}",
            columns=("", "ranks", "µs per call", "over time.monotonic()", "messages"),
            rows=rows,
            figures=figures,
            checks=checks,
        )
    ]


def measure(rank: Rank, *, ranks: int, root: str) -> dict[str, float]:
    """Microseconds per call, and the messages that ``CALLS`` steps have sent through the job's store."""
    state = {"x": torch.zeros(8)}
    with ckpt.Checkpointer(root, save=POLICY, process_group=rank.groups[ranks]) as c:
        counted = [_counted(holder) for holder in (c.group, c._notices) if holder is not None and holder.store is not None]
        found = {"empty": _each(lambda n: None), "clock": _each(lambda n: time.monotonic()), "step": _each(lambda n: c.step(n, state))}
        found["messages"] = float(sum(store.messages for store in counted))
        for store in counted:
            store.holder.store = store.inner
    return found


def _each(call: Callable[[int], object]) -> float:
    began = time.perf_counter()
    for n in range(1, CALLS + 1):
        call(n)
    return (time.perf_counter() - began) / CALLS * 1e6


def _counted(holder: Any) -> Counted:
    counted = holder.store = Counted(holder)
    return counted


class Counted:
    """A job's store that counts what the thread that made this asks of it; the thread that listens for notices has others."""

    def __init__(self, holder: Any) -> None:
        self.holder, self.inner, self.messages, self._thread = holder, holder.store, 0, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._thread:
            self.messages += 1
        return getattr(self.inner, name)
