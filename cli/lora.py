"""``ckpt lora``: merges an adapter of PEFT into its base model, and extracts one from a tuned model."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import click

from ckpt import units
from ckpt.cli.console.dividing import divided, divisible
from ckpt.cli.console.groups import CommandGroup
from ckpt.cli.console.interrupts import when_interrupted
from ckpt.cli.console.options import INTERRUPTED, config_options, grouped, parse_size, part_of_job
from ckpt.cli.console.output import URL, GroupedCommand, OneOf, Output, options, progress, require_torch, style
from ckpt.errors import UsageError

_TARGETS = ("hf", "native", "torch", "dcp")


@click.group("lora", cls=CommandGroup, short_help="Merge or extract a LoRA adapter.")
def command() -> None:
    """Merge an adapter of PEFT into its base model, or extract one from a tuned model.

    \b
    Example:
      ckpt lora merge hf/Llama-3-8B adapter/ merged/
      ckpt lora extract hf/Llama-3-8B tuned/ adapter/ --rank 16
    """


_root = grouped("Source", "--root", metavar="KEY", help="Key of the state that contains the model. [default: the only one]")
_threads = grouped("Resources", "--threads", type=click.IntRange(min=1), metavar="N", help="Reading threads. [default: cores, at most 4]")


@command.command("merge", cls=GroupedCommand, short_help="Write a model with an adapter merged into it.")
@click.argument("base", metavar="BASE", type=URL)
@click.argument("adapter", metavar="ADAPTER", type=URL)
@click.argument("target", metavar="OUT", type=URL)
@grouped("Output", "--to", default=_TARGETS[0], metavar="FORMAT", type=OneOf(_TARGETS), help=f"One of {', '.join(_TARGETS)}. [default: hf]")
@config_options
@grouped("Output", "--shard-size", callback=parse_size, metavar="SIZE", help="Approximate file size. [default: hf 5GB, others 4GiB]")
@grouped("Output", "--overwrite", is_flag=True, help="Replace a checkpoint at OUT; native only.")
@grouped("Output", "--verify", is_flag=True, help="Read each written file again and compare it.")
@grouped("Output", "--dry-run", is_flag=True, help="Only list what would be written.")
@_root
@grouped("Source", "--allow-nan", is_flag=True, help="Accept NaN and infinite elements.")
@grouped("Resources", "--memory", callback=parse_size, metavar="SIZE", default="1GiB", show_default=True, help="Memory for tensors.")
@_threads
@divisible
@options
def merge_(base: str, adapter: str, target: str, *, dry_run: bool, as_json: bool, quiet: bool, **chosen: Any) -> None:
    """Write the model at BASE, in any format, to OUT with the LoRA adapter of PEFT in the directory ADAPTER merged into its weights.

    Products are computed in float32, added and cast to the dtype of the weight. Memory use stays below --memory at any size. After an
    interruption the same command resumes. Under torchrun or srun the processes share the files among them.

    \b
    Example:
      ckpt lora merge hf/Llama-3-8B adapter/ merged/
      ckpt lora merge runs/base/step-100 adapter/ merged/ --config hf/Llama-3-8B
    """
    require_torch("`ckpt lora`")
    from ckpt.converters.lora import merge

    with divided(target, Output(json=as_json, quiet=quiet), apart=True) as (work, output):
        with when_interrupted("nothing was written" if dry_run else INTERRUPTED), progress("lora merge", output) as update:
            report = merge(base, adapter, target, part=part_of_job(work), dry_run=dry_run, progress=update, **chosen)
        written = report.written
        if output.json:
            output.document({**asdict(report), "dry_run": dry_run})
        elif not output.quiet:
            changes = f"{units.plural(report.updated, 'weight')} updated, {units.plural(report.replaced, 'tensor')} replaced"
            contents = f"{units.plural(written.tensors, 'tensor')}, {units.size(written.tensor_bytes)}; {changes}"
            verdict = "this part is done, others are not yet" if not written.finished else style("ok", "green")
            output.line(f"would write {contents}" if dry_run else f"{verdict}: {written.target}: {contents}")
            for note in written.notes if written.finished else ():
                output.talk(note)


@command.command("extract", cls=GroupedCommand, short_help="Write the adapter between a base and a tuned model.")
@click.argument("base", metavar="BASE", type=URL)
@click.argument("tuned", metavar="TUNED", type=URL)
@click.argument("target", metavar="OUT", type=URL)
@grouped("Output", "--rank", type=click.IntRange(min=1), metavar="R", required=True, help="Rank of the adapter.")
@_root
@_threads
@options
def extract_(base: str, tuned: str, target: str, *, rank: int, root: str | None, threads: int | None, as_json: bool, quiet: bool) -> None:
    """Write the adapter of rank R that comes nearest to the difference between the models at TUNED and BASE to the directory OUT. It says
    how much of the difference the adapter lacks.

    \b
    Example:
      ckpt lora extract hf/Llama-3-8B tuned/ adapter/ --rank 16
    """
    require_torch("`ckpt lora`")
    from ckpt.converters.lora import extract

    output = Output(json=as_json, quiet=quiet)
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
