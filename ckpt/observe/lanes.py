"""The timeline of one save: for some ranks, what each thread did when. Pure.

A save may have thousands of spans and a page is some hundred pixels wide, so neighbours of one phase that no eye can tell apart become
one bar, which says how many they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt.tracing.spans import Span, SpanTable

from .summary import SaveSummary

_RANKS = 8
_THREADS = 6
_PIXELS = 1200
_BARS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Spans of one phase: from ``start`` to ``end``, microseconds since the timeline begins, ``busy`` of them. ``summed``: only their sum
    is known, they lie somewhere between."""

    phase: str
    start: int
    end: int
    busy: int
    count: int
    nbytes: int
    summed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One thread of one rank."""

    rank: int
    thread: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """``aligned``: ranks are laid side by side by the clocks of their machines; else each begins at 0. ``left_out`` counts threads."""

    lanes: tuple[Lane, ...]
    micros: int
    aligned: bool
    left_out: int


def timeline(save: SaveSummary, tables: Mapping[int, SpanTable]) -> Timeline:
    """Of all ranks if they are few, else of the leader, the slowest ones and the median one."""
    ranks = _chosen(save, tables)
    starts = {rank: round(tables[rank].began * 1e6) for rank in ranks}
    aligned = max(starts.values()) - min(starts.values()) <= max(1_000_000, round(save.seconds * 1e6))
    shifts = {rank: starts[rank] - min(starts.values()) if aligned else 0 for rank in ranks}
    first = min(shifts[rank] + min((one.first for one in tables[rank].sums.values()), default=0) for rank in ranks)
    last = max(shifts[rank] + max((one.last for one in tables[rank].sums.values()), default=0) for rank in ranks)
    micros = max(last - first, 1)
    lanes, left_out = [], 0
    for rank in ranks:
        mine = _lanes(rank, tables[rank], shifts[rank] - first, micros)
        lanes += mine[:_THREADS]
        left_out += len(mine[_THREADS:])
    return Timeline(lanes=tuple(lanes), micros=micros, aligned=aligned, left_out=left_out)


def _chosen(save: SaveSummary, tables: Mapping[int, SpanTable]) -> list[int]:
    if len(tables) <= _RANKS:
        return sorted(tables)
    slowest = [rank for rank in save.slowest if tables[rank].spans] or list(save.slowest)
    middle = save.slowest[len(save.slowest) // 2]
    return sorted({min(tables), middle, *slowest[: _RANKS - 2]})


def _lanes(rank: int, table: SpanTable, shift: int, micros: int) -> list[Lane]:
    """The busiest threads first; of a rank without single spans one lane, of its sums."""
    by_thread: dict[int, list[Span]] = {}
    for span in table.spans:
        by_thread.setdefault(span.thread, []).append(span)
    lanes = [Lane(rank=rank, thread=table.threads[n], bars=_bars(spans, shift, micros)) for n, spans in by_thread.items()]
    order = {name: i for i, name in enumerate(table.threads)}
    lanes.sort(key=lambda lane: (order[lane.thread] > 0, -sum(bar.busy for bar in lane.bars), order[lane.thread]))
    sums = [
        Bar(phase=s.phase, start=s.first + shift, end=s.last + shift, busy=s.busy, count=s.count, nbytes=s.nbytes, summed=True)
        for s in sorted(table.folded, key=lambda s: (s.first, -s.last))
    ]
    return [*lanes, Lane(rank=rank, thread="sums", bars=tuple(sums))] if sums else lanes


def _bars(spans: Sequence[Span], shift: int, micros: int) -> tuple[Bar, ...]:
    gap = micros // _PIXELS
    while True:
        bars: list[Bar] = []
        for span in sorted(spans, key=lambda s: (s.start, -s.duration)):
            start, end = span.start + shift, span.start + span.duration + shift
            last = bars[-1] if bars else None
            if last is not None and last.phase == span.phase and start - last.end <= gap:
                busy, count, nbytes = last.busy + span.duration, last.count + 1, last.nbytes + span.nbytes
                bars[-1] = Bar(phase=span.phase, start=last.start, end=max(end, last.end), busy=busy, count=count, nbytes=nbytes)
            else:
                bars.append(Bar(phase=span.phase, start=start, end=end, busy=span.duration, count=1, nbytes=span.nbytes))
        if len(bars) <= _BARS:
            return tuple(bars)
        phases = len({bar.phase for bar in bars})
        if gap > micros:  # phases that take turns: the longest of them, as many as can be shown
            return tuple(sorted(sorted(bars, key=lambda b: (b.start - b.end, b.start))[: max(_BARS, phases)], key=lambda b: b.start))
        gap = 2 * gap + 1
