"""``ckpt prove``: runs a training script uninterrupted and resumed, and compares what it does."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ckpt import units
from ckpt.cli.console.interrupts import when_interrupted
from ckpt.cli.console.output import URL, Output, options, require_torch, style
from ckpt.errors import UsageError

if TYPE_CHECKING:
    from ckpt.testing import ResumeReport

INEXACT = 3


@click.command("prove", short_help="Prove that a training script resumes exactly.")
@click.argument("script", type=URL)
@click.argument("arguments", nargs=-1, metavar="[-- ARGS...]", type=click.UNPROCESSED)
@click.option("--at", type=click.IntRange(min=1), required=True, metavar="STEP", help="The step that is saved, and resumed from.")
@click.option("--after", type=click.IntRange(min=1), default=10, show_default=True, metavar="N", help="Steps that are compared after it.")
@click.option("--ranks", default="1", show_default=True, metavar="N,N", help="The first saves; it and the others resume.")
@click.option("--tolerance", type=float, default=1e-4, show_default=True, metavar="REL", help="Of numbers on another number of ranks.")
@click.option("--timeout", type=click.FloatRange(min=1), default=600.0, show_default=True, metavar="SECONDS", help="For each run.")
@click.option("--folder", metavar="DIR", help="Keep checkpoints, notes and output of the runs here. [default: a temporary folder]")
@options
def command(
    script: str,
    arguments: tuple[str, ...],
    *,
    at: int,
    after: int,
    ranks: str,
    tolerance: float,
    timeout: float,
    folder: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run SCRIPT under torchrun on this machine: uninterrupted, interrupted after a step, and resumed. Compare batches, learning rates,
    random generators, parameters, optimizer states and metrics.

    SCRIPT needs no change if it saves and restores by a ckpt.Checkpointer; its checkpoints are in a folder of the proof meanwhile. On as
    many ranks as saved, the comparison is bit for bit; on others, of batches, and of numbers to rounding. The exit code is 0 if the resume
    is exact, and 3 if not; then the first difference is shown, and what usually causes it.

    \b
    Example:
      ckpt prove train.py --at 20
      ckpt prove train.py --at 20 --ranks 2,3 -- --config small.toml
    """
    require_torch("`ckpt prove`")
    from ckpt.testing import prove

    output = Output(json=as_json, quiet=quiet)
    with when_interrupted("nothing of your run was changed; the same command starts from the beginning"):
        report = prove(
            [script, *arguments],
            at=at,
            worlds=_sizes(ranks),
            after=after,
            tolerance=tolerance,
            timeout=timeout,
            folder=folder,
            progress=output.talk,
        )
    if output.json:
        output.document({"exact": report.exact, **asdict(report)})
    else:
        _print(report, output)
    if not report.exact:
        click.get_current_context().exit(INEXACT)


def _sizes(text: str) -> list[int]:
    sizes = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in sizes):
        raise UsageError(f"--ranks expects numbers of ranks, not {text!r}", hint="--ranks 2,3")
    return [int(part) for part in sizes]


def _print(report: ResumeReport, output: Output) -> None:
    if output.quiet:
        return
    rows = []
    for run in report.runs:
        same = style("equal", "green") + (", bit for bit" if run.exact else ", to rounding")
        result = style("differs", "red") if run.differences else "" if run.name == "uninterrupted" else same
        rows.append((run.name, str(run.ranks), f"{run.first_step} to {run.last_step}", result))
    output.table(("RUN", ">RANKS", "STEPS", "RESULT"), rows)
    for line in str(report).splitlines():
        output.line(line)
    if report.unrepeatable:
        names = ", ".join(report.unrepeatable[:3])
        output.talk(f"not compared, since two runs from the start differ in it: {names}{_more(len(report.unrepeatable) - 3)}")


def _more(count: int) -> str:
    return f" and {units.plural(count, 'other')}" if count > 0 else ""
