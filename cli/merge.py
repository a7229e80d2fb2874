"""``ckpt merge`` averages checkpoints, ``ckpt lora`` merges an adapter of PEFT into its base model, or extracts one."""

from __future__ import annotations

import os
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import click

from ckpt import units
from ckpt.errors import UsageError
from ckpt.needs import require_torch

from .dividing import divided, divisible
from .interrupts import when_interrupted
from .options import (
    INTERRUPTED,
    CommandGroup,
    MappingChoice,
    file_options,
    grouped,
    mapping_options,
    parse_size,
    part_of_job,
    skip_option,
    tell_written,
    views_of,
)
from .output import URL, GroupedCommand, OneOf, Output, options, progress, style

_TARGETS = ("native", "hf", "torch", "dcp")
_SCHEDULES = ("linear", "cosine", "sqrt")


def _parse_weights(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[float, ...] | None:
    """Numbers and fractions: ``0.5,0.3,0.2``, ``1/3,2/3``."""
    if text is None:
        return None
    try:
        return tuple(float(Fraction(part.strip())) for part in text.split(","))
    except (ValueError, ZeroDivisionError, OverflowError) as err:
        raise click.BadParameter(f"{text!r} is no list of numbers such as 0.5,0.3,0.2 or 1/3,2/3") from err


@click.command("merge", cls=GroupedCommand, short_help="Average several checkpoints.")
@click.argument("target", metavar="OUT", type=URL)
@click.argument("sources", metavar="SRC...", type=URL, nargs=-1, required=True)
@grouped("Average", "--weights", callback=_parse_weights, metavar="W,W,...", help="One weight for each SRC. [default: equal ones]")
@grouped("Average", "--last", type=click.IntRange(min=2), metavar="N", help="SRC is a run: average its newest N checkpoints.")
@grouped("Average", "--schedule", type=OneOf(_SCHEDULES), metavar="NAME", help=f"Weights that replace a decay: {', '.join(_SCHEDULES)}.")
@grouped("Average", "--any-sum", is_flag=True, help="Accept weights whose sum is not 1.")
@grouped("Average", "--values-from", type=click.IntRange(min=1), metavar="N", help="SRC with the values. [default: 1; --last: the newest]")
@grouped("Average", "--copy", multiple=True, metavar="GLOB", help="Copy tensors that match GLOB from that SRC, too. Repeatable.")
@grouped("Average", "--allow-nan", is_flag=True, help="Accept NaN and infinite elements.")
@grouped(
    "Output", "--to", default="native", show_default=True, metavar="FORMAT", type=OneOf(_TARGETS), help=f"One of {', '.join(_TARGETS)}."
)
@grouped("Output", "--dtype", metavar="DTYPE", help="Dtype of averaged tensors, except those of optimizers. [default: as they are stored]")
@file_options("OUT")
@grouped("Selection", "--root", metavar="KEY", help="For hf: key of the state that contains the model. [default: the only one]")
@grouped("Selection", "--only", multiple=True, metavar="GLOB", help="Average only tensors whose new name matches GLOB. Repeatable.")
@grouped("Selection", "--exclude", multiple=True, metavar="GLOB", help="Leave out tensors whose new name matches GLOB. Repeatable.")
@skip_option
@grouped("Selection", "--optimizer/--no-optimizer", default=False, help="Average optimizer states too, or leave them out (default).")
@mapping_options
@grouped("Resources", "--memory", callback=parse_size, metavar="SIZE", default="1GiB", show_default=True, help="Memory for tensors.")
@grouped("Resources", "--threads", type=click.IntRange(min=1), metavar="N", help="Reading threads. [default: cores, at most 4]")
@divisible
@options
def merge(
    target: str,
    sources: tuple[str, ...],
    *,
    last: int | None,
    values_from: int | None,
    mapping: MappingChoice,
    config: str | None,
    dry_run: bool,
    output: Output,
    **chosen: Any,
) -> None:
    """Write the weighted average of the checkpoints SRC to OUT. They may have any formats and layouts, and must have the same tensors.

    Floating-point tensors are averaged in float32, in the order of the arguments, and cast back; other tensors must be equal. Step,
    options and other values come from one SRC. Optimizers are left out. Memory use stays below --memory at any size. After an interruption
    the same command resumes. Under torchrun or srun the processes share the files among them.

    \b
    Example:
      ckpt merge out/ runs/a/step-100 runs/a/step-200 --weights 0.3,0.7
      ckpt merge out/ --last 5 runs/a --schedule sqrt
      ckpt merge soup/ --to hf --config hf/Llama-3-8B tuned-a/ tuned-b/ tuned-c/
    """
    require_torch("`ckpt merge`")
    from ckpt.converters.merge import last_steps, merge

    with divided(target, output, apart=True) as (work, output):
        if last is not None:
            if len(sources) != 1:
                raise UsageError(f"--last takes one run, not {len(sources)}", hint="ckpt merge OUT --last 5 RUN")
            sources = last_steps(sources[0], last)
            values_from = values_from or last
        if values_from is not None and values_from > len(sources):
            raise UsageError(f"--values-from {values_from}: there are {units.plural(len(sources), 'checkpoint')}")
        views = views_of(sources[0], mapping, config)
        chosen |= {"views": views, "config": config, "values_from": (values_from or 1) - 1}
        with when_interrupted("nothing was written" if dry_run else INTERRUPTED), progress("merge", output) as update:
            report = merge(target, sources, part=part_of_job(work), dry_run=dry_run, progress=update, **chosen)
        if output.json:
            output.document({**asdict(report), "dry_run": dry_run})
        elif not output.quiet:
            tell_written(report.written, output, dry_run=dry_run)
            for source, weight in zip(report.sources, report.weights, strict=True):
                output.line(f"  {weight:.6g} x {source}")
            kinds = f"{report.averaged} averaged, {report.compared} equal in all, {report.copied} copied"
            output.talk(f"tensors: {kinds}; step, options and other values come from {report.values_from}")


@click.group("lora", cls=CommandGroup, short_help="Merge or extract a LoRA adapter.")
def lora() -> None:
    """Merge an adapter of PEFT into its base model, or extract one from a tuned model.

    \b
    Example:
      ckpt lora merge hf/Llama-3-8B adapter/ merged/
      ckpt lora extract hf/Llama-3-8B tuned/ adapter/ --rank 16
    """


_root = grouped("Source", "--root", metavar="KEY", help="Key of the state that contains the model. [default: the only one]")
_threads = grouped("Resources", "--threads", type=click.IntRange(min=1), metavar="N", help="Reading threads. [default: cores, at most 4]")


@lora.command("merge", cls=GroupedCommand, short_help="Write a model with an adapter merged into it.")
@click.argument("base", metavar="BASE", type=URL)
@click.argument("adapter", metavar="ADAPTER", type=URL)
@click.argument("target", metavar="OUT", type=URL)
@grouped("Output", "--to", default="hf", show_default=True, metavar="FORMAT", type=OneOf(_TARGETS), help=f"One of {', '.join(_TARGETS)}.")
@file_options("OUT")
@_root
@grouped("Source", "--adapter-config", metavar="PATH", type=URL, help="adapter_config.json of PEFT, or its directory. [default: ADAPTER]")
@grouped("Source", "--allow-nan", is_flag=True, help="Accept NaN and infinite elements.")
@grouped("Resources", "--memory", callback=parse_size, metavar="SIZE", default="1GiB", show_default=True, help="Memory for tensors.")
@_threads
@divisible
@options
def merge_(base: str, adapter: str, target: str, *, dry_run: bool, output: Output, **chosen: Any) -> None:
    """Write the model at BASE, in any format, to OUT with the LoRA adapter of PEFT in the directory ADAPTER merged into its weights.

    With --adapter-config ADAPTER may be a checkpoint of the model that PEFT adapted, whole or saved with trainable=True.

    Products are computed in float32, added and cast to the dtype of the weight. Memory use stays below --memory at any size. After an
    interruption the same command resumes. Under torchrun or srun the processes share the files among them.

    \b
    Example:
      ckpt lora merge hf/Llama-3-8B adapter/ merged/
      ckpt lora merge runs/base/step-100 adapter/ merged/ --config hf/Llama-3-8B
      ckpt lora merge hf/Llama-3-8B part/ merged/ --adapter-config adapter/
    """
    require_torch("`ckpt lora`")
    from ckpt.converters.lora import merge

    with divided(target, output, apart=True) as (work, output):
        with when_interrupted("nothing was written" if dry_run else INTERRUPTED), progress("lora merge", output) as update:
            report = merge(base, adapter, target, part=part_of_job(work), dry_run=dry_run, progress=update, **chosen)
        if output.json:
            output.document({**asdict(report), "dry_run": dry_run})
        elif not output.quiet:
            changes = f"{units.plural(report.updated, 'weight')} updated, {units.plural(report.replaced, 'tensor')} replaced"
            tell_written(report.written, output, dry_run=dry_run, detail=f"; {changes}")


@lora.command("extract", cls=GroupedCommand, short_help="Write the adapter between a base and a tuned model.")
@click.argument("base", metavar="BASE", type=URL)
@click.argument("tuned", metavar="TUNED", type=URL)
@click.argument("target", metavar="OUT", type=URL)
@grouped("Output", "--rank", type=click.IntRange(min=1), metavar="R", required=True, help="Rank of the adapter.")
@_root
@_threads
@options
def extract_(base: str, tuned: str, target: str, *, rank: int, root: str | None, threads: int | None, output: Output) -> None:
    """Write the adapter of rank R that comes nearest to the difference between the models at TUNED and BASE to the directory OUT. It
    reports the share of the difference that the adapter lacks.

    \b
    Example:
      ckpt lora extract hf/Llama-3-8B tuned/ adapter/ --rank 16
    """
    require_torch("`ckpt lora`")
    from ckpt.converters.lora import extract

    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("extract is work of one process", hint="start it without torchrun")
    with when_interrupted("nothing was written"), progress("lora extract", output) as update:
        report = extract(base, tuned, target, rank=rank, root=root, threads=threads, progress=update)
    if output.json:
        output.document(asdict(report))
    elif not output.quiet:
        products, whole = units.plural(len(report.errors), "product"), units.plural(len(report.whole), "tensor")
        output.line(
            f"{style('ok', 'green')}: {report.url}: {products} of rank {report.rank}, {whole} stored whole, {units.size(report.bytes)}"
        )
        output.line(f"the products lack {report.error:.2%} of the difference (Frobenius norm)")
        for name in sorted(report.errors, key=lambda n: -report.errors[n])[:3]:
            output.line(f"  {name}: {report.errors[name]:.2%}")
