"""``ckpt convert``, ``import`` and ``rebuild``: make checkpoints from other formats and from damaged ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import click

from ckpt import units
from ckpt.errors import UsageError
from ckpt.needs import require_torch
from ckpt.text import parse_json

from .dividing import divided, divisible
from .interrupts import nothing_begun, when_interrupted
from .options import (
    INTERRUPTED,
    MappingChoice,
    file_options,
    grouped,
    left_out_message,
    mapping_options,
    parse_numbers,
    parse_size,
    part_of_job,
    skip_option,
    tell_written,
    views_of,
)
from .output import URL, GroupedCommand, OneOf, Output, options, progress, style

if TYPE_CHECKING:
    from ckpt.converters.convert import RepairReport
    from ckpt.converters.target import Argument
    from ckpt.formats.native.rebuild import RebuildReport


_TARGETS = ("native", "hf", "torch", "dcp", "torch_dist", "megatron")
_RANKS = click.IntRange(min=1)
_SHOWN = 10
"""Repaired tensors that are listed for people."""


def megatron_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The ranks that ``--to megatron`` writes for; the command takes them as ``parallel``, None if no option is given."""

    @wraps(command)
    def with_ranks(
        *args: Any, tp: int | None, pp: int | None, vpp: int | None, ep: int | None, arguments: tuple[str, ...], **options: Any
    ) -> Any:
        if (tp, pp, vpp, ep) == (None,) * 4 and not arguments:
            return command(*args, parallel=None, **options)
        from ckpt.converters.target import MegatronParallel

        given = dict(map(_argument, arguments))
        parallel = MegatronParallel(tensor=tp or 1, pipeline=pp or 1, virtual=vpp or 1, expert=ep or 1, arguments=given)
        return command(*args, parallel=parallel, **options)

    option = partial(grouped, "Megatron (--to megatron)")
    options = (
        option("--tp", type=_RANKS, metavar="N", help="Tensor-parallel ranks. [default: 1]"),
        option("--pp", type=_RANKS, metavar="N", help="Pipeline-parallel ranks. [default: 1]"),
        option("--vpp", type=_RANKS, metavar="N", help="Virtual stages on each pipeline rank. [default: 1]"),
        option("--ep", type=_RANKS, metavar="N", help="Expert-parallel ranks. [default: 1]"),
        option("--arg", "arguments", multiple=True, metavar="NAME=VALUE", help="An argument of the job, by its name in args. Repeatable."),
    )
    for add in reversed(options):
        with_ranks = add(with_ranks)
    return with_ranks


