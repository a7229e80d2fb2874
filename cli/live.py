"""``ckpt watch`` and ``ckpt live``: a save in progress, and a live state that is served."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ckpt import units
from ckpt.errors import NotFoundError, UsageError
from ckpt.text import printable

from .options import CommandGroup, time_option
from .output import URL, Output, options

if TYPE_CHECKING:
    from ckpt.runs.report.history import SaveWatcher, WatchSnapshot
    from ckpt.telemetry.progress import SaveProgress, SlowRank


HANGS, NOT_COMMITTED = 31, 11
_LINES = 10.0
"""Seconds between two lines of a log that nothing new is in."""
_NAMED = 3
_REASON = 3.0
"""Seconds for which the reason of a failure is waited for."""
_LEAST = 0.05


@click.command("watch", short_help="Follow a save in progress.")
@click.argument("url", type=URL)
@click.option("--once", is_flag=True, help="Report the current state and exit.")
@click.option("--interval", type=float, metavar="SECONDS", help="Polling interval. [default: 1, on object stores 5]")
@time_option("--timeout", default="10min", help="Exit if no save starts, or one makes no progress, for TIME.")
@options
def watch(url: str, *, once: bool, interval: float | None, timeout: float, output: Output) -> None:
    """Show the progress of the save at URL, a run or a checkpoint: phase, bytes, and the ranks that it waits for. Exits with its result.

    Without a save in progress, wait for the next. A save becomes visible after one second, on object stores after five. With --json, each
    poll prints one line. Exit code: 0 if the save is committed (with --once: or in progress), 10 if none starts or nothing is at URL, 11 if
    it failed, 31 if it hangs.

    \b
    Example:
      ckpt watch runs/a
      ckpt watch --once --json runs/a/step-00001000
    """
    from ckpt.runs.report.history import SaveWatcher

    if interval is not None and not _LEAST <= interval < 1e6:
        raise UsageError(f"the interval must be at least {_LEAST:g} seconds, not {interval:g}", where="--interval")
    watcher = SaveWatcher(url)
    screen = _Screen(output)
    if once:
        seen = watcher.look()
        seen = (watcher.newest() or seen) if seen.state == "idle" else seen
        screen.show(seen, last=True)
    else:
        seen = _follow(watcher, screen, interval or (5.0 if watcher.backend.io_hints.coalesce_gap else 1.0), timeout)
    if seen.state == "idle":
        raise NotFoundError(
            "no save is in progress here", where=url, hint="saves shorter than a second are not visible; CKPT_PROGRESS=off hides all"
        )
    code = HANGS if seen.state == "hangs" else 0 if seen.state in ("committed", "saving") else NOT_COMMITTED
    if once and seen.state == "committing":
        code = 0
    if code:
        click.get_current_context().exit(code)


def _follow(watcher: SaveWatcher, screen: _Screen, interval: float, patience: float) -> WatchSnapshot:
    moved, last = time.monotonic(), None
    while True:
        seen = watcher.look()
        at = (seen.state, seen.id, seen.progress and (seen.progress.phase, seen.progress.phases, seen.progress.awaited))
        if at != last:
            moved, last = time.monotonic(), at
        still = time.monotonic() - moved
        over = seen.state == "committed" or (seen.state == "failed" and (seen.reason is not None or still >= _REASON)) or still >= patience
        if seen.state == "failed" and not over:
            time.sleep(min(interval, 0.2))
            continue
        screen.show(seen, last=over)
        if over:
            return seen
        time.sleep(interval)


class _Screen:
    """Where looks are shown: one line that changes on a terminal, a line now and then in a log, documents as JSON."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._live = sys.stdout.isatty() and not output.json
        self._shown = 0.0
        self._state: object = None
        self._bytes: tuple[float, int] | None = None

    def show(self, seen: WatchSnapshot, *, last: bool) -> None:
        if self._output.json:
            if seen.state != "idle":
                self._output.document(_document(seen))
            return
        if self._output.quiet:
            if last and seen.state == "committed":
                self._output.line(seen.url)
            return
        text, now = self._text(seen), time.monotonic()
        if self._live and not last:
            width = shutil.get_terminal_size().columns - 1
            click.echo(f"\r\x1b[2K{printable(text, one_line=True)[:width]}", nl=False)
        elif last or seen.state != self._state or (seen.state != "idle" and now - self._shown >= _LINES):
            click.echo("\r\x1b[2K" if self._live else "", nl=False)
            if seen.state != "idle" or not last:
                self._output.line(text)
            self._shown, self._state = now, seen.state

    def _text(self, seen: WatchSnapshot) -> str:
        name = seen.url.rstrip("/").rpartition("/")[2]
        if seen.state == "idle":
            return f"{name}: no save in progress{f', {seen.reason}' if seen.reason else ''}; waiting for the next"
        if seen.state == "committed":
            size = "" if seen.tensor_bytes is None else f", {units.size(seen.tensor_bytes)}"
            took = "" if seen.seconds is None else f" after {seen.seconds:.1f} s"
            rate = f" ({units.size(seen.tensor_bytes / seen.seconds)}/s)" if seen.tensor_bytes and seen.seconds else ""
            return f"{name}: committed{took}{size}{rate}"
        if seen.state == "failed":
            return f"{name}: failed{'' if seen.reason is None else f': {seen.reason}'}"
        if seen.state == "committing":
            return f"{name}: all ranks have done their part; the leader commits"
        assert seen.progress is not None
        return f"{name}: {_hangs(seen.silent)}{self._progress(seen.progress, seen.age)}"

    def _progress(self, progress: SaveProgress, age: float) -> str:
        done, total = progress.done, progress.total
        took = max(progress.at - progress.began, 1e-9)
        share = f" {units.size(done)} of {units.size(total)} ({100 * done // total} %), {units.size(done / took)}/s" if total else ""
        count = f"{progress.ranks - progress.awaited:,} of {units.plural(progress.ranks, 'rank')} ready after {took + age:.0f} s"
        if not progress.awaited:
            return f"{progress.phase}{share}; {count}"
        named = ", ".join(_rank(one) for one in progress.slowest[:_NAMED])
        more = f" and {progress.awaited - _NAMED:,} more" if progress.awaited > _NAMED else ""
        return f"{progress.phase}{share}; {count}; waits for {named}{more}"


