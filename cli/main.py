"""The ``ckpt`` command: finds the subcommand and turns errors into messages and exit codes.

Nothing heavier than click is imported here; a command's file is imported when the command runs.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from keyword import iskeyword
from typing import Any

import click

from ckpt._version import __version__
from ckpt.errors import CkptError, StorageError
from ckpt.text.printable import printable

from .interrupts import INTERRUPTED, quit_at_once
from .output import Output, unwritable

COMMANDS = {
    "ls": "List the checkpoints of a run.",
    "inspect": "Show what a checkpoint holds.",
    "verify": "Read a checkpoint whole and compare it with its digests.",
    "diff": "Compare two checkpoints of any formats.",
    "stats": "Show where the time of a save went.",
    "watch": "Watch a save while it goes on.",
    "report": "Draw saves: one HTML file, for a browser or print.",
    "advise": "Say how often a run should save.",
    "tag": "Give a checkpoint a name that keeps it, or take it away.",
    "import": "Point a checkpoint at the files of another, of any format.",
    "convert": "Write a checkpoint in another format.",
    "cp": "Copy a checkpoint to another storage.",
    "gc": "Remove what a run does not need: old checkpoints, orphaned files.",
}
"""Command → the line in ``ckpt --help``. Command ``x`` is the attribute ``command`` of ``ckpt.cli.x``, or ``ckpt.cli.x_``."""


class Commands(click.Group):
    """A group that imports a command only to run it, and that ends with the exit codes of docs/cli.md."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        command = importlib.import_module(f"ckpt.cli.{module}").command
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, which from here on hears of Ctrl-C by KeyboardInterrupt and cleans up."""
        if signal.getsignal(signal.SIGINT) is quit_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Run and exit; the arguments are those of ``click.Command.main``."""
        arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        extra["standalone_mode"] = False
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # names may have characters that the terminal, or UTF-8, cannot show
                stream.reconfigure(errors="backslashreplace")
        sys.exit(_exit_code(lambda: super(Commands, self).main(arguments, prog_name or "ckpt", **extra), as_json="--json" in arguments))


@click.group(
    "ckpt",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="A URL is a path or scheme://… . Every command takes --json and -q. Exit codes and JSON fields: docs/cli.md.",
)
@click.version_option(__version__, prog_name="ckpt", message="%(prog)s %(version)s")
def cli() -> None:
    """Look at and check the checkpoints of distributed training.

    \b
    Example:
      ckpt ls runs/a
      ckpt inspect runs/a/step-00001000 '*.wq.weight'
      ckpt verify runs/a/step-00001000
    """


def _exit_code(run: Any, *, as_json: bool) -> int:
    """Run a command; say what went wrong, if anything, and give the exit code."""
    try:
        code = run()
        _flush()
    except CkptError as err:
        _say(type(err).__name__, err.message, err.where, err.hint, err.exit_code, as_json=as_json)
        return err.exit_code
    except click.ClickException as err:
        context = getattr(err, "ctx", None)
        hint = f"{context.command_path} --help" if context is not None else "ckpt --help"
        _say("UsageError", err.format_message(), None, hint, 2, as_json=as_json)
        return 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        _let_go_of_stdout()  # whoever read our output has gone (ckpt ls | head)
        return 1
    except Exception as err:  # noqa: BLE001 - the boundary of the program: everything unexpected is shown whole
        click.echo(printable(traceback.format_exc()), err=True, nl=False)
        if as_json:
            _document(type(err).__name__, str(err), None, None, 1)
        return 1
    return code if isinstance(code, int) else 0


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as err:
        _let_go_of_stdout()
        raise unwritable(err) from err


def _let_go_of_stdout() -> None:
    """Python would complain once more when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(kind: str, message: str, where: str | None, hint: str | None, code: int, *, as_json: bool) -> None:
    where_line = "" if where is None else f"\n  where: {where}"
    hint_line = "" if hint is None else f"\n  try: {hint}"
    click.echo(printable(f"error: {message}{where_line}{hint_line}"), err=True)
    if as_json:
        _document(kind, message, where, hint, code)


def _document(kind: str, message: str, where: str | None, hint: str | None, code: int) -> None:
    with suppress(StorageError):  # where standard output takes nothing, the line on stderr has said all
        Output().document({"error": {"type": kind, "message": message, "where": where, "hint": hint, "exit_code": code}})
