"""How a command prints: data on stdout, messages on stderr; for people, as one JSON document, or bare for scripts."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

import click

from ckpt.errors import StorageError
from ckpt.text.printable import printable, printable_json

from .styled import rendered
from .styled import style as style
from .table import table_lines

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """The form of output that the user chose. ``quiet``: only names on stdout and only errors on stderr. ``muted``: another process of the
    same work says everything."""

    json: bool = False
    quiet: bool = False
    muted: bool = False

    def document(self, fields: Mapping[str, Any]) -> None:
        """The one JSON document of a command, on stdout; on one line unless stdout is a terminal."""
        if self.muted:
            return
        _print(printable_json(json.dumps(fields, ensure_ascii=False, allow_nan=False, indent=2 if sys.stdout.isatty() else None)))

    def line(self, text: str = "") -> None:
        """A line of data, on stdout. Colours are dropped where nobody would see them."""
        if not self.muted:
            _print(rendered(text, colours=_has_colours(sys.stdout)))

    def talk(self, text: str) -> None:
        """A message, on stderr; nothing if quiet."""
        if not (self.quiet or self.muted):
            click.echo(rendered(text, colours=_has_colours(sys.stderr)), err=True)

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Aligned columns under a head line, on stdout. ``>`` before a head aligns right, ``~`` marks free text that may wrap; empty
        columns are left out. On a terminal the table fits its width, or COLUMNS; elsewhere each row is one uncut line."""
        for line in table_lines(heads, rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None):
            self.line(line)


def options(command: Command) -> Command:
    """The options of every command: ``--json`` and ``-q``, which the command takes as ``as_json`` and ``quiet``, and ``-v``."""
    json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
    quiet = click.option("-q", "--quiet", is_flag=True, callback=_log_errors_only, help="Print bare names or nothing, and only errors.")
    return json_option(quiet(verbose(command)))


def verbose(command: Command) -> Command:
    """The option ``-v``, for a command and for ``ckpt`` itself; nothing is passed to the command."""
    text = "Log what happens to stderr; -vv logs details."
    return click.option("-v", "--verbose", count=True, expose_value=False, callback=_log_more, help=text)(command)


class _LogLines(logging.Handler):
    """Log messages on stderr, above a progress bar if there is one: ``click.echo`` finds the stream that the bar has put there."""

    def emit(self, record: logging.LogRecord) -> None:
        moment = "" if record.levelno >= logging.WARNING else time.strftime("%H:%M:%S ", time.localtime(record.created))
        click.echo(printable(f"{moment}{record.levelname.lower()}: {record.getMessage()}"), err=True)


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Print warnings of the package on stderr for the length of the block; ``-v`` and ``-q`` change the level within."""
    logger, handler = logging.getLogger("ckpt"), _LogLines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _log_more(context: click.Context, parameter: click.Parameter, count: int) -> None:
    if count:
        logging.getLogger("ckpt").setLevel(logging.INFO if count == 1 else logging.DEBUG)


def _log_errors_only(context: click.Context, parameter: click.Parameter, value: bool) -> bool:  # noqa: FBT001 - click's signature
    if value:
        logging.getLogger("ckpt").setLevel(logging.ERROR)
    return value


def _print(text: str) -> None:
    try:
        click.echo(text)
    except BrokenPipeError:
        raise
    except OSError as err:
        raise unwritable(err) from err


def unwritable(err: OSError) -> StorageError:
    """The error for a standard output that takes nothing more."""
    hint = "free space where it is redirected to, or redirect it elsewhere"
    return StorageError(f"standard output cannot be written: {err.strerror or err}", hint=hint)


def _has_colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
