"""Sizes as people write them."""

from __future__ import annotations

import re

from ckpt.errors import UsageError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def size_of(text: str) -> int:
    """Bytes: ``5GB``, ``512MiB``, ``1000000``.

    Raises:
        UsageError: it is no size.
    """
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,3})?) ?([KMGT]?I?)B?", text.strip().upper())
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise UsageError(f"{text!r} is no size such as 5GB or 512MiB")
    return int(float(found[1]) * _UNITS[found[2]])
