"""Text for people: what errors and logs say goes through here.

Names, paths and messages of others may hold control characters, which a terminal would obey. Invariant: what :func:`printable` gives moves
no cursor, sets no title or clipboard and turns no text around.
"""

from __future__ import annotations

import logging
import re

_CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but for tab and newline, DEL, C1
_SEPARATORS = "\u2028\u2029"
_DIRECTIONS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_UNSAFE = re.compile(f"[{_CONTROL}{_SEPARATORS}{_DIRECTIONS}]")
_UNSAFE_IN_A_LINE = re.compile(f"[\t\n{_CONTROL}{_SEPARATORS}{_DIRECTIONS}]")


def printable(text: str, *, one_line: bool = False) -> str:
    """``text`` with control characters and marks of direction as escapes: ``\\x1b``, ``\\u202e``. ``one_line``: newlines and tabs too."""
    return (_UNSAFE_IN_A_LINE if one_line else _UNSAFE).sub(_escaped, text)


def printable_json(document: str) -> str:
    """A JSON document whose strings hold such characters as JSON escapes: it parses to the same values."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", document)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


_places: dict[str, str] = {}
"""Beginnings of URLs that mean something inside one job only → what users call the place."""


def show_as(url: str, place: str) -> None:
    """From now on errors and logs of this process say ``place``, a directory or a URL that users know, for ``url`` and what lies below it.
    For good: an error is often shown when whatever it is about has ended."""
    _places[url.rstrip("/")] = place.rstrip("/")


def in_known_places(text: str) -> str:
    """``text`` with the places that users know, in place of URLs that mean something inside one job only."""
    for url in sorted(_places, key=len, reverse=True):  # one may begin with another
        text = text.replace(url, _places[url])
    return text


class _Printable(logging.Filter):
    """Log messages name tensors, files and places too, and most handlers write to a terminal."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        safe = printable(in_known_places(text))
        if safe != text:
            record.msg, record.args = safe, ()
        return True


logging.getLogger("ckpt").addFilter(_Printable())
