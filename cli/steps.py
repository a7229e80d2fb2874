"""``ckpt ls``, ``cp``, ``tag`` and ``rm``: the checkpoints of a run, one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

import click

from ckpt import units
from ckpt.errors import ConflictError, FormatError, StorageError, UsageError
from ckpt.needs import require_torch

from .dividing import divided, divisible
from .interrupts import when_interrupted
from .output import URL, Output, Update, options, progress, style

if TYPE_CHECKING:
    from ckpt.engine.copy import CopyReport
    from ckpt.net.divided_work import DividedWork
    from ckpt.runs.step_listing import Step


_HEADS = ("CHECKPOINT", ">STEP", "STATUS", ">BYTES", ">ON DISK", ">SHARED", ">RANKS", ">AGE", "~METRICS", "~TAGS", "~LINKS", "~NOTE")


@click.command("ls", short_help="List the checkpoints of a run.")
@click.argument("root", type=URL)
@options
def ls(root: str, *, output: Output) -> None:
    """List the checkpoints of the run at ROOT, the newest step last.

    ROOT is the directory that contains the steps of a run, or a single checkpoint. Unfinished saves and damaged checkpoints are listed with
    the reason, checkpoints of other formats with the name of the format. BYTES counts its tensors before compression, ON DISK its files,
    and SHARED the data files of other checkpoints that it refers to. -q prints only the URLs of checkpoints that can be loaded.

    \b
    Example:
      ckpt ls runs/a
      ckpt ls -q runs/a | tail -1     # the newest checkpoint
    """
    from ckpt.formats.registry import list_foreign
    from ckpt.io_backends.registry import join_url
    from ckpt.runs.step_listing import directory_name, list_steps, none_here, stored_sizes, vanished_bases

    steps = sorted(list_steps(root), key=lambda step: step.abandoned is None)  # the newest comes last
    steps = _with_lost_parts(steps, vanished_bases(root, steps))
    foreign = list_foreign(root, {step.url for step in steps} | {join_url(root, name) for step in steps for name in step.also})
    if not steps and not foreign:
        raise none_here(root)
    if output.quiet and not output.json:
        for step in steps:
            if step.committed:
                output.line(step.url)
        return
    sizes = stored_sizes(steps)
    if output.json:
        output.document(
            {
                "root": root,
                "steps": [_step_fields(step) | {"stored_bytes": sizes.get(step.url)} for step in steps],
                "foreign": [{"url": url, "format": name} for url, name in foreign.items()],
            }
        )
        return
    rows = [(directory_name(step), *_step_row(step, sizes.get(step.url))) for step in steps]
    names = {url: url.rstrip("/").rpartition("/")[2] for url in foreign}
    output.table(_HEADS, rows + [(names[url], "", name, *[""] * (len(_HEADS) - 3)) for url, name in foreign.items()])


def _with_lost_parts(steps: Sequence[Step], vanished: Mapping[str, Sequence[str]]) -> list[Step]:
    """The same steps; those whose records are whole and that lack what lies elsewhere, of ``vanished`` bases or of members, are damaged."""
    from ckpt.concurrency import map_tasks
    from ckpt.io_backends.registry import open_backend
    from ckpt.runs.members import members_problem

    def look(step: Step) -> Step:
        problems: list[str | None] = [f"{name} has vanished, and data files that this needs with it" for name in vanished.get(step.url, ())]
        try:
            problems.append(members_problem(open_backend(step.url.rstrip("/").rpartition("/")[0]), step.members) if step.members else None)
        except FormatError as err:
            problems.append(err.message)
        reason = "; ".join(filter(None, problems))
        return replace(step, committed=False, damaged=True, reason=reason) if reason else step

    return map_tasks(look, steps, 8, "ckpt-list")


def _step_fields(step: Step) -> dict[str, object]:
    fields = asdict(step)
    fields["metrics"] = {name: value if math.isfinite(value) else str(value) for name, value in step.metrics.items()}
    fields["members"] = {name: checkpoint._asdict() for name, checkpoint in step.members.items()}
    return {"step": fields.pop("number"), **fields}


def _step_row(step: Step, stored: int | None) -> tuple[str, ...]:
    status = style("committed", "green") if step.committed else style("damaged" if step.damaged else "unfinished", "red")
    return (
        "" if step.number is None else str(step.number),
        status,
        "" if step.tensor_bytes is None else units.size(step.tensor_bytes),
        "" if stored is None else units.size(stored),
        units.size(step.shared_bytes) if step.shared_bytes else "",
        "" if step.world_size is None else str(step.world_size),
        units.age(step.created) if step.committed else "",
        " ".join(f"{name}={value:.4g}" for name, value in step.metrics.items()),
        ", ".join(step.tags),
        ", ".join([*([f"leads to {step.link}"] if step.link else []), *step.also]),
        "; ".join(
            [
                *([step.reason] if step.reason else []),
                *([f"of {', '.join(step.members)}"] if step.members else []),
                *([f"abandoned: the run went on from step {step.abandoned} without it"] if step.abandoned is not None else []),
                *([f"a part, saved with {step.part}"] if step.part is not None else []),
                *([f"lost: {', '.join(step.lost)}"] if step.lost else []),
            ]
        ),
    )


_COPY_INTERRUPTED = (
    "run the same command again to resume: complete files are not copied again; to give up, remove them with `ckpt gc --yes`"
)


@click.command("cp", short_help="Copy a checkpoint to another storage.")
@click.argument("source", metavar="SRC", type=URL)
@click.argument("target", metavar="DST", type=URL)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Threads that read and write. [default: 8]")
@click.option("--compare", is_flag=True, help="Read and compare every byte, also where an object store could copy by itself.")
@click.option("--dry-run", is_flag=True, help="Only report what would be copied.")
@divisible
@options
def cp(source: str, target: str, *, threads: int | None, compare: bool, dry_run: bool, output: Output) -> None:
    """Copy the checkpoint at SRC to DST; both are URLs of any storage. If DST ends in /, the copy gets the name of SRC below it.

    Every byte is checked against its digest. An object store may copy files itself; --compare reads these, too. DST cannot be opened until
    it is complete. After an interruption the same command resumes. Another checkpoint at DST is never replaced, and nothing is put beside
    other files. The copy of a virtual checkpoint is self-contained. Under torchrun or srun the processes share the files among them.

    \b
    Example:
      ckpt cp runs/a/step-00001000 s3://bucket/runs/a/
      ckpt cp gs://bucket/runs/a/step-00001000 /local/disk/step-00001000
    """
    from ckpt.formats.native.commit import read_record
    from ckpt.io_backends.registry import join_url, open_backend

    above, _, name = target.rpartition("/")
    record = None
    with suppress(StorageError) if name else nullcontext():  # what is above may be nobody's to read
        record = read_record(open_backend(above)) if above and not above.endswith(":/") else None
    if record is not None:
        message = "this is a checkpoint itself; a copy inside it would be hidden"
        raise ConflictError(message, where=above, hint="name the directory of a run, or a new directory without / at its end")
    if target.endswith("/"):
        target = join_url(target, source.rstrip("/").rpartition("/")[2])
    with divided(target, output, single=False) as (work, output):
        with when_interrupted("nothing was written" if dry_run else _COPY_INTERRUPTED), progress("cp", output) as update:
            report = _copy(source, target, threads=threads, compare=compare, progress=update, dry_run=dry_run, work=work)
        if output.json:
            output.document({**asdict(report), "dry_run": dry_run})
        elif not output.quiet:
            output.line(_copied(report, dry_run=dry_run))


def _copy(
    source: str, target: str, *, threads: int | None, compare: bool, progress: Update, dry_run: bool, work: DividedWork | None
) -> CopyReport:
    """Copy the files; of a virtual checkpoint, which has none, make a self-contained one."""
    from ckpt.engine.copy import CopyReport, copy_checkpoint
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

    made = convert(source, target, to="native", part=work, threads=threads, progress=progress, dry_run=dry_run)
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


def _copied(report: CopyReport, *, dry_run: bool) -> str:
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


@click.command("tag", short_help="Add or remove tags, which protect a checkpoint from removal.")
@click.argument("url", type=URL)
@click.argument("tags", nargs=-1)
@click.option("-d", "--delete", is_flag=True, help="Remove the TAGS.")
@options
def tag(url: str, tags: tuple[str, ...], *, delete: bool, output: Output) -> None:
    """Add TAGS to the checkpoint at URL; without TAGS, list those that it has. Tagged checkpoints are never removed.

    \b
    Example:
      ckpt tag runs/a/step-00001000 release-1
      ckpt tag -d runs/a/step-00001000 release-1
    """
    from ckpt.formats.native.writer import set_tags
    from ckpt.formats.registry import open_catalog
    from ckpt.io_backends.registry import open_backend
    from ckpt.runs.step_listing import list_steps

    if delete and not tags:
        raise UsageError("-d needs the TAGS to remove", hint=f"ckpt tag {url} lists them")
    odd = [tag for tag in tags if not tag or tag.split() != [tag]]
    if odd and not delete:  # there may be one of an earlier release
        raise UsageError(f"{odd[0]!r} is not a tag: a tag is a word without spaces", hint="give several tags as several arguments")
    steps = list_steps(url)
    if not (steps and steps[0].members):
        open_catalog(url)  # so that a tag never keeps what cannot be opened
    if not steps:
        hint = "`ckpt import` creates a checkpoint of ckpt's own format that references this one"
        raise FormatError("only checkpoints of ckpt's own format have tags", where=url, hint=hint)
    has = set(steps[0].tags)
    missing = sorted(set(tags) - has) if delete else []
    if missing:
        none = "it has no tags, so nothing is to be removed; `ckpt ls` of the run shows which checkpoints have any"
        hint = f"it has {', '.join(sorted(has))}" if has else none
        raise UsageError(f"the checkpoint has no tag {', '.join(missing)}", where=url, hint=hint)
    wanted = has - set(tags) if delete else has | set(tags)
    if wanted != has:
        set_tags(open_backend(url), wanted, id=steps[0].id, instead_of=has)
    if output.json:
        output.document({"url": url, "tags": sorted(wanted)})
    else:
        for tag in sorted(wanted):
            output.line(tag)


@click.command("rm", short_help="Remove one checkpoint.")
@click.argument("url", type=URL)
@click.option("--yes", is_flag=True, help="Remove. Without it, only show what would be removed.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed; the default.")
@options
def rm(url: str, *, yes: bool, dry_run: bool, output: Output) -> None:
    """Show what removing the checkpoint at URL would free; with --yes, remove it. URL is on any storage.

    A checkpoint stays if it is tagged, if others of its run refer to its files or point into them, or if a part of a state needs it. Files
    that do not belong to the checkpoint stay, too. Of a symbolic link, only the link is removed.

    \b
    Example:
      ckpt rm runs/a/step-00001000
      ckpt rm s3://bucket/runs/a/step-00001000 --yes
    """
    from ckpt.io_backends.registry import open_backend
    from ckpt.runs.removal import named_removal
    from ckpt.runs.step_listing import stored_sizes

    if yes and dry_run:
        raise UsageError("--yes and --dry-run contradict each other")
    going = named_removal(url.rstrip("/"))
    link = going.step.link
    size = 0 if link is not None else sum(stored_sizes([going.step]).values())
    left: list[str] = []
    if yes:
        going.remove()
        left = open_backend(going.step.url).list_dir() if link is None else []
    if output.json:
        step = going.step
        output.document({"url": step.url, "step": step.number, "id": step.id, "link": link, "bytes": size, "removed": yes, "left": left})
        return
    what = f"the link {going.step.url} to {link}" if link is not None else f"{going.step.url}, {units.size(size)}"
    if output.quiet:
        output.line(going.step.url)
    elif yes:
        rest = f"; other files stay there: {', '.join(left[:5])}" if left else ""
        output.line(f"{style('removed', 'red')}: {what}{rest}")
    else:
        output.line(f"{style('would remove', 'red')}: {what}; --yes removes it")
