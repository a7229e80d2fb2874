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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from keyword import iskeyword
from typing import Any, ClassVar

import click

from ckpt.errors import CkptError, StorageError
from ckpt.settings import __version__
from ckpt.text import printable

from .dividing import ARGUMENTS
from .interrupts import INTERRUPTED, quit_at_once
from .options import CommandGroup, options_behind_name
from .output import OneOf, Output, logging_to_stderr, near_hint, options, unwritable

COMMANDS = {
    "ls": "List the checkpoints of a run.",
    "inspect": "Show what a checkpoint contains.",
    "plan": "Show what a load into a layout would read.",
    "verify": "Check every byte of a checkpoint against its digests.",
    "diff": "Compare two checkpoints, of any formats.",
    "prove": "Prove that a training script resumes exactly.",
    "stats": "Show where the time of a save went.",
    "watch": "Follow a save in progress.",
    "live": "Show the versions of a live state, and its sinks.",
    "memory": "Run, show or end the daemon that holds checkpoints in memory.",
    "report": "Draw saves as one HTML file.",
    "advise": "Recommend how often a run should save.",
    "tag": "Add or remove tags, which protect a checkpoint from removal.",
    "import": "Create a checkpoint that references files of another one.",
    "convert": "Convert a checkpoint to another format.",
    "merge": "Average several checkpoints.",
    "lora": "Merge or extract a LoRA adapter.",
    "cp": "Copy a checkpoint to another storage.",
    "rebuild": "Rebuild a lost or damaged index from the data files.",
    "rm": "Remove one checkpoint.",
    "gc": "Remove old checkpoints and orphaned files of a run.",
    "completion": "Print the completion script of a shell.",
}
"""Command → the line in ``ckpt --help``. Command ``x`` is the attribute ``x`` of the file that ``_FILES`` names, or of ``ckpt.cli.x``."""

_FILES = {
    **dict.fromkeys(("ls", "cp", "tag", "rm"), "steps"),
    **dict.fromkeys(("import", "rebuild"), "convert"),
    **dict.fromkeys(("plan", "prove", "advise"), "job"),
    "diff": "verify",
    "report": "stats",
    "watch": "live",
    "lora": "merge",
    "completion": "main",
}

_ELSEWHERE = (
    "list:ls get:ls show:inspect info:inspect describe:inspect delete:rm remove:rm prune:gc forget:gc copy:cp check:verify compare:diff "
    "export:convert reshard:convert average:merge repair:rebuild"
)
"""Names that other tools have for a command, with its name here."""

_EXIT_CODES = """\
Exit codes: 0 success; 1 internal error; 2 wrong usage; 3 different (diff, prove);
10 not found; 11 not committed; 12 unknown format; 20 damaged; 21 unknown name;
22 shapes or values do not match; 23 a live state is torn; 30 storage failed;
31 a rank failed or hangs; 32 another save is in progress;
33 something else is there, or must stay; 130 interrupted;
141 the reader of the output has gone."""
_PIPE_CLOSED = 141
"""What a shell says of a program that SIGPIPE ended."""
_GENERAL = """\
A URL is a path or scheme://… . Every command takes --json, -q, -v and --color, also before its name.
`ckpt help COMMAND` shows its options."""


