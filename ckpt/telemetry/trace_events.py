"""Spans as a trace that chrome://tracing and ui.perfetto.dev open: the trace event format, as JSON. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .spans import Span, SpanTable

Event = dict[str, Any]

_LANES = 16
"""Tracks for one thread: spans on a track must lie inside or after each other."""


def trace_lines(tables: Mapping[int, SpanTable]) -> Iterator[str]:
    """The lines of a whole trace file."""
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    between = ""
    for event in trace_events(tables):
        yield between + json.dumps(event, separators=(",", ":"))
        between = ",\n"
    yield "\n]}\n"


def trace_events(tables: Mapping[int, SpanTable]) -> Iterator[Event]:
    """Trace events: a process is a rank, a thread a thread. Times are microseconds since the first span of any rank.

    Ranks are laid side by side by the wall clocks of their machines. Sums stand on tracks of their own, from first start to last end.
    """
    began = {rank: round(table.began * 1e6) for rank, table in tables.items()}
    zero = min((began[rank] + min(s.first for s in t.sums.values()) for rank, t in tables.items() if t.sums), default=0)
    for rank, table in sorted(tables.items()):
        yield from _rank_events(rank, table, began[rank] - zero)


def _rank_events(rank: int, table: SpanTable, shift: int) -> Iterator[Event]:
    yield _name(rank, 0, "process_name", name=f"rank {rank}")
    yield _name(rank, 0, "process_sort_index", sort_index=rank)
    by_thread: dict[int, list[Span]] = {}
    for span in table.spans:
        by_thread.setdefault(span.thread, []).append(span)
    track = 0
    for number, name in enumerate(table.threads):
        for lane in _lanes(by_thread.get(number, [])):
            track += 1  # from 1: some viewers take thread 0 for idle time
            yield _name(rank, track, "thread_name", name=name)
            yield from (_complete(rank, track, s.phase, s.start + shift, s.duration, {"bytes": s.nbytes}) for s in lane)
    for one in table.folded:
        track += 1
        yield _name(rank, track, "thread_name", name=f"{one.phase}: sum of {one.count:,}")
        about = {"bytes": one.nbytes, "spans": one.count, "busy_seconds": one.seconds}
        yield _complete(rank, track, one.phase, one.first + shift, one.last - one.first, about)


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """The spans of a thread such that in each lane any two are apart or one inside the other; on most threads they are."""
    lanes: list[list[Span]] = []
    ends: list[list[int]] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.duration)):
        lane = _free_lane(ends, span)
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(span)
    return lanes


def _free_lane(ends: list[list[int]], span: Span) -> int:
    """The first lane where ``span`` fits; ``ends`` are the ends of what still runs in each, the outermost first."""
    end = span.start + span.duration
    for lane, running in enumerate(ends):
        while running and running[-1] <= span.start:
            running.pop()
        if not running or end <= running[-1] or lane == _LANES - 1:
            running.append(end)
            return lane
    ends.append([end])
    return len(ends) - 1


def _complete(rank: int, track: int, phase: str, start: int, duration: int, args: Mapping[str, Any]) -> Event:
    return {"ph": "X", "cat": "ckpt", "name": phase, "pid": rank, "tid": track, "ts": start, "dur": duration, "args": dict(args)}


def _name(rank: int, track: int, kind: str, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": args}
