"""How a command prints: data on stdout, messages on stderr; for people, as one JSON document, or bare for scripts."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click
from click.shell_completion import CompletionItem

from ckpt import units
from ckpt.errors import StorageError
from ckpt.text import did_you_mean, printable, printable_json

# Text for a terminal: styles that only this program can give, and everything else made printable.
#
# Names in a checkpoint are whatever its writer chose. A style is therefore marked with a secret of this process, and becomes an escape
# sequence only in :func:`rendered`; control characters of anybody else are shown as escapes such as ``\x1b``.

_STYLES: dict[str, dict[str, Any]] = {"bold": {"bold": True}, "green": {"fg": "green"}, "red": {"fg": "red"}, "dim": {"dim": True}}
_MARK = f"\ufdd0{secrets.token_hex(8)}"  # no name can contain it: nobody knows it before this process runs
_STYLED = re.compile(f"{_MARK}([a-z]+)\ufdd1(.*?){_MARK}\ufdd1", re.DOTALL)


def style(text: str, name: str | None) -> str:
    """``text`` to be shown ``bold``, ``dim``, ``green`` or ``red`` where the output has colours; as it is without a name."""
    return text if name is None else f"{_MARK}{name}\ufdd1{text}{_MARK}\ufdd1"


def split_styled(cell: str) -> tuple[str, str | None]:
    """The printable text of a cell and the name of its style; None unless one style covers all of it."""
    match = _STYLED.fullmatch(cell)
    return (rendered(cell, colours=False), None) if match is None else (printable(match[2], one_line=True), match[1])


def rendered(text: str, *, colours: bool) -> str:
    """The line as it goes to the stream: our own styles as escape sequences or dropped, all else made printable."""
    parts, at = [], 0
    for match in _STYLED.finditer(text):
        inner = printable(match[2], one_line=True)
        parts += [printable(text[at : match.start()], one_line=True), click.style(inner, **_STYLES[match[1]]) if colours else inner]
        at = match.end()
    return "".join([*parts, printable(text[at:], one_line=True)])


def width(cell: str) -> int:
    """Columns that the cell takes on a terminal."""
    return len(rendered(cell, colours=False))


def pad(cell: str, columns: int, *, right: bool) -> str:
    """The cell with spaces up to a width, before it if ``right``."""
    room = " " * (columns - width(cell))
    return room + cell if right else cell + room


# Tables for people: aligned columns that fit the width of the terminal, or 80 columns.
#
# How a table is made to fit, when it is wider than ``limit``:
#
# 1. Columns of free text (head ``~``) wrap onto further lines below their row; they need at least ``_NARROWEST`` columns.
# 2. Other columns on the left side, names and URLs, lose their middle: ``model.layers.0…wq.weight``. The widest loses first.
#    In pipes and files no name is cut: after one that is wider than its column, the row continues on the next line.
# 3. If numbers alone are too wide, the columns are dealt out over several tables below each other; each repeats the first column.
#
# Numbers are never cut.

_GAP = 2
_NARROWEST = 16


class Column:
    """One column: its head, its cells, and how wide it may become. ``>`` before the head aligns right, ``~`` marks free text."""

    def __init__(self, head: str, cells: Sequence[str]) -> None:
        self.right, self.free = head.startswith(">"), head.startswith("~")
        self.head = head.lstrip(">~")
        self.cells = cells
        self.width = max(width(cell) for cell in (self.head, *cells))

    @property
    def least(self) -> int:
        """The width below which the column becomes useless."""
        return self.width if self.right else min(self.width, max(_NARROWEST, width(self.head)))

    def lines_of(self, row: int, *, whole: bool) -> list[str]:
        """The cell of a row as the lines that it takes in this column, where ``whole`` names and words may stick out."""
        cell = self.cells[row]
        if width(cell) <= self.width:
            return [cell]
        if self.free:
            # The text in lines of at most ``limit``, broken between words; a word that is longer is broken anywhere, unless ``whole``
            text, name = split_styled(cell)
            return [style(line, name) for line in wrap(text, self.width, break_on_hyphens=False, break_long_words=not whole)]
        return [cell if whole else _shortened(cell, self.width)]


def table_lines(heads: Sequence[str], rows: Sequence[Sequence[str]], limit: int, *, whole: bool) -> Iterator[str]:
    """The lines of a table. A column without any text is left out, unless there is no row at all; so is a head line without any."""
    columns = [Column(head, [row[i] for row in rows]) for i, head in enumerate(heads) if not rows or any(row[i] for row in rows)]
    for n, part in enumerate(_parts(columns, limit)):
        _narrow(part, limit)
        if any(column.head for column in part):
            yield from _joined(part, [style(column.head, "bold") for column in part], limit)
        for row in range(len(rows)):
            if n and not any(column.cells[row] for column in part[1:]):
                continue  # the first table has its name
            cells = [column.lines_of(row, whole=whole) for column in part]
            for line in zip_longest(*cells, fillvalue=""):
                yield from _joined(part, line, limit)


def _parts(columns: list[Column], limit: int) -> list[list[Column]]:
    """The columns of each table: all of them in one, if their least widths fit."""
    if not columns:
        return []
    first, parts = columns[0], [[columns[0]]]
    used = first.least
    for column in columns[1:]:
        if used + _GAP + column.least > limit and len(parts[-1]) > 1:
            parts.append([first])
            used = first.least
        parts[-1].append(column)
        used += _GAP + column.least
    return parts


def _narrow(columns: Sequence[Column], limit: int) -> None:
    """Take the excess from free text first, then from the widest columns of the others that can give."""
    excess = sum(column.width + _GAP for column in columns) - _GAP - limit
    while excess > 0:
        giving = [c for c in columns if c.free and c.width > c.least] or [c for c in columns if c.width > c.least]
        if not giving:
            return
        widest = max(giving, key=lambda column: column.width)
        step = min(excess, widest.width - widest.least)
        widest.width -= step
        excess -= step


def _joined(columns: Sequence[Column], cells: Sequence[str], limit: int) -> Iterator[str]:
    """Each cell below its head. One that is wider than its column begins further left if need be, and the next one on a new line."""
    line, at = "", 0
    for column, cell in zip(columns, cells, strict=True):
        if cell:
            begin = min(at, max(0, limit - width(cell)))
            if line and width(line) + _GAP > begin:
                yield line
                line = ""
            line = (pad(line, begin, right=False) + pad(cell, column.width, right=column.right)).rstrip()
        at += column.width + _GAP
    yield line


def _shortened(cell: str, limit: int) -> str:
    """The cell without its middle; the end has the larger share, since names differ there."""
    text, name = split_styled(cell)
    front = (limit - 1) // 3
    return style(f"{text[:front]}…{text[len(text) - (limit - 1 - front) :]}", name)


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
        columns are left out. The table fits the terminal, or COLUMNS, or 80 columns; elsewhere than on a terminal, no name is cut."""
        for line in table_lines(heads, rows, shutil.get_terminal_size().columns, whole=not sys.stdout.isatty()):
            self.line(line)


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command: ``--json`` and ``-q``, which the command takes as ``output``, ``-v`` and ``--color``."""

    @wraps(command)
    def with_output(*args: Any, as_json: bool, quiet: bool, **given: Any) -> Any:
        return command(*args, output=Output(json=as_json, quiet=quiet), **given)

    json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
    quiet = click.option("-q", "--quiet", is_flag=True, callback=_log_errors_only, help="Print bare names or nothing, and only errors.")
    verbose = click.option(
        "-v", "--verbose", count=True, expose_value=False, callback=_log_more, help="Log what happens to stderr; -vv logs details."
    )
    color = click.option(
        "--color",
        type=OneOf(("auto", "always", "never")),
        metavar="WHEN",
        expose_value=False,
        callback=_choose_color,
        help="Use colors: auto, always or never. [default: auto]",
    )
    return json_option(quiet(verbose(color(with_output))))


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


def _choose_color(context: click.Context, parameter: click.Parameter, when: str | None) -> None:
    context.color = None if when in (None, "auto") else when == "always"


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
    context = click.get_current_context(silent=True)
    if context is not None and context.color is not None:
        return context.color
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


# Progress of something long, on stderr: a bar on a terminal, otherwise a line every ten seconds; nothing if quiet.

INTERVAL = 10.0
"""Seconds between two lines in a log."""

Update = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes in all."""


