"""How often a run should save: from what its saves and loads took, and how often it fails. Pure, but for reading what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median

from ckpt.errors import CorruptError, UsageError
from ckpt.policies.cost import daly, young
from ckpt.text.json_reader import parse_json
from ckpt.tracing.spans import SpanTable

BEFORE_CAPTURED = frozenset({"collect", "plan", "capture"})
"""Phases in which a save in the background may hold training up."""
PAUSE = 2.0
"""Steps that took this many times as long as the fastest ones are not training alone: the job stood still between two starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSave:
    """One save, in seconds: from the call to the commit, and for how long it blocked training."""

    seconds: float
    blocked: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """How often to save, and what that loses. Times are in seconds."""

    mtbf: float
    """Of the job, between two failures."""
    save: float
    """The median from call to commit."""
    blocked: float
    """The median for which a save blocks training."""
    load: float
    young: float
    daly: float
    interval: float
    """Daly's, but no shorter than a save takes, since one is in flight at a time, nor than a step of training."""

    @property
    def wasted(self) -> float:
        """Expected work that a failure loses, as ByteCheckpoint has it (arXiv 2407.20143, appendix C): ½ · (interval + save) + load."""
        return (self.interval + self.save) / 2 + self.load

    @property
    def ettr(self) -> float:
        """The effective training time ratio of the same appendix: interval / (interval + wasted), as if each interval saw one failure."""
        return self.interval / (self.interval + self.wasted)

    @property
    def lost(self) -> float:
        """The share of time that saves block and failures lose at this interval, failing every ``mtbf``; at most 1."""
        return min(1.0, self.blocked / (self.interval + self.blocked) + self.wasted / self.mtbf)


def advise(saves: Sequence[MeasuredSave], load: float | None, mtbf: float, *, step: float | None = None) -> Advice:
    """The best interval for a job that fails every ``mtbf`` seconds. ``load`` None: as long as a save. ``step``: seconds of one, if known.

    Raises:
        UsageError: ``mtbf`` is not positive.
    """
    if not mtbf > 0:
        raise UsageError(f"the time between failures is positive, not {mtbf!r}", hint="--mtbf 6h")
    took, blocked = median(s.seconds for s in saves), median(s.blocked for s in saves)
    return Advice(
        mtbf=mtbf,
        save=took,
        blocked=blocked,
        load=took if load is None else load,
        young=young(blocked, mtbf),
        daly=daly(blocked, mtbf),
        interval=max(daly(blocked, mtbf), took, step or 0.0),
    )


def step_seconds(steps: Iterable[tuple[int, datetime]]) -> float | None:
    """Seconds of a step of training, from the numbers of steps and when they were committed; None if that cannot be told. Stretches with a
    pause in them, such as that between the end of a job and the start of the next one, are left out."""
    pairs = pairwise(sorted(steps))
    rates = [(later - at).total_seconds() / (m - n) for (n, at), (m, later) in pairs if m > n and later > at]
    return median(rate for rate in rates if rate <= PAUSE * min(rates)) if rates else None


def of_spans(tables: Mapping[int, SpanTable]) -> MeasuredSave:
    """From the spans of a save, of the ranks for which that is longest. A save in the background blocks training at most until all is
    captured; most of that may overlap with training, which spans do not know."""
    return MeasuredSave(seconds=max(t.wall for t in tables.values()), blocked=max(_blocked(t) for t in tables.values()))


def _blocked(table: SpanTable) -> float:
    if "capture" not in table.sums:
        return table.wall
    sums = [s for phase, s in table.sums.items() if phase in BEFORE_CAPTURED]
    return (max(s.last for s in sums) - min(s.first for s in sums)) / 1e6


def of_events(text: str, where: str) -> tuple[list[MeasuredSave], list[float]]:
    """Saves, and seconds of loads, from the lines that ``ckpt.monitors.JsonLines`` has written. A last line that was cut off is left out.

    Raises:
        CorruptError: another line is none of these.
    """
    saves, loads = [], []
    *lines, _ = text.split("\n")  # without a line feed the last one was cut off
    for number, line in enumerate(lines, 1):
        try:
            event = parse_json(line)
            if event["kind"] == "save.durable":
                saves.append(MeasuredSave(seconds=float(event["seconds"]), blocked=float(event["blocked"])))
            elif event["kind"] == "restore" and "error" not in event:
                loads.append(float(event["seconds"]))
        except (ValueError, TypeError, KeyError) as err:
            raise CorruptError(f"line {number} is no event: {err!r}", where=where, hint="name a file that JsonLines has written") from err
    return saves, loads
