"""The environment variables that ckpt reads, all of them. Arguments win over them.

=====================  =======  ====================================================================
``CKPT_TIMEOUT``       600      seconds without a sign of life after which a rank counts as dead
``CKPT_THREADS``       4        threads that each rank reads or writes with
=====================  =======  ====================================================================
"""

from __future__ import annotations

import os

from .errors import UsageError

DEFAULT_TIMEOUT = 600.0


def timeout(given: float | None) -> float:
    return _positive("timeout", given, "CKPT_TIMEOUT", DEFAULT_TIMEOUT)


def threads(given: int | None) -> int:
    return max(1, int(_positive("threads", given, "CKPT_THREADS", 4.0)))


def _positive(what: str, given: float | None, variable: str, default: float) -> float:
    text: object = given if given is not None else os.environ.get(variable)
    if text is None:
        return default
    try:
        value = float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"{what} must be a positive number, not {text!r}", where=None if given is not None else variable)
    return value
