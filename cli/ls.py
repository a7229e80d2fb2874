"""``ckpt ls``: the checkpoints of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ckpt import units
from ckpt.cli.console.output import URL, Output, options, style

if TYPE_CHECKING:
    from ckpt.runs.step_listing import Step

_HEADS = ("CHECKPOINT", ">STEP", "STATUS", ">TENSORS", ">ON DISK", ">SHARED", ">RANKS", ">AGE", "~METRICS", "~TAGS", "~LINKS", "~NOTE")


@click.command("ls", short_help="List the checkpoints of a run.")
@click.argument("root", type=URL)
@options
def command(root: str, *, as_json: bool, quiet: bool) -> None:
    """List the checkpoints of the run at ROOT, the newest step last.

    ROOT is the directory that contains the steps of a run, or a single checkpoint. Unfinished saves and damaged checkpoints are listed
    with the reason, checkpoints of other formats with the name of the format. ON DISK is the size of all files of a checkpoint, SHARED that
    of data files of other checkpoints that it refers to; TENSORS is the size of its tensors before compression. -q prints only the URLs of
    checkpoints that can be loaded.

    \b
    Example:
      ckpt ls runs/a
      ckpt ls -q runs/a | tail -1     # the newest checkpoint
    """
    from ckpt.formats.registry import list_foreign
    from ckpt.io_backends.registry import join_url
    from ckpt.runs.step_listing import directory_name, list_steps, none_here, stored_sizes, vanished_bases

    output = Output(json=as_json, quiet=quiet)
    steps = sorted(list_steps(root), key=lambda step: step.abandoned is None)  # the newest comes last
    foreign = list_foreign(root, {step.url for step in steps} | {join_url(root, name) for step in steps for name in step.also})
    if not steps and not foreign:
        raise none_here(root)
    if quiet and not output.json:
        for step in steps:
            if step.committed:
                output.line(step.url)
        return
    sizes, vanished = stored_sizes(steps), vanished_bases(root, steps)
    if output.json:
        output.document(
            {
                "root": root,
                "steps": [_fields(step) | {"stored_bytes": sizes.get(step.url)} for step in steps],
                "foreign": [{"url": url, "format": name} for url, name in foreign.items()],
            }
        )
        return
    rows = [(directory_name(step), *_row(step, sizes.get(step.url), vanished.get(step.url, ()))) for step in steps]
    names = {url: url.rstrip("/").rpartition("/")[2] for url in foreign}
    output.table(_HEADS, rows + [(names[url], "", name, *[""] * (len(_HEADS) - 3)) for url, name in foreign.items()])


def _fields(step: Step) -> dict[str, object]:
    fields = asdict(step)
    fields["metrics"] = {name: value if math.isfinite(value) else str(value) for name, value in step.metrics.items()}
    fields["members"] = {name: checkpoint._asdict() for name, checkpoint in step.members.items()}
    return {"step": fields.pop("number"), **fields}


def _row(step: Step, stored: int | None, vanished: Sequence[str]) -> tuple[str, ...]:
    status = style("committed", "green") if step.committed else style("damaged" if step.damaged else "unfinished", "red")
    return (
        "" if step.number is None else str(step.number),
        status,
        "" if step.tensor_bytes is None else units.size(step.tensor_bytes),
        "" if stored is None else units.size(stored),
        units.size(step.shared_bytes) if step.shared_bytes else "",
        "" if step.world_size is None else str(step.world_size),
        units.age(step.created) if step.committed else "",
        " ".join(f"{name}={value:.4g}" for name, value in step.metrics.items()),
        ", ".join(step.tags),
        ", ".join([*([f"leads to {step.link}"] if step.link else []), *step.also]),
        "; ".join(
            [
                *([step.reason] if step.reason else []),
                *([f"of {', '.join(step.members)}"] if step.members else []),
                *([f"abandoned: the run went on from step {step.abandoned} without it"] if step.abandoned is not None else []),
                *([f"a part, saved with {step.part}"] if step.part is not None else []),
                *([f"lost: {', '.join(step.lost)}"] if step.lost else []),
                *(f"{name} has vanished, and data files that this needs with it" for name in vanished),
            ]
        ),
    )
