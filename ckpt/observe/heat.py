"""Rank × phase: how long each rank was busy in each phase, as levels against the phase's median rank. Pure.

With many ranks a cell is a block of neighbours, and shows the slowest of them: a mean would hide the one that is looked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ckpt.tracing.spans import NOTICEABLE, NOTICEABLE_SHARE, WAITING, SpanTable

from .summary import SaveSummary, brief

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
    """The phases in the order of ``save``, work before waiting; each cell is the slowest rank of one of ``groups``, or a ``typical`` one:
    the median."""
    floor = 1e6 * max(NOTICEABLE, NOTICEABLE_SHARE * save.seconds)
    names = sorted((phase.phase for phase in save.phases), key=lambda name: name in WAITING)
    rows: dict[str, tuple[Cell | None, ...]] = {}
    medians: dict[str, float] = {}
    for name in names:
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
    shades = _SHADES["unicode" if _can_show(_SHADES["unicode"], encoding) else "ascii"]
    title = f"ranks 0 to {ranks - 1}" + (f", {size} a column" if size > 1 else "")
    width = min(max(len(heat.groups), len(title)), _COLUMNS)
    yield f"{'PHASE':{_LABEL}}  {title:{width}}  SLOWEST"
    for name, cells in heat.rows.items():
        line = "".join(" " if cell is None else shades[cell.level] for cell in cells)
        worst = max((cell for cell in cells if cell is not None), key=lambda cell: (cell.micros, -cell.rank))
        yield f"{name[:_LABEL]:{_LABEL}}  {line:{width}}  {worst.rank}: {brief(worst.micros / 1e6)} s"
    bounds = zip(shades[MIDDLE + 1 :], BOUNDS[MIDDLE:], strict=True)
    yield f"{shades[MIDDLE]} about the median, or faster   {'   '.join(f'{shade} ≥ {bound:g} ×' for shade, bound in bounds)}"


def _can_show(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
