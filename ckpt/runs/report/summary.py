"""One save in figures: its phases over all ranks, who held it up and why, what no span covers. Pure.

Machines' clocks differ, so no time of one rank is ever taken from that of another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median

from ckpt import units
from ckpt.telemetry.spans import LEADING, NOTICEABLE, NOTICEABLE_SHARE, WAITING, PhaseSum, SpanTable, stragglers

_MORE_BYTES = 1.25

_CAPTURE, _COLLECT = "capture", "collect"
_BLAMED = {
    "write": "disk or network",
    "sync": "disk",
    "read": "disk or network",
    "capture": "copy out of the device",
    "exchange": "network",
    "hash": "processor",
    "encode": "processor",
    "verify": "processor",
    "decode": "processor",
    "copy": "memory",
    "collect": "Python process",
    "plan": "Python process",
}
"""Phase → what of the machine is slow where a rank takes longer for as many bytes."""


@dataclass(frozen=True, kw_only=True)
class PhaseSummary:
    """One phase over the ranks that have it; ``rank`` is the one that was busy longest, for ``seconds``."""

    phase: str
    ranks: int
    rank: int
    seconds: float
    median: float
    wall: float
    spans: int
    bytes: int

    @property
    def rate(self) -> float | None:
        """Bytes a second of all ranks together; None where none are counted."""
        return self.bytes / self.wall if self.bytes and self.wall > 0 else None

    @property
    def shared(self) -> bool:
        """Whether it is work that all ranks have: neither waiting nor the leader's alone."""
        return self.phase not in WAITING | LEADING


