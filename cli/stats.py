"""``ckpt stats`` and ``ckpt report``: where the time of saves went, as tables and as one HTML file."""

from __future__ import annotations

import errno
import math
import os
import secrets
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from ckpt import units
from ckpt.errors import NotCommittedError, StorageError, UsageError

from .options import parse_mesh
from .output import URL, Output, options, style

if TYPE_CHECKING:
    from ckpt.formats.native.commit import CommitRecord
    from ckpt.formats.native.runlog import LogEntry
    from ckpt.runs.report.history import History, SavedSpans
    from ckpt.runs.report.summary import PhaseSummary, SaveSummary
    from ckpt.telemetry.spans import SpanTable


_SHOWN = 8
_MENTIONED = 0.01
"""Least share of a save without any span that is worth a row."""


@click.command("stats", short_help="Show where the time of a save went.")
@click.argument("url", type=URL)
@click.option("--ranks", "by_rank", is_flag=True, help="Show each rank, the slowest first.")
@click.option("--heatmap", is_flag=True, help="Show all ranks at once, one line per phase; dark is slow.")
@click.option("--trace", metavar="FILE", help="Write a trace for ui.perfetto.dev or chrome://tracing.")
@options
def stats(url: str, *, by_rank: bool, heatmap: bool, trace: str | None, output: Output) -> None:
    """Show how long each phase of the save at URL took, the slowest first. If URL is a run, show one line per save.

    SECONDS is how long the threads of the slowest RANK were busy and MEDIAN that of the median rank. WALL is the time from the first start
    to the last end. WORK of --ranks leaves out waiting and what the leader does alone.

    Of a run, SECONDS is the time from the first phase to the last, and BLOCKED how long training waited: for the whole call, which begins
    before the first phase, and later for the copy of the state. So BLOCKED can be more. With ≥ only the call is known. SLOWEST is the rank
    that holds the others up and its phase, or else the longest phase.

    \b
    Example:
      ckpt stats runs/a/step-00001000
      ckpt stats --ranks runs/a/step-00001000 | head
      ckpt stats --heatmap runs/a/step-00001000
      ckpt stats --trace save.json runs/a/step-00001000
      ckpt stats runs/a
    """
    from ckpt.runs.report.history import is_checkpoint, read_history, read_save

    if by_rank and heatmap:
        raise UsageError("--ranks and --heatmap show the same in two ways", hint="give one of them")
    if not is_checkpoint(url):
        history = read_history(url)
        if history.saves or history.log:
            if by_rank or heatmap or trace is not None:
                newest = history.saves[-1].url if history.saves else "none is committed"
                raise UsageError(
                    "--ranks, --heatmap and --trace apply to one save, and this is a run", where=url, hint=f"name one: {newest}"
                )
            _show_run(history, output)
            return
    saved = read_save(url)
    record, tables, save = saved.record, saved.tables, saved.summary
    if saved.error is not None:
        raise saved.error
    assert record is not None and save is not None  # else there is an error
    if trace is not None:
        from ckpt.telemetry.spans import trace_lines

        _write("trace", trace, (line.encode() for line in trace_lines(tables)))
    if output.json:
        output.document(_document(url, record, save, tables, by_rank=by_rank))
    elif output.quiet:
        for name in save.slowest if by_rank else [phase.phase for phase in save.phases]:
            output.line(str(name))
    else:
        if heatmap:
            from ckpt.runs.report.summary import terminal_lines

            for line in terminal_lines(save, tables, encoding=getattr(sys.stdout, "encoding", None) or "ascii"):
                output.line(line)
        elif by_rank:
            _print_ranks(save, tables, output)
        else:
            _print_phases(save, output)
        _print_totals(record, save, output)
    if trace is not None:
        spans = sum(len(table.spans) for table in tables.values())
        output.talk(f"{trace}: {units.plural(spans, 'span')} of {units.plural(len(tables), 'rank')}; open it in ui.perfetto.dev")


# ---------------------------------------------------------------------------------------------------------------- people


def _print_phases(save: SaveSummary, output: Output) -> None:
    heads = ("PHASE", ">RANK", ">SECONDS", ">MEDIAN", ">WALL", ">BYTES", ">RATE", "NOTE")
    rows = [_row(phase) for phase in save.phases]
    gap = save.unaccounted
    if gap is not None and gap.share >= _MENTIONED:
        note = f"{100 * gap.share:.0f} % of the save"
        rows.append(("unaccounted", str(gap.rank), _seconds(gap.seconds), _seconds(gap.median), "", "", "", note))
    output.table(heads, rows)


