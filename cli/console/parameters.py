"""Types of arguments and options: URLs that a shell completes as paths, choices with suggestions, and options in groups; and whether what a
command needs is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ckpt.errors import UsageError
from ckpt.text import did_you_mean

if TYPE_CHECKING:
    TextType = click.ParamType[str]
else:
    TextType = click.ParamType  # older versions of click have no type arguments


class UrlType(TextType):
    """A path or URL, as it is; a shell completes it as a path."""

    name = "url"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


class OneOf(TextType):
    """One of several words. With ``open_ended`` other words pass too, such as the path of a file, and the words are only completed."""

    name = "choice"

    def __init__(self, words: Sequence[str], *, open_ended: bool = False) -> None:
        self.words = words
        self.open_ended = open_ended

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.words and not self.open_ended:
            close = did_you_mean(str(value), self.words)
            self.fail(f"{value!r} is not one of {', '.join(self.words)}{f'; {close}' if close else ''}", param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        words = [CompletionItem(word) for word in self.words if word.startswith(incomplete)]
        return words or ([CompletionItem(incomplete, type="file")] if self.open_ended else [])


URL = UrlType()


class GroupedOption(click.Option):
    """An option that ``--help`` shows below the title of its group."""

    def __init__(self, *args: Any, group: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose ``--help`` has a section for each group of options; those without a group come last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(parameter, "group", "General"), []).append(record)
        general = sections.pop("General", [])
        for title, records in [*sections.items(), ("General", general)]:
            with formatter.section(title):
                formatter.write_dl(records)


def require_torch(command: str) -> None:
    """Check that PyTorch is installed, before the command begins anything."""
    if find_spec("torch") is None:
        raise UsageError(f"{command} needs PyTorch, which is not installed", hint="pip install torch")
