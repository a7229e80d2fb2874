"""``ckpt import``: a virtual checkpoint of somebody else's files."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ckpt.text import units

from .output import Output, options, style
from .progress import progress
from .translating import TranslationChoice, left_out, skipping, translating, views_of

if TYPE_CHECKING:
    from ckpt.converters.virtual.importer import ImportReport


@click.command("import", short_help="Point a checkpoint at the files of another, of any format.")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@translating
@skipping
@click.option("--only", multiple=True, metavar="GLOB", help="Only tensors and values whose (new) name fits GLOB; several: any of them.")
@click.option("--digest", is_flag=True, help="Read all bytes once, so that every load can verify them.")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint that is at DST.")
@options
def command(
    source: str,
    target: str,
    *,
    translation: TranslationChoice,
    skip: tuple[str, ...],
    only: tuple[str, ...],
    digest: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write a virtual checkpoint at DST: an index that points into the files at SRC, which stay where and as they are.

    ckpt.load, ckpt.open and all commands work on it as on any other. `ckpt cp` makes a copy of its own. A source file that changes later
    is noticed by its size and time; with --digest every byte is verified.

    \b
    Example:
      ckpt import /models/Llama-3-8B imported/llama
      ckpt import --names llama --convention megatron /models/Llama-3-8B imports/m
      ckpt import --names llama --convention huggingface --skip '*.master' m/ hf/
      ckpt import --digest runs/deepspeed/global_step100 imported/step-100
    """
    from ckpt.converters.virtual.importer import import_checkpoint

    output = Output(json=as_json, quiet=quiet)
    views = views_of(source, translation)
    with progress("import", output) as update:
        report = import_checkpoint(source, target, views=views, only=only, skip=skip, digest=digest, overwrite=overwrite, progress=update)
    if output.json:
        output.document(asdict(report))
    elif not output.quiet:
        output.line(_sentence(report))
        if report.left_out:
            output.talk(left_out(report.left_out))


def _sentence(report: ImportReport) -> str:
    held = f"{units.plural(report.tensors, 'tensor')}, {units.size(report.tensor_bytes)} in {units.plural(report.sources, 'file')}"
    verdict = style("ok", "green")
    return f"{verdict}: {report.url}: {held} ({report.format}), pointed at in {units.duration(report.seconds)}"