@click.command("convert", cls=GroupedCommand, short_help="Convert a checkpoint to another format.")
@click.argument("source", metavar="SRC", type=URL)
@click.argument("target", metavar="DST", type=URL)
@grouped("Output", "--to", required=True, metavar="FORMAT", type=OneOf(_TARGETS, open_ended=True), help=f"One of {', '.join(_TARGETS)}.")
@grouped("Output", "--dtype", metavar="DTYPE", help="Cast floating-point tensors, except those of optimizers: bfloat16, float16, …")
@file_options("DST")
@grouped("Source", "--root", metavar="KEY", help="Key of the state that contains the model. [default: the only one; torch_dist: model]")
@grouped("Source", "--repair", is_flag=True, help="Repair optimizer states that Megatron-Core 0.15 to 0.19 misplaced.")
@grouped("Source", "--job", multiple=True, metavar="NAME=N", help="For --repair: a job argument that the files do not contain.")
@grouped("Selection", "--only", multiple=True, metavar="GLOB", help="Convert only tensors whose new name matches GLOB. Repeatable.")
@grouped("Selection", "--exclude", multiple=True, metavar="GLOB", help="Leave out tensors whose new name matches GLOB. Repeatable.")
@skip_option
@grouped("Selection", "--optimizer/--no-optimizer", default=True, help="Include optimizer states (default) or not; hf never does.")
@mapping_options
@grouped("Resources", "--memory", callback=parse_size, metavar="SIZE", default="1GiB", show_default=True, help="Memory for tensors.")
@grouped("Resources", "--threads", type=click.IntRange(min=1), metavar="N", help="Reading threads. [default: cores, at most 4]")
@megatron_options
@divisible
@options
def convert(
    source: str,
    target: str,
    *,
    to: str,
    mapping: MappingChoice,
    job: tuple[str, ...],
    config: str | None,
    dry_run: bool,
    output: Output,
    **chosen: Any,
) -> None:
    """Convert the checkpoint at SRC, in any format that ckpt reads, and write it to DST. Memory use stays below --memory at any size.

    DST is a directory; for torch a file, and for hf a file if it ends in .safetensors. Nothing can be opened at DST until the conversion
    is complete. After an interruption the same command resumes. Under torchrun or srun the processes share the files among them.

    \b
    Example:
      ckpt convert --to hf --config hf/Llama-3-8B runs/a/step-00001000 out/
      ckpt convert --to hf --names llama --convention huggingface m/step-100 out/
      ckpt convert --to torch_dist megatron/iter_0001000 resharded/
      ckpt convert --to torch --no-optimizer runs/a/step-00001000 model.pt
      ckpt convert --to native --repair megatron/iter_0001000 mended/
      ckpt convert --to megatron --tp 4 --names llama --convention megatron hf/ m/
      torchrun --nproc-per-node 4 -m ckpt convert --to native a/ b/
    """
    require_torch("`ckpt convert`")
    with nothing_begun():
        from ckpt.converters.convert import convert

    with divided(target, output, apart=True) as (work, output):
        with when_interrupted("nothing was written; run the command again"):
            views = views_of(source, mapping, config)
        chosen |= {"views": views, "config": config, "job": parse_numbers(job, "--job", "data_parallel_size=12")}
        with when_interrupted("nothing was written" if dry_run else INTERRUPTED), progress("convert", output) as update:
            report = convert(source, target, to=to, part=part_of_job(work), dry_run=dry_run, progress=update, **chosen)
        if output.json:
            output.document({**asdict(report), "repair": _repair_fields(report.repair), "dry_run": dry_run})
        elif not output.quiet:
            formats = f" ({report.source_format} to {report.to})"
            tell_written(report, output, dry_run=dry_run, verb="convert", detail=formats)
            for path in report.files if dry_run else ():
                output.line(f"  {path}")
            if report.repair is not None:
                _tell_repair(report.repair, output, dry_run=dry_run)
            if report.to == "hf" and report.finished and report.source_format.startswith("Megatron") and views is None:
                hint = "add --names llama --convention huggingface"
                output.talk(f"the tensors still have Megatron's names, which transformers does not load: {hint}")


def _tell_repair(repair: RepairReport, output: Output, *, dry_run: bool) -> None:
    if not repair.needed:
        output.line(f"nothing to repair: {repair.reason}")
        return
    done = "would be " if dry_run else ""
    elements = f"{repair.mended:,} elements {done}repaired, {repair.filled:,} lost ones {done}filled"
    output.line(f"repaired: {units.plural(len(repair.tensors), 'tensor')}, {elements}: {repair.reason}")
    size = "one bucket" if repair.bucket_size is None else f"buckets of {repair.bucket_size:,} elements"
    output.line(f"  {size}, {repair.data_parallel} ranks; {units.plural(repair.masters, 'master')} fit their weights")
    for tensor in repair.tensors[:_SHOWN]:
        output.line(f"  {tensor.tensor}: {tensor.mended:,} repaired, {tensor.filled:,} filled")
    if len(repair.tensors) > _SHOWN:
        output.line(f"  and {len(repair.tensors) - _SHOWN} more: --json lists all")


def _repair_fields(repair: RepairReport | None) -> dict[str, Any] | None:
    if repair is None:
        return None
    tensors = [tensor._asdict() for tensor in repair.tensors]
    return {**asdict(repair), "mended": repair.mended, "filled": repair.filled, "tensors": tensors}


def _argument(text: str) -> tuple[str, Argument]:
    """``NAME=VALUE``: null, true, false and numbers as JSON has them, all else as text."""
    name, equals, value = text.partition("=")
    if not name.isidentifier() or not equals:
        raise UsageError(f"--arg expects NAME=VALUE, not {text!r}", hint="--arg num_attention_heads=32, --arg transformer_impl=local")
    try:
        parsed = parse_json(value)
    except ValueError:
        return name, value
    return name, value if isinstance(parsed, (list, dict)) else parsed


