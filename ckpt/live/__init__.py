"""Live state: from the memory of ranks into the memory of others, in any layout, without storage."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .control import SinkStatus as SinkStatus
    from .control import SourceStatus as SourceStatus
    from .control import VersionStatus as VersionStatus
    from .holdings import Version as Version
    from .publication import Publication as Publication
    from .publication import PublishReport as PublishReport
    from .reshard_offers import ReshardReport as ReshardReport
    from .reshard_offers import Traffic as Traffic
    from .resharding import reshard as reshard
    from .sink import Sink as Sink
    from .source import Source as Source
    from .take_phases import TakeReport as TakeReport

_WHERE = {
    "reshard": "resharding",
    "ReshardReport": "reshard_offers",
    "Traffic": "reshard_offers",
    "Source": "source",
    "Publication": "publication",
    "PublishReport": "publication",
    "Version": "holdings",
    "Sink": "sink",
    "TakeReport": "take_phases",
    "SourceStatus": "control",
    "VersionStatus": "control",
    "SinkStatus": "control",
}
"""Public name → the module that has it."""

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module 'ckpt.live' has no attribute {name!r}")
