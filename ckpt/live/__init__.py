"""Live state: from the memory of ranks into the memory of others, in any layout, without storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.needs import late_names

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

if not TYPE_CHECKING:  # a checker would take every name for Any
    __getattr__ = late_names(__name__, {name: f".{where}" for name, where in _WHERE.items()})
