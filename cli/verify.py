"""``ckpt verify`` checks the bytes of one checkpoint, ``ckpt diff`` compares two."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from io import StringIO
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit

from ckpt import units
from ckpt.errors import FormatError, UsageError
from ckpt.text import parse_json

from .dividing import divided, divisible, single_part
from .interrupts import when_interrupted
from .options import MappingChoice, mapping_options, views_of
from .output import URL, Output, options, progress, style

if TYPE_CHECKING:
    from ckpt.converters.comparison import DiffReport, TensorDifference, Tolerance, ValueDifference
    from ckpt.converters.semantic import SemanticReport
    from ckpt.engine.verify import VerifyReport
    from ckpt.net.divided_work import DividedWork


CORRUPT = 20
UNREAD = "unread"
MISFIT = 22


@click.command("verify", short_help="Check every byte of a checkpoint against its digests.")
@click.argument("url", type=URL)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Threads that read and hash. [default: one per core, 2 to 16]")
@click.option("--semantic", is_flag=True, help="Also check that weights, master weights, moments and steps are consistent.")
@divisible
@options
def verify(url: str, *, threads: int | None, semantic: bool, output: Output) -> None:
    """Check the checkpoint at URL: its index, that its chunks cover each tensor exactly, its files, and every byte.

    All problems are listed, not only the first. The exit code is 0 if there are none and 20 if there are any; 12 if the only ones are
    tensors of classes that ckpt does not read. It is 22 if all bytes are intact but --semantic finds tensors that are not consistent.
    Under torchrun or srun the processes share the chunks among them; with --part each element of an array job reads its own.

    \b
    Example:
      ckpt verify runs/a/step-00001000
      ckpt verify --json runs/a/step-00001000 | jq '.problems[].file'
    """
    from ckpt.engine.verify import verify
    from ckpt.runs.members import member_urls

    if parts := member_urls(url):
        _verify_members(url, parts, threads=threads, semantic=semantic, output=output)
        return
    part = single_part()
    if part is not None and semantic:
        raise UsageError("--semantic reads whole tensors, and --part a part of them", hint="run it once without --part")
    with divided(url, output) as (work, output):
        with when_interrupted("nothing was changed; the same command starts from the beginning"), progress("verify", output) as update:
            report = verify(url, threads=threads, progress=update, work=work)
        meaning = _check_semantic(url, threads, work) if semantic and report.ok else None
        if output.json:
            fields = {"url": url, "ok": report.ok, **asdict(report), **({} if part is None else {"part": list(part)})}
            semantics = None if meaning is None else {"ok": not meaning.problems, **asdict(meaning)}
            output.document({**fields, "remedy": remedy_of(url, report), "semantic": semantics})
        else:
            _print(url, report, output, part)
            if meaning is not None:
                for problem in meaning.problems:
                    output.line(str(problem))
                if meaning.remedy is not None:
                    output.line(f"remedy: {meaning.remedy}")
                if not output.quiet:
                    good = style("fits", "green")
                    verdict = good if not meaning.problems else style(units.plural(len(meaning.problems), "misfit"), "red")
                    counts = {"master": meaning.masters, "moment": meaning.moments, "step": meaning.steps, "replica": meaning.replicas}
                    checked = ", ".join(units.plural(count, what) for what, count in counts.items())
                    output.line(f"{verdict}: {checked}")
        if not report.ok:
            click.get_current_context().exit(FormatError.exit_code if _kinds(report) == {UNREAD} else CORRUPT)
        if meaning is not None and meaning.problems:
            click.get_current_context().exit(MISFIT)


def _verify_members(url: str, parts: Mapping[str, str], *, threads: int | None, semantic: bool, output: Output) -> None:
    """Verify the checkpoint of each member of a joint step; the exit code is that of the first with problems."""
    context, code, documents = click.get_current_context(), 0, {}
    for name, part in parts.items():
        if not output.json and not output.quiet:
            click.echo(f"{name}: {part}")
        text = StringIO()
        try:
            with redirect_stdout(text) if output.json else nullcontext():
                context.invoke(verify, url=part, threads=threads, semantic=semantic, as_json=output.json, quiet=output.quiet)
        except Exit as end:
            code = code or end.exit_code
        documents[name] = parse_json(text.getvalue() or "null")
    if output.json:
        output.document({"url": url, "ok": not code, "members": documents})
    context.exit(code)


def _check_semantic(url: str, threads: int | None, work: DividedWork | None) -> SemanticReport | None:
    """What the values mean, which one process checks alone, while the others wait for it; None on these."""
    from ckpt.converters.semantic import check_semantic
    from ckpt.formats.registry import open_catalog

    if work is None:
        return check_semantic(open_catalog(url), threads=threads)
    reports: list[SemanticReport] = []

    def check(rows: object) -> dict[str, Any]:
        reports.append(check_semantic(open_catalog(url), threads=threads))
        return {}

    work.agree("semantic", dict, check)
    return reports[0] if reports else None


def _print(url: str, report: VerifyReport, output: Output, part: tuple[int, int] | None) -> None:
    for problem in report.problems:
        output.line(str(problem))
    if output.quiet:
        return
    verdict = style("ok", "green") if report.ok else style(units.plural(len(report.problems), "problem"), "red")
    if not report.ok:
        output.line(f"remedy: {remedy_of(url, report)}")
    what = "the index and the values are intact; there are no tensors" if report.ok else "no data was read"
    if report.chunks:
        what = f"{units.plural(report.files, 'file')}, {units.plural(report.chunks, 'chunk')}, {units.size(report.bytes)}"
        rate = f" ({units.size(report.bytes / report.seconds)}/s)" if report.seconds >= _TIMED else ""
        what += f" in {units.duration(report.seconds)}{rate}"
    if part is not None:
        verdict = f"part {part[0]} of {part[1]}: {verdict}"
    output.line(f"{verdict}: {what}")
    if report.undigested:
        output.line(f"{units.plural(report.undigested, 'chunk')} could be read but not checked: this format keeps no digests of them")


def remedy_of(url: str, report: VerifyReport) -> str | None:
    """What a user can do about the problems; None if there are none."""
    from ckpt.formats.native.catalog import FORMAT
    from ckpt.formats.registry import find_format

    if report.ok:
        return None
    kinds = _kinds(report) - {UNREAD}
    if not kinds:
        return "load these tensors with the library that wrote them: they could not be checked; all else is intact"
    if kinds <= {"index", "tiling", "state"}:
        if find_format(url) not in (None, FORMAT.name):
            return "restore what is missing or damaged from another copy, then verify again; or load another checkpoint"
        return "`ckpt rebuild` makes the index again from the data files, which are intact or were not checked; or load another checkpoint"
    if kinds == {"read"}:
        return "the storage could not be read: verify again when it answers"
    return "restore the files named above from another copy of this checkpoint, then verify again; or load another checkpoint"


def _kinds(report: VerifyReport) -> set[str]:
    return {problem.kind for problem in report.problems}


_TIMED = 0.1
"""Seconds of work from which a rate says something."""
DIFFERENT = 3


@click.command("diff", short_help="Compare two checkpoints, of any formats.")
@click.argument("left", metavar="A", type=URL)
@click.argument("right", metavar="B", type=URL)
@click.option("--root", metavar="KEY", help="Compare the model below KEY of A's state, by its names there, with B.")
@click.option("--only", multiple=True, metavar="GLOB", help="Compare only tensors and values whose name matches GLOB. Repeatable.")
@click.option(
    "--tolerance",
    "rules",
    multiple=True,
    metavar="[GLOB=]ABS[,REL]",
    help="Elements may differ by ABS + REL times the larger one. The first rule that matches a tensor applies. Repeatable.",
)
@click.option("--values/--no-values", default=True, show_default=True, help="Also compare plain values.")
@click.option("--dtypes/--no-dtypes", default=True, show_default=True, help="Also compare dtypes.")
@mapping_options
@click.option("--rename", multiple=True, metavar="OLD=NEW", help="Names of A that begin with OLD begin with NEW in B. Repeatable.")
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Comparing threads. [default: one per core, 2 to 16]")
@options
def diff(
    left: str,
    right: str,
    *,
    root: str | None,
    only: tuple[str, ...],
    rules: tuple[str, ...],
    values: bool,
    dtypes: bool,
    mapping: MappingChoice,
    rename: tuple[str, ...],
    threads: int | None,
    output: Output,
) -> None:
    """Compare the checkpoints A and B, of any formats: names, shapes, dtypes, elements and values.

    Tensors that differ are listed with the largest difference first. The exit code is 0 if the checkpoints are equal and 3 if not. Two
    NaNs are equal, and padding is ignored. Elements of two dtypes are compared as numbers; with --no-dtypes dtypes are ignored,
    and --tolerance 0,0.004 allows what a cast to bfloat16 rounds.

    \b
    Example:
      ckpt diff runs/a/step-100 runs/b/step-100
      ckpt diff --tolerance '*.bias=1e-6' --tolerance 1e-5,1e-3 a b
      ckpt diff --names llama --convention megatron /models/Llama-3-8B imports/m
      ckpt diff --rename optimizer.state.model.=optimizer.state. step-100 model.pt
      ckpt diff --root model runs/a/step-100 export/
      ckpt diff --root model --no-dtypes --tolerance 0,0.004 step-100 export-bf16/
    """
    from ckpt.converters.comparison import compare

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
            dtypes=dtypes,
            threads=threads,
            progress=update,
        )
    if output.json:
        output.document(_diff_fields(report))
    else:
        _print_differences(report, root, output)
    if not report.same:
        click.get_current_context().exit(DIFFERENT)


def _renamed(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not old or not equals:
        raise UsageError(f"--rename expects OLD=NEW, not {text!r}", hint="--rename optimizer.state.model.=optimizer.state.")
    return old, new


def _tolerance(rule: str) -> Tolerance:
    from ckpt.converters.comparison import Tolerance

    glob, equals, numbers = rule.rpartition("=")
    absolute, _, relative = numbers.partition(",")
    try:
        return Tolerance(glob=glob if equals else "*", absolute=float(absolute or 0), relative=float(relative or 0))
    except ValueError as err:
        hint = "--tolerance '*.bias=1e-6' or --tolerance 0,1e-3"
        raise UsageError(f"--tolerance expects [GLOB=]ABS[,REL], not {rule!r}", hint=hint) from err


def _print_differences(report: DiffReport, root: str | None, output: Output) -> None:
    if output.quiet:
        for name in [*(d.name for d in report.differences), *(v.path for v in report.value_differences)]:
            output.line(name)
        return
    if not report.same:
        output.table(("", "~"), [(style("A", "bold"), report.left), (style("B", "bold"), report.right)])
    if report.differences:
        output.line()
        ordered = sorted(report.differences, key=_severity)
        output.table(("TENSOR", "DIFFERENCE", ">ELEMENTS", ">MAX ABS", ">MAX REL", "FIRST"), [_diff_row(d) for d in ordered])
    if report.value_differences:
        output.line()
        changes = [change for v in report.value_differences for change in _changes(v)]
        output.table(("VALUE", "~A", "~B"), [(path, _short(left), _short(right)) for path, left, right in changes])
    if not report.same:
        output.line()
    compared = f"{units.plural(report.tensors, 'tensor')} ({units.size(report.bytes)}) and {units.plural(report.values, 'value')}"
    verdict = style("same", "green")
    if not report.same:
        verdict = style(units.plural(len(report.differences) + len(report.value_differences), "difference"), "red")
    output.line(f"{verdict}: compared {compared} in {units.duration(report.seconds)}")
    if any(d.kind == "dtype" for d in report.differences):
        output.talk("elements were compared as numbers; to allow two dtypes and their rounding: --no-dtypes --tolerance 0,0.004")
    _suggest_names(report, root, output)


def _severity(difference: TensorDifference) -> tuple[int, float, float, int, str]:
    """Sorts what is missing first, then shapes and dtypes, then elements, the largest relative difference first."""
    kinds = ("only-left", "only-right", "shape", "dtype", "values")
    return (kinds.index(difference.kind), -difference.max_rel, -difference.max_abs, -difference.elements, difference.name)


def _diff_row(difference: TensorDifference) -> tuple[str, ...]:
    if difference.kind in ("only-left", "only-right"):
        return (difference.name, f"only in {'A' if difference.kind == 'only-left' else 'B'}", "", "", "", "")
    if difference.kind != "values":
        return (difference.name, f"{difference.kind} {difference.left} ≠ {difference.right}", "", "", "", "")
    first = f"[{', '.join(map(str, difference.first or ()))}]"
    return (difference.name, "values", f"{difference.elements:,}", f"{difference.max_abs:.3g}", f"{difference.max_rel:.3g}", first)


def _changes(difference: ValueDifference) -> list[tuple[str, str | None, str | None]]:
    """Where within dicts and lists a value differs: path, and the text of each side or None."""
    try:
        sides = [_NOTHING if text is None else parse_json(text) for text in (difference.left, difference.right)]
    except ValueError:  # no JSON: nothing to descend into
        return [(difference.path, difference.left, difference.right)]
    return list(_descend(difference.path, sides[0], sides[1])) or [(difference.path, difference.left, difference.right)]


_NOTHING: Any = object()


def _descend(path: str, left: Any, right: Any) -> Iterator[tuple[str, str | None, str | None]]:
    from ckpt.plan.tree import child_path, items_of, pairs_of, text

    def children(node: Any) -> dict[str, Any] | None:
        if node is _NOTHING:
            return None
        pairs = pairs_of(node)
        if pairs is not None:
            return {child_path(path, key): child for key, child in pairs}
        items = items_of(node)
        return None if items is None else {f"{path}[{n}]": child for n, child in enumerate(items)}

    inside, beside = children(left), children(right)
    if inside and beside:  # an empty container is shown as such
        for name in dict.fromkeys([*inside, *beside]):
            yield from _descend(name, inside.get(name, _NOTHING), beside.get(name, _NOTHING))
    elif left != right:
        yield path, None if left is _NOTHING else text(left), None if right is _NOTHING else text(right)


def _suggest_names(report: DiffReport, root: str | None, output: Output) -> None:
    """Where the names of one side are those of the other below a key, or with another beginning: say which option makes them equal."""
    sides = [{d.name for d in report.differences if d.kind == kind} for kind in ("only-left", "only-right")]
    for inner, outer, how in ((sides[1], sides[0], ""), (sides[0], sides[1], " and B before A")):
        keys = () if report.tensors else sorted({name.partition(".")[0] for name in outer})
        key = next((k for k in keys if inner and inner <= {name[len(k) + 1 :] for name in outer if name.startswith(f"{k}.")}), None)
        if key is not None:
            remedy = f"compare without --root, with --only '{key}.*'" if key == root else f"add --root {key}{how}"
            output.talk(f"no name is in both, but those below {key!r} are: {remedy}")
            return
    if not all(sides):
        return
    name = min(sides[0])
    same, like = max((_same_end(name, other), other) for other in sides[1])
    old, new = ("".join(f"{part}." for part in each.split(".")[:-same]) for each in (name, like)) if same else ("", "")
    renamed = {new + other.removeprefix(old) for other in sides[0] if other.startswith(old)} & sides[1]
    if len(renamed) > 1 and 2 * len(renamed) >= len(sides[0]):
        how = f"--rename {old}={new}" if old else f"--rename {new}= and B before A"
        output.talk(f"{units.plural(len(renamed), 'name')} begin with {old!r} in A and with {new!r} in B: add {how}")


def _same_end(name: str, other: str) -> int:
    """How many of the last parts of two dotted names are the same."""
    pairs = zip(reversed(name.split(".")), reversed(other.split(".")), strict=False)
    return next((n for n, (one, two) in enumerate(pairs) if one != two), min(name.count("."), other.count(".")) + 1)


def _short(text: str | None) -> str:
    return "nothing" if text is None else text if len(text) <= 60 else f"{text[:59]}…"


def _diff_fields(report: DiffReport) -> dict[str, Any]:
    document = {"same": report.same} | asdict(report)
    for row in document["differences"]:
        row |= {key: "inf" for key in ("max_abs", "max_rel") if not math.isfinite(row[key])}
    for row, difference in zip(document["value_differences"], report.value_differences, strict=True):
        row["changes"] = [{"path": path, "left": left, "right": right} for path, left, right in _changes(difference)]
    return document
