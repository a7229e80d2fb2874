"""What a Checkpointer tells of its saves and loads while they happen: one small value for each event. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

Kind = Literal[
    "save.begun",
    "save.captured",
    "save.durable",
    "save.failed",
    "save.copied",
    "save.published",
    "save.removed",
    "restore",
    "alert",
    "publish.failed",
]
Topic = Literal["slow", "stall", "straggler", "storage", "publishing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """What happened. A field is None, or empty, where it says nothing about events of this kind, or is not known.

    ===================  ===========================================================================================
    ``kind``             what it means
    ===================  ===========================================================================================
    ``save.begun``       a save was begun; training goes on. ``blocked`` is what the call took
    ``save.captured``    the state may change again
    ``save.durable``     the checkpoint is committed. ``seconds`` from the call to the commit
    ``save.failed``      it was not; ``error``, ``reason`` and ``failed_ranks`` say why and where
    ``save.copied``      each file is in as many failure domains as asked for, or has parity; ``seconds`` since the commit
    ``save.published``   the copy at the root is committed, with a local tier; ``seconds`` since the local one was
    ``publish.failed``   a try to publish failed; it is tried again
    ``save.removed``     a checkpoint that no rule keeps is removed
    ``restore``          a checkpoint was loaded; with ``error`` and ``reason``, none could be
    ``alert``            something needs looking at: ``topic``, and ``reason`` in words
    ===================  ===========================================================================================
    """

    kind: Kind
    at: float
    """Seconds since 1970, by the clock of the rank that tells."""
    rank: int
    """The rank that tells."""
    ranks: int
    """How many take part."""
    root: str
    """Of the run."""
    step: int | None = None
    url: str | None = None
    """Of the checkpoint."""
    id: str | None = None
    """Of the save: copies have the same."""
    seconds: float | None = None
    tensor_bytes: int | None = None
    """Of the whole checkpoint; of ``restore``, those that this rank needed."""
    blocked: float | None = None
    """Seconds for which the save has blocked training on this rank, so far."""
    slowest: int | None = None
    """The rank that was busy longest with the save."""
    stragglers: tuple[int, ...] = ()
    """Ranks that were busy more than 1.5 times as long as the median rank, the slowest first."""
    retries: int | None = None
    """Requests to the storage that all ranks had to make again."""
    throttled: int | None = None
    """Those of them where the storage asked to slow down."""
    error: str | None = None
    """Name of the class of the error."""
    reason: str | None = None
    failed_ranks: tuple[int, ...] = ()
    """Other ranks that failed; empty where it was this one, or the error is of all."""
    topic: Topic | None = None
    """Of an alert."""

    def to_json(self) -> dict[str, Any]:
        """The fields that say something."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values if value not in (None, ())}


Listener = Callable[[Event], object]
"""What ``on_event`` takes. One with an attribute ``every_rank`` that is true is called on all ranks, any other on the leader."""
