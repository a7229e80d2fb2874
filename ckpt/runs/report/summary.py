"""One save in figures: its phases over all ranks, who held it up and why, what no span covers. Pure.

Machines' clocks differ, so no time of one rank is ever taken from that of another.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ckpt import units
from ckpt.catalog import TensorEntry
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


def floor_between(seconds: float) -> float:
    """The difference that counts between saves of about so many ``seconds``: by less than 1 s small saves differ of themselves."""
    return max(1.0, floor_of(seconds))


def _verdict(tables: Mapping[int, SpanTable], phases: tuple[PhaseSummary, ...], lost: Loss | None, floor: float) -> str:
    """One line: what to look at first."""
    if lost is not None:
        # The phase in which a rank loses most, and whether it has more to do there
        rank, worst = lost.rank, lost.phase
        mine, (busy, nbytes) = tables[rank].sums[worst], _middle(worst, tables)
        times = ratio(mine.busy, busy)
        if mine.nbytes > _MORE_BYTES * nbytes:
            return f"rank {rank} has more to {worst} than others: {units.size(mine.nbytes)}, the median is {units.size(nbytes)}; {times}"
        if lost.seconds < floor:
            return (
                f"rank {rank} is a little slower in several phases, in none by {brief(floor)} s; most in {worst} ({brief(mine.seconds)} s)"
            )
        return f"rank {rank}'s {_BLAMED.get(worst, worst)}: {worst} takes {times} ({brief(mine.seconds)} s), for as many bytes"
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


# Rank × phase: how long each rank was busy in each phase, as levels against the phase's median rank; and what a checkpoint consists of.
# Pure.
#
# With many ranks a cell is a block of neighbours, and shows the slowest of them: a mean would hide the one that is looked for.

BOUNDS = (0.5, 0.8, 1.25, 1.5, 2.0, 3.0)
"""Ratios to the median between levels 0 … 6."""
MIDDLE = 2
"""The level of what is about the median."""

_COLUMNS = 48
_LABEL = 11
_SHADES = {"unicode": "···░▒▓█", "ascii": "...-+*#"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One rank of some in one phase: busy ``micros``, ``level`` against the median rank."""

    rank: int
    micros: int
    nbytes: int
    level: int


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """``rows`` by phase: a cell for each of ``groups``, None where none of these ranks has the phase. ``medians`` in microseconds."""

    groups: tuple[range | tuple[int, ...], ...]
    rows: Mapping[str, tuple[Cell | None, ...]]
    medians: Mapping[str, float]


