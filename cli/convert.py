"""``ckpt convert``: a checkpoint of any format in another format."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from ckpt.errors import UsageError
from ckpt.io_backends.registry import open_backend
from ckpt.text import units

from .output import Output, options, style
from .progress import progress
from .translating import TranslationChoice, left_out, numbers_in, skipping, translating, views_of

if TYPE_CHECKING:
    from ckpt.converters.convert import ConvertReport
    from ckpt.converters.pipeline.parallel import Argument, MegatronParallel
    from ckpt.converters.pipeline.repair import RepairReport

_RANKS = click.IntRange(min=1)
_RANK_OPTIONS = (
    click.option("--tp", type=_RANKS, help="For megatron: tensor-parallel ranks. [default: 1]"),
    click.option("--pp", type=_RANKS, help="For megatron: pipeline-parallel ranks. [default: 1]"),
    click.option("--vpp", type=_RANKS, help="For megatron: virtual stages on each of them. [default: 1]"),
    click.option("--ep", type=_RANKS, help="For megatron: expert-parallel ranks. [default: 1]"),
    click.option(
        "--arg", "arguments", multiple=True, metavar="NAME=VALUE", help="For megatron: an argument of the job, by its name in args."
    ),
)
_CONFIG = "config.json"
_SHOWN = 10
"""Tensors that were repaired, in the text."""


def _size(text: str) -> int:
    """Bytes: ``5GB``, ``512MiB``, ``1000000``."""
    try:
        return units.parse_size(text)
    except UsageError as err:
        raise click.BadParameter(err.message) from err


def megatron_ranks(command: Callable[..., Any]) -> Callable[..., Any]:
    """The ranks that ``megatron`` is written for; the command takes them as ``parallel``, None if nothing is asked for."""

    @wraps(command)
    def with_ranks(
        *args: Any, tp: int | None, pp: int | None, vpp: int | None, ep: int | None, arguments: tuple[str, ...], **options: Any
    ) -> Any:
        return command(*args, parallel=_parallel(tp, pp, vpp, ep, arguments), **options)

    for option in reversed(_RANK_OPTIONS):
        with_ranks = option(with_ranks)
    return with_ranks


@click.command("convert", short_help="Write a checkpoint in another format.")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--to", required=True, metavar="FORMAT", help="native, hf, torch, dcp; torch_dist or megatron (Megatron-Core).")
@translating
@skipping
@click.option("--only", multiple=True, metavar="GLOB", help="Only tensors whose (new) name fits GLOB; several: any of them.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Not tensors whose (new) name fits GLOB; several: any of them.")
@click.option("--optimizer/--no-optimizer", default=True, help="With the state of optimizers, or without. hf never has it.")
@click.option("--dtype", metavar="DTYPE", help="Convert floating-point tensors, but those of optimizers, to bfloat16, float16, …")
@click.option("--root", metavar="KEY", help="Key of the state that has the model. [default: the only one, for torch_dist model]")
@megatron_ranks
@click.option("--config", metavar="PATH", help="For hf: a config.json, or the directory of a model that has it, and tokenizer files.")
@click.option("--shard-size", type=_size, metavar="SIZE", help="Size of a file, about. [default: 5GB for hf, else 4GiB]")
@click.option("--memory", type=_size, metavar="SIZE", default="1GiB", show_default=True, help="Memory for tensors.")
@click.option("--threads", type=click.IntRange(min=1), help="How many read at once. [default: cores, at most 4]")
@click.option("--verify", is_flag=True, help="Read every file again, and compare it with what was written.")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint that is at DST; for native.")
@click.option("--repair", is_flag=True, help="Mend states of optimizers that Megatron-Core 0.15 to 0.19 displaced.")
@click.option("--job", multiple=True, metavar="NAME=N", help="For --repair: an argument of the Megatron job that its files do not tell.")
@click.option("--dry-run", is_flag=True, help="Only tell what would be written.")
@options
def command(
    source: str,
    target: str,
    *,
    to: str,
    translation: TranslationChoice,
    job: tuple[str, ...],
    config: str | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    **chosen: Any,
) -> None:
    """Write the checkpoint at SRC, of any format that ckpt reads, at DST in another one. Memory stays below a budget, whatever the size.

    If it is interrupted, the same command goes on. Under torchrun the processes divide the files among them. Nothing can be opened at DST
    before all of it is there. DST is a directory; for torch a file, and for hf a file if it ends in .safetensors.

    \b
    Example:
      ckpt convert --to hf --config hf/Llama-3-8B runs/a/step-00001000 out/
      ckpt convert --to hf --names llama --convention huggingface m/step-100 out/
      ckpt convert --to torch_dist megatron/iter_0001000 resharded/
      ckpt convert --to torch --no-optimizer runs/a/step-00001000 model.pt
      ckpt convert --to native --repair megatron/iter_0001000 mended/
      ckpt convert --to megatron --tp 4 --names llama --convention megatron hf/ m/
      torchrun --nproc-per-node 4 --no-python ckpt convert --to native a/ b/
    """
    from ckpt.converters.convert import convert

    output = Output(json=as_json, quiet=quiet)
    views = views_of(source, translation, config)
    chosen |= {"views": views, "config": config, "job": numbers_in(job, "--job", "data_parallel_size=12")}
    with progress("convert", output) as update:
        report = convert(source, target, to=to, part=_part(), dry_run=dry_run, progress=update, **chosen)
    if output.json:
        output.document({**asdict(report), "repair": _repair_fields(report.repair), "dry_run": dry_run})
    elif not output.quiet:
        _tell(report, output, dry_run=dry_run, translated=views is not None)


def _tell(report: ConvertReport, output: Output, *, dry_run: bool, translated: bool) -> None:
    held = f"{units.plural(report.tensors, 'tensor')}, {units.size(report.tensor_bytes)} in {units.plural(len(report.files), 'file')}"
    if dry_run:
        output.line(f"would convert {held} ({report.source_format} to {report.to}), {units.size(report.written_bytes)} to write")
        for path in report.files:
            output.line(f"  {path}")
    else:
        written = f"{units.size(report.written_bytes)} written in {units.duration(report.seconds)}"
        verdict = style("ok", "green") if report.finished else "other processes are not ready yet"
        output.line(f"{verdict}: {report.target}: {held} ({report.source_format} to {report.to}), {written}")
    if report.repair is not None:
        _tell_repair(report.repair, output, dry_run=dry_run)
    if report.left_out:
        output.talk(left_out(report.left_out))
    if report.to == "hf" and report.finished:
        _tell_lacking(report, output, translated=translated)


def _tell_lacking(report: ConvertReport, output: Output, *, translated: bool) -> None:
    """What an export lacks before ``from_pretrained`` takes it."""
    if report.source_format.startswith("Megatron") and not translated:
        output.talk(
            "names are still those of Megatron, which transformers does not load: --names llama --convention huggingface, or another"
        )
    if not report.target.endswith(".safetensors") and _CONFIG not in open_backend(report.target).list_dir():
        output.talk(f"no {_CONFIG} was beside the source, and from_pretrained needs it: --config PATH, or put it into {report.target}")


def _tell_repair(repair: RepairReport, output: Output, *, dry_run: bool) -> None:
    if not repair.needed:
        output.line(f"nothing was to be repaired: {repair.reason}")
        return
    done = "would be " if dry_run else ""
    elements = f"{repair.mended:,} elements {done}mended, {repair.filled:,} lost ones {done}filled"
    output.line(f"repaired: {units.plural(len(repair.tensors), 'tensor')}, {elements}: {repair.reason}")
    size = "one bucket" if repair.bucket_size is None else f"buckets of {repair.bucket_size:,} elements"
    output.line(f"  {size}, {repair.data_parallel} ranks; {units.plural(repair.masters, 'master')} fit their weights")
    for tensor in repair.tensors[:_SHOWN]:
        output.line(f"  {tensor.tensor}: {tensor.mended:,} mended, {tensor.filled:,} filled")
    if len(repair.tensors) > _SHOWN:
        output.line(f"  and {len(repair.tensors) - _SHOWN} more: --json lists all")


def _repair_fields(repair: RepairReport | None) -> dict[str, Any] | None:
    if repair is None:
        return None
    tensors = [tensor._asdict() for tensor in repair.tensors]
    return {**asdict(repair), "mended": repair.mended, "filled": repair.filled, "tensors": tensors}


def _parallel(tp: int | None, pp: int | None, vpp: int | None, ep: int | None, arguments: Sequence[str]) -> MegatronParallel | None:
    """The ranks that the options say; None if they say nothing."""
    if (tp, pp, vpp, ep) == (None,) * 4 and not arguments:
        return None
    from ckpt.converters.pipeline.parallel import MegatronParallel

    said = dict(map(_argument, arguments))
    return MegatronParallel(tensor=tp or 1, pipeline=pp or 1, virtual=vpp or 1, expert=ep or 1, arguments=said)


def _argument(text: str) -> tuple[str, Argument]:
    """``NAME=VALUE``: null, true, false and numbers as JSON has them, all else as text."""
    name, equals, value = text.partition("=")
    if not name.isidentifier() or not equals:
        raise UsageError(f"--arg {text!r} is no NAME=VALUE", hint="--arg num_attention_heads=32, --arg transformer_impl=local")
    try:
        found = json.loads(value)
    except ValueError:
        return name, value
    return name, value if isinstance(found, (list, dict)) else found


def _part() -> tuple[int, int]:
    """Number of this process and how many there are, as torchrun says."""
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise UsageError(f"RANK={rank} of WORLD_SIZE={world} cannot be", hint="unset both, or start with torchrun")
    return int(rank), int(world)
