"""What a rank counts of its own work. Spans: which phase of a save or load took how long, on which rank and thread, and for how many bytes.
A meter of bytes, and of how long training stood still. No torch.

Each rank records into a ``Spans``; its row (plain JSON) is what others read as a ``SpanTable``. Times are microseconds since the table
began, by this rank's own clock; ``began`` is the wall clock at that moment, so that ranks can be laid side by side.
"""

from __future__ import annotations

import json
import math
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import TracebackType
from typing import Any, NamedTuple

from ckpt.errors import CorruptError, UsageError
from ckpt.text import parse_json

from .progress import BEGIN, CAPTURE, WRITE, RankSign, printable_host

Row = dict[str, Any]
"""A table as JSON."""

WAITING = frozenset({"agree", "settle"})
"""Phases in which a rank waits for others, or for its own training: they say nothing about this rank's speed."""
LEADING = frozenset({"commit"})
"""Phases that only the leader has: they do not make it slower than others at the same work."""

STRAGGLER = 1.5
"""A rank that works longer than this times the median rank may hold the others up …"""
NOTICEABLE = 0.05
"""… if it works longer by this many seconds …"""
NOTICEABLE_SHARE = 0.02
"""… and by this share of the save: 5 ms are more than 1.5 × 3 ms, and nobody waits for them."""

LIMIT = 4096
MOST = 1 << 16
"""Single spans of one table: kept by default, and at most."""
_ALL_RANKS = 1 << 18
"""Single spans that all ranks of a job together send to the leader by default."""
_FEW = 4
"""Spans of each phase for which a place is kept until late in the save."""

UNNEEDED = "the checkpoint itself does not need them: ckpt verify says whether it is whole"

_PHASE = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_PHASES = 64
_NAME = 64
MICROS = 1 << 53
BYTES = (1 << 63) - 1
"""The most of each that a row may have."""
_YEAR_9999 = 250_000_000_000


def stragglers(work: Mapping[int, float], seconds: float) -> list[int]:
    """Of busy seconds by rank, in a save of ``seconds``, those ranks that hold the others up, the slowest first."""
    from statistics import median  # slow to import, and seldom needed

    middle = median(work.values()) if work else 0.0
    least = max(STRAGGLER * middle, middle + max(NOTICEABLE, NOTICEABLE_SHARE * seconds))
    return sorted((rank for rank in work if work[rank] > least), key=lambda rank: (-work[rank], rank))


