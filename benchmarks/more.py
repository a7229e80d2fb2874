"""The scenarios that compare other things than the contestants' saves and loads, by name."""

from __future__ import annotations

from collections.abc import Callable

from . import async_saves, footprint, gpu, scale, steady
from .findings import Finding
from .places import Place
from .pool import Pool
from .scenarios import Settings, Tell

MORE: dict[str, Callable[[Settings, Pool, Place, Tell], list[Finding]]] = {
    "async": async_saves.run,
    "memory": footprint.run,
    "scale": scale.run,
    "steady": steady.run,
    "gpu": gpu.run,
}
"""Each gives findings for one place."""
