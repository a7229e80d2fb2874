"""Text of others: JSON that is parsed safely, names made safe for a terminal, names that were probably meant, URLs."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from itertools import islice
from typing import Any, NoReturn

_NUMBER = re.compile("0|[1-9][0-9]{0,8}")

# The one place that parses JSON, of files and of messages: whatever is wrong with the text is a ValueError, which callers name.
#
# ``json.loads`` raises RecursionError for ``[[[[…``, a file of a few kilobytes, and guesses at encodings other than UTF-8.


def parse_json(
    data: bytes | bytearray | memoryview | str, *, finite: bool = False, object_of: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """The value that a text is. ``finite``: NaN and Infinity are refused, which Python accepts. ``object_of`` makes objects of pairs."""
    text = data if isinstance(data, str) else str(data, "utf-8")
    try:
        return json.loads(text, parse_constant=_refuse if finite else None, object_pairs_hook=object_of)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_object(
    data: bytes | bytearray | memoryview | str, *, object_of: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> dict[str, Any]:
    """As :func:`parse_json`, where only an object will do; the text of the error can follow "is damaged: "."""
    try:
        members = parse_json(data, object_of=object_of)
    except ValueError as err:
        raise ValueError(f"it is not JSON ({err})") from err
    if not isinstance(members, dict):
        raise ValueError("it is not a JSON object")
    return members


def number_of(text: str) -> int:
    """The number that ``str`` writes so, from 0 on and of at most nine digits; ValueError for any other spelling: ``int`` takes ``" 1"``,
    ``"+1"`` and ``"1_0"``, too."""
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text!r:.40} is not a number")
    return int(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# Text for people: what errors and logs say goes through here.
#
# Names, paths and messages of others may hold control characters, which a terminal would obey. Invariant: what :func:`printable` gives
# moves no cursor, sets no title or clipboard and turns no text around.

_CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but for tab and newline, DEL, C1
_SEPARATORS = "\u2028\u2029"
_DIRECTIONS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_UNSAFE = re.compile(f"[{_CONTROL}{_SEPARATORS}{_DIRECTIONS}]")
_UNSAFE_IN_A_LINE = re.compile(f"[\t\n{_CONTROL}{_SEPARATORS}{_DIRECTIONS}]")


def printable(text: str, *, one_line: bool = False) -> str:
    """``text`` with control characters and marks of direction as escapes: ``\\x1b``, ``\\u202e``. ``one_line``: newlines and tabs too."""
    unsafe = _UNSAFE_IN_A_LINE if one_line else _UNSAFE
    return unsafe.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def printable_json(document: str) -> str:
    """A JSON document whose strings hold such characters as JSON escapes: it parses to the same values."""
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", document)


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


# Names that somebody may have meant, for errors that say ``did you mean``.

_COMPARED = 20_000
"""Names that are compared at most: about a second."""


def close_names(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The names that differ from ``name`` by a typing error or two, the closest first. Letter case does not count."""
    by_lower: dict[str, str] = {}
    for candidate in islice(names, _COMPARED):
        by_lower.setdefault(candidate.lower(), candidate)
    return [by_lower[lower] for lower in get_close_matches(name.lower(), by_lower, count, 0.7)]


def did_you_mean(name: str, names: Iterable[str]) -> str | None:
    """``did you mean a, b or c?``; None if nothing is close."""
    close = close_names(name, names)
    if not close:
        return None
    return f"did you mean {' or '.join(filter(None, (', '.join(close[:-1]), close[-1])))}?"


# Where something is stored: a URL or path as text, or a local path as an object.


def url_text(url: str | os.PathLike[str]) -> str:
    """The text of a URL or of a local path.

    An object that has ``storage_options``, as universal_pathlib's do, stays as it is: its text alone would lose them, so
    ``io_backends.registry`` refuses it and says what to do. A ``pathlib.Path`` made of a URL has lost a slash, ``s3:/bucket``, which is
    refused there too.
    """
    if isinstance(url, os.PathLike) and not hasattr(url, "storage_options"):
        return os.fspath(url)
    return url  # type: ignore[return-value]  # refused with a message when it is opened


def address_text(host: str, port: int) -> str:
    """``host:port``, as URLs have it: with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