def _row(phase: PhaseSummary) -> tuple[str, ...]:
    from ckpt.telemetry.spans import LEADING, WAITING

    times = (_seconds(phase.seconds), _seconds(phase.median), _seconds(phase.wall))
    waits = "waits for training" if phase.phase == "settle" else "waits for ranks"
    note = waits if phase.phase in WAITING else "the leader alone" if phase.phase in LEADING else ""
    return (phase.phase, str(phase.rank), *times, units.size(phase.bytes) if phase.bytes else "", _rate(phase.rate), note)


def _print_ranks(save: SaveSummary, tables: Mapping[int, SpanTable], output: Output) -> None:
    from ckpt.runs.report.summary import ratio

    names, stragglers = [phase.phase for phase in save.phases], set(save.stragglers)
    rows = []
    for rank in save.slowest:
        table = tables[rank]
        phases = [_seconds(table.sums[name].seconds) if name in table.sums else "" for name in names]
        note = style(ratio(table.seconds, save.median), "red") if rank in stragglers else ""
        again = f"{table.retries:,}" if table.retries else ""
        rows.append((str(rank), table.host or "", _seconds(table.seconds), *phases, again, note))
    output.table((">RANK", "HOST", ">WORK", *(f">{name}" for name in names), ">RETRIES", "NOTE"), rows)


def _print_totals(record: CommitRecord, save: SaveSummary, output: Output) -> None:
    size, rate = units.size(record.tensor_bytes), _rate(record.tensor_bytes / save.seconds if save.seconds > 0 else None)
    output.line(f"{units.plural(record.world_size, 'rank')}, {size} in {_seconds(save.seconds)} s{f' ({rate})' if rate else ''}")
    output.line(f"stragglers: {_some(save.stragglers)}" if save.stragglers else "no stragglers")
    output.line(f"verdict: {save.verdict}")
    if save.retries:
        again, throttled = (sum(pair[i] for pair in save.retries.values()) for i in (0, 1))
        slow = f", {throttled:,} since the storage asked to slow down" if throttled else ""
        output.line(f"{units.plural(again, 'request')} to the storage made again{slow}: {_some(tuple(save.retries))}")
    if save.missing:
        output.line(f"no spans were kept of {units.plural(len(save.missing), 'rank')}: {_some(save.missing)}")
    if save.folded:
        output.line(f"{units.plural(save.folded, 'span')} are kept as sums only")


def _some(ranks: tuple[int, ...]) -> str:
    more = f" and {len(ranks) - _SHOWN:,} more" if len(ranks) > _SHOWN else ""
    return ", ".join(f"rank {rank}" for rank in ranks[:_SHOWN]) + more


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3f}"


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{units.size(rate)}/s"


# -------------------------------------------------------------------------------------------------------------- machines


def _document(url: str, record: CommitRecord, save: SaveSummary, tables: Mapping[int, SpanTable], *, by_rank: bool) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(save).items() if name not in ("work", "slowest", "measured", "lost")}
    fields |= {"url": url, "id": record.id, "created": record.created, "world_size": record.world_size, "tensor_bytes": record.tensor_bytes}
    fields |= {
        "phases": [{**asdict(phase), "rate": phase.rate} for phase in save.phases],
        "blocked_measured": save.measured,
        "retries": sum(again for again, _ in save.retries.values()),
        "throttled": sum(throttled for _, throttled in save.retries.values()),
    }
    return {**fields, "ranks": [_rank(rank, tables[rank]) for rank in save.slowest]} if by_rank else fields


def _rank(rank: int, table: SpanTable) -> dict[str, Any]:
    phases = [{"phase": s.phase, "seconds": s.seconds, "wall": s.wall, "spans": s.count, "bytes": s.nbytes} for s in table.sums.values()]
    return {
        "rank": rank,
        "began": datetime.fromtimestamp(table.began, timezone.utc).isoformat(timespec="microseconds"),
        "seconds": table.seconds,
        "wall": table.wall,
        "folded": table.folded_count,
        "host": table.host,
        "coordinates": dict(table.coordinates),
        "blocked": None if table.blocked is None else (table.blocked + (table.waited or 0)) / 1e6,
        "retries": table.retries,
        "throttled": table.throttled,
        "phases": phases,
    }


