"""Pictures: series over steps, bars, heat maps. Lengths across are shares of the width, so that text keeps its size on any screen;
only marks without text are stretched.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ckpt import units
from ckpt.text import printable

from .heat import BOUNDS, MIDDLE, Cell, HeatMap
from .summary import PhaseSummary, SaveSummary, Unaccounted, brief

# HTML and SVG as text. Escaping is not the caller's to remember: whatever is not ``Markup`` is escaped where it is put in.

_LONGEST = 96
_VOID = frozenset({"meta", "br", "col"})
_ATTRIBUTES = {"class_": "class", "view_box": "viewBox", "preserve_aspect_ratio": "preserveAspectRatio", "for_": "for"}


class Markup(str):
    """Text that is HTML already. Only this module makes it of what others wrote, escaped."""

    __slots__ = ()


def tag(name: str, /, *children: str | Markup, **attributes: object) -> Markup:
    """An element. ``class_`` stands for ``class``, ``view_box`` for ``viewBox``, other underscores for hyphens; None leaves out."""
    shown = {_ATTRIBUTES.get(key, key.replace("_", "-")): value for key, value in attributes.items() if value is not None}
    given = "".join(f' {key}="{text(str(value))}"' for key, value in shown.items())
    return Markup(f"<{name}{given}>" if name in _VOID else f"<{name}{given}>{join(children)}</{name}>")


def join(parts: Sequence[str]) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else text(part) for part in parts))


def text(value: str) -> str:
    """Escaped, on one line, and without control characters or halves of characters, which no HTML file may hold."""
    clean = printable(value, one_line=True).encode("utf-8", "backslashreplace").decode("utf-8")
    return html.escape(clean, quote=True)


def short(value: str, most: int = _LONGEST) -> str:
    """At most so many characters, the middle left out: names differ at their ends."""
    return value if len(value) <= most else f"{value[: most // 2 - 1]}…{value[-(most - most // 2) :]}"


def percent(share: float) -> str:
    """A length as a share of the width, so that charts fit any screen: ``12.5%``."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


_KNOWN = ("collect", "plan", "agree", "capture", "exchange", "encode", "hash", "write", "sync", "commit")
_LIKE = {"open": "collect", "match": "plan", "read": "write", "verify": "hash", "decode": "encode", "copy": "capture"}
_HEIGHT = 84
_STRIP = 72
_MENTIONED = 0.001


def colour_of(phase: str) -> str:
    """The class of a phase: the same colour in every report."""
    name = _LIKE.get(phase, phase)
    return f"p{_KNOWN.index(name)}" if name in _KNOWN else "px"


def legend(phases: Iterable[str]) -> Markup:
    items = [tag("span", tag("i", class_=f"key {colour_of(phase)}"), short(phase, 24), class_="item") for phase in phases]
    return tag("p", *items, class_="legend")


def heat_legend() -> Markup:
    names = [f"≤ {BOUNDS[0]:g} ×", f"≤ {BOUNDS[1]:g} ×", "about the median", *(f"≥ {bound:g} ×" for bound in BOUNDS[MIDDLE:])]
    return tag(
        "p", *[tag("span", tag("i", class_=f"key h{level}"), name, class_="item") for level, name in enumerate(names)], class_="legend"
    )


# ---------------------------------------------------------------------------------------------------------------- series


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """``x`` is a step or a number in a row; ``y`` None where it is not known. ``label`` says all of it."""

    x: float
    y: float | None
    label: str


