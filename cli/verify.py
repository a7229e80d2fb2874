"""``ckpt verify``: checks every byte of a checkpoint against its digests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit

from ckpt import units
from ckpt.cli.console.dividing import divided, divisible, single_part
from ckpt.cli.console.interrupts import when_interrupted
from ckpt.cli.console.output import URL, Output, options, progress, style
from ckpt.errors import FormatError, UsageError

if TYPE_CHECKING:
    from ckpt.converters.compare.semantic import SemanticReport
    from ckpt.engine.verify.verify import Problem, VerifyReport
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
def command(url: str, *, threads: int | None, semantic: bool, as_json: bool, quiet: bool) -> None:
    """Check the checkpoint at URL: its index, that its chunks cover each tensor exactly, its files, and every byte.

    All problems are listed, not only the first. The exit code is 0 if there are none and 20 if there are any; 12 if the only ones are
    tensors of classes that ckpt does not read. It is 22 if all bytes are intact but --semantic finds tensors that are not consistent.
    Under torchrun or srun the processes share the chunks among them; with --part each element of an array job reads its own.

    \b
    Example:
      ckpt verify runs/a/step-00001000
      ckpt verify --json runs/a/step-00001000 | jq '.problems[].file'
    """
    from ckpt.engine.verify.verify import verify
    from ckpt.runs.members import member_urls

    if parts := member_urls(url):
        _verify_members(parts, threads=threads, semantic=semantic, as_json=as_json, quiet=quiet)
        return
    part = single_part()
    if part is not None and semantic:
        raise UsageError("--semantic reads whole tensors, and --part a part of them", hint="run it once without --part")
    with divided(url, Output(json=as_json, quiet=quiet)) as (work, output):
        with when_interrupted("nothing was changed; the same command starts from the beginning"), progress("verify", output) as update:
            report = verify(url, threads=threads, progress=update, work=work)
        meaning = _check_semantic(url, threads, work) if semantic and report.ok else None
        if output.json:
            output.document(
                _fields(url, report)
                | ({} if part is None else {"part": list(part)})
                | {"remedy": remedy_of(url, report), "semantic": None if meaning is None else _semantic_fields(meaning)}
            )
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


def _verify_members(parts: Mapping[str, str], **options: Any) -> None:
    """Verify the checkpoint of each member of a joint step; the exit code is that of the first with problems."""
    context, code = click.get_current_context(), 0
    for name, part in parts.items():
        if not options["as_json"] and not options["quiet"]:
            click.echo(f"{name}: {part}")
        try:
            context.invoke(command, url=part, **options)
        except Exit as end:
            code = code or end.exit_code
    context.exit(code)


def _check_semantic(url: str, threads: int | None, work: DividedWork | None) -> SemanticReport | None:
    """What the values mean, which one process checks alone, while the others wait for it; None on these."""
    from ckpt.converters.compare.semantic import check_semantic
    from ckpt.formats.registry import open_catalog

    if work is None:
        return check_semantic(open_catalog(url), threads=threads)
    reports: list[SemanticReport] = []

    def check(rows: object) -> dict[str, Any]:
        reports.append(check_semantic(open_catalog(url), threads=threads))
        return {}

    work.agree("semantic", dict, check)
    return reports[0] if reports else None


def _semantic_fields(report: SemanticReport) -> dict[str, Any]:
    counts = {"masters": report.masters, "moments": report.moments, "steps": report.steps, "replicas": report.replicas}
    return {"ok": not report.problems, **counts, "problems": [_problem(p) for p in report.problems], "remedy": report.remedy}


def _print(url: str, report: VerifyReport, output: Output, part: tuple[int, int] | None) -> None:
    for problem in report.problems:
        output.line(str(problem))
    if output.quiet:
        return
    verdict = style("ok", "green") if report.ok else style(units.plural(len(report.problems), "problem"), "red")
    if not report.ok:
        output.line(f"remedy: {remedy_of(url, report)}")
    rate = units.size(report.bytes / max(report.seconds, 1e-9))
    what = f"{units.plural(report.files, 'file')}, {units.plural(report.chunks, 'chunk')}, {units.size(report.bytes)}"
    if part is not None:
        verdict = f"part {part[0]} of {part[1]}: {verdict}"
    output.line(f"{verdict}: {what} in {units.duration(report.seconds)} ({rate}/s)")
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


def _fields(url: str, report: VerifyReport) -> dict[str, Any]:
    return {
        "url": url,
        "ok": report.ok,
        "files": report.files,
        "chunks": report.chunks,
        "undigested": report.undigested,
        "bytes": report.bytes,
        "seconds": report.seconds,
        "problems": [_problem(problem) for problem in report.problems],
    }


def _problem(problem: Problem) -> dict[str, Any]:
    box = None if problem.box is None else {"offset": problem.box.offset, "shape": problem.box.shape}
    return {"kind": problem.kind, "file": problem.file, "tensor": problem.tensor, "box": box, "message": problem.message}