def heat_map(
    save: SaveSummary, tables: Mapping[int, SpanTable], groups: Sequence[range | tuple[int, ...]], *, typical: bool = False
) -> HeatMap:
    """The phases in the order of ``save``; each cell is the slowest rank of one of ``groups``, or a ``typical`` one: the median."""
    floor = 1e6 * floor_of(save.seconds)
    rows: dict[str, tuple[Cell | None, ...]] = {}
    medians: dict[str, float] = {}
    for name in (phase.phase for phase in save.phases):
        sums = {rank: table.sums[name] for rank, table in tables.items() if name in table.sums}
        middle = medians[name] = median(one.busy for one in sums.values())
        cells: list[Cell | None] = []
        for group in groups:
            busy = sorted((sums[rank].busy, -rank) for rank in group if rank in sums)
            if not busy:
                cells.append(None)
                continue
            rank = -busy[len(busy) // 2 if typical else -1][1]
            one = sums[rank]
            cells.append(Cell(rank=rank, micros=one.busy, nbytes=one.nbytes, level=level_of(one.busy, middle, floor)))
        rows[name] = tuple(cells)
    return HeatMap(groups=tuple(groups), rows=rows, medians=medians)


def level_of(value: float, middle: float, floor: float) -> int:
    """0 … 6: how a value compares with the median; what differs by less than ``floor`` is as the median."""
    if abs(value - middle) < floor:
        return MIDDLE
    return sum(value >= bound * middle for bound in BOUNDS)


def blocks(ranks: int, size: int) -> tuple[range, ...]:
    """Neighbouring ranks, ``size`` in each block but the last."""
    return tuple(range(first, min(first + size, ranks)) for first in range(0, ranks, size))


def terminal_lines(save: SaveSummary, tables: Mapping[int, SpanTable], encoding: str) -> Iterator[str]:
    """The heat map in 80 columns and without colours."""
    ranks = max(tables) + 1
    size = -(-ranks // _COLUMNS)
    heat = heat_map(save, tables, blocks(ranks, size))
    try:
        shades = _SHADES["unicode"]
        shades.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        shades = _SHADES["ascii"]
    title = (f"ranks 0 to {ranks - 1}" if ranks > 1 else "rank 0") + (f", {size} a column" if size > 1 else "")
    width = min(max(len(heat.groups), len(title)), _COLUMNS)
    yield f"{'PHASE':{_LABEL}}  {title:{width}}  SLOWEST"
    for name, cells in heat.rows.items():
        line = "".join(" " if cell is None else shades[cell.level] for cell in cells)
        worst = max((cell for cell in cells if cell is not None), key=lambda cell: (cell.micros, -cell.rank))
        yield f"{name[:_LABEL]:{_LABEL}}  {line:{width}}  {worst.rank}: {brief(worst.micros / 1e6)} s"
    bounds = zip(shades[MIDDLE + 1 :], BOUNDS[MIDDLE:], strict=True)
    yield f"{shades[MIDDLE]} about the median, or faster   {'   '.join(f'{shade} ≥ {bound:g} ×' for shade, bound in bounds)}"


# What a checkpoint consists of, by kind and by layer, from the names of its tensors alone. Pure.
#
# Names are the user's own, so kinds are guesses from words that everybody uses. The default is ``model`` for floating-point tensors.

MODEL, EMA, DATA, RNG, VALUES, OTHER = "model", "averaged weights", "data", "random numbers", "values", "other"
OPTIMIZER = "optimizer: "
"""Followed by the name of a state, such as ``exp_avg``."""

_OPTIMIZER = re.compile(r"(?:^|\.)\w*optim\w*\.(?:state\.)?(?P<rest>.+)", re.IGNORECASE)
_WORDS = (
    (RNG, re.compile(r"(?:^|[._])(?:rng|rngs|generators?|random)(?:[._]|$)", re.IGNORECASE)),
    (DATA, re.compile(r"(?:^|[._])(?:data|dataset|dataloader|loader|sampler)s?(?:[._]|$)", re.IGNORECASE)),
    (EMA, re.compile(r"(?:^|[._])(?:ema|swa|averaged)(?:[._]|$)", re.IGNORECASE)),
)
_STATES = 12
_LEAVES = 140
_SMALL = 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class KindSize:
    """Stored tensors of one kind; ``VALUES`` counts none."""

    kind: str
    bytes: int
    tensors: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSize:
    """Stored tensors of one kind and layer; an empty ``layer`` stands for ``tensors`` of many small ones."""

    kind: str
    layer: str
    bytes: int
    tensors: int


def kinds_of(entries: Iterable[TensorEntry], values: int) -> tuple[tuple[KindSize, ...], tuple[LayerSize, ...]]:
    """Bytes by kind, and by kind and layer, the largest first. ``values`` are the bytes of what is not a tensor.

    Aliases count nothing: their bytes are those of another tensor.
    """
    by_kind: dict[str, list[int]] = {}
    by_layer: dict[tuple[str, str], list[int]] = {}
    for entry in entries:
        if entry.alias is None:
            kind, path = _kind(entry)
            for sums in (by_kind.setdefault(kind, [0, 0]), by_layer.setdefault((kind.partition(":")[0], _layer(path)), [0, 0])):
                sums[0] += entry.nbytes
                sums[1] += 1
    if values:
        by_kind[VALUES] = [values, 0]
    ordered = sorted(by_kind, key=lambda kind: (-by_kind[kind][0], kind))
    more = [kind for kind in ordered if kind.startswith(OPTIMIZER)][_STATES:]  # of names of its own for each parameter
    if more:
        together = [by_kind.pop(kind) for kind in more]
        by_kind[f"{OPTIMIZER}{len(more):,} more"] = [sum(sums[0] for sums in together), sum(sums[1] for sums in together)]
    kinds = [KindSize(kind=kind, bytes=nbytes, tensors=count) for kind, (nbytes, count) in by_kind.items()]
    layers = [LayerSize(kind=kind, layer=layer, bytes=nbytes, tensors=n) for (kind, layer), (nbytes, n) in by_layer.items()]
    return tuple(sorted(kinds, key=lambda k: (-k.bytes, k.kind))), _few_layers(layers)


def _kind(entry: TensorEntry) -> tuple[str, str]:
    """The kind, and the path of what it belongs to: of an optimizer's state the parameter."""
    match = _OPTIMIZER.search(entry.name)
    if match is not None:
        parameter, _, state = match["rest"].rpartition(".")
        return OPTIMIZER + (state if parameter else "state"), parameter or match["rest"]
    kind = next((kind for kind, words in _WORDS if words.search(entry.name)), None)
    if kind is None:
        kind = MODEL if entry.dtype.name.startswith(("float", "bfloat", "complex")) else OTHER
    return kind, entry.name


def _layer(path: str) -> str:
    """Up to the first number, ``model.layers.3``; without one the first parts but the last."""
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if number is not None:
        return ".".join(parts[: number + 1])
    return ".".join(parts[: min(3, max(len(parts) - 1, 1))])


def _few_layers(layers: list[LayerSize]) -> tuple[LayerSize, ...]:
    ordered = sorted(layers, key=lambda s: (-s.bytes, s.kind, s.layer))
    total = sum(s.bytes for s in ordered)
    shown = [s for s in ordered[:_LEAVES] if s.bytes >= _SMALL * total]
    rest: dict[str, list[int]] = {}
    for s in ordered[len(shown) :]:
        sums = rest.setdefault(s.kind, [0, 0])
        sums[0] += s.bytes
        sums[1] += s.tensors
    more = [LayerSize(kind=kind, layer="", bytes=nbytes, tensors=n) for kind, (nbytes, n) in rest.items() if nbytes]
    return tuple(sorted([*shown, *more], key=lambda s: (-s.bytes, s.kind, s.layer)))
