"""Names that somebody may have meant, for errors that say ``did you mean``."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

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
