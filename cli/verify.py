"""``ckpt verify``: every byte of a checkpoint against its digests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import units
from .output import Output, options
from .progress import progress

if TYPE_CHECKING:
    from ckpt.engine.verify import Problem, VerifyReport

CORRUPT = 20


@click.command("verify", short_help="Read a checkpoint whole and compare it with its digests.")
@click.argument("url")
@click.option("--threads", type=click.IntRange(min=1), help="How many read and hash at once. [default: one per core, 2 to 16]")
@options
def command(url: str, *, threads: int | None, as_json: bool, quiet: bool) -> None:
    """Check the checkpoint at URL: its index, the tiling of its tensors, its files, and every byte.

    All problems are listed, not only the first one. The exit code is 0 if there is none and 20 if there is any.

    \b
    Example:
      ckpt verify runs/a/step-00001000
      ckpt verify --json runs/a/step-00001000 | jq '.problems[].file'
    """
    from ckpt.engine.verify import verify

    output = Output(json=as_json, quiet=quiet)
    with progress("verify", output) as update:
        report = verify(url, threads=threads, progress=update)
    if output.json:
        output.document(_fields(url, report))
    else:
        _print(report, output)
    if not report.ok:
        click.get_current_context().exit(CORRUPT)


def _print(report: VerifyReport, output: Output) -> None:
    for problem in report.problems:
        output.line(str(problem))
    if output.quiet:
        return
    verdict = click.style("ok", fg="green") if report.ok else click.style(units.plural(len(report.problems), "problem"), fg="red")
    rate = units.size(report.bytes / max(report.seconds, 1e-9))
    what = f"{units.plural(report.files, 'file')}, {units.plural(report.chunks, 'chunk')}, {units.size(report.bytes)}"
    output.line(f"{verdict}: {what} in {units.duration(report.seconds)} ({rate}/s)")
    if report.undigested:
        output.line(f"{units.plural(report.undigested, 'chunk')} could be read but not compared: this format keeps no digests")


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
