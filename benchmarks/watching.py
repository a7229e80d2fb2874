"""The scenario ``watching``: what a job pays for being watched: the spans of its saves, a listener for its events, and the alerts.

One measurement of a large save does not show that beside its noise. So small saves are made in turns, watched and not, and the difference
of their CPU times is set beside the CPU time of a save of ``--size`` MB per rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

import torch

import ckpt
from ckpt.coordination.group import Group
from ckpt.events.reporter import Reporter
from ckpt.monitors import JsonLines
from ckpt.policies import EverySteps, Latest

from .findings import Finding, at_most
from .measure import cpu_seconds
from .places import Place
from .pool import Pool, Rank
from .scenarios import Settings, Tell

SAVES = 60
"""Small saves of each kind in one repetition."""
EVENTS = 1_000
SMALL = 1 << 20
EVENT_MOST, SAVE_MOST = 50.0, 1.01
"""Microseconds of an event; CPU time of a watched save over one that is not."""


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """On all ranks of ``settings.ranks``; the slowest rank counts."""
    n = settings.ranks
    samples = [pool.run(measure, on=n, ranks=n, nbytes=settings.size, root=place.fresh("watching")) for _ in range(settings.repeat + 1)][1:]
    more = median(max(r["watched"] - r["plain"] for r in ranks) for ranks in samples)
    plain = median(max(r["plain"] for r in ranks) for ranks in samples)
    large = median(max(r["large"] for r in ranks) for ranks in samples)
    event = median(max(r["event"] for r in ranks) for ranks in samples)
    tell(f"watching, {n} ranks: {1e3 * more:.2f} ms more a save, {event:.1f} µs an event")
    rows = [
        ("small save, not watched", f"{1e3 * plain:.2f}", ""),
        ("small save, watched: more", f"{1e3 * more:.2f}", ""),
        (f"save of {settings.size / 1e6:,.0f} MB per rank, not watched", f"{1e3 * large:.2f}", "1.000"),
        ("the same, watched", f"{1e3 * (large + more):.2f}", f"{1 + more / large:.3f}"),
        ("an event, listener and alerts", f"{event / 1e3:.4f}", ""),
    ]
    return [
        Finding(
            scenario="watching",
            title=f"what watching costs, {n} ranks, {place.label}: CPU time of the slowest rank",
            columns=("", "CPU ms", "over not watched"),
            rows=rows,
            figures={"more": more, "plain": plain, "large": large, "event_us": event, "samples": samples},
            checks=[
                at_most(f"CPU of a watched save over one that is not, {settings.size / 1e6:,.0f} MB", 1 + more / large, SAVE_MOST),
                at_most("an event, listener and alerts", event, EVENT_MOST, "µs"),
            ],
        )
    ]


def measure(rank: Rank, *, ranks: int, nbytes: int, root: str) -> dict[str, float]:
    """CPU seconds of a save of each kind, and microseconds of the trainer's thread for an event."""
    small = {"x": torch.ones(SMALL // 4)}
    group = rank.groups[ranks]
    costs: dict[str, list[float]] = {"plain": [], "watched": [], "large": []}
    with ExitStack() as stack:
        stack.callback(_spans, os.environ.get("CKPT_SPANS"))
        stack.callback(os.environ.pop, "CKPT_PROGRESS", None)
        watched = stack.enter_context(_checkpointer(f"{root}/watched", group, watched=True))
        plain = stack.enter_context(_checkpointer(f"{root}/plain", group, watched=False))
        for step in range(1, SAVES + 1):
            for kind, checkpointer in (("plain", plain), ("watched", watched)):
                _spans("on" if kind == "watched" else "off")
                costs[kind].append(_cpu(lambda c=checkpointer, s=step: _save(c, s, small)))  # type: ignore[misc]
        large = {"x": torch.ones(nbytes // 4)}
        _spans("off")
        for step in range(SAVES + 1, SAVES + 4):
            costs["large"].append(_cpu(lambda s=step: _save(plain, s, large)))  # type: ignore[misc]
    return {kind: median(values) for kind, values in costs.items()} | {"event": _event()}


def _checkpointer(root: str, group: object, *, watched: bool) -> ckpt.Checkpointer:
    listeners = [JsonLines(f"{root}.jsonl")] if watched else []
    every, keep = EverySteps(1), Latest(2)
    return ckpt.Checkpointer(root, save=every, keep=keep, process_group=group, on_event=listeners, alerts=watched)  # type: ignore[arg-type]


def _save(checkpointer: ckpt.Checkpointer, step: int, state: dict[str, torch.Tensor]) -> None:
    checkpointer.step(step, state)
    checkpointer.wait()


def _cpu(call: Callable[[], None]) -> float:
    began = cpu_seconds()
    call()
    return cpu_seconds() - began


def _spans(value: str | None) -> None:
    os.environ["CKPT_PROGRESS"] = "off" if value == "off" else "auto"
    if value is None:
        os.environ.pop("CKPT_SPANS", None)
    else:
        os.environ["CKPT_SPANS"] = value


def _event() -> float:
    reporter = Reporter("run", Group(0, (0,)), [lambda event: None], alerts=True, tiers=True)
    began = time.thread_time()
    for n in range(EVENTS):
        reporter.removed(n, "url", "id")
    spent = time.thread_time() - began
    reporter.close()
    return spent / EVENTS * 1e6