@contextmanager
def progress(label: str, output: Output) -> Iterator[Update]:
    """A place to report bytes to, for as long as the block runs."""
    if output.quiet or output.muted:
        yield lambda done, total: None
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bar(label) as update:
            yield update
    else:
        yield Lines(label, output.talk)


@contextmanager
def _bar(label: str) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class Lines:
    """Progress for a log: ``verify: 12 GiB of 40 GiB (30 %), 1.2 GiB/s, 23 s left``, at most one line per interval."""

    def __init__(self, label: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._label, self._say, self._clock = label, say, clock
        self._began = self._last = clock()

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if now - self._last < INTERVAL:
            return
        self._last = now
        rate = done / (now - self._began)
        left = f", {units.duration((total - done) / rate)} left" if rate > 0 else ""
        percent = 100 * done // max(total, 1)
        self._say(f"{self._label}: {units.size(done)} of {units.size(total)} ({percent} %), {units.size(rate)}/s{left}")


# Types of arguments and options: URLs that a shell completes as paths, choices with suggestions, and options in groups; and whether what a
# command needs is installed.

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # click 8.1 and 8.2 have no type arguments


class UrlType(ParamType):
    """A path or URL, as it is; a shell completes it as a path."""

    name = "url"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


class OneOf(ParamType):
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


# Names beside a URL where nothing is.

_LISTED = 10_000


def near_hint(url: str) -> str | None:
    """What to name in place of ``url``: the directory that a commit record is in, or one beside ``url`` with the same step number
    (``step-100`` for ``step-00000100``) or nearly the same name. Of a run that has other steps, how to list them."""
    from ckpt.errors import CkptError
    from ckpt.formats.native.commit import COMMIT_PATH
    from ckpt.formats.native.paths import step_number
    from ckpt.io_backends.registry import join_url, open_backend
    from ckpt.text import close_names

    parent, _, name = url.rstrip("/").rpartition("/")
    if not name or parent.endswith(":/"):
        return None
    if name == COMMIT_PATH and parent:
        return f"name the directory of the checkpoint: {parent}"
    try:
        beside = [entry.rstrip("/") for entry in open_backend(parent or ("/" if url.startswith("/") else ".")).list_dir("")[:_LISTED]]
    except CkptError:
        return None  # the storage fails, or the directory above does not exist either: the error itself says enough
    if name in beside:
        return None
    number = step_number(name)
    same = [entry for entry in beside if number is not None and step_number(entry) == number]
    # a step with another number is another checkpoint, never a typing error of this one
    close = same or close_names(name, (entry for entry in beside if number is None or step_number(entry) is None), 1)
    if close:
        return f"did you mean {join_url(parent, close[0]) if parent else close[0]}?"
    has_steps = number is not None and any(step_number(entry) is not None for entry in beside)
    return f"`ckpt ls {parent or '.'}` lists the steps of this run" if has_steps else None
