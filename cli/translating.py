"""Options of commands that can give tensors other names: which translation, into which spelling, and what of the source is not meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckpt import units
from ckpt.errors import UsageError

if TYPE_CHECKING:
    from ckpt.plan.views import View

_NAMES = (
    "Translate names and layouts: llama (Mistral and Qwen too), mixtral, qwen-moe, deepseek-v3, llama-plain, transformers-moe, "
    "transformers-mixtral, or a .toml file (docs/translations.md)."
)
_SPELLING = "Into whose names, those that you want: huggingface, megatron, plain, transformers."
Command = TypeVar("Command", bound=Callable[..., Any])


def translating(command: Command) -> Command:
    """``--names``, ``--spelling`` and ``--set``; the command takes them as ``translation``, ``spelling`` and ``numbers``."""
    command = click.option("--set", "numbers", multiple=True, metavar="NAME=N", help="A number of the model that its files do not tell.")(
        command
    )
    command = click.option("--spelling", metavar="SPELLING", help=_SPELLING)(command)
    return click.option("--names", "translation", metavar="NAMES", help=_NAMES)(command)


def skipping(command: Command) -> Command:
    """``--skip``; the command takes it as ``skip``."""
    told = "Not stored tensors whose name in SRC fits GLOB, so no rule of --names has to take them; several: any of them."
    return click.option("--skip", multiple=True, metavar="GLOB", help=told)(command)


def views_of(
    source: str, translation: str | None, spelling: str | None, numbers: Sequence[str], config: str | None = None
) -> Callable[[Mapping[str, Sequence[int]]], dict[str, View]] | None:
    """What the options ask for; None if they ask for nothing. A ``config`` of transformers tells numbers too.

    Raises:
        UsageError: one of them is missing or wrong.
    """
    if (spelling is None) != (translation is None):
        raise UsageError("--names and --spelling belong together", hint="--names llama --spelling megatron")
    if spelling is None or translation is None:
        if numbers:
            raise UsageError("--set is for a translation", hint="--names llama --spelling megatron")
        return None
    from ckpt.converters.mapping.convention import translated
    from ckpt.converters.targets.hf_config import read_configuration

    said = numbers_in(numbers, "--set", "query_groups=8")
    return translated(source, translation, spelling, {**read_configuration(config).numbers, **said})


def left_out(names: Sequence[str]) -> str:
    """What to tell of tensors and values of the source that the target has not."""
    return f"left out: {units.plural(len(names), 'name')}, such as {names[0]}"


def numbers_in(said: Sequence[str], option: str, example: str) -> dict[str, int]:
    """The numbers in an option that was given as ``NAME=N``, any number of times.

    Raises:
        UsageError: one of them is something else.
    """
    found = {}
    for text in said:
        name, _, value = text.partition("=")
        if not name or not value.isdecimal():
            raise UsageError(f"{option} {text!r} is no NAME=N", hint=f"{option} {example}")
        found[name] = int(value)
    return found
