"""The scenarios that compare other things than the contestants' saves and loads, by name. ``scale``: what jobs of tens of thousands of
ranks cost, played by one process, in parts; CPU seconds, bytes and how they grow with the ranks, against marks at 16,384 ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from . import async_saves, gpu, scale_load, scale_save, scale_values, steady
from .findings import Finding
from .places import Place
from .pool import Pool
from .scenarios import Settings, Tell

PARTS = (scale_save, scale_load, scale_values)


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """All parts, one after another."""
    return [finding for part in PARTS for finding in part.run(settings, pool, place, tell)]


MORE: dict[str, Callable[[Settings, Pool, Place, Tell], list[Finding]]] = {
    "async": async_saves.run,
    "scale": run,
    "steady": steady.run,
    "gpu": gpu.run,
}
"""Each gives findings for one place."""
