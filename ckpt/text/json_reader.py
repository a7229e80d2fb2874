"""The one place that parses JSON, of files and of messages: whatever is wrong with the text is a ValueError, which callers name.

``json.loads`` raises RecursionError for ``[[[[…``, a file of a few kilobytes, and guesses at encodings other than UTF-8.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn


def parse_json(
    data: bytes | bytearray | memoryview | str,
    *,
    finite: bool = False,
    object_of: Callable[[list[tuple[str, Any]]], Any] | None = None,
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


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
