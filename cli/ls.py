"""``ckpt ls``: the checkpoints of a run."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ckpt.text import units

from .output import Output, options, style

if TYPE_CHECKING:
    from ckpt.maintenance.step_listing import Step


@click.command("ls", short_help="List the checkpoints of a run.")
@click.argument("root")
@options
def command(root: str, *, as_json: bool, quiet: bool) -> None:
    """List the checkpoints below ROOT, the newest step last.

    ROOT is the directory that holds the steps of a run, or a single checkpoint. Saves that did not finish and damaged
    checkpoints are listed with the reason, checkpoints of other formats with the name of the format. A step that is a link says
    where it leads; links such as `latest` are named beside the step that they lead to. -q prints only the URLs of committed ones.

    \b
    Example:
      ckpt ls runs/a
      ckpt ls -q runs/a | tail -1     # the newest that can be loaded
    """
    from ckpt.formats.registry import list_foreign
    from ckpt.io_backends.registry import join_url
    from ckpt.maintenance.step_listing import list_steps, none_here

    output = Output(json=as_json, quiet=quiet)
    steps = list_steps(root)
    foreign = list_foreign(root, {step.url for step in steps} | {join_url(root, name) for step in steps for name in step.also})
    if not steps and not foreign:
        raise none_here(root)
    if output.json:
        others = [{"url": url, "format": name} for url, name in foreign.items()]
        output.document({"root": root, "steps": [_fields(step) for step in steps], "foreign": others})
    elif quiet:
        for step in steps:
            if step.committed:
                output.line(step.url)
    else:
        rows = [_row(step) for step in steps] + [(url, "", name, "", "", "", "", "", "") for url, name in foreign.items()]
        output.table(("CHECKPOINT", ">STEP", "STATUS", ">TENSORS", ">RANKS", ">AGE", "TAGS", "LINKS", "WHY NOT"), rows)


def _fields(step: Step) -> dict[str, object]:
    fields = asdict(step)
    fields["metrics"] = {name: value if math.isfinite(value) else str(value) for name, value in step.metrics.items()}
    return {"step": fields.pop("number"), **fields}


def _row(step: Step) -> tuple[str, ...]:
    status = style("committed", "green") if step.committed else style("damaged" if step.damaged else "unfinished", "red")
    return (
        step.url,
        "" if step.number is None else str(step.number),
        status,
        "" if step.tensor_bytes is None else units.size(step.tensor_bytes),
        "" if step.world_size is None else str(step.world_size),
        units.age(step.created) if step.committed else "",
        ", ".join(step.tags),
        ", ".join([*([f"leads to {step.link}"] if step.link else []), *step.also]),
        step.reason or "",
    )