# ----------------------------------------------------------------------------------------------------------------- a run


def _show_run(history: History, output: Output) -> None:
    if output.json:
        document: dict[str, Any] = {"root": history.url, "saves": [_of_run(saved) for saved in history.saves], "left_out": history.left_out}
        document |= {"failed": [], "loads": [], "log_problem": history.log_problem}
        for entry in history.log:
            document["failed" if entry.kind == "save" else "loads"].append(_of_log(entry))
        output.document(document)
    elif output.quiet:
        for saved in history.saves:
            if saved.summary is not None:
                output.line(saved.url)
    else:
        members = any(saved.member for saved in history.saves)
        job = ("MEMBER",) if members else ()
        heads = (">STEP", *job, "CREATED", ">SECONDS", ">BLOCKED", ">BYTES", ">RANKS", "SLOWEST", "NOTE")
        output.table(heads, [_run_row(saved, members=members) for saved in history.saves])
        if history.left_out:
            output.line(f"{units.plural(history.left_out, 'step')} of {history.candidates:,} were left out, evenly")
        _print_log(history, output)


def _print_log(history: History, output: Output) -> None:
    from ckpt.formats.native.runlog import entry_line

    failed = [entry for entry in history.log if entry.error is not None]
    for entry in failed[-_SHOWN:]:
        output.line(f"{_moment(entry.at)}  {entry_line(entry)}")
    if len(failed) > _SHOWN:
        output.line(f"{units.plural(len(failed) - _SHOWN, 'older failure')}: --json, or ckpt report")
    loads = [entry for entry in history.log if entry.kind == "load" and entry.error is None and entry.seconds is not None]
    if loads:
        last = loads[-1]
        output.line(f"{_moment(last.at)}  {entry_line(last)} in {_seconds(last.seconds or 0.0)} s by {units.plural(last.ranks, 'rank')}")
    if history.log_problem is not None:
        output.talk(f"{history.url}: {history.log_problem}")


