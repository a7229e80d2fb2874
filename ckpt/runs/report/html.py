"""A report as one HTML file: no network, no image, nothing that runs but the script beside this module, which the page does without.

The policy in the head names the digests of that style and script: a browser runs and applies nothing else, whatever a name contains.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Container, Iterator, Sequence
from datetime import datetime, timezone
from importlib.resources import files

from ckpt import units

from . import areas, charts
from .charts import Markup, Point, join, number, short, tag
from .content import Detail, HistoryEvent, Report, Setting, run_stragglers
from .history import SavedSpans
from .summary import SaveSummary, brief

_CODE = "ckpt.runs.report"
_YEAR_9999 = 250_000_000_000
_RANKS = 12


def render(report: Report) -> str:
    """The whole page. Equal reports give equal pages."""
    style, script = ((files(_CODE) / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'"
    detail = report.detail
    title = short(" · ".join(report.urls), 120)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"ckpt report: {title}"),
        tag("style", Markup(style)),
    )
    parts: list[str | Markup] = [tag("header", tag("p", "ckpt report", class_="brand"), tag("h1", title), _subtitle(report))]
    parts += _sections(report, detail)
    if detail is not None and detail.rows:
        data = json.dumps(_data(detail), separators=(",", ":")).replace("<", "\\u003c")
        parts.append(tag("script", Markup(data), type="application/json", id="heat"))
    body = tag("body", tag("main", *parts), tag("div", id="tip", hidden="hidden"), tag("script", Markup(script)))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _digest(code: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}"


def _data(detail: Detail) -> dict[str, object]:
    """What the script shows below the pointer: microseconds, the rank of each cell, and its bytes."""
    phases = [
        {
            "phase": name,
            "median": detail.heat.medians[name],
            "busy": [-1 if cell is None else cell.micros for cell in cells],
            "rank": [-1 if cell is None else cell.rank for cell in cells] if any(len(group) > 1 for group in detail.heat.groups) else None,
        }
        for name, cells in detail.heat.rows.items()
    ]
    return {"rows": detail.rows, "phases": phases}


def _sections(report: Report, detail: Detail | None) -> Iterator[Markup]:
    if detail is not None:
        yield _tiles(detail, report)
        yield _advice(detail)
    else:
        yield _section(
            "", tag("p", "No save here has spans, so there is nothing to show. They are kept unless CKPT_SPANS=off.", class_="big")
        )
    if len([s for s in report.saves if s.summary is not None]) > 1:
        yield _over_steps(report)
        yield from _stragglers(report.saves, detail)
    if detail is not None:
        yield from _of_one(detail)
    if len(report.compared) > 1:
        yield _compared(report.compared)
    if report.failed:
        rows = [tag("tr", tag("td", _moment(one.at), data_v=f"{one.at:.3f}"), tag("td", short(one.what, 400))) for one in report.failed]
        yield _section("Saves that failed", charts.table(("when", "what"), rows), about="The newest 20.")
    if report.loads:
        yield _loads(report.loads)
    if report.notes:
        yield _section("What this report leaves out", tag("ul", *[tag("li", short(note, 300)) for note in report.notes]))


def _loads(loads: Sequence[HistoryEvent]) -> Markup:
    rows = [
        tag(
            "tr",
            tag("td", _moment(one.at), data_v=f"{one.at:.3f}"),
            tag("td", short(one.what, 400)),
            number(brief(one.seconds) if one.seconds is not None else "", one.seconds or 0.0),
            number(f"{one.ranks:,}", one.ranks),
            number(units.size(one.nbytes) if one.nbytes is not None else "", one.nbytes or 0),
            tag("td", short(one.slowest, 80)),
        )
        for one in loads
    ]
    heads = ("when", "what", "seconds", "ranks", "the leader's bytes", "what took longest")
    return _section("Loads", charts.table(heads, rows), about="The newest 20 that a Checkpointer made.")


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S") if at < _YEAR_9999 else "?"


def _section(title: str, *parts: str | Markup, about: str = "") -> Markup:
    heads = [tag("h2", title)] if title else []
    return tag("section", *heads, *([tag("p", about, class_="about")] if about else []), *parts)


def _subtitle(report: Report) -> Markup:
    detail = report.detail
    if detail is None or detail.saved.record is None:
        return tag("p", units.plural(len(report.saves), "save"), class_="about")
    record = detail.saved.record
    which = f"{units.plural(len(report.saves), 'save')}. In detail: {_name(detail.saved)}, " if len(report.saves) > 1 else ""
    return tag(
        "p",
        f"{which}saved {record.created[:19].replace('T', ' ')} UTC by {short(record.writer, 40)}, id {short(record.id, 24)}",
        class_="about",
    )


def _name(saved: SavedSpans) -> str:
    return short(saved.url.rstrip("/").rpartition("/")[2], 40) if saved.step is None else f"step {saved.step:,}"


# ------------------------------------------------------------------------------------------------------- figures and advice


def _tiles(detail: Detail, report: Report) -> Markup:
    save, record = detail.save, detail.record
    rate = f"{units.size(record.tensor_bytes / save.seconds)}/s" if save.seconds > 0 else "–"
    tiles = [
        ("durable after", f"{brief(save.seconds)} s", "the slowest rank's wall time"),
        (
            "training blocked",
            _blocked(save),
            "saved in the background" if save.background else "the whole save: it was not in the background",
        ),
        ("tensors", units.size(record.tensor_bytes), units.plural(sum(kind.tensors for kind in detail.kinds), "tensor")),
        ("rate", rate, "all ranks together"),
        ("ranks", f"{record.world_size:,}", f"{units.size(record.tensor_bytes / max(record.world_size, 1))} each"),
        ("stragglers", f"{len(save.stragglers):,}", "ranks above 1.5 × the median" if save.stragglers else "no rank holds the others up"),
    ]
    if report.failed:
        steps = ", ".join(dict.fromkeys(f"{one.step:,}" for one in reversed(report.failed) if one.step is not None))
        tiles.insert(
            0,
            (
                "failed saves",
                f"{len(report.failed):,}",
                short(f"at {'steps' if ',' in steps else 'step'} {steps}" if steps else "listed below", 60),
            ),
        )
    if save.retries:
        again, throttled = (sum(pair[i] for pair in save.retries.values()) for i in (0, 1))
        worst = next(iter(save.retries))
        about = f"{units.plural(throttled, 'time')} the storage asked to slow down; most on rank {worst}: {save.retries[worst][0]:,}"
        tiles.append(("requests made again", f"{again:,}", about))
    cost = _cost([detail.saved], report.setting)
    if cost is not None:
        known = [s for s in report.saves if s.summary is not None]
        more = _cost(known, report.setting) if len(known) > 1 else None
        tiles.append(("cost of blocking", cost, f"{more} for the {len(known):,} saves here" if more else "blocked seconds × ranks × price"))
    return tag("section", *[tag("div", tag("span", a), tag("b", b), tag("small", c), class_="tile") for a, b, c in tiles], class_="tiles")


def _blocked(save: SaveSummary) -> str:
    return "not known" if save.blocked is None else f"{'≥ ' if save.background and not save.measured else ''}{brief(save.blocked)} s"


def _cost(saves: Sequence[SavedSpans], setting: Setting) -> str | None:
    if setting.price is None:
        return None
    hours = [s.summary.blocked * s.record.world_size / 3600 for s in saves if s.summary and s.record and s.summary.blocked is not None]
    lower = any(s.summary.background and not s.summary.measured for s in saves if s.summary)
    return f"{'≥ ' if lower else ''}{setting.currency}{setting.price * sum(hours):,.2f}"


def _advice(detail: Detail) -> Markup:
    save = detail.save
    verdict = tag("p", f"{save.verdict[0].upper()}{save.verdict[1:]}.", class_="big")
    items = [tag("li", tag("b", advice.what), " ", tag("span", advice.why)) for advice in detail.advice]
    rest = tag("ul", *items, class_="advice") if items else tag("p", "Nothing stands out that would be worth changing.", class_="about")
    return _section("What to do", verdict, rest)


# ------------------------------------------------------------------------------------------------------------- over steps


def _over_steps(report: Report) -> Markup:
    saves = report.saves
    steps = [s.step for s in saves]
    by_step = None not in steps and len(set(steps)) == len(steps)
    xs = [float(s.step or 0) if by_step else i + 1.0 for i, s in enumerate(saves)]

    def points(figure: str) -> list[Point]:
        series = []
        for x, saved in zip(xs, saves, strict=True):
            save, record = saved.summary, saved.record
            if save is None or record is None:
                series.append(Point(x=x, y=None, label=""))
                continue
            y, shown = {
                "durable": (save.seconds, f"durable after {brief(save.seconds)} s"),
                "blocked": (save.blocked, f"blocked {_blocked(save)}"),
                "rate": ((rate := record.tensor_bytes / save.seconds if save.seconds > 0 else None), f"{units.size(rate or 0)}/s"),
                "size": (float(record.tensor_bytes), units.size(record.tensor_bytes)),
                "stragglers": (float(len(save.stragglers)), units.plural(len(save.stragglers), "straggler")),
            }[figure]
            series.append(Point(x=x, y=y, label=f"{_name(saved)}: {shown}"))
        return series

    failed = [Point(x=float(e.step), y=None, label=f"step {e.step:,}: {short(e.what, 200)}") for e in report.failed if e.step is not None]
    marks, axis = (failed, "step") if by_step else ([], "save")
    panels = [
        charts.series("durable, blocked", points("durable"), lambda y: f"{brief(y)} s", points("blocked"), marks, axis),
        charts.series("rate", points("rate"), lambda y: f"{units.size(y)}/s", failed=marks, axis=axis),
        charts.series("tensors", points("size"), units.size, failed=marks, axis=axis),
        charts.series("stragglers", points("stragglers"), lambda y: f"{y:,.0f}", failed=marks, axis=axis),
    ]
    about = f"From {_name(saves[0])} to {_name(saves[-1])}; beside each title the newest value. Blocked is dashed."
    about += " A red line is a save that failed." if marks else ""
    return _section("Over steps", tag("div", *panels, class_="panels"), about=about)


def _stragglers(saves: Sequence[SavedSpans], detail: Detail | None) -> Iterator[Markup]:
    """The ranks that held up saves of the whole run: a rank that is slow now and then is seldom so in the newest save."""
    known = [saved.summary for saved in saves if saved.summary is not None]
    ranks = run_stragglers(known)
    if not ranks:
        return
    few = detail is not None and detail.rows is None
    shown = () if detail is None else detail.saved.tables if few else detail.save.slowest[:_RANKS]
    rows = [
        tag(
            "tr",
            tag("th", _rank_link(one.rank, shown), scope="row", data_v=str(one.rank)),
            tag("td", f"slowest in {one.saves:,} of {units.plural(len(known), 'save')}", data_v=str(one.saves)),
            tag("td", short(one.phase, 32)),
            number(brief(one.seconds), one.seconds),
        )
        for one in ranks[:_RANKS]
    ]
    left = f" {units.plural(len(ranks) - _RANKS, 'rank')} with fewer saves left out." if len(ranks) > _RANKS else ""
    heads = ("rank", "saves", "mostly in", "seconds lost")
    yield _section("Stragglers over the run", charts.table(heads, rows, kind="run"), about=f"The rank that held up each save most.{left}")


def _rank_link(rank: int, shown: Container[int]) -> str | Markup:
    """The name of a rank; a link to its row if the page has one."""
    return tag("a", f"rank {rank}", href=f"#rank-{rank}") if rank in shown else f"rank {rank}"


# ------------------------------------------------------------------------------------------------------------- one save


def _of_one(detail: Detail) -> Iterator[Markup]:
    save, heat = detail.save, detail.heat
    about = "The bar is the slowest rank, the mark the median rank. Threads that work at once count each: phases do not add up to the save."
    yield _section(f"Phases of {_name(detail.saved)}", charts.phase_rows(save), about=about)
    about = "Colour compares a rank with the median rank of the phase. "
    if detail.rows is None:
        body = charts.heat_table(heat, [charts.group_name(group) for group in heat.groups], "seconds", ids=True)
    else:
        size = len(heat.groups[0])
        in_column = "ranks" if size == 1 else f"cells of {size} ranks, the slowest of them"
        about += f"Each column is {detail.rows} {in_column}, from the top; rank 0 is at the left."
        body = join([charts.heat_strips(heat, detail.rows), _slowest(detail)])
    yield _section("Ranks and phases", charts.heat_legend(), body, about=about)
    for group in detail.groups:
        left = f" The {group.left_out:,} fastest are left out." if group.left_out else ""
        table = charts.heat_table(group.heat, [short(label, 40) for label in group.labels], "seconds")
        yield _section(f"By {short(group.title, 40)}", table, about=f"The median rank of each.{left}")
    times = detail.times
    clocks = "by the clocks of their machines" if times.aligned else "each from its own beginning: their clocks are too far apart"
    left = f" {units.plural(times.left_out, 'less busy thread')} left out." if times.left_out else ""
    lanes = [charts.legend(dict.fromkeys(bar.phase for lane in times.lanes for bar in lane.bars)), areas.timeline_rows(times)]
    yield _section("Threads over time", *lanes, about=f"A lane is a thread. Ranks are laid side by side {clocks}.{left}")
    if detail.kinds:
        total = sum(kind.bytes for kind in detail.kinds) or 1
        rows = [
            tag(
                "tr",
                tag("td", tag("i", class_=f"key {areas.kind_colour(k.kind)}"), short(k.kind, 48)),
                number(units.size(k.bytes), k.bytes),
                number(f"{100 * k.bytes / total:.1f} %", k.bytes),
                number(f"{k.tensors:,}" if k.tensors else "", k.tensors),
            )
            for k in detail.kinds
        ]
        table = charts.table(("kind", "bytes", "share", "tensors"), rows)
        about = "Kinds are taken from the names of tensors. Areas are in proportion to bytes."
        yield _section("What is stored", areas.kind_bar(detail.kinds), table, areas.tree_map(detail.layers), about=about)


def _slowest(detail: Detail) -> Markup:
    """The slowest ranks as a table: for print, and where no script runs."""
    save, tables = detail.save, detail.saved.tables
    names = list(detail.heat.rows)
    rows = []
    for rank in save.slowest[:_RANKS]:
        sums = tables[rank].sums
        cells = [
            tag("td", brief(sums[name].seconds) if name in sums else "", data_v=str(sums[name].busy if name in sums else -1), class_="n")
            for name in names
        ]
        total = number(brief(save.work[rank]), save.work[rank])
        rows.append(tag("tr", tag("th", f"rank {rank}", scope="row", data_v=str(rank)), total, *cells, id=f"rank-{rank}"))
    return join(
        [tag("h3", "The slowest ranks", tag("small", "seconds")), charts.table(("rank", "work", *[short(n, 16) for n in names]), rows)]
    )


def _compared(saves: Sequence[SavedSpans]) -> Markup:
    """A row for each phase, a column for each save."""
    summaries = [saved.summary for saved in saves if saved.summary is not None]
    names = dict.fromkeys(phase.phase for save in summaries for phase in save.phases)
    cells = {"the save": [number(f"{brief(save.seconds)} s", save.seconds) for save in summaries]}
    for name in names:
        phases = [save.phase(name) for save in summaries]
        cells[short(name, 32)] = [number(brief(p.seconds), p.seconds) if p else number("", -1.0) for p in phases]
    rows = [tag("tr", tag("th", name, scope="row"), *numbers) for name, numbers in cells.items()]
    table = charts.table(("slowest rank, seconds", *[_name(saved) for saved in saves]), rows)
    return _section("Side by side", table)
