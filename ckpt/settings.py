"""The environment variables that ckpt reads, all of them. Arguments win over them.

=====================  =======  ==============================================================================
``CKPT_TIMEOUT``       600      seconds without a sign of life after which a rank counts as dead
``CKPT_THREADS``       cores    threads that each rank reads or writes with; by default its share of the
                                machine's cores, at most 4
``CKPT_DIRECT``        auto     ``on``, ``off``: files are written past the page cache where the file
                                system can, or never; ``auto``: large files, where trying shows that it pays
``CKPT_SPANS``         on       ``off``: no record of how long each phase of a save took (``ckpt stats``)
``CKPT_CONDITIONAL_PUT``        ``require``: an object store that does not keep the conditions of a write is
                       require  refused; ``emulate``: we look and then write, which protects nothing from
                                another job that saves to the same place at once
``CKPT_STORAGE_OPTIONS``        a JSON file: URL → the storage options of what lies below it, as
                       none     ``ckpt.configure_storage`` takes them
=====================  =======  ==============================================================================
"""

from __future__ import annotations

import os
from typing import Literal

from .errors import UsageError

DEFAULT_TIMEOUT = 600.0

Direct = Literal["auto", "on", "off"]


def timeout(given: float | None) -> float:
    return _positive("timeout", given, "CKPT_TIMEOUT", DEFAULT_TIMEOUT)


def threads(given: int | None) -> int:
    return max(1, int(_positive("threads", given, "CKPT_THREADS", float(_cores()))))


def _cores() -> int:
    """Cores that this rank has for itself, at most 4; torchrun says how many ranks share the machine."""
    shared = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, cores // (int(shared) if shared.isdigit() and int(shared) else 1)))


def direct() -> Direct:
    text = os.environ.get("CKPT_DIRECT", "auto")
    for known in ("auto", "on", "off"):
        if text == known:
            return known
    raise UsageError(f"direct writes are auto, on or off, not {text!r}", where="CKPT_DIRECT")


def spans() -> bool:
    text = os.environ.get("CKPT_SPANS", "on")
    if text not in ("on", "off"):
        raise UsageError(f"spans are on or off, not {text!r}", where="CKPT_SPANS")
    return text == "on"


def conditional_put() -> Literal["require", "emulate"]:
    text = os.environ.get("CKPT_CONDITIONAL_PUT", "require")
    if text not in ("require", "emulate"):
        raise UsageError(f"conditional puts are required or emulated: require or emulate, not {text!r}", where="CKPT_CONDITIONAL_PUT")
    return "emulate" if text == "emulate" else "require"


def storage_options() -> str | None:
    return os.environ.get("CKPT_STORAGE_OPTIONS") or None


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