class Spans:
    """The spans of one rank in one save or load. Thread-safe. Off, it keeps nothing and asks no clock.

    Beyond ``limit`` single spans only sums per phase are kept (``PhaseSum``); the table says of how many. Of many ``ranks`` each keeps
    fewer, down to 64, so that what all send to the leader stays small. The last places are left for phases that come late and seldom.
    """

    def __init__(self, *, on: bool = True, limit: int = LIMIT, ranks: int = 1) -> None:
        if not 0 <= limit <= MOST:
            raise UsageError(f"the limit of single spans is 0 to {MOST:,}, not {limit:,}")
        self.on = on
        self.limit = min(limit, max(64, _ALL_RANKS // max(ranks, 1)))
        self._reserve = min(64, self.limit // 4)
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._sums: dict[str, list[int]] = {}
        """Of all spans by phase: count, bytes, busy, first, last."""
        self._folded: dict[str, list[int]] = {}
        """The same of those that are not kept one by one."""
        self._threads: list[threading.Thread] = []
        self._names: list[str] = []
        """Of these, as a terminal may show them."""
        if on:
            self._began = time.time()
            self._zero = time.perf_counter()

    @contextmanager
    def span(self, phase: str, nbytes: int = 0) -> Iterator[None]:
        """A block of work: ``with spans.span("write", 4096): …``. It counts also if the block raises."""
        if not self.on:
            yield
            return
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, began, time.perf_counter(), nbytes)

    def add(self, phase: str, began: float, ended: float, nbytes: int = 0) -> None:
        """Work of the calling thread from ``began`` to ``ended``, both of ``time.perf_counter()``."""
        if not self.on:
            return
        start = math.floor((began - self._zero) * 1e6)
        duration = max(math.floor((ended - self._zero) * 1e6) - start, 0)  # ends are rounded, not durations: inner spans stay inside
        me = threading.current_thread()
        with self._lock:
            total = self._sums.setdefault(phase, [0, 0, 0, start, start])
            room = self.limit - len(self._spans)
            if room > self._reserve or (room > 0 and total[0] < _FEW):
                if me not in self._threads:
                    # A thread takes over the number of a dead one of the same name: pools come and go.
                    same = (i for i, thread in enumerate(self._threads) if thread.name == me.name and not thread.is_alive())
                    number = next(same, len(self._threads))
                    self._threads[number : number + 1] = [me]
                    self._names[number : number + 1] = ["".join(c if c.isprintable() else "?" for c in me.name[:_NAME])]
                self._spans.append(Span(phase, self._threads.index(me), start, duration, nbytes))
                into: tuple[list[int], ...] = (total,)
            else:
                into = total, self._folded.setdefault(phase, [0, 0, 0, start, start])
            for sums in into:
                sums[:] = sums[0] + 1, sums[1] + nbytes, sums[2] + duration, min(sums[3], start), max(sums[4], start + duration)

    def table(self) -> SpanTable:
        """What was recorded so far."""
        if not self.on:
            return SpanTable(began=0.0, threads=(), spans=(), folded=())
        with self._lock:
            folded = tuple(PhaseSum.of(phase, *numbers) for phase, numbers in self._folded.items())
            return SpanTable(began=self._began, threads=tuple(self._names), spans=tuple(self._spans), folded=folded)

    def to_json(self) -> Row:
        """The row that this rank sends to the leader: JSON, ``SpanTable.from_row`` reads it. Empty if off.

        With sums of all phases, so that a leader of many ranks need not look at each span; the single spans are text in it, which the
        leader takes apart for few.
        """
        if not self.on:
            return {}
        with self._lock:
            spans, number = list(self._spans), {phase: i for i, phase in enumerate(self._sums)}
            row = {
                "began": self._began,
                "phases": list(number),
                "threads": list(self._names),
                "folded": [[number[phase], *numbers] for phase, numbers in self._folded.items()],
                "sums": [[number[phase], *numbers] for phase, numbers in self._sums.items()],
            }
        columns = [list(column) for column in zip(*spans, strict=True)] or [[]] * 5
        return {**row, "spans": json.dumps([[number[phase] for phase in columns[0]], *columns[1:]], separators=(",", ":"))}


@dataclass(eq=False)
class SaveMeter:
    """Counts bytes. Threads of the save add to it; ``ckpt watch``, a handle and a progress callback read it.

    It refers to nothing of the save, so whoever reads it does not keep the state's memory.
    """

    phase: int = BEGIN
    total: int = 0
    """Bytes of this rank's chunks, as they are in memory."""
    staged: bool = False
    """Whether they are captured before they are written."""
    captured: int = 0
    written: int = 0
    saved: int = 0
    """Bytes that a codec has made unnecessary to write."""
    host: str = field(default_factory=lambda: printable_host(socket.gethostname()))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, captured: int = 0, written: int = 0, saved: int = 0) -> None:
        with self._lock:
            self.captured += captured
            self.written += written
            self.saved += saved

    @property
    def done(self) -> int:
        """Bytes of the state that need no more work of this rank's writers."""
        return min(self.written + self.saved, self.total)

    def sign(self, count: int) -> RankSign:
        """What this rank says of itself in its sign number ``count``."""
        phase, done = self.phase, self.done if self.phase != BEGIN else 0
        if phase >= WRITE and not done and self.staged and self.captured < self.total:
            phase, done = CAPTURE, self.captured
        return RankSign(count=count, phase=phase, done=done, total=self.total, host=self.host)


class Stall:
    """A sum of stretches of time in which training waited: ``with stall: …``. Thread-safe; what overlaps counts once.

    A stretch that is going on counts up to now, so whoever asks while a rank still waits hears of it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self._since = 0.0
        self._sum = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if self._waiting == 0:
                self._since = time.perf_counter()
            self._waiting += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._waiting -= 1
            if self._waiting == 0:
                self._sum += time.perf_counter() - self._since

    def add(self, seconds: float) -> None:
        """A stretch that somebody else has measured, and that overlaps no other."""
        with self._lock:
            self._sum += seconds

    @property
    def seconds(self) -> float:
        """So far."""
        with self._lock:
            return self._sum + (time.perf_counter() - self._since if self._waiting else 0.0)


# ----------------------------------------------------------------------------------------------------------------- tables


class Span(NamedTuple):
    """One piece of work: ``start`` and ``duration`` in microseconds, ``thread`` a number of the table's."""

    phase: str
    thread: int
    start: int
    duration: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSum:
    """Several spans of one phase on one rank. ``busy`` is summed over threads; ``first`` start and ``last`` end; microseconds."""

    phase: str
    count: int
    nbytes: int
    busy: int
    first: int
    last: int

    @classmethod
    def of(cls, phase: str, count: int, nbytes: int, busy: int, first: int, last: int) -> PhaseSum:
        return cls(phase=phase, count=count, nbytes=nbytes, busy=busy, first=first, last=last)

    @property
    def seconds(self) -> float:
        return self.busy / 1e6

    @property
    def wall(self) -> float:
        """Seconds from the first start to the last end."""
        return (self.last - self.first) / 1e6

    def __add__(self, other: PhaseSum) -> PhaseSum:
        return PhaseSum(
            phase=self.phase,
            count=self.count + other.count,
            nbytes=self.nbytes + other.nbytes,
            busy=self.busy + other.busy,
            first=min(self.first, other.first),
            last=max(self.last, other.last),
        )


@dataclass(frozen=True, kw_only=True)
class SpanTable:
    """The spans of one rank. ``began`` is seconds since 1970; ``folded`` are the sums of spans that were not kept one by one."""

    began: float
    threads: tuple[str, ...]
    spans: tuple[Span, ...]
    folded: tuple[PhaseSum, ...]
    host: str | None = None
    """The machine that the rank ran on, if that is known."""
    coordinates: Mapping[str, int] = field(default_factory=dict)
    """Of the rank in the mesh of its job, by dimension."""
    blocked: int | None = None
    """Microseconds for which training stood still for this save in the background, until its spans were kept."""
    waited: int | None = None
    """The same for the save before it, after the spans of that one were kept."""
    retries: int = 0
    """Requests to the storage that were made again."""
    throttled: int = 0
    """Those of them where the storage had asked to slow down."""
    sums: Mapping[str, PhaseSum] = field(init=False)
    """All spans by phase, the busiest first."""

    def __post_init__(self) -> None:
        columns: dict[str, list[Span]] = {}
        for span in self.spans:
            columns.setdefault(span.phase, []).append(span)
        sums = {
            phase: PhaseSum(
                phase=phase,
                count=len(spans),
                nbytes=sum(s.nbytes for s in spans),
                busy=sum(s.duration for s in spans),
                first=min(s.start for s in spans),
                last=max(s.start + s.duration for s in spans),
            )
            for phase, spans in columns.items()
        }
        for one in self.folded:
            sums[one.phase] = sums[one.phase] + one if one.phase in sums else one
        object.__setattr__(self, "sums", {s.phase: s for s in sorted(sums.values(), key=lambda s: (-s.busy, s.phase))})

    @property
    def seconds(self) -> float:
        """Busy seconds of the work that all ranks share: without waiting for others, and without what only the leader does."""
        return sum(s.busy for s in self.sums.values() if s.phase not in WAITING | LEADING) / 1e6

    @property
    def wall(self) -> float:
        """Seconds from the first start to the last end of all phases; 0 without spans."""
        sums = self.sums.values()
        return (max(s.last for s in sums) - min(s.first for s in sums)) / 1e6 if sums else 0.0

    @property
    def folded_count(self) -> int:
        """How many spans are there as sums only."""
        return sum(s.count for s in self.folded)

    def summed(self) -> SpanTable:
        """The same table without single spans."""
        return replace(self, threads=(), spans=(), folded=tuple(self.sums.values()))

    def to_row(self) -> Row:
        """As JSON; phases are numbers, and spans columns."""
        phases = list(dict.fromkeys([*(s.phase for s in self.spans), *(s.phase for s in self.folded)]))
        number = {phase: i for i, phase in enumerate(phases)}
        columns = [list(column) for column in zip(*self.spans, strict=True)] if self.spans else [[], [], [], [], []]
        return {
            "began": self.began,
            "phases": phases,
            "threads": list(self.threads),
            "spans": [[number[phase] for phase in columns[0]], *columns[1:]],
            "folded": [[number[s.phase], s.count, s.nbytes, s.busy, s.first, s.last] for s in self.folded],
        }

    @classmethod
    def from_row(cls, row: object, where: str | None = None) -> SpanTable:
        """Read what ``to_row`` gave, or ``Spans.to_json``. Nothing in it is believed; ``where`` is for the message."""
        try:
            return _table(row)
        except ValueError as err:
            raise CorruptError(f"these are not the spans of a rank: {err}", where=where, hint=UNNEEDED) from err


# ---------------------------------------------------------------------------------------------------------------- reading


def _table(row: object) -> SpanTable:
    """Raises ValueError with what is wrong."""
    if not isinstance(row, dict):
        raise ValueError("it is not an object")
    began = began_of(row)
    spans = parse_json(row["spans"]) if isinstance(row.get("spans"), str) else row.get("spans")
    lists: list[list[Any]] = []
    for member, values, most in (
        ("phases", row.get("phases"), _PHASES),
        ("spans", spans, 5),
        ("threads", row.get("threads"), MOST),
        ("folded", row.get("folded"), _PHASES),
    ):
        if not isinstance(values, list) or len(values) > most:
            raise ValueError(f"its {member} are not a list of at most {most:,}")
        lists.append(values)
    phases, columns, threads, folded = lists
    if not all(isinstance(p, str) for p in phases) or not are_phases(tuple(phases)):
        raise ValueError("its phases are not names")
    if len(columns) != 5 or not all(isinstance(c, list) and len(c) == len(columns[0]) for c in columns):
        raise ValueError("its spans are not columns")
    if len(columns[0]) > MOST:
        raise ValueError(f"it has {len(columns[0]):,} single spans")
    if len(threads) > len(columns[0]) or not all(isinstance(t, str) and len(t) <= _NAME and t.isprintable() for t in threads):
        raise ValueError("its threads are not names")
    if not all(isinstance(one, list) and len(one) == 6 for one in folded):
        raise ValueError("a sum is not a row of six")
    number, count, nbytes = (0, len(phases) - 1), (1, BYTES), (0, BYTES)
    bounds = [*zip(columns, (number, (0, len(threads) - 1), (-MICROS, MICROS), (0, MICROS), nbytes), strict=True)]
    bounds += zip(zip(*folded, strict=True), (number, count, nbytes, nbytes, (-MICROS, MICROS), (-MICROS, 2 * MICROS)), strict=False)
    for values, (low, high) in bounds:
        if not all(type(v) is int and low <= v <= high for v in values):
            raise ValueError(f"a number is not between {low:,} and {high:,}")
    if any(first > last for *_, first, last in folded):
        raise ValueError("a sum ends before it starts")
    if len({one[0] for one in folded}) != len(folded):
        raise ValueError("a phase has two sums")
    return SpanTable(
        began=began,
        threads=tuple(threads),
        spans=tuple(map(Span, [phases[p] for p in columns[0]], *columns[1:])),
        folded=tuple(PhaseSum.of(phases[p], *numbers) for p, *numbers in folded),
    )


def began_of(row: Mapping[str, object]) -> float:
    """Seconds since 1970. Raises ValueError if a row does not say."""
    began = row.get("began")
    if not isinstance(began, int | float) or isinstance(began, bool) or not 0 <= began < _YEAR_9999:
        raise ValueError("it does not say when it began")
    return float(began)


@lru_cache(maxsize=64)
def are_phases(phases: tuple[str, ...]) -> bool:
    """Whether these are names of phases, all different: the ranks of a job have the same."""
    return all(map(_PHASE.fullmatch, phases)) and len(set(phases)) == len(phases)


# Spans as a trace that chrome://tracing and ui.perfetto.dev open: the trace event format, as JSON. No torch.

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
        shift = began[rank] - zero
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
