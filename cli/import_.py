"""``ckpt import``: creates a virtual checkpoint, which references files of other tools."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ckpt import units
from ckpt.cli.console.interrupts import when_interrupted
from ckpt.cli.console.options import MappingChoice, left_out_message, mapping_options, skip_option, views_of
from ckpt.cli.console.output import URL, Output, options, progress, style

if TYPE_CHECKING:
    from ckpt.converters.importer import ImportReport


@click.command("import", short_help="Create a checkpoint that references files of another one.")
@click.argument("source", metavar="SRC", type=URL)
@click.argument("target", metavar="DST", type=URL)
@mapping_options
@skip_option
@click.option("--only", multiple=True, metavar="GLOB", help="Include only tensors and values whose new name matches GLOB. Repeatable.")
@click.option("--digest", is_flag=True, help="Read all bytes once and record their digests, so that every load verifies them.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint at DST.")
@options
def command(
    source: str,
    target: str,
    *,
    mapping: MappingChoice,
    skip: tuple[str, ...],
    only: tuple[str, ...],
    digest: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
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

    output = Output(json=as_json, quiet=quiet)
    views = views_of(source, mapping)
    with when_interrupted("nothing was written; the same command starts from the beginning"), progress("import", output) as update:
        report = import_checkpoint(source, target, views=views, only=only, skip=skip, digest=digest, overwrite=overwrite, progress=update)
    if output.json:
        output.document(asdict(report))
    elif not output.quiet:
        output.line(_sentence(report))
        if report.left_out:
            output.talk(left_out_message(report.left_out))


def _sentence(report: ImportReport) -> str:
    contents = f"{units.plural(report.tensors, 'tensor')}, {units.size(report.tensor_bytes)} in {units.plural(report.sources, 'file')}"
    verdict = style("ok", "green")
    return f"{verdict}: {report.url}: {contents} ({report.format}), referenced in {units.duration(report.seconds)}"
