"""``ckpt rebuild``: a lost index, made again from the data files."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ckpt import units
from ckpt.cli.console.output import URL, Output, options, style

if TYPE_CHECKING:
    from ckpt.runs.rebuild import RebuildReport


@click.command("rebuild", short_help="Rebuild a lost or damaged index from the data files.")
@click.argument("url", type=URL)
@click.option(
    "--id", "id", metavar="ID", help="The save to rebuild: what its files in data/ begin with. Only needed without a commit record."
)
@click.option("--dry-run", is_flag=True, help="Only report what would be rebuilt.")
@options
def command(url: str, *, id: str | None, dry_run: bool, as_json: bool, quiet: bool) -> None:
    """Make the index of the checkpoint at URL again: checkpoint.json, and the files in index-*/ that are missing or damaged.

    Every data file says which tensors it holds. Index files that are intact are kept. Aliases, padding and plain values that are lost with
    their index file cannot be rebuilt; the command names what is lost. Data files are never changed.

    Only headers are read: run ckpt verify afterwards to compare every byte.

    \b
    Example:
      ckpt rebuild --dry-run runs/a/step-00001000
      ckpt rebuild runs/a/step-00001000
      ckpt verify runs/a/step-00001000
    """
    from ckpt.runs.rebuild import rebuild_checkpoint

    output = Output(json=as_json, quiet=quiet)
    report = rebuild_checkpoint(url, id=id, dry_run=dry_run)
    if output.json:
        output.document(asdict(report))
    elif not output.quiet:
        output.line(_sentence(report))
        if "values" in report.lost:
            output.talk("`Checkpointer.restore` passes over it if the state needs its values, and takes an older step with a warning;")
            output.talk("`restore(state, step=…, strict=False)` and `ckpt.load(…, strict=False)` load its tensors")
        if report.rebuilt and not dry_run:
            output.talk(f"`ckpt verify {url}` compares every byte")


def _sentence(report: RebuildReport) -> str:
    size = f"{units.plural(report.tensors, 'tensor')} ({units.size(report.bytes)}) in {units.plural(report.files, 'data file')}"
    lost = f"; lost: {', '.join(report.lost)}" if report.lost else "; nothing is lost" if report.rebuilt else ""
    if not report.rebuilt:
        return f"{style('ok', 'green')}: {report.url}: the index of save {report.id} is intact: {size}{lost}"
    if report.dry_run:
        return f"would rebuild the index of save {report.id} at {report.url}: {size}{lost}"
    return f"{style('ok', 'green')}: {report.url}: the index of save {report.id} is rebuilt: {size}{lost}"
