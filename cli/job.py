"""``ckpt plan``, ``prove`` and ``advise``: what a job would read, whether it resumes exactly, how often it should save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING

import click

from ckpt import units
from ckpt.errors import NotFoundError, UsageError
from ckpt.needs import require_torch

from .interrupts import when_interrupted
from .options import parse_mesh
from .output import URL, OneOf, Output, options, style

if TYPE_CHECKING:
    from ckpt.engine.dry_run_load import MeshForecast
    from ckpt.testing import ResumeReport


_VERIFY = ("full", "partial", "off")


def _parse_layout(context: click.Context, parameter: click.Parameter, text: str) -> Mapping[str, int] | None:
    """A mesh, or a number of ranks."""
    return parse_mesh(context, parameter, f"fsdp={text}" if text.isdecimal() else text)


def _parse_cuts(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    cuts = []
    for text in texts:
        glob, _, dim = text.rpartition("=")
        if not glob or not dim.isdecimal():
            raise click.BadParameter(f"{text!r} is no GLOB=DIM such as '*.router.weight=0'")
        cuts.append((glob, int(dim)))
    return tuple(cuts)


@click.command("plan", short_help="Show what a load into a layout would read.")
@click.argument("url", type=URL)
@click.option("--layout", required=True, callback=_parse_layout, metavar="SIZES", help="pp=2,dp=2,fsdp=4,tp=8, or N for fsdp=N.")
@click.option(
    "--cut", callback=_parse_cuts, multiple=True, metavar="GLOB=DIM", help="Dimension that tp cuts of tensors named GLOB. Repeatable."
)
@click.option("--only", multiple=True, metavar="GLOB", help="Load only tensors whose name matches GLOB. Repeatable.")
@click.option(
    "--verify", type=OneOf(_VERIFY), default="full", show_default=True, metavar="HOW", help="As for ckpt.load: full, partial, off."
)
@click.option(
    "--ranks-per-host",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="N",
    help="Consecutive ranks that share a host, and reads of it.",
)
@click.option(
    "--ranks", "most", type=click.IntRange(min=1), default=64, show_default=True, metavar="N", help="Plan N ranks, spread evenly."
)
@options
def plan(
    url: str,
    layout: Mapping[str, int],
    cut: tuple[tuple[str, int], ...],
    only: tuple[str, ...],
    verify: str,
    *,
    ranks_per_host: int,
    most: int,
    output: Output,
) -> None:
    """Show what each rank would read to load the checkpoint at URL, of any format, into a layout. Nothing is loaded.

    Mesh dimensions: dp replicates, fsdp cuts dimension 0, tp cuts projections and embeddings by their usual names, pp divides layers.
    The plan is that of ckpt.load; in a job, ckpt.load(..., dry_run=True) plans the job's own state. Seconds are estimated
    from a sample of the reads.

    \b
    Example:
      ckpt plan runs/a/step-00001000 --layout 64
      ckpt plan runs/a/step-00001000 --layout pp=2,fsdp=4,tp=4 --only 'model.*'
      ckpt plan --json hf/Llama-3-8B --layout tp=8 | jq .ranks[0].bytes_read
    """
    require_torch("`ckpt plan`")
    from ckpt.engine.dry_run_load import MeshRules, forecast_on_mesh
    from ckpt.formats.registry import open_catalog

    rules = MeshRules.of(layout, cut, ranks_per_host)
    forecast = forecast_on_mesh(open_catalog(url), rules, only=only, verify=verify, most_ranks=most)  # type: ignore[arg-type]
    if output.json:
        output.document(asdict(forecast))
    elif not output.quiet:
        _print_forecast(forecast, output, len(rules.mesh.ranks))


def _print_forecast(forecast: MeshForecast, output: Output, world: int) -> None:
    rows = [
        (
            str(one.rank),
            units.size(one.state_bytes),
            units.size(one.bytes_read),
            units.size(one.bytes_received) if one.bytes_received else "",
            f"{one.requests:,}",
            f"{one.files:,}",
            units.size(one.memory),
        )
        for one in forecast.ranks
    ]
    output.table(("RANK", ">STATE", ">READ", ">RECEIVED", ">REQUESTS", ">FILES", ">MEMORY"), rows)
    ranks = forecast.ranks
    read = units.size(sum(one.bytes_read for one in ranks))
    output.line(f"{len(ranks)} of {units.plural(world, 'rank')}: {read} in {units.plural(sum(one.requests for one in ranks), 'request')}")
    output.line(f"about {_time(forecast.seconds)} on the slowest ({forecast.estimated_from})")
    if forecast.replicated:
        names = ", ".join(forecast.replicated[:3]) + (", …" if len(forecast.replicated) > 3 else "")
        output.talk(f"note: no rule of tp cuts {units.plural(len(forecast.replicated), 'tensor')}, such as {names}: --cut GLOB=DIM does")


INEXACT = 3


@click.command("prove", short_help="Prove that a training script resumes exactly.")
@click.argument("script", type=URL)
@click.argument("arguments", nargs=-1, metavar="[-- ARGS...]", type=click.UNPROCESSED)
@click.option("--at", type=click.IntRange(min=1), required=True, metavar="STEP", help="The step that is saved, and resumed from.")
@click.option("--after", type=click.IntRange(min=1), default=10, show_default=True, metavar="N", help="Steps that are compared after it.")
@click.option("--ranks", default="1", show_default=True, metavar="N,N", help="Numbers of ranks: the first one saves, and all resume.")
@click.option("--tolerance", type=float, default=1e-4, show_default=True, metavar="REL", help="Tolerance on other numbers of ranks.")
@click.option("--timeout", type=click.FloatRange(min=1), default=600.0, show_default=True, metavar="SECONDS", help="For each run.")
@click.option("--folder", metavar="DIR", help="Keep checkpoints, notes and output of the runs here. [default: a temporary folder]")
@options
def prove(
    script: str,
    arguments: tuple[str, ...],
    *,
    at: int,
    after: int,
    ranks: str,
    tolerance: float,
    timeout: float,
    folder: str | None,
    output: Output,
) -> None:
    """Run SCRIPT under torchrun on this machine: uninterrupted, interrupted after a step, and resumed. Compare batches, learning rates,
    random generators, parameters, optimizer states and metrics.

    SCRIPT needs no change if it saves and restores by a ckpt.Checkpointer; its checkpoints go to the folder of
    the proof. On the same number of ranks the comparison is bit for bit; on others, batches are compared exactly and numbers to rounding.
    The exit code is 0 if the resume is exact, and 3 if not; then the first difference and its usual cause are shown.

    \b
    Example:
      ckpt prove train.py --at 20
      ckpt prove train.py --at 20 --ranks 2,3 -- --config small.toml
    """
    require_torch("`ckpt prove`")
    from ckpt.testing import prove

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
        _print_proof(report, output)
    if not report.exact:
        click.get_current_context().exit(INEXACT)


def _sizes(text: str) -> list[int]:
    sizes = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in sizes):
        raise UsageError(f"--ranks expects numbers of ranks, not {text!r}", hint="--ranks 2,3")
    return [int(part) for part in sizes]


def _print_proof(report: ResumeReport, output: Output) -> None:
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
        more = f" and {units.plural(len(report.unrepeatable) - 3, 'other')}" if len(report.unrepeatable) > 3 else ""
        seeds = " (a generator does if the script does not seed it)" if any(n.startswith("generator ") for n in report.unrepeatable) else ""
        output.talk(f"not compared, since two runs from the start differ in it{seeds}: {', '.join(report.unrepeatable[:3])}{more}")


_RECENT = 20
"""Saves whose median counts as the cost of one."""


@click.command("advise", short_help="Recommend how often a run should save.")
@click.argument("root", type=URL)
@click.option("--mtbf", required=True, metavar="TIME", help="Mean time between failures of the job, e.g. 6h, 1d12h, 90min.")
@options
def advise(root: str, *, mtbf: str, output: Output) -> None:
    """Recommend how often the run at ROOT should save, by Daly's formula: the interval that loses least time to saves and failures.

    The cost of a save is the time for which it blocked training: the median of the last 20 that recorded it. -q prints the
    interval in seconds.

    \b
    Example:
      ckpt advise runs/a --mtbf 6h
    """
    from ckpt.formats.native.catalog import FORMAT
    from ckpt.formats.registry import list_foreign
    from ckpt.policies.save import daly
    from ckpt.runs.report.history import read_history
    from ckpt.runs.step_listing import none_here

    between = units.seconds(mtbf)
    if not between:
        raise UsageError(f"--mtbf expects a time such as 6h, 1d12h, 90min or 30s, not {mtbf!r}", hint="--mtbf 6h")
    history = read_history(root)
    if not history.saves:
        if set(list_foreign(root, ()).values()) - {FORMAT.name}:
            hint = "name the directory that holds the steps of a run"
            raise NotFoundError("only checkpoints of other formats are here, which record no durations", where=root, hint=hint)
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
    elif output.quiet:
        output.line(f"{interval:.0f}")
    else:
        output.line(f"save every {_time(interval)}{'' if best == interval else f', as often as saves end; by their cost {_time(best)}'}")
        output.line(f"measured: a save takes {_time(took)} and blocks training for {_time(blocked)}")


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 9.5 else units.duration(seconds)
