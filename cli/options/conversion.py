"""What commands that write a checkpoint through the pipeline of conversions have in common."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from ckpt.cli.console.output import Command
from ckpt.cli.console.parameters import GroupedOption
from ckpt.errors import UsageError
from ckpt.text import units

INTERRUPTED = "run the same command again to resume: files that are complete are not written again; `ckpt gc` removes them"


def grouped(group: str, *names: str, **attributes: Any) -> Callable[[Command], Command]:
    """An option that ``--help`` shows in a group."""
    return click.option(*names, cls=GroupedOption, group=group, **attributes)


def parse_size(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Bytes of ``5GB``, ``512MiB``, ``1000000``."""
    try:
        return None if text is None else units.parse_size(text)
    except UsageError as err:
        raise click.BadParameter(err.message) from err


def part_of_job() -> tuple[int, int]:
    """Rank and number of the processes, from the variables that torchrun sets."""
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise UsageError(f"RANK={rank} is not a rank of WORLD_SIZE={world}", hint="unset both, or start with torchrun")
    return int(rank), int(world)
