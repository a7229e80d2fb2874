"""How a command speaks: data on stdout, talk on stderr; for people, as one JSON document, or bare for scripts.

Names in a checkpoint are whatever its writer chose. Every line is made printable here, where it leaves the program; only the styles that
:func:`style` gave become escape sequences.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

import click

from ckpt.errors import StorageError
from ckpt.text.printable import printable, printable_json

Command = TypeVar("Command", bound=Callable[..., Any])

_STYLES: dict[str, dict[str, Any]] = {"bold": {"bold": True}, "green": {"fg": "green"}, "red": {"fg": "red"}}
_MARK = f"\ufdd0{secrets.token_hex(8)}"  # no name can contain it: nobody knows it before this process runs
_STYLED = re.compile(f"{_MARK}([a-z]+)\ufdd1(.*?){_MARK}\ufdd1", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """What the user asked for. ``quiet``: only names on stdout and only errors on stderr."""

    json: bool = False
    quiet: bool = False

    def document(self, fields: Mapping[str, Any]) -> None:
        """The one JSON document of a command, on stdout; on one line unless a person looks at it."""
        _print(printable_json(json.dumps(fields, ensure_ascii=False, allow_nan=False, indent=2 if sys.stdout.isatty() else None)))

    def line(self, text: str = "") -> None:
        """A line of data, on stdout. Colours are dropped where nobody would see them."""
        _print(_rendered(text, colours=_colours(sys.stdout)))

    def talk(self, text: str) -> None:
        """A line that is not data, on stderr; nothing if quiet."""
        if not self.quiet:
            click.echo(_rendered(text, colours=_colours(sys.stderr)), err=True)

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Aligned columns under a head line, on stdout. A head with ``>`` before it aligns to the right; empty columns are left out."""
        used = [i for i in range(len(heads)) if not rows or any(row[i] for row in rows)]
        lines = [[style(heads[i].lstrip(">"), "bold") for i in used], *([row[i] for i in used] for row in rows)]
        widths = [max(_width(line[at]) for line in lines) for at in range(len(used))]
        for line in lines:
            cells = [_pad(cell, width, right=heads[i].startswith(">")) for cell, width, i in zip(line, widths, used, strict=True)]
            self.line("  ".join(cells).rstrip())


def options(command: Command) -> Command:
    """The options that every command has: ``--json`` and ``-q``. The command takes them as ``as_json`` and ``quiet``."""
    command = click.option("--json", "as_json", is_flag=True, help="Print one JSON document; its fields are only ever added to.")(command)
    return click.option("-q", "--quiet", is_flag=True, help="Print bare names or nothing; only errors on stderr.")(command)


def _print(text: str) -> None:
    try:
        click.echo(text)
    except BrokenPipeError:
        raise
    except OSError as err:
        raise unwritable(err) from err


def unwritable(err: OSError) -> StorageError:
    """What to raise if standard output takes nothing more."""
    hint = "free space where it is redirected to, or redirect it elsewhere"
    return StorageError(f"standard output cannot be written: {err.strerror or err}", hint=hint)


def style(text: str, name: str) -> str:
    """``text`` to be shown ``bold``, ``green`` or ``red`` where the output has colours."""
    return f"{_MARK}{name}\ufdd1{text}{_MARK}\ufdd1"


def _rendered(text: str, *, colours: bool) -> str:
    """The line as it goes to the stream: all but our own styles made printable."""
    parts, at = [], 0
    for match in _STYLED.finditer(text):
        inner = printable(match[2], one_line=True)
        parts += [printable(text[at : match.start()], one_line=True), click.style(inner, **_STYLES[match[1]]) if colours else inner]
        at = match.end()
    return "".join([*parts, printable(text[at:], one_line=True)])


def _width(cell: str) -> int:
    return len(_rendered(cell, colours=False))


def _pad(cell: str, width: int, *, right: bool) -> str:
    room = " " * (width - _width(cell))
    return room + cell if right else cell + room


def _colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