def _hangs(silent: tuple[SlowRank, ...]) -> str:
    if not silent:
        return ""
    named = ", ".join(f"rank {one.rank}{f' (host {one.host})' if one.host else ''} for {one.quiet:.0f} s" for one in silent[:_NAMED])
    more = f" and {len(silent) - _NAMED} more" if len(silent) > _NAMED else ""
    return f"hangs: no sign of life from {named}{more}; "


def _rank(one: SlowRank) -> str:
    if one.phase == "begin":
        return f"rank {one.rank}, which has not begun"
    share = f" {100 * one.done // one.total} %" if one.total else ""
    return f"rank {one.rank} ({f'host {one.host}, ' if one.host else ''}{one.phase}{share})"


def _document(seen: WatchSnapshot) -> dict[str, Any]:
    progress = seen.progress.to_json() if seen.progress is not None else None
    if progress is not None:
        del progress["version"]
    return {
        "url": seen.url,
        "state": seen.state,
        "id": seen.id,
        "age": round(seen.age, 3),
        "silent": [{"rank": one.rank, "host": one.host or None, "seconds": round(one.quiet, 3)} for one in seen.silent],
        "progress": progress,
        "seconds": seen.seconds,
        "tensor_bytes": seen.tensor_bytes,
        "reason": seen.reason,
    }


@click.group("live", cls=CommandGroup, short_help="Show the versions of a live state, and its sinks.")
def live() -> None:
    """Show the versions of a live state, and its sinks.

    \b
    Example:
      ckpt live status tcp://trainer0:7010/actor
    """


@live.command("status", short_help="Show the versions of a source, and the version of each sink.")
@click.argument("address", metavar="ADDRESS")
@time_option("--timeout", default="10s", help="Give up if nothing answers for TIME.")
@options
def status(address: str, *, timeout: float, output: Output) -> None:
    """Show the versions that the source at ADDRESS keeps, and for each sink its version, where it came from, and whether it is late.

    Set CKPT_LIVE_SECRET to the source's secret. It is not needed in the source's account on the machine of its leader. -q prints the step
    of the newest version.

    \b
    Example:
      ckpt live status tcp://trainer0:7010/actor
      ckpt live --json status tcp://trainer0:7010/actor
    """
    from ckpt import units
    from ckpt.live.control import SinkSecret, ask_status
    from ckpt.plan.tables import ranks_text

    if not timeout:
        raise UsageError("nothing answers within no time", where="--timeout", hint="10s, 2min")
    answer = ask_status(address, SinkSecret(None, address)(), timeout)
    if output.json:
        output.document(asdict(answer))
        return
    if output.quiet:
        for version in answer.versions[-1:]:
            output.line(str(version.step))
        return
    versions, sinks = len(answer.versions), len(answer.sinks)
    output.line(f"run {answer.run}, {versions} version{'s' * (versions != 1)}, {sinks} sink{'s' * (sinks != 1)}")
    if answer.lost_ranks:
        output.line(f"{ranks_text(answer.lost_ranks)} of the source died: it publishes nothing any more")
    output.table(
        (">STEP", ">SIZE", ">RANKS", ">AGE", ">TAKEN BY"),
        [(str(v.step), units.size(v.bytes), str(v.ranks), units.duration(v.age), str(len(v.taken_by))) for v in reversed(answer.versions)],
    )
    if not answer.sinks:
        return
    output.line()
    newest = {v.digest: v.step for v in answer.versions}
    rows = []
    for sink in answer.sinks:
        doing = f"taking for {units.duration(sink.seconds)}" if sink.state == "taking" and sink.seconds is not None else sink.state
        if sink.lost_ranks:
            doing += f" ({ranks_text(sink.lost_ranks)})"
        last = sink.took[-1] if sink.took else None
        rows.append(
            (
                sink.sink,
                str(sink.ranks),
                "-" if sink.step is None else str(sink.step),
                f"{doing}, late" if sink.late else doing,
                "" if last is None else f"{newest[last[0]]}: {units.size(last[1])} in {units.duration(last[2])}",
                ", ".join(f"{who} {units.size(count)}" for who, count in sink.took_from.items()),
                ", ".join(f"{why} {units.size(count)}" for why, count in sink.dense.items()),
                (sink.error or "").partition("\n")[0],  # --json has all of it
            )
        )
    output.table(("SINK", ">RANKS", ">STEP", "STATE", "LAST TAKE", "FROM", "WHOLE", "~ERROR"), rows)
