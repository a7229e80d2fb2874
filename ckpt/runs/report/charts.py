"""Pictures: series over steps, bars, heat maps. Lengths across are shares of the width, so that text keeps its size on any screen;
only marks without text are stretched."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ckpt import units
from ckpt.text import printable

from .summary import BOUNDS, MIDDLE, Cell, HeatMap, PhaseSummary, SaveSummary, Unaccounted, brief

# HTML and SVG as text. Escaping is not the caller's to remember: whatever is not ``Markup`` is escaped where it is put in.

_LONGEST = 96
_VOID = frozenset({"meta", "br", "col", "input"})
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
_TEXT = 13
_INNER = {"x": "0", "y": "4", "width": "100%", "height": str(_HEIGHT), "view_box": "0 0 1000 100", "preserve_aspect_ratio": "none"}
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
    """``x`` is a step or a number in a row; ``y`` None where it is not known. ``label`` says all of it, ``target`` is what it leads to."""

    x: float
    y: float | None
    label: str
    target: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """``kind`` is its class, ``name`` what stands at its end, ``failed`` where a save failed."""

    kind: str
    points: Sequence[Point]
    name: str = ""
    failed: Sequence[Point] = ()


def series(title: str, lines: Sequence[Line], show: Callable[[float], str], axis: str = "step") -> Markup:
    """A panel: lines over steps on one scale, and marks where saves failed. Nothing if no value is known. One line has its figures in the
    title, those of lines with names are elsewhere."""
    known = [point.y for line in lines for point in line.points if point.y is not None]
    if not known:
        return Markup("")
    top = max(known) or 1.0
    xs = [point.x for line in lines for point in (*line.points, *line.failed)]
    low, high = min(xs), max(xs)
    named = any(line.name for line in lines)
    chart = tag(
        "svg",
        tag("line", x1="0", x2="100%", y1="4", y2="4", class_="rule"),
        tag("line", x1="0", x2="100%", y1=str(_HEIGHT + 4), y2=str(_HEIGHT + 4), class_="rule"),
        tag("svg", *[_path(line, low, high, top) for line in lines], **_INNER),
        *[_mark(p, low, high, f"failed {line.kind}") for line in lines for p in line.failed],
        *[dot for line in lines for dot in _dots(line, low, high, top)],
        tag("text", show(top), x="-6", y="8", class_="axis"),
        tag("text", "0", x="-6", y=str(_HEIGHT + 8), class_="axis"),
        *(_names(lines, top) if named else ()),
        width="100%",
        height=str(_HEIGHT + 8),
        role="img",
        aria_label=f"{title} over steps",
        class_="chart named" if named else "chart",
    )
    ends = tag("p", tag("span", f"{low:,.0f}"), tag("span", axis), tag("span", f"{high:,.0f}" if high > low else ""), class_="ends")
    if named:
        return tag("div", tag("h3", title), chart, ends, class_="panel")
    values = [point.y for point in lines[0].points if point.y is not None]
    latest = show(values[-1]) if values else ""
    spread = tag("small", f"median {show(nearest(values, 50))} · p95 {show(nearest(values, 95))}") if values else ""
    return tag("div", tag("h3", title, " ", tag("b", latest), spread), chart, ends, class_="panel")


def nearest(values: Sequence[float], percentile: int) -> float:
    """The nearest rank: a value that occurred."""
    return sorted(values)[-(-percentile * len(values) // 100) - 1]


def _mark(point: Point, low: float, high: float, kind: str) -> Markup:
    x = percent(_across(point.x, low, high))
    return tag("line", tag("title", point.label), x1=x, x2=x, y1="4", y2=str(_HEIGHT + 4), class_=kind)


def _path(line: Line, low: float, high: float, top: float) -> Markup:
    """Broken where a value is not known."""
    path, pen = [], "M"
    for point in line.points:
        if point.y is None:
            pen = "M"
            continue
        path.append(f"{pen}{1000 * _across(point.x, low, high):.1f} {100 - 100 * point.y / top:.1f}")
        pen = "L"
    return tag("path", d="".join(path), class_=f"line {line.kind}", vector_effect="non-scaling-stroke")


def _dots(line: Line, low: float, high: float, top: float) -> list[Markup]:
    """Those that lead somewhere are no stops of the Tab key: the list of steps leads there, too."""
    size = "3" if len(line.points) <= 60 else "2"
    dots = []
    for p in line.points:
        if p.y is not None:
            place = {"cx": percent(_across(p.x, low, high)), "cy": f"{4 + _HEIGHT * (1 - p.y / top):.1f}", "r": size}
            dot = tag("circle", tag("title", p.label), **place, class_=f"dot {line.kind}")
            dots.append(tag("a", dot, href=f"#{p.target}", tabindex="-1") if p.target else dot)
    return dots


def _names(lines: Sequence[Line], top: float) -> list[Markup]:
    """The name of each line at the height of its last value, or as near as names can be read."""
    ends = [(next((p.y for p in reversed(line.points) if p.y is not None), None), line) for line in lines]
    ends.sort(key=lambda end: -(end[0] or 0.0))
    names, y = [], 4.0 - _TEXT
    for i, (value, line) in enumerate(ends):
        y = min(max(4 + _HEIGHT * (1 - (value or 0.0) / top), y + _TEXT), _HEIGHT + 4 - _TEXT * (len(ends) - 1 - i))
        marks = (tag("circle", cx="12", cy="0", r="4", class_=f"dot {line.kind}"), tag("text", short(line.name, 16), x="20", y="4"))
        names.append(tag("svg", *marks, x="100%", y=f"{y:.1f}", class_=f"end {line.kind}"))
    return names


def _across(x: float, low: float, high: float) -> float:
    """A margin on both sides, so that no dot is cut."""
    return 0.01 + 0.98 * ((x - low) / (high - low) if high > low else 0.5)


# ---------------------------------------------------------------------------------------------------------------- phases


def phase_rows(save: SaveSummary) -> Markup:
    """A bar for each phase: the slowest rank, and a mark at the median one."""
    gap = save.unaccounted
    top = max([*(phase.seconds for phase in save.phases), gap.seconds if gap is not None else 0.0]) or 1.0
    heads = ("phase", "slowest rank to median", ">slowest", ">median", ">wall", ">bytes", ">rate", ">operations")
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
    """A table that can be sorted by its heads, if there is anything to sort; heads of numbers are markup or begin with
    ``>``. It scrolls where it is too wide."""
    plain = [name for name in heads if not isinstance(name, Markup) and name[0] != ">"]
    cells = [
        tag("th", name if isinstance(name, Markup) else name.lstrip(">"), scope="col", class_=None if name in plain else "n")
        for name in heads
    ]
    head = tag("thead", tag("tr", *cells))
    return tag("div", tag("table", head, tag("tbody", *rows), class_=f"sortable {kind}".strip()), class_="scroll", tabindex="0")


# ------------------------------------------------------------------------------------------------------------- heat maps


def heat_table(heat: HeatMap, labels: Sequence[str], *, anchor: str | None = None) -> Markup:
    """A row for each group of ranks, a column for each phase, seconds in the cells. Links lead to the rows of ranks of the ``anchor``."""
    names = list(heat.rows)
    rows = [
        tag(
            "tr",
            tag("th", label, scope="row", data_v=str(i)),
            *[_heat_cell(heat.rows[name][i], label, name) for name in names],
            id=f"{anchor}-rank-{heat.groups[i][0]}" if anchor else None,
        )
        for i, label in enumerate(labels)
    ]
    middles = [number(brief(heat.medians[name] / 1e6), heat.medians[name]) for name in names]
    foot = tag("tfoot", tag("tr", tag("th", "median", scope="row"), *middles))
    head = tag(
        "thead", tag("tr", tag("th", "seconds", scope="col"), *[tag("th", short(name, 16), scope="col", class_="n") for name in names])
    )
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