@dataclass(frozen=True, kw_only=True)
class Unaccounted:
    """Time of the save on a rank that no span covers: ``seconds`` of ``rank``, where it is the largest share. ``ranks`` are those of
    which it is known: spans kept as sums only say nothing about gaps."""

    rank: int
    seconds: float
    share: float
    median: float
    ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Where the slowest straggler, ``rank``, loses most against the median rank: ``seconds`` in ``phase``."""

    rank: int
    phase: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SaveSummary:
    """``seconds`` is the wall time of the rank that took longest; ``slowest`` are all ranks in order, ``stragglers`` the first of them."""

    phases: tuple[PhaseSummary, ...]
    seconds: float
    median: float
    work: Mapping[int, float]
    """Busy seconds of each rank in the phases that all ranks share."""
    slowest: tuple[int, ...]
    stragglers: tuple[int, ...]
    missing: tuple[int, ...]
    folded: int
    blocked: float | None
    """Seconds that the slowest caller waited; of a save in the background at least these, if they are not ``measured``."""
    measured: bool
    """The callers have measured what they waited: for this save, until its spans were kept, and after that for the one before."""
    background: bool
    retries: Mapping[int, tuple[int, int]]
    """Requests to the storage that a rank made again, and those of them where it was asked to slow down, the most first."""
    unaccounted: Unaccounted | None
    lost: Loss | None
    verdict: str

    def phase(self, name: str) -> PhaseSummary | None:
        return next((phase for phase in self.phases if phase.phase == name), None)


def summarize(tables: Mapping[int, SpanTable], world_size: int) -> SaveSummary:
    """``tables`` by rank, at least one."""
    work = {rank: table.seconds for rank, table in tables.items()}
    slowest = tuple(sorted(work, key=lambda rank: (-work[rank], rank)))
    seconds = max(table.wall for table in tables.values())
    slow = tuple(stragglers(work, seconds))
    phases = _phases(tables)
    background = any(_CAPTURE in table.sums for table in tables.values())
    lost = _loss(slow[0], tables) if slow else None
    trouble = {rank: (table.retries, table.throttled) for rank, table in tables.items() if table.retries}
    return SaveSummary(
        phases=phases,
        seconds=seconds,
        median=median(work.values()),
        work=work,
        slowest=slowest,
        stragglers=slow,
        missing=tuple(rank for rank in range(world_size) if rank not in tables),
        folded=sum(table.folded_count for table in tables.values()),
        blocked=_blocked(tables.values(), background=background),
        measured=background and any(table.blocked is not None for table in tables.values()),
        background=background,
        retries=dict(sorted(trouble.items(), key=lambda one: (-one[1][0], one[0]))),
        unaccounted=_unaccounted(tables),
        lost=lost,
        verdict=_verdict(tables, phases, lost, floor_of(seconds)),
    )


def _phases(tables: Mapping[int, SpanTable]) -> tuple[PhaseSummary, ...]:
    sums: dict[str, dict[int, PhaseSum]] = {}
    for rank, table in tables.items():
        for one in table.sums.values():
            sums.setdefault(one.phase, {})[rank] = one
    phases = [_phase(name, by_rank) for name, by_rank in sums.items()]
    return tuple(sorted(phases, key=lambda p: (-p.seconds, p.phase)))


def _phase(name: str, by_rank: Mapping[int, PhaseSum]) -> PhaseSummary:
    slowest = min(by_rank, key=lambda rank: (-by_rank[rank].busy, rank))
    return PhaseSummary(
        phase=name,
        ranks=len(by_rank),
        rank=slowest,
        seconds=by_rank[slowest].seconds,
        median=median(s.seconds for s in by_rank.values()),
        wall=max(s.wall for s in by_rank.values()),
        spans=sum(s.count for s in by_rank.values()),
        bytes=sum(s.nbytes for s in by_rank.values()),
    )


# ------------------------------------------------------------------------------------------------------ blocked and gaps


def _blocked(tables: Collection[SpanTable], *, background: bool) -> float | None:
    """A save that captures goes on in the background: its caller waited at least until what it did itself was done. Else the caller
    waited for all of it. None if single spans of no rank that could say are kept."""
    if not background:
        return max((_last(table) for table in tables if table.sums), default=0) / 1e6
    measured = [table.blocked + (table.waited or 0) for table in tables if table.blocked is not None]
    if measured:
        return max(measured) / 1e6
    ends = [end for table in tables if (end := _end_of_caller(table)) is not None]
    return max(ends) / 1e6 if ends else None


def _end_of_caller(table: SpanTable) -> int | None:
    """When the thread that collected the state had done so and planned; None where that is not kept."""
    callers = {span.thread for span in table.spans if span.phase == _COLLECT}
    if not callers and _COLLECT in table.sums:
        return max(table.sums[name].last for name in (_COLLECT, "plan") if name in table.sums)
    ends = [span.start + span.duration for span in table.spans if span.thread in callers]
    return max(ends, default=None)


def _last(table: SpanTable) -> int:
    return max(one.last for one in table.sums.values()) - min(0, min(one.first for one in table.sums.values()))


def _unaccounted(tables: Mapping[int, SpanTable]) -> Unaccounted | None:
    gaps = {rank: uncovered(table) for rank, table in tables.items() if table.spans and not table.folded}
    shares = {rank: gap / _last(tables[rank]) for rank, gap in gaps.items() if _last(tables[rank]) > 0}
    if not shares:
        return None
    worst = min(shares, key=lambda rank: (-shares[rank], rank))
    middle = median(gaps.values()) / 1e6
    return Unaccounted(rank=worst, seconds=gaps[worst] / 1e6, share=shares[worst], median=middle, ranks=len(shares))


def uncovered(table: SpanTable) -> int:
    """Microseconds from the moment that the table began until its last end in which no thread of the rank was in a span."""
    covered, end = 0, None
    for start, stop in sorted((span.start, span.start + span.duration) for span in table.spans):
        if end is None or start > end:
            covered, end = covered + stop - start, stop
        elif stop > end:
            covered, end = covered + stop - end, stop
    return _last(table) - covered


# -------------------------------------------------------------------------------------------------------------- verdict


def floor_of(seconds: float) -> float:
    """The difference in seconds that counts in a save of ``seconds``. Verdicts and heat maps share it, so they never disagree."""
    return max(NOTICEABLE, NOTICEABLE_SHARE * seconds)


def _verdict(tables: Mapping[int, SpanTable], phases: tuple[PhaseSummary, ...], lost: Loss | None, floor: float) -> str:
    """One line: what to look at first."""
    if lost is not None:
        return _why_slow(lost, tables, floor)
    longest = max(phases, key=lambda p: (p.wall, p.phase), default=None)
    if longest is None or not longest.wall:
        return "nothing took any time"
    if longest.phase in LEADING:
        return f"no rank is slow; {longest.phase} takes longest, {brief(longest.wall)} s of the leader alone"
    if longest.phase in WAITING:
        return f"no rank is slow; {longest.phase} takes longest, {brief(longest.wall)} s of waiting for each other"
    return f"no rank is slow; {longest.phase} takes longest, {brief(longest.wall)} s on rank {longest.rank}"


def _middle(name: str, tables: Mapping[int, SpanTable]) -> tuple[float, float]:
    """Busy microseconds and bytes of the median rank in a phase; a rank that lacks the phase has 0."""
    sums = [table.sums.get(name) for table in tables.values()]
    return median(s.busy if s else 0 for s in sums), median(s.nbytes if s else 0 for s in sums)


def _loss(rank: int, tables: Mapping[int, SpanTable]) -> Loss:
    sums = tables[rank].sums
    lost = {name: sums[name].busy - _middle(name, tables)[0] for name in sums.keys() - WAITING - LEADING}
    worst = max(lost, key=lambda name: (lost[name], name))
    return Loss(rank=rank, phase=worst, seconds=lost[worst] / 1e6)


def _why_slow(lost: Loss, tables: Mapping[int, SpanTable], floor: float) -> str:
    """The phase in which a rank loses most, and whether it has more to do there."""
    rank, worst = lost.rank, lost.phase
    mine, (busy, nbytes) = tables[rank].sums[worst], _middle(worst, tables)
    times = ratio(mine.busy, busy)
    if mine.nbytes > _MORE_BYTES * nbytes:
        return f"rank {rank} has more to {worst} than others: {units.size(mine.nbytes)}, the median is {units.size(nbytes)}; {times}"
    if lost.seconds < floor:
        return f"rank {rank} is a little slower in several phases, in none by {brief(floor)} s; most in {worst} ({brief(mine.seconds)} s)"
    return f"rank {rank}'s {_BLAMED.get(worst, worst)}: {worst} takes {times} ({brief(mine.seconds)} s), for as many bytes"


def ratio(value: float, middle: float) -> str:
    """``2.2 × the median``; in words where the median is nothing."""
    return f"{min(value / middle, 9999):.1f} × the median" if middle > 0 else "the median is 0"


def brief(seconds: float) -> str:
    """Seconds with three digits: ``0.041``, ``3.41``, ``22.6``, ``1,234``."""
    return (
        f"{seconds:,.3f}"
        if seconds < 1
        else f"{seconds:,.2f}"
        if seconds < 9.995
        else f"{seconds:,.1f}"
        if seconds < 100
        else f"{seconds:,.0f}"
    )
