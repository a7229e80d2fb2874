"""``ckpt cp``: copies a checkpoint from one storage to another."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

import click

from ckpt import units
from ckpt.cli.console.dividing import divided, divisible
from ckpt.cli.console.interrupts import when_interrupted
from ckpt.cli.console.output import URL, Output, Update, options, progress, require_torch, style
from ckpt.errors import UsageError

if TYPE_CHECKING:
    from ckpt.engine.copy.copy import CopyReport
    from ckpt.net.divided_work import DividedWork

_INTERRUPTED = "run the same command again to resume: complete files are not copied again; to give up, remove them with `ckpt gc --yes`"


@click.command("cp", short_help="Copy a checkpoint to another storage.")
@click.argument("source", metavar="SRC", type=URL)
@click.argument("target", metavar="DST", type=URL)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Threads that read and write. [default: 8]")
@click.option("--compare", is_flag=True, help="Read and compare every byte, also where an object store could copy by itself.")
@click.option("--dry-run", is_flag=True, help="Only report what would be copied.")
@divisible
@options
def command(source: str, target: str, *, threads: int | None, compare: bool, dry_run: bool, as_json: bool, quiet: bool) -> None:
    """Copy the checkpoint at SRC to DST; both are URLs of any storage. If DST ends in /, the copy gets the name of SRC below it.

    Every byte is checked against its digest on the way, but for what an object store copies within itself; --compare reads that too.
    The checkpoint exists at DST only when all of it is there. After an interruption the same command resumes. Another checkpoint at DST
    is never replaced, and nothing is put beside other files. The copy of a virtual checkpoint is self-contained.
    Under torchrun or srun the processes share the files among them.

    \b
    Example:
      ckpt cp runs/a/step-00001000 s3://bucket/runs/a/
      ckpt cp gs://bucket/runs/a/step-00001000 /local/disk/step-00001000
    """
    from ckpt.io_backends.registry import join_url

    if target.endswith("/"):
        target = join_url(target, source.rstrip("/").rpartition("/")[2])
    with divided(target, Output(json=as_json, quiet=quiet), single=False) as (work, output):
        with when_interrupted("nothing was written" if dry_run else _INTERRUPTED), progress("cp", output) as update:
            report = _copy(source, target, threads=threads, compare=compare, progress=update, dry_run=dry_run, work=work)
        if output.json:
            output.document({**asdict(report), "dry_run": dry_run})
        elif not output.quiet:
            output.line(_sentence(report, dry_run=dry_run))


def _copy(
    source: str, target: str, *, threads: int | None, compare: bool, progress: Update, dry_run: bool, work: DividedWork | None
) -> CopyReport:
    """Copy the files; of a virtual checkpoint, which has none, make a self-contained one."""
    from ckpt.engine.copy.copy import CopyReport, copy_checkpoint
    from ckpt.formats.native.virtual import VirtualCatalog
    from ckpt.formats.registry import open_catalog
    from ckpt.runs.members import copy_joint, member_urls

    copy = partial(_copy, threads=threads, compare=compare, progress=progress, dry_run=dry_run, work=work)
    if work is not None and member_urls(source):
        raise UsageError("a step of several jobs is copied by one process", where=source, hint="run `ckpt cp` without torchrun")
    if reports := copy_joint(source, target, copy, commit=not dry_run):
        sums = {f: sum(getattr(r, f) for r in reports) for f in ("files", "bytes", "copied_files", "copied_bytes", "seconds")}
        return replace(reports[0], source=source, target=target, **sums)
    if not isinstance(open_catalog(source), VirtualCatalog):
        return copy_checkpoint(source, target, threads=threads, progress=progress, dry_run=dry_run, compare=compare, work=work)
    require_torch("`ckpt cp` of a virtual checkpoint")
    from ckpt.converters.convert import convert

    part = (0, 1) if work is None else work
    made = convert(source, target, to="native", part=part, threads=threads, progress=progress, dry_run=dry_run)
    return CopyReport(
        source=source,
        target=target,
        id=made.id,
        files=len(made.files),
        bytes=made.file_bytes,
        copied_files=made.written_files,
        copied_bytes=made.written_bytes,
        committed=made.finished,
        seconds=made.seconds,
    )


def _sentence(report: CopyReport, *, dry_run: bool) -> str:
    copied = f"{units.plural(report.copied_files, 'file')}, {units.size(report.copied_bytes)}"
    present = report.files - report.copied_files
    rest = f"; {units.plural(present, 'file')} already at the destination" if present else ""
    if dry_run:
        return f"would copy {copied} to {report.target}{rest}"
    if not report.copied_files:
        copied = f"nothing to copy in {units.duration(report.seconds)}"
    else:
        copied += f" copied in {units.duration(report.seconds)} ({units.size(report.copied_bytes / max(report.seconds, 1e-9))}/s)"
    by_store = (
        f"; the store copied {units.size(report.uncompared_bytes)} by itself: `ckpt verify` compares them"
        if report.uncompared_bytes
        else ""
    )
    return f"{style('ok', 'green')}: {report.target}: {copied}{rest}{by_store}"
