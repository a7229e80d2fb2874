"""Text for a terminal: styles that only this program can give, and everything else made printable.

Names in a checkpoint are whatever its writer chose. A style is therefore marked with a secret of this process, and becomes an escape
sequence only in :func:`rendered`; control characters of anybody else are shown as escapes such as ``\\x1b``.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import click

from ckpt.text.printable import printable

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
