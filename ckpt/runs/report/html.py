"""A report as one HTML file: no network, no image, nothing that runs but the script beside this module, which the page does without.

The policy in the head names the digests of that style and script: a browser runs and applies nothing else, whatever a name contains.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib.resources import files
from statistics import median

from ckpt import units

from . import areas, charts
from .advice import run_stragglers
from .charts import Line, Markup, Point, join, nearest, number, short, tag
from .content import Detail, HistoryEvent, Report, Series, Setting, distinct
from .history import SavedSpans
from .summary import SaveSummary, brief, floor_between, level_of

_CODE = "ckpt.runs.report"
_YEAR_9999 = 250_000_000_000
_RANKS = 12
_LEFT_OUT = "Its ranks and threads are not in this page, which would be too large. A report of this save alone shows them."


def render(report: Report) -> str:
    """The whole page. Equal reports give equal pages."""
    style, script = ((files(_CODE) / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'"
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
    parts = [
        tag("header", tag("p", "ckpt report", class_="brand"), tag("h1", short(" · ".join(report.urls), 400)), _subtitle(report)),
        *_sections(report),
    ]
    body = tag("body", tag("main", *parts), tag("div", id="tip", hidden="hidden"), tag("script", Markup(script)))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _digest(code: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}"


def _data(detail: Detail) -> Markup:
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
    data = json.dumps({"rows": detail.rows, "phases": phases}, separators=(",", ":")).replace("<", "\\u003c")
    return tag("script", Markup(data), type="application/json")


def _sections(report: Report) -> Iterator[Markup]:
    series, detail = report.series[0], report.detail
    several = len(report.series) > 1
    anchors = {} if several else _anchors(series.known)
    if several:
        yield from _over_runs(report)
    elif detail is not None:
        yield _tiles(detail, report)
        save = detail.save
        verdict = tag("p", _unbroken(f"{save.verdict[0].upper()}{save.verdict[1:]}."), class_="big")
        items = [tag("li", tag("b", _unbroken(advice.what)), " ", tag("span", _unbroken(advice.why))) for advice in detail.advice]
        rest = tag("ul", *items, class_="advice") if items else tag("p", "Nothing stands out that would be worth changing.", class_="about")
        yield _section("What to do", verdict, rest)
    else:
        none = "No save here has spans, so there is nothing to show. They are kept unless CKPT_SPANS=off."
        yield _section("", tag("p", none, class_="big"))
    if len(series.known) > 1 and not several:
        about = f"From {_name(series.saves[0])} to {_name(series.saves[-1])}; beside each title the newest value. Blocked is dashed."
        about += " A red line is a save that failed." if series.failed else ""
        yield _section("Over steps", _panels(report.series, [""], anchors), about=about)
        yield from _stragglers(series.known, {step.saved.url: step for step in report.steps}, anchors)
    if detail is not None:
        yield from _steps(series.known, report.steps, anchors)
        yield from _stored(detail)
    if len(report.compared) > 1:
        columns = [{"the save": brief(saved.seconds), **_medians([saved])} for saved in report.compared]
        yield _section(
            "Side by side",
            _side_by_side(("slowest rank, seconds", *[f">{_name(saved)}" for saved in report.compared]), columns),
            about="The fastest, the median, the slowest and the newest save." if len(series.known) > len(report.compared) else "",
        )
    names = [f"{name}: " for name in distinct(report.urls)] if several else [""]
    newest = {} if several else {f"step-{one.step}": one for one in reversed(series.failed) if one.step is not None}
    ids = {one: name for name, one in newest.items() if name not in anchors.values()}  # a link to a step with no save leads to its failure
    failed = [
        tag("tr", tag("td", _moment(one.at), data_v=f"{one.at:.3f}"), tag("td", short(f"{name}{one.what}", 400)), id=ids.get(one))
        for run, name in zip(report.series, names, strict=True)
        for one in run.failed
    ]
    if failed:
        about = "The newest 20 of each run." if several else "The newest 20."
        yield _section("Saves that failed", charts.table(("when (UTC)", "what"), failed), about=about, id="failed")
    if series.loads and not several:
        yield _loads(series.loads)
    if report.notes:
        yield _section("What this report leaves out", tag("ul", *[tag("li", short(note, 300)) for note in report.notes]))


def _anchors(saves: Sequence[SavedSpans]) -> dict[str, str]:
    """URL → the name that links lead to: that of the step, if each has one of its own."""
    by_step = _by_step(saves)
    return {saved.url: f"step-{saved.step}" if by_step else f"save-{i + 1}" for i, saved in enumerate(saves)}


def _by_step(saves: Sequence[SavedSpans]) -> bool:
    """Whether each is of a step of its own."""
    steps = {saved.step for saved in saves}
    return None not in steps and len(steps) == len(saves)


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
    heads = ("when (UTC)", "what", ">seconds", ">ranks", ">the leader's bytes", "what took longest")
    return _section("Loads", charts.table(heads, rows), about="The newest 20 that a Checkpointer made.")


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S") if at < _YEAR_9999 else "?"


def _section(title: str, *parts: str | Markup, about: str = "", id: str | None = None) -> Markup:
    heads = [tag("h2", title)] if title else []
    return tag("section", *heads, *([tag("p", about, class_="about")] if about else []), *parts, id=id)


def _unbroken(text: str) -> str:
    """A line ends between words, not between a figure and its unit."""
    return re.sub(r"(?<=≥) |(?<=\d) (?=(?:s|[KMGT]iB|[×%])\W)", "\u00a0", text)


def _subtitle(report: Report) -> Markup:
    saves = units.plural(sum(len(one.saves) for one in report.series), "save")
    if report.detail is None:
        return tag("p", f"{units.plural(len(report.series), 'run')}, {saves}" if len(report.series) > 1 else saves, class_="about")
    record = report.detail.record
    which = f"{saves}. These figures: {_name(report.detail.saved)}, " if len(report.series[0].saves) > 1 else ""
    made = f"saved {record.created[:19].replace('T', ' ')} UTC by {short(record.writer, 40)}, id {short(record.id, 24)}"
    return tag("p", which + made, class_="about")


def _name(saved: SavedSpans) -> str:
    return f"step {saved.step:,}" if saved.step is not None and not saved.label else short(saved.label, 60)


# ------------------------------------------------------------------------------------------------------- figures and advice


def _tiles(detail: Detail, report: Report) -> Markup:
    save, record = detail.save, detail.record
    where = "saved in the background" if save.background else "the whole save: it was not in the background"
    tiles: list[tuple[str, str | Markup, str | Markup]] = [
        ("durable after", f"{brief(save.seconds)} s", "the slowest rank's wall time"),
        ("training blocked", _blocked(save), where),
        ("size", units.size(record.tensor_bytes), units.plural(sum(kind.tensors for kind in detail.kinds), "tensor")),
        ("rate", f"{units.size(_rate(detail.saved))}/s", "all ranks together"),
        ("ranks", f"{record.world_size:,}", f"{units.size(record.tensor_bytes / max(record.world_size, 1))} each"),
        ("stragglers", f"{len(save.stragglers):,}", "ranks above 1.5 × the median" if save.stragglers else "no rank holds the others up"),
    ]
    if failed := report.series[0].failed:
        steps = ", ".join(dict.fromkeys(f"{one.step:,}" for one in reversed(failed) if one.step is not None))
        at = f"at {'steps' if ', ' in steps else 'step'} {steps}" if steps else "listed below"
        tiles.insert(0, ("failed saves", tag("a", f"{len(failed):,}", href="#failed"), short(at, 60)))
    if save.retries:
        again, throttled = (sum(pair[i] for pair in save.retries.values()) for i in (0, 1))
        worst = next(iter(save.retries))
        about = f"{units.plural(throttled, 'time')} the storage asked to slow down; most on rank {worst}: {save.retries[worst][0]:,}"
        tiles.append(("requests made again", f"{again:,}", about))
    cost = _cost([detail.saved], report.setting)
    if cost is not None:
        known = report.series[0].known
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


# ------------------------------------------------------------------------------------------------------------- over steps


def _over_runs(report: Report) -> Iterator[Markup]:
    """Lines of several runs, each with one colour; a box in the legend hides a run."""
    names = distinct(report.urls)
    keys = [tag("i", class_=f"key r{i}") for i in range(len(names))]
    boxes = [
        tag("label", tag("input", type="checkbox", checked="checked", id=f"run-{i}"), keys[i], short(name, 48), class_="item")
        for i, name in enumerate(names)
    ]
    about = "A thin line across is a save that failed. A report of one run alone shows its ranks, threads and tensors."
    yield _section("Over steps", tag("p", *boxes, class_="legend"), _panels(report.series, names, {}), about=about)
    columns = []
    for run in report.series:
        saves = [saved.summary for saved in run.known if saved.summary is not None]
        blocked = [save.blocked for save in saves if save.blocked is not None]
        newest = next(saved.record for saved in reversed(run.known) if saved.record is not None)
        figures = {
            "saves": f"{len(run.saves):,}",
            "failed saves": f"{len(run.failed):,}",
            "saves with stragglers": f"{sum(bool(save.stragglers) for save in saves):,}",
            "ranks, newest": f"{newest.world_size:,}",
            "size, newest": units.size(newest.tensor_bytes),
            "rate, median": f"{units.size(median(map(_rate, run.known)))}/s",
        }
        for name, seconds in (("durable after", [save.seconds for save in saves]), ("training blocked", blocked)):
            figures[f"{name}, median"] = f"{brief(median(seconds))} s" if seconds else "not known"
            figures[f"{name}, p95"] = f"{brief(nearest(seconds, 95))} s" if seconds else "not known"
        columns.append(figures | {f"{name}, median": f"{shown} s" for name, shown in _medians(run.known).items()})
    heads = [join([key, short(name, 24)]) for key, name in zip(keys, names, strict=True)]
    about = "Below the figures of saves each phase: the seconds of its slowest rank."
    yield _section("Side by side", _side_by_side(("figure", *heads), columns), about=about)


def _rate(saved: SavedSpans) -> float:
    """Bytes a second of all ranks together."""
    return saved.record.tensor_bytes / saved.seconds if saved.record is not None and saved.seconds > 0 else 0.0


def _panels(series: Sequence[Series], names: Sequence[str], anchors: Mapping[str, str]) -> Markup:
    """The lines of one run, or one of each of several runs."""
    by_step = all(_by_step(run.saves) for run in series)

    def points(run: Series, name: str, figure: str) -> list[Point]:
        drawn = []
        for i, saved in enumerate(run.saves):
            save, record = saved.summary, saved.record
            x = float(saved.step or 0) if by_step else i + 1.0
            if save is None or record is None:
                drawn.append(Point(x=x, y=None, label=""))
                continue
            y, shown = {
                "durable": (save.seconds, f"durable after {brief(save.seconds)} s"),
                "blocked": (save.blocked, f"blocked {_blocked(save)}"),
                "rate": (_rate(saved), f"{units.size(_rate(saved))}/s"),
                "size": (float(record.tensor_bytes), units.size(record.tensor_bytes)),
                "stragglers": (float(len(save.stragglers)), units.plural(len(save.stragglers), "straggler")),
            }[figure]
            drawn.append(Point(x=x, y=y, label=f"{name}{_name(saved)}: {shown}", target=anchors.get(saved.url)))
        return drawn

    def lines(*figures: str) -> list[Line]:
        drawn = []
        for i, (run, name) in enumerate(zip(series, names, strict=True)):
            marks = [e for e in run.failed if e.step is not None] if by_step else []
            prefix = f"{short(name, 48)}, " if name else ""
            failed = [Point(x=float(e.step or 0), y=None, label=f"{prefix}step {e.step:,}: {short(e.what, 200)}") for e in marks]
            for k, figure in enumerate(figures):
                kind = f"r{i}" if name else f"s{k}"
                drawn.append(Line(kind=kind, points=points(run, prefix, figure), name=name, failed=() if k else failed))
        return drawn

    axis = "step" if by_step else "save"
    seconds = ["durable", "blocked"] if len(series) > 1 else ["durable, blocked"]
    panels = [
        *[charts.series(title, lines(*title.split(", ")), lambda y: f"{brief(y)} s", axis) for title in seconds],
        charts.series("rate", lines("rate"), lambda y: f"{units.size(y)}/s", axis),
        charts.series("size", lines("size"), units.size, axis),
        charts.series("stragglers", lines("stragglers"), lambda y: f"{y:,.0f}", axis),
    ]
    return tag("div", *panels, class_="panels")


def _stragglers(saves: Sequence[SavedSpans], steps: Mapping[str, Detail], anchors: Mapping[str, str]) -> Iterator[Markup]:
    """The ranks that held up saves of the whole run: a rank that is slow now and then is seldom so in the newest save."""
    ranks = run_stragglers([saved.summary for saved in saves if saved.summary is not None])
    if not ranks:
        return
    rows = []
    for one in ranks[:_RANKS]:
        worst = saves[one.worst]
        row = f"-rank-{one.rank}" if worst.url in steps and one.rank in _ranks_with_rows(steps[worst.url]) else ""
        rows.append(
            tag(
                "tr",
                tag("th", f"rank {one.rank}", scope="row", data_v=str(one.rank)),
                tag("td", f"slowest in {one.saves:,} of {units.plural(len(saves), 'save')}", data_v=str(one.saves)),
                tag("td", short(one.phase, 32)),
                number(brief(one.seconds), one.seconds),
                tag("td", tag("a", _name(worst), href=f"#{anchors[worst.url]}{row}"), data_v=str(one.worst), class_="n"),
            )
        )
    left = f" {units.plural(len(ranks) - _RANKS, 'rank')} with fewer saves left out." if len(ranks) > _RANKS else ""
    heads = ("rank", "saves", "mostly in", ">seconds lost", ">worst")
    yield _section("Stragglers over the run", charts.table(heads, rows, kind="run"), about=f"The rank that held up each save most.{left}")


def _ranks_with_rows(detail: Detail) -> Sequence[int]:
    return [group[0] for group in detail.heat.groups] if detail.rows is None else detail.save.slowest[:_RANKS]


# ------------------------------------------------------------------------------------------------------------- one save


def _steps(saves: Sequence[SavedSpans], steps: Sequence[Detail], anchors: Mapping[str, str]) -> Iterator[Markup]:
    """All saves, the newest in view. A link shows another, by ``:target`` alone: no script is needed."""
    details = {step.saved.url: step for step in steps}
    middle = median(saved.seconds for saved in saves)
    if len(saves) > 1:
        links = []
        for saved in saves:
            level = level_of(saved.seconds, middle, floor_between(middle))
            about = f"{_name(saved)}: {brief(saved.seconds)} s{'' if saved.url in details else ', phases only'}"
            shown = _name(saved).removeprefix("step ")
            links.append(tag("a", shown, href=f"#{anchors[saved.url]}", class_=f"h{level}", title=about))
        yield tag("nav", tag("b", "Step"), tag("span", *links), class_="steps", aria_label="choose a step")
    for saved in saves:
        rest = _of_one(details[saved.url], anchors[saved.url]) if saved.url in details else [_section("", _LEFT_OUT)]
        inner = [_phases(saved), *rest]
        yield tag("div", *inner, class_="step newest" if saved is saves[-1] else "step", id=anchors[saved.url])


def _phases(saved: SavedSpans) -> Markup:
    save = saved.summary
    assert save is not None
    verdict = f"Durable after {brief(save.seconds)} s, training blocked {_blocked(save)}: {save.verdict}."
    about = "The bar is the slowest rank, the mark the median rank. Threads that work at once count each: phases do not add up to the save."
    return _section(f"Phases of {_name(saved)}", tag("p", _unbroken(verdict)), charts.phase_rows(save), about=about)


def _of_one(detail: Detail, anchor: str) -> Iterator[Markup]:
    heat = detail.heat
    about = "Colour compares a rank with the median rank of the phase. "
    if detail.rows is None:
        body = charts.heat_table(heat, [charts.group_name(group) for group in heat.groups], anchor=anchor)
    else:
        size = len(heat.groups[0])
        in_column = "ranks" if size == 1 else f"cells of {size} ranks, the slowest of them"
        about += f"Each column is {detail.rows} {in_column}, from the top; rank 0 is at the left."
        body = join([charts.heat_strips(heat, detail.rows), _slowest(detail, anchor), _data(detail)])
    yield _section("Ranks and phases", charts.heat_legend(), body, about=about)
    for group in detail.groups:
        left = f" The {group.left_out:,} fastest are left out." if group.left_out else ""
        table = charts.heat_table(group.heat, [short(label, 40) for label in group.labels])
        yield _section(f"By {short(group.title, 40)}", table, about=f"The median rank of each.{left}")
    times = detail.times
    clocks = "by the clocks of their machines" if times.aligned else "each from its own beginning: their clocks are too far apart"
    left = f" {units.plural(times.left_out, 'less busy thread')} left out." if times.left_out else ""
    lanes = [charts.legend(dict.fromkeys(bar.phase for lane in times.lanes for bar in lane.bars)), areas.timeline_rows(times)]
    yield _section(
        "Threads over time", *lanes, about=f"A lane is a thread. Ranks are laid side by side {clocks}.{' '.join((left, *detail.notes))}"
    )


def _stored(detail: Detail) -> Iterator[Markup]:
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
        table = charts.table(("kind", ">bytes", ">share", ">tensors"), rows)
        about = "Kinds are taken from the names of tensors. Areas are in proportion to bytes."
        yield _section(f"Stored in {_name(detail.saved)}", table, areas.tree_map(detail.layers), about=about)


def _slowest(detail: Detail, anchor: str) -> Markup:
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
        rows.append(tag("tr", tag("th", f"rank {rank}", scope="row", data_v=str(rank)), total, *cells, id=f"{anchor}-rank-{rank}"))
    return join(
        [
            tag("h3", "The slowest ranks", tag("small", "seconds")),
            charts.table(("rank", ">work", *[f">{short(n, 16)}" for n in names]), rows),
        ]
    )


def _medians(saves: Sequence[SavedSpans]) -> dict[str, str]:
    """Of each phase the median over saves of its slowest rank's seconds."""
    seconds: dict[str, list[float]] = {}
    for phase in (phase for saved in saves if saved.summary is not None for phase in saved.summary.phases):
        seconds.setdefault(short(phase.phase, 32), []).append(phase.seconds)
    return {name: brief(median(some)) for name, some in seconds.items()}


def _side_by_side(heads: Sequence[str], columns: Sequence[Mapping[str, str]]) -> Markup:
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [tag("tr", tag("th", name, scope="row"), *[tag("td", one.get(name, ""), class_="n") for one in columns]) for name in names]
    return charts.table(heads, rows, kind="figures")
