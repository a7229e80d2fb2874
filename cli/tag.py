"""``ckpt tag``: adds and removes tags, which protect a checkpoint from removal."""

from __future__ import annotations

import click

from ckpt.cli.console.output import URL, Output, options
from ckpt.errors import FormatError, UsageError


@click.command("tag", short_help="Add or remove tags, which protect a checkpoint from removal.")
@click.argument("url", type=URL)
@click.argument("tags", nargs=-1)
@click.option("-d", "--delete", is_flag=True, help="Remove the TAGS.")
@options
def command(url: str, tags: tuple[str, ...], *, delete: bool, as_json: bool, quiet: bool) -> None:
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

    output = Output(json=as_json, quiet=quiet)
    if delete and not tags:
        raise UsageError("-d needs the TAGS to remove", hint=f"ckpt tag {url} lists them")
    odd = [tag for tag in tags if not tag or tag.split() != [tag]]
    if odd and not delete:  # there may be one of an earlier release
        raise UsageError(f"{odd[0]!r} is no tag: a tag is a word without spaces", hint="give several tags as several arguments")
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
