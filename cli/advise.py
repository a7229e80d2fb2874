"""``ckpt advise``: recommends how often a run should save."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import click

from ckpt.errors import NotFoundError, StorageError, UsageError
from ckpt.text import units

from .console.output import Output, options
from .console.parameters import URL

if TYPE_CHECKING:
    from ckpt.maintenance.step_listing import Step
    from ckpt.observe.intervals import Advice, MeasuredSave

EVENTS = "events.jsonl"
_LIMIT = 256 << 20


@click.command("advise", short_help="Recommend how often a run should save.")
@click.argument("root", type=URL)
@click.option("--mtbf", required=True, metavar="TIME", help="Mean time between failures of the job, e.g. 6h, 1d12h, 90min.")
@click.option("--ranks", type=click.IntRange(1), metavar="N", help="Scale the failure rate to N ranks.")
@click.option("--load", metavar="TIME", help="Duration of a load, if the events have none.")
@click.option("--events", metavar="FILE", help=f"Events written by JsonLines. [default: {EVENTS} in ROOT]")
@click.option("--last", type=click.IntRange(1), default=20, show_default=True, metavar="N", help="Number of saves to use.")
@options
def command(
    root: str, *, mtbf: str, ranks: int | None, load: str | None, events: str | None, last: int, as_json: bool, quiet: bool
) -> None:
    """Recommend how often the run at ROOT should save, by Daly's formula.

    The cost of a save is measured: from events that ckpt.monitors.JsonLines recorded, or else from the spans of the last checkpoints.
    Spans do not include the time that training waited for an earlier save. -q prints the interval in seconds.

    \b
    Example:
      ckpt advise runs/a --mtbf 6h
      ckpt advise runs/a --mtbf 6h --ranks 1024
    """
    from ckpt.formats.native.commit import moment_of
    from ckpt.maintenance.step_listing import list_steps, none_here
    from ckpt.observe.intervals import advise, step_seconds

    output = Output(json=as_json, quiet=quiet)
    between, given = _seconds(mtbf, "--mtbf"), _seconds(load, "--load") if load is not None else None
    steps = [s for s in list_steps(root) if s.committed and s.number is not None]
    if not steps:
        raise none_here(root)
    measured, loads = _of_events(root, events)
    saves = measured[-last:] or _of_spans(steps[-last:])
    if not saves:
        hint = f"save with CKPT_SPANS=on, or with on_event=ckpt.monitors.JsonLines({root!r} + '/{EVENTS}')"
        raise NotFoundError("the durations of this run's saves are not recorded", where=root, hint=hint)
    ranks_of_run = steps[-1].world_size or 1
    took = given if given is not None else median(loads) if loads else None
    moments = [(s.number, moment_of(s.created)) for s in steps[-last:] if s.number is not None and s.created]
    per_step = step_seconds([(number, at) for number, at in moments if at is not None])
    advice = advise(saves, took, between * (ranks_of_run / ranks if ranks is not None else 1), step=per_step)
    every = max(1, round(advice.interval / per_step)) if per_step else None
    fields: dict[str, Any] = {
        "root": root,
        "saves": len(saves),
        "source": "events" if measured else "spans",
        "ranks": ranks if ranks is not None else ranks_of_run,
        "mtbf": advice.mtbf,
        "save_seconds": advice.save,
        "blocked_seconds": advice.blocked,
        "load_seconds": advice.load,
        "load_measured": took is not None,
        "step_seconds": per_step,
        "young_seconds": advice.young,
        "daly_seconds": advice.daly,
        "interval_seconds": advice.interval,
        "interval_steps": every,
        "wasted_seconds": advice.wasted,
        "ettr": advice.ettr,
        "lost": advice.lost,
    }
    if output.json:
        output.document(fields)
    elif quiet:
        output.line(f"{advice.interval:.0f}")
    else:
        _print(advice, fields, output)


def _of_events(root: str, file: str | None) -> tuple[list[MeasuredSave], list[float]]:
    from ckpt.io_backends.registry import join_url, open_backend
    from ckpt.observe.intervals import of_events

    if file is not None:
        try:
            with open(file, encoding="utf-8") as lines:
                return of_events(lines.read(), file)
        except OSError as err:
            raise StorageError(f"the events cannot be read: {err.strerror or err}", where=file, hint="name an existing file") from err
    try:
        data = open_backend(root).read_whole(EVENTS, _LIMIT)
    except NotFoundError:
        return [], []
    return of_events(data.decode(errors="replace"), join_url(root, EVENTS))


def _of_spans(steps: list[Step]) -> list[MeasuredSave]:
    from ckpt.formats.native.commit import CommitRecord
    from ckpt.formats.native.spans import read_spans
    from ckpt.formats.native.writer import read_record
    from ckpt.io_backends.registry import open_backend
    from ckpt.observe.intervals import of_spans

    saves = []
    for step in steps:
        backend = open_backend(step.url)
        data = read_record(backend)
        if data is None:  # removed meanwhile
            continue
        try:
            saves.append(of_spans(read_spans(backend, CommitRecord.from_bytes(data, step.url))))
        except NotFoundError:
            continue
    return saves


def _seconds(text: str, option: str) -> float:
    seconds = units.seconds(text)
    if not seconds:
        raise UsageError(f"{option} expects a time such as 6h, 1d12h, 90min or 30s, not {text!r}", hint=f"{option} 6h")
    return seconds


def _print(advice: Advice, fields: dict[str, Any], output: Output) -> None:
    steps = f", every {units.plural(fields['interval_steps'], 'step')}" if fields["interval_steps"] else ""
    output.line(f"save every {_time(advice.interval)}{steps}")
    if advice.interval > advice.daly:
        limit = "as often as saves end" if advice.interval == advice.save else "every step"
        output.line(f"that is {limit}; by their cost alone it would be {_time(advice.daly)}")
    per = f"a step takes {_time(fields['step_seconds'])}" if fields["step_seconds"] else "how long a step takes is not known"
    guessed = "" if fields["load_measured"] else " (not measured: taken to be as long as a save)"
    waits = "" if fields["source"] == "events" else " (without waits for the save before: only events tell those)"
    output.line(f"measured: a save takes {_time(advice.save)} and blocks training for {_time(advice.blocked)}{waits}; {per}")
    output.line(f"a load takes {_time(advice.load)}{guessed}")
    output.line(f"a failure every {_time(advice.mtbf)} on {units.plural(fields['ranks'], 'rank')}, which loses {_time(advice.wasted)} each")
    ettr = f"ETTR {advice.ettr:.3f} if every interval had a failure (ByteCheckpoint, appendix C)"
    output.line(f"saves and failures take {100 * advice.lost:.2g} % of the time; {ettr}")


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 9.5 else units.duration(seconds)
