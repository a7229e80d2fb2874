"""Sizes, times and shapes as people read and write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone

from .errors import UsageError

_UNITS = {"d": 86_400, "h": 3_600, "min": 60, "s": 1}
_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def size(count: float) -> str:
    """Bytes with a binary unit: ``0 B``, ``1.5 KiB``, ``12 GiB``. Two to three digits."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    at = 0
    while count >= 1023.5 and at < len(units) - 1:
        count /= 1024
        at += 1
    text = f"{count:.0f}" if at == 0 or count >= 9.95 else f"{count:.1f}"
    return f"{text} {units[at]}"


def parse_size(text: str) -> int:
    """Bytes: ``5GB``, ``512MiB``, ``1000000``."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,3})?) ?([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in _BYTES or not float(match[1]):
        raise UsageError(f"{text!r} is not a size such as 5GB or 512MiB")
    return int(float(match[1]) * _BYTES[match[2]])


def duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``5 min``, ``3.5 h``, ``12 d``."""
    for unit, length in list(_UNITS.items())[:-1]:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 9.5 else f"{max(seconds, 0):.1f} s"


def seconds(text: str) -> float | None:
    """The seconds that ``90min``, ``36h``, ``1d12h`` or ``0`` stand for; None for anything else."""
    match = re.fullmatch(r"0|(?=.)" + "".join(rf"(?:(\d{{1,9}}){unit})?" for unit in _UNITS), text.strip(), re.ASCII)
    return None if match is None else float(sum(int(n or 0) * length for n, length in zip(match.groups(), _UNITS.values(), strict=True)))


def age(created: str | None, now: datetime | None = None) -> str:
    """How long ago an ISO 8601 time was; ``?`` if it is none. A time without a zone is UTC."""
    try:
        then = datetime.fromisoformat((created or "").replace("Z", "+00:00"))
    except ValueError:
        return "?"
    if then.tzinfo is None:
        then = then.replace(tzinfo=timezone.utc)
    seconds = ((now or datetime.now(timezone.utc)) - then).total_seconds()
    return "just now" if seconds < 2 else f"{duration(seconds)} ago"


def plural(count: int, word: str) -> str:
    """``1 file``, ``2,000 files``."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def shape(sizes: Sequence[int]) -> str:
    """``4096 × 1024``, or ``scalar``."""
    return " × ".join(map(str, sizes)) or "scalar"
