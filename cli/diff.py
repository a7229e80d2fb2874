"""``ckpt diff``: how two checkpoints differ, whatever their formats."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ckpt.errors import UsageError
from ckpt.text import units

from .console.output import Output, options, style
from .console.parameters import URL
from .console.progress import progress
from .mapping_options import MappingChoice, mapping_options, views_of

if TYPE_CHECKING:
    from ckpt.converters.compare.comparison import DiffReport, TensorDifference, Tolerance

DIFFERENT = 3


@click.command("diff", short_help="Compare two checkpoints, of any formats.")
@click.argument("left", metavar="A", type=URL)
@click.argument("right", metavar="B", type=URL)
@click.option("--root", metavar="KEY", help="Compare the model below KEY of A's state, by its names there, with B.")
@click.option("--only", multiple=True, metavar="GLOB", help="Only tensors and values whose name fits GLOB; several: any of them.")
@click.option(
    "--tolerance",
    "rules",
    multiple=True,
    metavar="[GLOB=]ABS[,REL]",
    help="What elements may differ by: ABS + REL times the larger one. Of several rules the first that fits a tensor counts.",
)
@click.option("--values/--no-values", default=True, show_default=True, help="Compare also what is no tensor.")
@mapping_options
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="Names of A that begin with OLD begin with NEW in B; several times.")
@click.option("--threads", type=click.IntRange(min=1), help="How many compare at once. [default: one per core, 2 to 16]")
@options
def command(
    left: str,
    right: str,
    *,
    root: str | None,
    only: tuple[str, ...],
    rules: tuple[str, ...],
    values: bool,
    mapping: MappingChoice,
    rename: tuple[str, ...],
    threads: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compare the checkpoints A and B: names, shapes, dtypes, elements and values.

    The exit code is 0 if they are the same and 3 if not. Two NaNs are the same, and padding does not count.

    \b
    Example:
      ckpt diff runs/a/step-100 runs/b/step-100
      ckpt diff --tolerance '*.bias=1e-6' --tolerance 1e-5,1e-3 a b
      ckpt diff --names llama --convention megatron /models/Llama-3-8B imports/m
      ckpt diff --rename optimizer.state.model.=optimizer.state. step-100 model.pt
      ckpt diff --root model runs/a/step-100 export/
    """
    from ckpt.converters.compare.comparison import compare

    output = Output(json=as_json, quiet=quiet)
    tolerances = [_tolerance(rule) for rule in rules]
    views = views_of(left, mapping)
    with progress("diff", output) as update:
        report = compare(
            left,
            right,
            views=views,
            rename=dict(map(_renamed, rename)),
            root=root,
            only=only,
            tolerances=tolerances,
            values=values and views is None,
            threads=threads,
            progress=update,
        )
    if output.json:
        output.document(_fields(report))
    else:
        _print(report, output)
    if not report.same:
        click.get_current_context().exit(DIFFERENT)


def _renamed(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not old or not equals:
        raise UsageError(f"--rename {text!r} is no OLD=NEW", hint="--rename optimizer.state.model.=optimizer.state.")
    return old, new


def _tolerance(rule: str) -> Tolerance:
    from ckpt.converters.compare.comparison import Tolerance

    glob, equals, said = rule.rpartition("=")
    absolute, _, relative = said.partition(",")
    try:
        return Tolerance(glob=glob if equals else "*", absolute=float(absolute or 0), relative=float(relative or 0))
    except ValueError as err:
        raise UsageError(f"--tolerance {rule!r} is no [GLOB=]ABS[,REL]", hint="--tolerance '*.bias=1e-6' or --tolerance 0,1e-3") from err


def _print(report: DiffReport, output: Output) -> None:
    for difference in report.differences:
        output.line(difference.name if output.quiet else _sentence(difference))
    for value in report.value_differences:
        output.line(value.path if output.quiet else f"{value.path}: {_short(value.left)} ≠ {_short(value.right)}")
    if output.quiet:
        return
    what = f"{units.plural(report.tensors, 'tensor')} ({units.size(report.bytes)}) and {units.plural(report.values, 'value')}"
    verdict = style("same", "green")
    if not report.same:
        verdict = style(units.plural(len(report.differences) + len(report.value_differences), "difference"), "red")
    output.line(f"{verdict}: compared {what} in {units.duration(report.seconds)}")
    if not report.tensors:
        _tell_roots(report, output)


def _tell_roots(report: DiffReport, output: Output) -> None:
    """Where no name is in both: whether one side has the names of the other below a key."""
    sides = [{d.name for d in report.differences if d.kind == kind} for kind in ("only-left", "only-right")]
    for inner, outer, how in ((sides[1], sides[0], ""), (sides[0], sides[1], " and B before A")):
        keys = sorted({name.partition(".")[0] for name in outer})
        key = next((k for k in keys if inner and inner <= {name[len(k) + 1 :] for name in outer if name.startswith(f"{k}.")}), None)
        if key is not None:
            output.talk(f"no name is in both, but the names are those below {key!r}: --root {key}{how}")
            return


def _sentence(found: TensorDifference) -> str:
    if found.kind in ("only-left", "only-right"):
        return f"{found.name}: only in {'A' if found.kind == 'only-left' else 'B'}"
    if found.kind != "values":
        return f"{found.name}: {found.kind} {found.left} ≠ {found.right}"
    at = ", ".join(map(str, found.first or ()))
    count = f"{found.elements:,} {'element differs' if found.elements == 1 else 'elements differ'}"
    return f"{found.name}: {count}, by at most {found.max_abs:.3g} ({found.max_rel:.3g} relative), first at [{at}]"


def _short(text: str | None) -> str:
    return "nothing" if text is None else text if len(text) <= 60 else f"{text[:59]}…"


def _fields(report: DiffReport) -> dict[str, Any]:
    document = {"same": report.same} | asdict(report)
    for row in document["differences"]:
        row |= {key: _number(row[key]) for key in ("max_abs", "max_rel")}
    return document


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"
