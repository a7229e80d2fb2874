"""The scenarios that compare other things than the contestants' saves and loads, by name. ``scale``: what jobs of tens of thousands of
ranks cost, played by one process; CPU seconds and bytes, against marks at 16,384 ranks. tests/plan/test_growth.py holds how they grow.
"""

from __future__ import annotations

from collections.abc import Callable

from . import async_saves, gpu, scale_load, scale_save, steady
from .findings import Finding
from .places import Place
from .pool import Pool
from .scenarios import Settings, Tell


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """Saves, then a load."""
    return [finding for part in (scale_save, scale_load) for finding in part.run(settings, pool, place, tell)]


MORE: dict[str, Callable[[Settings, Pool, Place, Tell], list[Finding]]] = {
    "async": async_saves.run,
    "scale": run,
    "steady": steady.run,
    "gpu": gpu.run,
}
"""Each gives findings for one place."""