def _moment(at: float) -> str:
    return datetime.fromtimestamp(min(at, 2.5e11), timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def _of_log(entry: LogEntry) -> dict[str, Any]:
    phases: dict[str, float] = {}
    for one in (one for table in entry.tables.values() for one in table.sums.values()):
        phases[one.phase] = max(phases.get(one.phase, 0.0), one.seconds)
    fields = {name: value for name, value in entry.to_json().items() if name not in ("kind", "spans")}
    return {**fields, "at": _moment(entry.at)} | ({"phases": phases} if entry.kind == "load" else {})


def _of_run(saved: SavedSpans) -> dict[str, Any]:
    record, save = saved.record, saved.summary
    return {
        "url": saved.url,
        "step": saved.step,
        "member": saved.member,
        "created": record.created if record else None,
        "world_size": record.world_size if record else None,
        "tensor_bytes": record.tensor_bytes if record else None,
        "seconds": save.seconds if save else None,
        "blocked": save.blocked if save else None,
        "background": save.background if save else None,
        "blocked_measured": save.measured if save else None,
        "retries": sum(again for again, _ in save.retries.values()) if save else None,
        "stragglers": list(save.stragglers) if save else [],
        "verdict": save.verdict if save else None,
        "problem": saved.problem,
    }


def _run_row(saved: SavedSpans, *, members: bool) -> tuple[str, ...]:
    """What is slowest: the rank that holds the others up and its phase, or else the longest phase."""
    from ckpt.runs.step_listing import UNFINISHED

    record, save = saved.record, saved.summary
    step = ("" if saved.step is None else str(saved.step), *([saved.member or ""] if members else []))
    if record is None:
        return (*step, "", "", "", "", "", "", UNFINISHED if isinstance(saved.error, NotCommittedError) else saved.problem or "")
    known = (record.created[:16].replace("T", " "), units.size(record.tensor_bytes), str(record.world_size))
    if save is None:
        return (*step, known[0], "", "", *known[1:], "", saved.problem or "")
    blocked = "" if save.blocked is None else f"{'≥ ' if save.background and not save.measured else ''}{_seconds(save.blocked)}"
    slowest = max(save.phases, key=lambda phase: (phase.wall, phase.phase)).phase if save.phases else ""
    if save.lost is not None:
        more = f" and {len(save.stragglers) - 1:,} more" if len(save.stragglers) > 1 else ""
        slowest = f"rank {save.lost.rank}{more}: {save.lost.phase}"
    return (*step, known[0], _seconds(save.seconds), blocked, *known[1:], slowest, "")


@click.command("report", short_help="Draw saves as one HTML file.")
@click.argument("urls", metavar="URL...", nargs=-1, required=True, type=URL)
@click.option("-o", "--out", metavar="FILE", default="report.html", show_default=True, help="File to write; - is stdout.")
@click.option("--price", metavar="NUMBER", help="Price of one rank for an hour, e.g. 2.50 or €2.50.")
@click.option("--ranks-per-host", type=click.IntRange(1), metavar="N", help="Consecutive ranks that share a host.")
@click.option(
    "--mesh", callback=parse_mesh, metavar="NAME=SIZE,...", help="Parallel dimensions, the fastest-varying last, e.g. pp=4,dp=8,tp=8."
)
@options
def report(
    urls: tuple[str, ...], *, out: str, price: str | None, ranks_per_host: int | None, mesh: dict[str, int] | None, output: Output
) -> None:
    """Draw where the time of saves went. URL is a run, or several runs or checkpoints to compare.

    The report is one HTML file that needs no network and no scripts: figures, advice, a heat map of ranks and phases, threads over time,
    and the stored tensors. The page shows the newest save first; links show the others. Charts of several runs lie over each other.

    \b
    Example:
      ckpt report runs/a
      ckpt report runs/a runs/b
      ckpt report runs/a/step-1000 -o step.html --price 2.50
      ckpt report runs/a/step-1000 runs/b/step-1000 -o both.html
    """
    from ckpt.plan.layout.mesh import Mesh
    from ckpt.runs.report.content import Setting, build_report
    from ckpt.runs.report.html import render

    if out == "-" and output.json:
        raise UsageError("the report and the JSON document cannot both go to stdout", hint="name a file with -o")
    currency, number = _price(price)
    setting = Setting(price=number, currency=currency, ranks_per_host=ranks_per_host, mesh=None if mesh is None else Mesh.of(mesh))
    report = build_report(urls, setting)
    page = render(report).encode()
    if out == "-":
        sys.stdout.buffer.write(page)
        return
    _write("report", out, [page])
    saves = sum(len(series.known) for series in report.series)
    if output.json:
        notes = list(report.notes)
        output.document(
            {"path": out, "bytes": len(page), "saves": saves, "detail": report.detail and report.detail.saved.url, "notes": notes}
        )
        return
    for note in report.notes:
        output.talk(note)
    output.talk(f"{out}: {units.plural(saves, 'save')}, {units.size(len(page))}; open it in a browser")


def _price(text: str | None) -> tuple[str, float | None]:
    """Currency and number of ``€2.50``."""
    if text is None:
        return "", None
    number = text.lstrip("$€£¥ ")
    with suppress(ValueError):
        price = float(number)
        if math.isfinite(price) and 0 <= price < 1e9:
            return text[: len(text) - len(number)], price
    raise UsageError(f"{text!r} is not a price such as 2.50 or €2.50", where="--price")


_WRITE_HINTS = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "name a file in an existing directory"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "name a file in a directory in which you may write"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space there, or name a file elsewhere"),
    errno.EISDIR: "this is a directory: name a file in it",
}


def _write(what: str, path: str, parts: Iterable[bytes]) -> None:
    """Write the whole file or nothing."""
    # An earlier file stays if the disk is full.
    part = f"{path}.{secrets.token_hex(4)}.part"
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # /dev/stdout, a pipe
            with open(path, "wb") as file:
                file.writelines(parts)
            return
        with open(part, "wb") as file:
            file.writelines(parts)
        os.replace(part, path)
    except OSError as err:
        with suppress(OSError):
            os.unlink(part)
        if isinstance(err, BrokenPipeError):
            raise
        hint = _WRITE_HINTS.get(err.errno or 0, "name a file that can be written")
        raise StorageError(f"the {what} cannot be written: {err.strerror or err}", where=path, hint=hint) from err
