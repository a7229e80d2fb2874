"""Pictures: a timeline of threads, and areas in proportion to bytes."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.text import units

from .charts import colour_of
from .lanes import Bar, Lane, Timeline
from .markup import Markup, percent, short, tag
from .sizes import KindSize, LayerSize
from .summary import brief

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
        about = f"{short(lane.thread, 32)}: {_about(bar)}"
        x, width = bar.start / micros, max((bar.end - bar.start) / micros, 0.0008)
        kind = f"{colour_of(bar.phase)}{' pale' if bar.summed else ''}"
        marks.append(
            tag("rect", tag("title", about), x=percent(x), y=str(2 + _LANE * row), width=percent(width), height=str(_LANE - 2), class_=kind)
        )
    return marks


def _about(bar: Bar) -> str:
    times = f"{brief(bar.start / 1e6)} to {brief(bar.end / 1e6)} s"
    busy = f", busy {brief(bar.busy / 1e6)} s" if bar.count > 1 else ""
    nbytes = f", {units.size(bar.nbytes)}" if bar.nbytes else ""
    return f"{short(bar.phase, 32)}, {times}{busy}{nbytes}{f', {bar.count:,} spans' if bar.count > 1 else ''}"


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
    (Bruls, Huizing and van Wijk, 2000). ``aspect`` is that of the whole picture, ``area`` is in shares of it.
    """
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


def kind_bar(kinds: Sequence[KindSize]) -> Markup:
    """All bytes in one bar."""
    total = sum(kind.bytes for kind in kinds) or 1
    marks, at = [], 0.0
    for kind in kinds:
        share = kind.bytes / total
        about = f"{short(kind.kind, 48)}: {units.size(kind.bytes)}, {100 * share:.1f} %"
        marks.append(
            tag(
                "rect",
                tag("title", about),
                x=percent(at),
                y="0",
                width=percent(share),
                height="22",
                class_=f"part {kind_colour(kind.kind)}",
            )
        )
        at += share
    return tag("svg", *marks, width="100%", height="22", role="img", aria_label="bytes by kind", class_="kinds")
