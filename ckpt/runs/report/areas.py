"""Pictures: a timeline of threads, and areas in proportion to bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt import units
from ckpt.telemetry.spans import Span, SpanTable

from .charts import Markup, colour_of, percent, short, tag
from .summary import LayerSize, SaveSummary, brief

# The timeline of one save: for some ranks, what each thread did when. Pure.
#
# A save may have thousands of spans and a page is some hundred pixels wide, so neighbours of one phase that no eye can tell apart become
# one bar, which says how many they are.

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
    ranks = sorted(tables)
    if len(tables) > _RANKS:
        slowest = [rank for rank in save.slowest if tables[rank].spans] or list(save.slowest)
        ranks = sorted({min(tables), save.slowest[len(save.slowest) // 2], *slowest[: _RANKS - 2]})
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


_LANE = 13
_TREE = 380
_WIDE, _NARROW = 1060, 340
_LETTER = 6.6

Rect = tuple[float, float, float, float]
"""x, y, width, height, of 1."""


def timeline_rows(times: Timeline) -> Markup:
    """A block for each rank, a lane for each of its threads."""
    rows = []
    for rank in dict.fromkeys(lane.rank for lane in times.lanes):
        lanes = [lane for lane in times.lanes if lane.rank == rank]
        marks = [mark for i, lane in enumerate(lanes) for mark in _marks(lane, i, times.micros)]
        height = _LANE * len(lanes) + 4
        lines = [tag("line", x1=percent(x / 4), x2=percent(x / 4), y1="0", y2=str(height), class_="rule") for x in range(5)]
        drawn = tag("svg", *lines, *marks, width="100%", height=str(height), role="img", aria_label=f"threads of rank {rank} over time")
        rows.append(tag("div", tag("b", f"rank {rank}"), drawn, class_="lane"))
    seconds = times.micros / 1e6
    ticks = tag("p", *[tag("span", f"{brief(seconds * i / 4)} s") for i in range(5)], class_="ends ticks")
    return tag("div", *rows, ticks, class_="lanes")


def _marks(lane: Lane, row: int, micros: int) -> list[Markup]:
    marks = []
    for bar in lane.bars:
        times = f"{brief(bar.start / 1e6)} to {brief(bar.end / 1e6)} s"
        busy = f", busy {brief(bar.busy / 1e6)} s" if bar.count > 1 else ""
        nbytes = f", {units.size(bar.nbytes)}" if bar.nbytes else ""
        count = f", {bar.count:,} spans" if bar.count > 1 else ""
        about = f"{short(lane.thread, 32)}: {short(bar.phase, 32)}, {times}{busy}{nbytes}{count}"
        x, width = bar.start / micros, max((bar.end - bar.start) / micros, 0.0008)
        kind = f"{colour_of(bar.phase)}{' pale' if bar.summed else ''}"
        marks.append(
            tag("rect", tag("title", about), x=percent(x), y=str(2 + _LANE * row), width=percent(width), height=str(_LANE - 2), class_=kind)
        )
    return marks


# ----------------------------------------------------------------------------------------------------------------- sizes


def kind_colour(kind: str) -> str:
    """The class of a kind: all states of an optimizer have one."""
    kinds = {"model": "k0", "optimizer": "k1", "averaged weights": "k2", "data": "k3", "random numbers": "k4", "values": "k5"}
    return kinds.get(kind.partition(":")[0], "k6")


def tree_map(layers: Sequence[LayerSize]) -> Markup:
    """An area for each layer, by kind: squarified, so that none is a sliver."""
    total = sum(layer.bytes for layer in layers)
    if not total:
        return Markup("")
    kinds: dict[str, list[LayerSize]] = {}
    for layer in layers:
        if layer.bytes:
            kinds.setdefault(layer.kind, []).append(layer)
    named = sorted(kinds.items(), key=lambda item: (-sum(s.bytes for s in item[1]), item[0]))
    outer = squarify([sum(s.bytes for s in mine) / total for _, mine in named], (0.0, 0.0, 1.0, 1.0), _WIDE / _TREE)
    areas = []
    for (kind, mine), area in zip(named, outer, strict=True):
        nbytes = sum(s.bytes for s in mine)
        share = nbytes / total
        for layer, rect in zip(mine, squarify([s.bytes / nbytes * share for s in mine], area, _WIDE / _TREE), strict=True):
            areas.append(_area(kind, layer, rect))
    return tag("svg", *areas, width="100%", height=str(_TREE), role="img", aria_label="bytes by layer", class_="tree")


def _area(kind: str, layer: LayerSize, rect: Rect) -> Markup:
    x, y, width, height = rect
    name = layer.layer or f"{layer.tensors:,} small tensors"
    size, count = units.size(layer.bytes), units.plural(layer.tensors, "tensor")
    parts = [tag("title", f"{kind}: {name}, {size} in {count}"), tag("rect", width="100%", height="100%", class_=kind_colour(kind))]
    label = short(name, 40)
    if height * _TREE >= 16 and width * _WIDE >= 24:
        fits = max(int((width * _WIDE - 8) / _LETTER), 0)
        shown = label if len(label) <= fits else f"…{label[len(label) - fits + 1 :]}" if fits >= 4 else ""
        narrow = "" if len(shown) * _LETTER <= width * _NARROW - 6 else "wide"
        parts += [tag("text", shown, x="5", y="14", class_=narrow or None)] if shown else []
        if height * _TREE >= 30 and len(size) <= fits:
            parts.append(tag("text", size, x="5", y="28", class_="wide faint" if len(size) * _LETTER > width * _NARROW - 6 else "faint"))
    return tag("svg", *parts, x=percent(x), y=f"{y * _TREE:.1f}", width=percent(width), height=f"{height * _TREE:.1f}")


def squarify(shares: Sequence[float], area: Rect, aspect: float) -> list[Rect]:
    """Rectangles of the given sizes, largest first, that tile ``area``: rows along its shorter side, each as long as it makes them squarer
    (Bruls, Huizing and van Wijk, 2000). ``aspect`` is that of the whole picture, ``area`` is in shares of it."""
    x, y, width, height = area
    rects: list[Rect] = []
    at = 0
    while at < len(shares):
        upright = width * aspect >= height
        side = height if upright else width * aspect
        row, worst = 1, _worst(shares[at : at + 1], side, aspect)
        while at + row < len(shares) and _worst(shares[at : at + row + 1], side, aspect) <= worst:
            row += 1
            worst = _worst(shares[at : at + row], side, aspect)
        together = sum(shares[at : at + row])
        along = 0.0
        for share in shares[at : at + row]:
            part = share / together
            if upright:
                rects.append((x, y + along * height, together / height, part * height))
            else:
                rects.append((x + along * width, y, part * width, together / width))
            along += part
        if upright:
            x, width = x + together / height, max(width - together / height, 1e-9)
        else:
            y, height = y + together / width, max(height - together / width, 1e-9)
        at += row
    return rects


def _worst(row: Sequence[float], side: float, aspect: float) -> float:
    """The ratio of the longest rectangle of a row laid along ``side``."""
    total = sum(row) * aspect
    return max(
        max(side * side * share * aspect / (total * total), total * total / (side * side * share * aspect)) for share in (row[0], row[-1])
    )
