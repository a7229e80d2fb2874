"""Tables for people: aligned columns that fit the width of the terminal.

How a table is made to fit, when it is wider than ``limit``:

1. Columns of free text (head ``~``) wrap onto further lines below their row; they need at least ``_NARROWEST`` columns.
2. Other columns on the left side, names and URLs, lose their middle: ``model.layers.0…wq.weight``. The widest loses first.
3. If numbers alone are too wide, the columns are dealt out over several tables below each other; each repeats the first column.

Numbers are never cut. Without a limit, which is what pipes and files get, nothing is cut or wrapped: each row is one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .styled import pad, split_styled, style, width

_GAP = 2
_NARROWEST = 12


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

    def lines_of(self, row: int) -> list[str]:
        """The cell of a row as the lines that it takes in this column."""
        cell = self.cells[row]
        if width(cell) <= self.width:
            return [cell]
        return _wrapped(cell, self.width) if self.free else [_shortened(cell, self.width)]


def table_lines(heads: Sequence[str], rows: Sequence[Sequence[str]], limit: int | None) -> Iterator[str]:
    """The lines of a table. A column without any text is left out, unless there is no row at all; so is a head line without any."""
    columns = [Column(head, [row[i] for row in rows]) for i, head in enumerate(heads) if not rows or any(row[i] for row in rows)]
    for part in _parts(columns, limit):
        if limit is not None:
            _narrow(part, limit)
        if any(column.head for column in part):
            yield _joined(part, [style(column.head, "bold") for column in part])
        for row in range(len(rows)):
            cells = [column.lines_of(row) for column in part]
            for n in range(max(map(len, cells))):
                yield _joined(part, [lines[n] if n < len(lines) else "" for lines in cells])


def _parts(columns: list[Column], limit: int | None) -> list[list[Column]]:
    """The columns of each table: all of them in one, if their least widths fit."""
    if limit is None or not columns:
        return [columns]
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


def _joined(columns: Sequence[Column], cells: Sequence[str]) -> str:
    return (" " * _GAP).join(pad(cell, c.width, right=c.right) for c, cell in zip(columns, cells, strict=True)).rstrip()


def _shortened(cell: str, limit: int) -> str:
    """The cell without its middle; the end has the larger share, since names differ there."""
    text, name = split_styled(cell)
    front = (limit - 1) // 3
    return style(f"{text[:front]}…{text[len(text) - (limit - 1 - front) :]}", name)


def _wrapped(cell: str, limit: int) -> list[str]:
    """The text in lines of at most ``limit``, broken between words; a word that is longer is broken anywhere."""
    text, name = split_styled(cell)
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) <= limit:
            lines[-1] += f" {word}"
            continue
        pieces = [word[at : at + limit] for at in range(0, len(word), limit)] or [""]
        lines = [*lines, *pieces] if lines[-1] else [*lines[:-1], *pieces]
    return [style(line, name) for line in lines]
