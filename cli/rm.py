"""``ckpt rm``: removes one checkpoint."""

from __future__ import annotations

import click

from ckpt import units
from ckpt.cli.console.output import URL, Output, options, style
from ckpt.errors import UsageError


@click.command("rm", short_help="Remove one checkpoint.")
@click.argument("url", type=URL)
@click.option("--yes", is_flag=True, help="Remove. Without it, only say what would be removed.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed; the default.")
@options
def command(url: str, *, yes: bool, dry_run: bool, as_json: bool, quiet: bool) -> None:
    """Say what removing the checkpoint at URL would free; with --yes, remove it. URL is on any storage.

    A checkpoint stays if it is tagged, if others of its run refer to its files or point into them, or if a part of a state needs it. Files
    that are no part of the checkpoint stay, too. Of a symbolic link only the link goes.

    \b
    Example:
      ckpt rm runs/a/step-00001000
      ckpt rm s3://bucket/runs/a/step-00001000 --yes
    """
    from ckpt.io_backends.registry import open_backend
    from ckpt.runs.named_removal import named_removal
    from ckpt.runs.step_listing import stored_sizes

    if yes and dry_run:
        raise UsageError("--yes and --dry-run contradict each other")
    output = Output(json=as_json, quiet=quiet)
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
    if quiet:
        output.line(going.step.url)
    elif yes:
        rest = f"; other files stay there: {', '.join(left[:5])}" if left else ""
        output.line(f"{style('removed', 'red')}: {what}{rest}")
    else:
        output.line(f"{style('would remove', 'red')}: {what}; --yes removes it")