def series(
    title: str,
    points: Sequence[Point],
    show: Callable[[float], str],
    second: Sequence[Point] = (),
    failed: Sequence[Point] = (),
    axis: str = "step",
) -> Markup:
    """A panel: a line over steps, a second, dashed one on the same scale, and a mark where a save failed. Nothing if no value is known."""
    known = [point.y for point in (*points, *second) if point.y is not None]
    if not known:
        return Markup("")
    top = max(known) or 1.0
    low, high = min(p.x for p in (*points, *failed)), max(p.x for p in (*points, *failed))
    lines = [_line(line, low, high, top, f"line s{i}") for i, line in enumerate((points, second)) if line]
    dots = [dot for i, line in enumerate((points, second)) for dot in _dots(line, low, high, top, f"dot s{i}")]
    chart = tag(
        "svg",
        tag("line", x1="0", x2="100%", y1="4", y2="4", class_="rule"),
        tag("line", x1="0", x2="100%", y1=str(_HEIGHT + 4), y2=str(_HEIGHT + 4), class_="rule"),
        tag("svg", *lines, x="0", y="4", width="100%", height=str(_HEIGHT), view_box="0 0 1000 100", preserve_aspect_ratio="none"),
        *[_mark(p, low, high) for p in failed],
        *dots,
        tag("text", show(top), x="-6", y="8", class_="axis"),
        tag("text", "0", x="-6", y=str(_HEIGHT + 8), class_="axis"),
        width="100%",
        height=str(_HEIGHT + 8),
        role="img",
        aria_label=f"{title} over steps",
        class_="chart",
    )
    ends = tag("p", tag("span", f"{low:,.0f}"), tag("span", axis), tag("span", f"{high:,.0f}" if high > low else ""), class_="ends")
    values = sorted(point.y for point in points if point.y is not None) or sorted(known)
    middle, tail = values[(len(values) - 1) // 2], values[-(-95 * len(values) // 100) - 1]  # the nearest rank: values that occurred
    latest = next((point.y for point in reversed(points) if point.y is not None), None)
    spread = tag("small", f"median {show(middle)} · p95 {show(tail)}")
    head = tag("h3", title, " ", tag("b", "" if latest is None else show(latest)), spread)
    return tag("div", head, chart, ends, class_="panel")


def _mark(point: Point, low: float, high: float) -> Markup:
    x = percent(_across(point.x, low, high))
    return tag("line", tag("title", point.label), x1=x, x2=x, y1="4", y2=str(_HEIGHT + 4), class_="failed")


def _line(points: Sequence[Point], low: float, high: float, top: float, kind: str) -> Markup:
    """Broken where a value is not known."""
    path, pen = [], "M"
    for point in points:
        if point.y is None:
            pen = "M"
            continue
        path.append(f"{pen}{1000 * _across(point.x, low, high):.1f} {100 - 100 * point.y / top:.1f}")
        pen = "L"
    return tag("path", d="".join(path), class_=kind, vector_effect="non-scaling-stroke")


def _dots(points: Sequence[Point], low: float, high: float, top: float, kind: str) -> list[Markup]:
    size = "3" if len(points) <= 60 else "2"
    return [
        tag(
            "circle",
            tag("title", p.label),
            cx=percent(_across(p.x, low, high)),
            cy=f"{4 + _HEIGHT * (1 - p.y / top):.1f}",
            r=size,
            class_=kind,
        )
        for p in points
        if p.y is not None
    ]


def _across(x: float, low: float, high: float) -> float:
    """A margin on both sides, so that no dot is cut."""
    return 0.01 + 0.98 * ((x - low) / (high - low) if high > low else 0.5)


# ---------------------------------------------------------------------------------------------------------------- phases


def phase_rows(save: SaveSummary) -> Markup:
    """A bar for each phase: the slowest rank, and a mark at the median one."""
    gap = save.unaccounted
    top = max([*(phase.seconds for phase in save.phases), gap.seconds if gap is not None else 0.0]) or 1.0
    heads = ("phase", "slowest rank to median", "slowest", "median", "wall", "bytes", "rate", "operations")
    rows = []
    for phase in save.phases:
        note = "" if phase.shared else " waiting" if phase.phase == "agree" else " the leader alone"
        more = [
            number(brief(phase.wall), phase.wall),
            number(units.size(phase.bytes) if phase.bytes else "", phase.bytes),
            number(f"{units.size(phase.rate)}/s" if phase.rate else "", phase.rate or 0),
            number(f"{phase.spans:,}", phase.spans),
        ]
        rows.append(_phase_row(tag("td", short(phase.phase, 32), tag("small", note)), colour_of(phase.phase), phase, top, more))
    if gap is not None and gap.share >= _MENTIONED:
        name = tag("td", "no phase", tag("small", f"{100 * gap.share:.1f} % of the save"))
        rows.append(_phase_row(name, "pgap", gap, top, [tag("td")] * 4))
    return table(heads, rows, kind="phases")


def _phase_row(name: Markup, kind: str, phase: PhaseSummary | Unaccounted, top: float, more: Sequence[Markup]) -> Markup:
    bar = tag("rect", x="0", y="3", width=percent(phase.seconds / top), height="10", rx="2", class_=kind)
    mark = tag("rect", x=percent(min(phase.median / top, 0.995)), y="1", width="2", height="14", class_="mark")
    drawn = tag("td", tag("svg", bar, mark, width="100%", height="16"), class_="bar")
    slowest = tag("td", brief(phase.seconds), " s", tag("small", f"rank {phase.rank}"), data_v=f"{phase.seconds:.6f}", class_="n")
    return tag("tr", name, drawn, slowest, number(brief(phase.median), phase.median), *more)


def number(shown: str, value: float) -> Markup:
    """A cell that sorts by its value."""
    return tag("td", shown, data_v=f"{value:.6f}", class_="n")


def table(heads: Sequence[str], rows: Sequence[Markup], kind: str = "") -> Markup:
    """A table that can be sorted by its heads, if there is anything to sort. It scrolls by itself where it is too wide."""
    head = tag("thead", tag("tr", *[tag("th", name, scope="col") for name in heads]))
    return tag("div", tag("table", head, tag("tbody", *rows), class_=f"sortable {kind}".strip()), class_="scroll", tabindex="0")


# ------------------------------------------------------------------------------------------------------------- heat maps


def heat_table(heat: HeatMap, labels: Sequence[str], what: str, *, ids: bool = False) -> Markup:
    """A row for each group of ranks, a column for each phase, seconds in the cells. With ``ids``, links lead to the rows of ranks."""
    names = list(heat.rows)
    rows = [
        tag(
            "tr",
            tag("th", label, scope="row", data_v=str(i)),
            *[_heat_cell(heat.rows[name][i], label, name) for name in names],
            id=f"rank-{heat.groups[i][0]}" if ids else None,
        )
        for i, label in enumerate(labels)
    ]
    middles = [number(brief(heat.medians[name] / 1e6), heat.medians[name]) for name in names]
    foot = tag("tfoot", tag("tr", tag("th", "median", scope="row"), *middles))
    head = tag("thead", tag("tr", tag("th", what, scope="col"), *[tag("th", short(name, 16), scope="col") for name in names]))
    return tag("div", tag("table", head, tag("tbody", *rows), foot, class_="sortable heat"), class_="scroll", tabindex="0")


def _heat_cell(cell: Cell | None, label: str, phase: str) -> Markup:
    if cell is None:
        return tag("td", class_="hn", data_v="-1")
    more = f", {units.size(cell.nbytes)}" if cell.nbytes else ""
    return tag(
        "td",
        brief(cell.micros / 1e6),
        class_=f"h{cell.level}",
        data_v=str(cell.micros),
        title=f"{label}, {phase}: {brief(cell.micros / 1e6)} s{more}",
    )


def heat_strips(heat: HeatMap, rows: int) -> Markup:
    """A strip for each phase: a column for each block of ``rows`` cells. Scripts show what is below the pointer. Phases in which all ranks
    are about equal are only named."""
    columns = -(-len(heat.groups) // rows)
    strips, equal = [], []
    for number, (name, cells) in enumerate(heat.rows.items()):
        if all(cell is not None and cell.level == MIDDLE for cell in cells):
            equal.append(f"{short(name, 32)} ({brief(heat.medians[name] / 1e6)} s)")
            continue
        worst = max((cell for cell in cells if cell is not None), key=lambda cell: (cell.micros, -cell.rank))
        where = f"slowest: rank {worst.rank}, {brief(worst.micros / 1e6)} s · median {brief(heat.medians[name] / 1e6)} s"
        paths = [tag("path", d=_runs(cells, level, rows, columns), class_=f"h{level}") for level in range(len(BOUNDS) + 1)]
        strip = tag(
            "svg",
            *[path for path in paths if ' d=""' not in path],
            view_box=f"0 0 {columns} {rows}",
            preserve_aspect_ratio="none",
            width="100%",
            height=str(max(_STRIP, 2 * rows)),
            shape_rendering="crispEdges",
            role="img",
            aria_label=f"{short(name, 32)} of all ranks; {where}",
            class_="strip",
            tabindex="0",
            data_strip=str(number),
        )
        strips.append(tag("div", tag("h3", short(name, 32), tag("small", where)), strip))
    if equal:
        strips.append(tag("p", f"About equal on all ranks: {', '.join(equal)}.", class_="about even"))
    return join(strips)


def _runs(cells: Sequence[Cell | None], level: int, rows: int, columns: int) -> str:
    """The cells of one level as rectangles: cell i is in column i // rows, and neighbours across are one rectangle."""
    path = []
    for row in range(rows):
        start = None
        for column in range(columns + 1):
            at = column * rows + row
            cell = cells[at] if column < columns and at < len(cells) else None
            is_of_it = cell is not None and cell.level == level
            if is_of_it and start is None:
                start = column
            elif not is_of_it and start is not None:
                path.append(f"M{start} {row}h{column - start}v1H{start}z")
                start = None
    return "".join(path)


def group_name(group: Sequence[int]) -> str:
    first, last = group[0], group[-1]
    return f"rank {first}" if first == last else f"ranks {first}–{last}"
