"""The scenario ``scale``: what jobs of tens of thousands of ranks cost, played by one process. Each part is about one of the things that
such a job does; it gives CPU seconds, bytes and how they grow with the ranks, and checks them against marks at 16,384 ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from . import scale_calls, scale_load, scale_save, scale_steps, scale_store, scale_values
from .findings import Finding
from .places import Place
from .pool import Pool
from .scenarios import Settings, Tell

PARTS: dict[str, Callable[[Settings, Pool, Place, Tell], list[Finding]]] = {
    "save": scale_save.run,
    "calls": scale_calls.run,
    "load": scale_load.run,
    "store": scale_store.run,
    "steps": scale_steps.run,
    "values": scale_values.run,
}


def run(settings: Settings, pool: Pool, place: Place, tell: Tell) -> list[Finding]:
    """All parts, one after another."""
    return [finding for part in PARTS.values() for finding in part(settings, pool, place, tell)]
