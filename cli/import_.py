"""``ckpt import``: a virtual checkpoint of somebody else's files."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ckpt.errors import UsageError

from . import units
from .output import Output, options
from .progress import progress

if TYPE_CHECKING:
    from ckpt.converters.importing import ImportReport


@click.command("import", short_help="Point a checkpoint at the files of another, of any format.")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--to", "spelling", metavar="SPELLING", help="Names of the tensors: huggingface, transformers, megatron or plain.")
@click.option("--names", "translation", metavar="NAMES", help="The translation to use: one that comes with ckpt, or a .toml file.")
@click.option("--set", "numbers", multiple=True, metavar="NAME=N", help="A number of the model that its files do not tell.")
@click.option("--only", multiple=True, metavar="GLOB", help="Only tensors whose (new) name fits GLOB; several: any of them.")
@click.option("--digest", is_flag=True, help="Read all bytes once, so that every load can verify them.")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint that is at DST.")
@options
def command(
    source: str,
    target: str,
    *,
    spelling: str | None,
    translation: str | None,
    numbers: tuple[str, ...],
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
      ckpt import --to megatron --names llama /models/Llama-3-8B imported/m
      ckpt import --digest runs/deepspeed/global_step100 imported/step-100
    """
    from ckpt.converters.importing import import_checkpoint
    from ckpt.converters.spelling import translated

    if (spelling is None) != (translation is None):
        raise UsageError("--to and --names belong together", hint="--to megatron --names llama")
    output = Output(json=as_json, quiet=quiet)
    views = None if spelling is None or translation is None else translated(source, translation, spelling, _numbers(numbers))
    with progress("import", output) as update:
        report = import_checkpoint(source, target, views=views, only=only, digest=digest, overwrite=overwrite, progress=update)
    if output.json:
        output.document(asdict(report))
    elif not output.quiet:
        output.line(_sentence(report))


def _sentence(report: ImportReport) -> str:
    held = f"{units.plural(report.tensors, 'tensor')}, {units.size(report.tensor_bytes)} in {units.plural(report.sources, 'file')}"
    verdict = click.style("ok", fg="green")
    return f"{verdict}: {report.url}: {held} ({report.format}), pointed at in {units.duration(report.seconds)}"


def _numbers(said: tuple[str, ...]) -> dict[str, int]:
    found = {}
    for text in said:
        name, _, value = text.partition("=")
        if not name or not value.isdecimal():
            raise UsageError(f"--set {text!r} is no NAME=N", hint="--set query_groups=8")
        found[name] = int(value)
    return found
