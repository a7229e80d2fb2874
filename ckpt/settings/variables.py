"""Reading environment variables, and a warning about those that look like one of ours and are none."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import overload

from ckpt.text.suggest import close_names

PREFIX = "CKPT_"
NAMES = (
    "CKPT_CONDITIONAL_PUT",
    "CKPT_DIRECT",
    "CKPT_DOMAIN",
    "CKPT_LIVE_LOCAL",
    "CKPT_LIVE_SECRET",
    "CKPT_MEMORY",
    "CKPT_MEMORY_BUDGET",
    "CKPT_MEMORY_DIR",
    "CKPT_MEMORY_IDLE",
    "CKPT_MEMORY_PORT",
    "CKPT_MEMORY_SECRET",
    "CKPT_PROGRESS",
    "CKPT_S3_CHECKSUM",
    "CKPT_SOCKET_IFNAME",
    "CKPT_SOURCES",
    "CKPT_SPANS",
    "CKPT_STORAGE_OPTIONS",
    "CKPT_THREADS",
    "CKPT_TIMEOUT",
)

log = logging.getLogger("ckpt")


@overload
def variable(name: str) -> str | None: ...


@overload
def variable(name: str, default: str) -> str: ...


def variable(name: str, default: str | None = None) -> str | None:
    """The value of one of ``NAMES``, or of a variable of others."""
    warn_of_misspelt()
    return os.environ.get(name, default)


@cache
def warn_of_misspelt() -> None:
    """Warn, once in a process, of variables whose names are nearly ours. Others that begin so may be the user's own."""
    known = [name.removeprefix(PREFIX) for name in NAMES]
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in NAMES and (near := close_names(name.removeprefix(PREFIX), known, 1)):
            log.warning("the environment variable %s is ignored: ckpt has none of this name. Did you mean %s%s?", name, PREFIX, near[0])
