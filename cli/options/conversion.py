"""What commands that write a checkpoint through the pipeline of conversions have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ckpt import units
from ckpt.cli.console.output import Command
from ckpt.cli.console.parameters import URL, GroupedOption
from ckpt.errors import UsageError

if TYPE_CHECKING:
    from ckpt.converters.pipeline.divided import Part
    from ckpt.net.divided_work import DividedWork

INTERRUPTED = "run the same command again to resume: files that are complete are not written again; `ckpt gc` removes them"


def grouped(group: str, *names: str, **attributes: Any) -> Callable[[Command], Command]:
    """An option that ``--help`` shows in a group."""
    return click.option(*names, cls=GroupedOption, group=group, **attributes)


def config_options(command: Command) -> Command:
    """``--config``, and ``--no-config``, which the command takes as ``require_config``."""
    one = grouped(
        "Output",
        "--config",
        metavar="PATH",
        type=URL,
        is_eager=True,
        help="For hf: a config.json, or a model's directory with it and tokenizer.",
    )
    none = grouped("Output", "--no-config", "require_config", is_flag=True, callback=_inverted, help="For hf: a config.json is not needed.")
    return one(none(command))


def _inverted(context: click.Context, parameter: click.Parameter, flag: bool) -> bool:  # noqa: FBT001 - click's arguments
    if flag and context.params.get("config") is not None:
        raise click.UsageError("--config names a configuration, and --no-config says that none is needed: give one of them")
    return not flag


def parse_size(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Bytes of ``5GB``, ``512MiB``, ``1000000B``: without a unit nobody knows what was meant."""
    if text is not None and text.strip().replace(".", "").isdigit():
        raise click.BadParameter(f"{text!r} has no unit: write {text}GB, {text}MiB or {text}B, which is bytes")
    try:
        return None if text is None else units.parse_size(text)
    except UsageError as err:
        raise click.BadParameter(err.message) from err


def part_of_job(work: DividedWork | None) -> Part:
    """This process's part: of the work that it divides with others, or by RANK and WORLD_SIZE of processes that do not communicate."""
    from ckpt.cli.console.dividing import is_alone
    from ckpt.net.group import rank_and_size

    if is_alone():
        return 0, 1
    return rank_and_size() if work is None else work
