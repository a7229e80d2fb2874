"""What a Checkpointer tells of its saves and loads while they happen: one small value for each event, and a thread for each listener. No
torch."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from queue import SimpleQueue
from typing import Any, Generic, Literal, TypeVar
from weakref import WeakSet

Kind = Literal[
    "save.begun",
    "save.captured",
    "save.durable",
    "save.failed",
    "save.copied",
    "save.published",
    "save.joint",
    "save.given_up",
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
    ``save.joint``       all members of a run of several jobs have saved the step: it exists
    ``save.given_up``    one of them did not, in time: the step does not exist; ``reason``
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


# Events on their way to one listener: a queue of bounded length and a thread, so that no listener can hold training up.
#
# Whoever posts an event never waits, whatever the listener does: one that is full loses events, which are counted and said in the log.

T = TypeVar("T")

log = logging.getLogger("ckpt")

LIMIT = 1024
"""Events that wait for a listener at most."""


FLUSH = 5.0
"""Seconds that the end of a Checkpointer, or of the program, waits for listeners."""


class ListenerThread(Generic[T]):
    """One listener's end; ``T`` is what it listens to, events as a rule. Its thread is a daemon: a listener that hangs does not keep a
    program from ending for longer than ``FLUSH``. A program that ends without ``close`` waits as long for what was posted."""

    def __init__(self, listener: Callable[[T], object]) -> None:
        self.listener = listener
        self.dropped = 0
        self.failed = 0
        self._name = getattr(listener, "__qualname__", None) or type(listener).__name__
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ckpt-events", daemon=True)
        self._thread.start()
        _open.add(self)

    def post(self, event: T) -> None:
        """Hand over an event. Never waits."""
        if self._closed or self._queue.qsize() >= LIMIT:
            self.dropped += 1
        else:
            self._queue.put(event)

    def end(self) -> None:
        """Let the thread end once the listener has had every event. Does not wait, and nothing may be posted any more."""
        self._queue.put(None)

    def close(self, until: float) -> None:
        """Wait until the listener has had every event, at most until ``time.monotonic()`` says ``until``; say what it missed."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join(max(0.0, until - time.monotonic()))
        left = max(0, self._queue.qsize() - 1) + 1 if self._thread.is_alive() else 0
        if left or self.dropped:
            log.warning("the listener %s has missed %d events: it takes longer than there is time", self._name, left + self.dropped)
        if self.failed > 1:
            log.warning("the listener %s has raised for %d events", self._name, self.failed)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self.listener(event)
            except Exception:  # a listener must not harm the job
                self.failed += 1
                if self.failed == 1:
                    log.warning(
                        "the listener %s raised an error for %s; it still receives later events",
                        self._name,
                        getattr(event, "kind", event),
                        exc_info=True,
                    )


_open: WeakSet[ListenerThread[Any]] = WeakSet()


@atexit.register
def _flush() -> None:
    """At the end of the program, when saves in the background are over: threads that are no daemons have been waited for."""
    until = time.monotonic() + FLUSH
    for thread in list(_open):
        thread.close(until)
