"""A command that consists of commands, such as ``ckpt`` itself and ``ckpt lora``."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ckpt.text import did_you_mean

_OWN = {"-h", "--help", "--version"}
"""Options of a group itself; all others are those of its commands."""


class UnknownName(click.UsageError):
    """A name on the command line that does not exist, with the names that are close to it."""

    def __init__(self, message: str, ctx: click.Context, suggestion: str | None) -> None:
        super().__init__(message, ctx)
        self.suggestion = suggestion


class CommandGroup(click.Group):
    """Options may stand before the name of a command, a wrong name has a suggestion, and no name at all is a question for help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, options_behind_name(args) or ["--help"])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            raise UnknownName(f"no command {args[0]!r}", ctx, did_you_mean(args[0], names))
        return super().resolve_command(ctx, args)


def options_behind_name(args: Sequence[str]) -> list[str]:
    """``--json ls URL`` as ``ls --json URL``."""
    at = 0
    while at < len(args) and args[at].startswith("-"):
        at += 2 if args[at] == "--color" else 1
    if at >= len(args):
        return list(args)
    before = args[:at]
    return [*(arg for arg in before if arg in _OWN), args[at], *(arg for arg in before if arg not in _OWN), *args[at + 1 :]]
