"""The values that the phases of a save hand on (``save.py``): each has all that the next phase needs, and none of them ever changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpt.catalog import DataFile
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.retries import Retries
from ckpt.net.channel import Row
from ckpt.state.collect import Collected

from .capture import Capture
from .job import SaveJob, SaveReport
from .leader import OpenSave
from .plan import RankPlan
from .replicas import Replicas
from .reuse import Reuse
from .tensor_source import ChunkSource, FragmentExchange
from .writer import RankWriter


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """What one rank knows of its share before it talks to any other."""

    job: SaveJob
    backend: Backend
    collected: Collected
    values: bytes
    """The state without its tensors, as JSON; equal on all ranks."""
    own_values: bytes
    """The values that only this rank has, as JSON; empty if it has none."""
    plan: RankPlan
    source: ChunkSource
    fragments: FragmentExchange | None
    """Edges of flat shards that this rank sends or receives, if it does."""
    replicas: Replicas | None
    reuse: Reuse | None = None
    """What this rank refers to in the base, where saves may refer to anything; ``plan`` is what is left."""
    capture: Capture | None = None
    """Of a save in the background: the copy that is written in place of the state."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Begun:
    """All ranks' states make one checkpoint, which has an id: data files may be written."""

    prepared: Prepared
    id: str
    writer: RankWriter
    opened: OpenSave | None
    """On the leader: what it commits later."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Written:
    """This rank's data files are durable."""

    begun: Begun
    files: Sequence[DataFile]
    mirrored_bytes: int
    """Of their bytes, in files of other ranks."""
    row: Row
    """What the leader has to know of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Committed:
    """The checkpoint is there. On the leader also what the ranks met on the way."""

    report: SaveReport
    busy: Mapping[int, float] = field(default_factory=dict)
    """Seconds that each rank, counted from 0, was busy with the save."""
    retries: Retries = field(default_factory=Retries)
    """What storage has refused on all ranks."""
