"""``ckpt advise``: recommends how often a run should save."""

from __future__ import annotations

from statistics import median

import click

from ckpt import units
from ckpt.cli.console.output import URL, Output, options
from ckpt.errors import NotFoundError, UsageError

_RECENT = 20
"""Saves whose median counts as the cost of one."""


@click.command("advise", short_help="Recommend how often a run should save.")
@click.argument("root", type=URL)
@click.option("--mtbf", required=True, metavar="TIME", help="Mean time between failures of the job, e.g. 6h, 1d12h, 90min.")
@options
def command(root: str, *, mtbf: str, as_json: bool, quiet: bool) -> None:
    """Recommend how often the run at ROOT should save, by Daly's formula: the interval that loses least time to saves and failures.

    The cost of a save is the median of the last 20: for how long they blocked training, by the spans that checkpoints keep. -q prints the
    interval in seconds.

    \b
    Example:
      ckpt advise runs/a --mtbf 6h
    """
    from ckpt.policies.save import daly
    from ckpt.runs.report.history import read_history
    from ckpt.runs.step_listing import none_here

    output, between = Output(json=as_json, quiet=quiet), units.seconds(mtbf)
    if not between:
        raise UsageError(f"--mtbf expects a time such as 6h, 1d12h, 90min or 30s, not {mtbf!r}", hint="--mtbf 6h")
    history = read_history(root)
    if not history.saves:
        raise none_here(root)
    saves = [saved.summary for saved in history.saves if saved.summary is not None][-_RECENT:]
    if not saves:
        raise NotFoundError("the durations of this run's saves are not recorded", where=root, hint="save with CKPT_SPANS=on")
    took = median(save.seconds for save in saves)
    blocked = median(save.seconds if save.blocked is None else save.blocked for save in saves)
    best = daly(blocked, between)
    interval = max(best, took)
    if output.json:
        fields = {"root": root, "saves": len(saves), "mtbf": between, "save_seconds": took, "blocked_seconds": blocked}
        output.document({**fields, "daly_seconds": best, "interval_seconds": interval})
    elif quiet:
        output.line(f"{interval:.0f}")
    else:
        output.line(f"save every {_time(interval)}{'' if best == interval else f', as often as saves end; by their cost {_time(best)}'}")
        output.line(f"measured: a save takes {_time(took)} and blocks training for {_time(blocked)}")


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 9.5 else units.duration(seconds)