@click.command("import", short_help="Create a checkpoint that references files of another one.")
@click.argument("source", metavar="SRC", type=URL)
@click.argument("target", metavar="DST", type=URL)
@mapping_options
@skip_option
@click.option("--only", multiple=True, metavar="GLOB", help="Include only tensors and values whose new name matches GLOB. Repeatable.")
@click.option("--digest", is_flag=True, help="Read all bytes once and record their digests, so that every load verifies them.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at DST.")
@options
def import_(
    source: str,
    target: str,
    *,
    mapping: MappingChoice,
    skip: tuple[str, ...],
    only: tuple[str, ...],
    digest: bool,
    overwrite: bool,
    output: Output,
) -> None:
    """Create a virtual checkpoint at DST: an index that references the files at SRC, which stay where they are.

    ckpt.load, ckpt.open and all commands read it like any other checkpoint; `ckpt cp` makes a self-contained copy of it. A source file
    that changes later is detected by its size and modification time; with --digest, every byte is verified.

    \b
    Example:
      ckpt import /models/Llama-3-8B imported/llama
      ckpt import --names llama --convention megatron /models/Llama-3-8B imports/m
      ckpt import --names llama --convention huggingface --skip '*.master' m/ hf/
      ckpt import --digest runs/deepspeed/global_step100 imported/step-100
    """
    from ckpt.converters.importer import import_checkpoint

    views = views_of(source, mapping)
    with when_interrupted("nothing was written; the same command starts from the beginning"), progress("import", output) as update:
        report = import_checkpoint(source, target, views=views, only=only, skip=skip, digest=digest, overwrite=overwrite, progress=update)
    if output.json:
        output.document(asdict(report))
    elif not output.quiet:
        contents = f"{units.plural(report.tensors, 'tensor')}, {units.size(report.tensor_bytes)} in {units.plural(report.sources, 'file')}"
        took = units.duration(report.seconds)
        output.line(f"{style('ok', 'green')}: {report.url}: {contents} ({report.format}), referenced in {took}")
        if report.left_out:
            output.talk(left_out_message(report.left_out))


@click.command("rebuild", short_help="Rebuild a lost or damaged index from the data files.")
@click.argument("url", type=URL)
@click.option(
    "--id", "id", metavar="ID", help="The save to rebuild: the prefix of its files in data/. Only needed without a commit record."
)
@click.option("--dry-run", is_flag=True, help="Only report what would be rebuilt.")
@options
def rebuild(url: str, *, id: str | None, dry_run: bool, output: Output) -> None:
    """Rebuild the index of the checkpoint at URL: checkpoint.json, and the files in index-*/ that are missing or damaged.

    Every data file lists its tensors. Index files that are intact are kept. Aliases, padding and plain values that are lost with
    their index file cannot be rebuilt; the command names what is lost. Data files are never changed.

    Only headers are read: run ckpt verify afterwards to compare every byte.

    \b
    Example:
      ckpt rebuild --dry-run runs/a/step-00001000
      ckpt rebuild runs/a/step-00001000
      ckpt verify runs/a/step-00001000
    """
    from ckpt.formats.native.rebuild import rebuild_checkpoint

    report = rebuild_checkpoint(url, id=id, dry_run=dry_run)
    if output.json:
        output.document(asdict(report))
    elif not output.quiet:
        output.line(_rebuilt(report))
        if "values" in report.lost:
            output.talk("`Checkpointer.restore` passes over it if the state needs its values, and takes an older step with a warning;")
            output.talk("`restore(state, step=…, strict=False)` and `ckpt.load(…, strict=False)` load its tensors")
        if report.rebuilt and not dry_run:
            output.talk(f"`ckpt verify {url}` compares every byte")


def _rebuilt(report: RebuildReport) -> str:
    size = f"{units.plural(report.tensors, 'tensor')} ({units.size(report.bytes)}) in {units.plural(report.files, 'data file')}"
    lost = f"; lost: {', '.join(report.lost)}" if report.lost else "; nothing is lost" if report.rebuilt else ""
    if not report.rebuilt:
        return f"{style('ok', 'green')}: {report.url}: the index of save {report.id} is intact: {size}{lost}"
    if report.dry_run:
        return f"would rebuild the index of save {report.id} at {report.url}: {size}{lost}"
    return f"{style('ok', 'green')}: {report.url}: the index of save {report.id} is rebuilt: {size}{lost}"