class Commands(CommandGroup):
    """A group that imports a command only to run it, and that ends with the exit codes of docs/cli.md."""

    elsewhere: ClassVar[Mapping[str, str]] = dict(pair.split(":") for pair in _ELSEWHERE.split())

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"ckpt.cli.{_FILES.get(cmd_name, cmd_name)}")
        command = getattr(module, f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name)
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = options_behind_name(args)
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        ctx.meta[ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, which from here on hears of Ctrl-C by KeyboardInterrupt and cleans up."""
        if signal.getsignal(signal.SIGINT) is quit_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return super().invoke(ctx)
        except BrokenPipeError as err:
            raise _ReaderGone from err  # click would exit with 1, the code of a defect

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        url = _documentation()
        more = "" if url is None else f"Documentation: {url}"
        for paragraph in (_GENERAL, f"\b\n{_EXIT_CODES}", more):
            formatter.write_paragraph()
            formatter.write_text(paragraph)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Run and exit; the arguments are those of ``click.Command.main``."""
        arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        extra["standalone_mode"] = False
        sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115  None: closed
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # names may have characters that the terminal, or UTF-8, cannot show
                stream.reconfigure(errors="backslashreplace")
        with logging_to_stderr():
            code = _exit_code(lambda: super(Commands, self).main(arguments, prog_name or "ckpt", **extra), as_json="--json" in arguments)
        sys.exit(code)


class _ReaderGone(Exception):
    """Whoever read standard output has exited."""


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:  # noqa: FBT001  click's
    if not wanted or ctx.resilient_parsing:
        return
    from ckpt.needs import REINSTALL, installed_plugins, other_owners

    click.echo(f"ckpt {__version__}")
    for owner, added in installed_plugins().items():
        click.echo(printable(f"  {owner}: {', '.join(added)}"))
    for other in other_owners():
        message = f"warning: {other} has a module or command ckpt, too: one hides the other\n  try: {REINSTALL}"
        click.echo(printable(message), err=True)
    ctx.exit()


@click.group("ckpt", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version and plug-ins.")
def cli() -> None:
    """Inspect, check, convert and copy checkpoints of distributed training.

    \b
    Example:
      ckpt ls runs/a
      ckpt inspect runs/a/step-00001000 '*.wq.weight'
      ckpt verify runs/a/step-00001000
    """


@click.command("completion", short_help="Print the completion script of a shell.")
@click.argument("shell", type=OneOf(("bash", "zsh", "fish")))
@options
def completion(shell: str, *, output: Output) -> None:
    """Print the script that lets SHELL (bash, zsh or fish) complete commands, options, their values and paths.

    \b
    Example:
      eval "$(ckpt completion bash)"                             # in ~/.bashrc
      eval "$(ckpt completion zsh)"                              # in ~/.zshrc
      ckpt completion fish > ~/.config/fish/completions/ckpt.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # click knows these three
    root = click.get_current_context().find_root().command
    complete = kind(root, {}, "ckpt", "_CKPT_COMPLETE")
    script = complete.source_template % complete.source_vars()  # source() would start a bash to ask for its version
    if output.json:
        output.document({"shell": shell, "script": script})
    else:
        click.echo(script)


def _documentation() -> str | None:
    """The URL of the documentation, as the installed distribution's metadata have it."""
    from importlib.metadata import PackageNotFoundError, metadata

    with suppress(PackageNotFoundError):
        for entry in metadata("ckpt-toolkit").get_all("Project-URL") or ():
            label, _, url = entry.partition(", ")
            if label.lower() == "documentation":
                return str(url)
    return None


def _exit_code(run: Callable[[], Any], *, as_json: bool) -> int:
    """Run a command; say what went wrong, if anything, and give the exit code."""
    try:
        code = run()
        _flush()
    except CkptError as err:
        _report(type(err).__name__, err.message, err.where, _hint_of(err), err.exit_code, as_json=as_json)
        return err.exit_code
    except click.ClickException as err:
        context = getattr(err, "ctx", None)
        hint = getattr(err, "suggestion", None) or (f"{context.command_path} --help" if context is not None else "ckpt --help")
        _report("UsageError", err.format_message(), None, hint, 2, as_json=as_json)
        return 2
    except (click.Abort, KeyboardInterrupt) as err:
        hint = getattr(err, "hint", getattr(err.__cause__ or err.__context__, "hint", None))  # click wraps it into an Abort
        click.echo("interrupted" if hint is None else f"interrupted\n  try: {hint}", err=True)
        return INTERRUPTED
    except ModuleNotFoundError as err:
        if err.name is None or err.name.partition(".")[0] == "ckpt":
            raise
        message, hint = f"this command needs {err.name}, which is not installed", f"pip install {err.name.partition('.')[0]}"
        _report("UsageError", message, None, hint, 2, as_json=as_json)
        return 2
    except (BrokenPipeError, _ReaderGone):
        _let_go_of_stdout()  # whoever read our output has gone (ckpt ls | head)
        return _PIPE_CLOSED
    except Exception as err:  # noqa: BLE001 - the boundary of the program: everything unexpected is shown whole
        click.echo(printable(traceback.format_exc()), err=True, nl=False)
        if as_json:
            _document(type(err).__name__, str(err), None, None, 1)
        return 1
    return code if isinstance(code, int) else 0


def _hint_of(err: CkptError) -> str | None:
    """The hint of an error; where nothing is at a URL, with the names beside it that are close."""
    from ckpt.errors import NotFoundError

    if not isinstance(err, NotFoundError) or err.where is None:
        return err.hint
    return near_hint(err.where) or err.hint


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


def _report(kind: str, message: str, where: str | None, hint: str | None, code: int, *, as_json: bool) -> None:
    where_line = "" if where is None else f"\n  where: {where}"
    hint_line = "" if hint is None else f"\n  try: {hint}"
    click.echo(printable(f"error: {message}{where_line}{hint_line}"), err=True)
    if as_json:
        _document(kind, message, where, hint, code)


def _document(kind: str, message: str, where: str | None, hint: str | None, code: int) -> None:
    with suppress(StorageError):  # where standard output takes nothing, the line on stderr has said all
        Output().document({"error": {"type": kind, "message": message, "where": where, "hint": hint, "exit_code": code}})
