"""What a Checkpointer tells of its saves and loads while they happen: one small value for each event, the alerts that follow from them, and
a thread for each listener. No torch."""

from __future__ import annotations

import atexit
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from queue import SimpleQueue
from statistics import median
from typing import Any, Generic, Literal, TypeVar
from weakref import WeakSet

from ckpt import errors
from ckpt.errors import AccessError, StorageError, UsageError

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
Topic = Literal["slow", "stall", "straggler", "storage", "publishing", "unrestored"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """What happened. A field is None, or empty, where it does not apply to events of this kind, or is not known.

    ``save.begun``       a save was begun; training continues. ``blocked`` is what the call took
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


# Alerts: what in a run's saves needs somebody to look at it. Pure, but that it remembers the last saves.

_HISTORY = 20
"""Saves that are remembered."""
_FEWEST = 5
"""Saves that make a history."""
_NOTABLE = 1.0
"""Seconds: what is shorter is never slow."""
_NOTABLE_STALL = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Alerts:
    """When to alert. Each alert is given once for its cause, and again when that has ended and comes back, or another error is the cause.
    Publishing has caught up when nothing waits any more.

    Args:
        slower: a save takes so many times the median of the last 20, and more than a second.
        stall: the last five saves block training so many times as long as the five before, by their medians, and more than 0.1 s.
        last: so many saves in a row have the same straggler as their slowest rank.
        retries: the ranks have made so many requests again to get one save through.
        behind: so many checkpoints of the local tier wait to be published.

    Raises:
        UsageError: a limit is not above 1.
    """

    slower: float = 3.0
    stall: float = 2.0
    last: int = 5
    behind: int = 3
    retries: int = 20

    def __post_init__(self) -> None:
        for name in ("slower", "stall", "last", "behind", "retries"):
            if not getattr(self, name) > 1:
                raise UsageError(f"Alerts({name}) is above 1, not {getattr(self, name)!r}", hint="alerts=False turns them off")


@dataclass(eq=False)
class AlertRules:
    """The alerts that follow from the events of one run, in order."""

    limits: Alerts
    _took: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    _blocked: deque[float] = field(default_factory=lambda: deque(maxlen=2 * _FEWEST))
    _last: tuple[int | None, int] = None, 0
    """A rank, and how many saves in a row it was the last of."""
    _waiting: dict[int, float] = field(default_factory=dict)
    """Steps that are committed and not published, and since when."""
    _raised: dict[str, object] = field(default_factory=dict)
    """What goes wrong → what is known of the cause, for which there was an alert."""

    def follow(self, event: Event, *, tiers: bool = False) -> list[Event]:
        """The alerts that this event gives rise to. ``tiers``: what is durable has still to be published."""
        if event.kind == "save.durable":
            if tiers and event.step is not None:
                self._waiting[event.step] = event.at
            alerts = [self._slow(event), self._stall(event), self._straggler(event), self._late(event), self._refused(event)]
        elif event.kind in ("save.failed", "publish.failed"):
            alerts = [self._storage(event)]
        elif event.kind == "save.published" and event.step is not None:
            for step in [s for s in self._waiting if s <= event.step]:  # older ones are not published any more
                del self._waiting[step]
            self._raised.pop("publish.failed", None)
            alerts = [self._late(event)]
        else:
            alerts = []
        return [alert for alert in alerts if alert is not None]

    def since(self, step: int, at: float) -> float | None:
        """Seconds from the commit in the local tier until ``at``; None if it was not seen."""
        return at - self._waiting[step] if step in self._waiting else None

    # ---- what is wrong

    def _slow(self, event: Event) -> Event | None:
        took, usual = event.seconds or 0.0, median(self._took) if len(self._took) >= _FEWEST else None
        self._took.append(took)
        if usual is None or took <= max(self.limits.slower * usual, _NOTABLE):
            return self._alert(event, "slow", None)
        times = f"{took / max(usual, 1e-9):.1f} times as long as usual"
        words = f"the save of step {event.step} took {took:.1f} s, {times}; `ckpt stats {event.url}` shows which phase and rank"
        return self._alert(event, "slow", words)

    def _stall(self, event: Event) -> Event | None:
        self._blocked.append(event.blocked or 0.0)
        values = list(self._blocked)
        before, now = median(values[:_FEWEST]), median(values[_FEWEST:] or values)
        wrong = len(values) == 2 * _FEWEST and now > self.limits.stall * before and now - before > _NOTABLE_STALL
        took = f"the last {_FEWEST} saves have blocked training for {now:.2f} s each, those before for {before:.2f} s"
        hint = "look whether saves overlap, host memory is short, or the state has grown"
        return self._alert(event, "stall", f"{took}; {hint}" if wrong else None)

    def _straggler(self, event: Event) -> Event | None:
        rank = event.slowest if event.slowest in event.stragglers else None
        self._last = (rank, self._last[1] + 1 if rank == self._last[0] else 1)
        wrong = rank is not None and self._last[1] >= self.limits.last
        hint = f"look at its machine's disk and network, and with `ckpt stats --ranks {event.url}` whether it writes more than others"
        words = f"rank {rank} was the slowest in each of the last {self._last[1]} saves; {hint}"
        return self._alert(event, "straggler", words if wrong else None)

    def _storage(self, event: Event) -> Event | None:
        what = f"step {event.step} is not saved" if event.kind == "save.failed" else "checkpoints are not published"
        wrong = event.kind == "publish.failed" or _is_of_storage(event)
        words = f"{what}: {event.error}: {event.reason}; until that ends, a restart goes on from an older checkpoint"
        return self._alert(event, "storage", words if wrong else None, of=event.kind, cause=event.error)

    def _refused(self, event: Event) -> Event | None:
        """Of a save that got through all the same."""
        self._raised.pop("save.failed", None)
        slow = f", of these {event.throttled} since the storage asked to slow down" if event.throttled else ""
        words = (
            f"the save of step {event.step} has made {event.retries} requests to the storage again{slow}; "
            f"`ckpt stats --ranks {event.url}` shows which ranks; look at the network and the limits of the storage"
        )
        return self._alert(event, "storage", words if (event.retries or 0) >= self.limits.retries else None)

    def _late(self, event: Event) -> Event | None:
        if self._waiting and "publishing" in self._raised:  # fewer wait for a moment whenever one is published
            return None
        oldest = min(self._waiting, default=None)
        if oldest is None or len(self._waiting) < self.limits.behind:
            return self._alert(event, "publishing", None)
        wait = f"{len(self._waiting)} checkpoints wait to be published, step {oldest} for {event.at - self._waiting[oldest]:.0f} s"
        hint = "saves come faster than the root takes them; save less often, or look at its network"
        return self._alert(event, "publishing", f"{wait}: {hint}")

    def _alert(self, event: Event, topic: Topic, words: str | None, of: str | None = None, cause: object = None) -> Event | None:
        """``words`` is None where nothing is wrong. ``of``: what goes wrong, if the topic has several; ``cause``: of which there is one
        alert."""
        of = of or topic
        if words is None:
            self._raised.pop(of, None)
            return None
        if of in self._raised and self._raised[of] == cause:
            return None
        self._raised[of] = cause
        return replace(event, kind="alert", topic=topic, reason=words)


def _is_of_storage(event: Event) -> bool:
    """Whether the storage failed, for this rank or another one, whose error is named in the reason."""
    named = re.findall(r"raised (\w+):", event.reason or "")
    kinds = [getattr(errors, name, None) for name in (event.error or "", *named)]
    return any(isinstance(kind, type) and issubclass(kind, StorageError | AccessError) for kind in kinds)


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
