"""Options of commands that can give tensors other names: which translation, into which naming convention, and what to skip."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckpt.errors import UsageError
from ckpt.text import units

if TYPE_CHECKING:
    from ckpt.plan.views import LogicalTensor

_NAMES = (
    "Translate names and layouts: llama (Mistral and Qwen too), mixtral, qwen-moe, deepseek-v3, llama-plain, transformers-moe, "
    "transformers-mixtral, or a .toml file (docs/translations.md)."
)
_CONVENTION = "The naming convention that you want: huggingface, megatron, plain, transformers."
Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class TranslationChoice:
    """What ``--names``, ``--convention`` and ``--set`` were given as."""

    names: str | None
    convention: str | None
    numbers: tuple[str, ...]


def translating(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--names``, ``--convention`` and ``--set``; the command takes them as one ``translation``."""

    @wraps(command)
    def with_translation(*args: Any, names: str | None, convention: str | None, numbers: tuple[str, ...], **options: Any) -> Any:
        return command(*args, translation=TranslationChoice(names, convention, numbers), **options)

    number = click.option("--set", "numbers", multiple=True, metavar="NAME=N", help="A number of the model that its files do not tell.")
    target = click.option("--convention", metavar="NAME", help=_CONVENTION)
    return click.option("--names", metavar="NAMES", help=_NAMES)(target(number(with_translation)))


def skipping(command: Command) -> Command:
    """``--skip``; the command takes it as ``skip``."""
    told = "Not stored tensors whose name in SRC fits GLOB, so no rule of --names has to take them; several: any of them."
    return click.option("--skip", multiple=True, metavar="GLOB", help=told)(command)


def views_of(
    source: str, translation: TranslationChoice, config: str | None = None
) -> Callable[[Mapping[str, Sequence[int]]], dict[str, LogicalTensor]] | None:
    """What the options ask for; None if they ask for nothing. A ``config`` of transformers tells numbers too.

    Raises:
        UsageError: one of them is missing or wrong.
    """
    if (translation.convention is None) != (translation.names is None):
        raise UsageError("--names and --convention belong together", hint="--names llama --convention megatron")
    if translation.convention is None or translation.names is None:
        if translation.numbers:
            raise UsageError("--set is for a translation", hint="--names llama --convention megatron")
        return None
    from ckpt.converters.mapping.convention import translated_views
    from ckpt.converters.targets.hf_config import read_configuration

    numbers = {**read_configuration(config).numbers, **numbers_in(translation.numbers, "--set", "query_groups=8")}
    return translated_views(source, translation.names, translation.convention, numbers)


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
