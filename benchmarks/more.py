"""The scenarios that compare other things than the contestants' saves and loads, by name."""

from __future__ import annotations

from collections.abc import Callable

from . import (
    async_saves,
    background,
    coding,
    converting,
    exporting,
    footprint,
    foreign,
    gpu,
    live_bytes,
    live_push,
    merging,
    object_store,
    planning_large,
    scale,
    steady,
    stepping,
    watching,
)
from .findings import Finding
from .places import Place
from .pool import Pool
from .scenarios import Settings, Tell

MORE: dict[str, Callable[[Settings, Pool, Place, Tell], list[Finding]]] = {
    "async": async_saves.run,
    "background": background.run,
    "merge": merging.run,
    "codecs": coding.run,
    "memory": footprint.run,
    "plan-large": planning_large.run,
    "scale": scale.run,
    "step": stepping.run,
    "watching": watching.run,
    "s3": object_store.run,
    "convert": converting.run,
    "export": exporting.run,
    "foreign": foreign.run,
    "live-push": live_push.run,
    "live-bytes": live_bytes.run,
    "steady": steady.run,
    "gpu": gpu.run,
}
"""Each gives findings for one place."""
