"""What a Checkpointer tells, and to whom: it makes events of what happens to saves, and hands them to the listeners. And a note of saves
that failed outside of a Checkpointer.

Invariants: nothing here waits for a listener but ``close``, which has a deadline. Events of one rank come in the order in which things
happened there. Listeners are called on the leader, but for those that ask for every rank.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from ckpt.engine.save.background import SaveHandle, stats_of
from ckpt.errors import CkptError, NotFoundError, RankFailedError, UsageError
from ckpt.formats.native.runlog import PATH, LogEntry, add_entry
from ckpt.io_backends.registry import open_backend
from ckpt.net.group import Group
from ckpt.net.liveness import Members
from ckpt.telemetry.spans import Row, SpanTable, stragglers

from .events import FLUSH, AlertRules, Alerts, Event, Kind, Listener, ListenerThread, Topic

log = logging.getLogger("ckpt")

Noted: TypeAlias = tuple[LogEntry, Mapping[int, Row]]
"""An entry of the log, and the spans of the ranks, as they came."""


class Reporter:
    """One rank's end."""

    def __init__(
        self,
        root: str,
        group: Group,
        on_event: Listener | Sequence[Listener] | None,
        *,
        alerts: bool | Alerts,
        tiers: bool,
        keeps_log: bool = False,
    ) -> None:
        listeners = () if on_event is None else tuple(on_event) if isinstance(on_event, Sequence) else (on_event,)
        wrong: list[object] = [one for one in listeners if not callable(one)]
        if wrong:
            hint = "on_event= takes a function of one ckpt.monitors.Event, one of ckpt.monitors, or a list of these"
            raise UsageError(f"{wrong[0]!r} cannot be called with an event", hint=hint)
        if not isinstance(alerts, bool | Alerts):
            raise UsageError(f"alerts= is True, False or ckpt.monitors.Alerts(…), not {alerts!r}")
        self._root = root
        self._group = group
        self._tiers = tiers
        leads = group.rank == group.leader
        self._threads = [ListenerThread(one) for one in listeners if leads or getattr(one, "every_rank", False)]
        self._rules = AlertRules(alerts if isinstance(alerts, Alerts) else Alerts()) if alerts and leads else None
        self._log: ListenerThread[Noted] | None = None
        """Made when there is something to keep."""
        self._keeps_log = keeps_log and leads
        self._going = threading.Condition()
        """Of the events, that none overtakes another; and of ``_saves``."""
        self._saves = 0
        """Those that were begun and have not told yet how they ended."""

    # ---- what happens

    def begun(self, step: int, handle: SaveHandle) -> None:
        """A save was begun in this call."""
        with self._going:
            self._saves += 1
        stall = stats_of(handle).stall
        self.tell("save.begun", step, handle.url, blocked=stall.seconds)
        began = time.perf_counter() - stall.seconds

        def captured(future: object) -> None:
            if handle.captured.error() is None:
                self.tell("save.captured", step, handle.url, seconds=time.perf_counter() - began, blocked=stall.seconds)

        handle.captured.add_done_callback(captured)
        handle.durable.add_done_callback(lambda future: self._ended(step, handle))

    def not_begun(self, step: int, url: str, error: BaseException) -> None:
        """A save failed in the call that was to begin it."""
        self._keep(kind="save", step=step, url=url, phase="begin", **error_fields(error))
        self.tell("save.failed", step, url, **error_fields(error))

    def published(self, step: int, url: str, id: str | None) -> None:
        """A checkpoint of the local tier is committed at the root."""
        self.tell("save.published", step, url, id, self._rules.since(step, time.time()) if self._rules is not None else None)

    def not_published(self, step: int | None, error: BaseException) -> None:
        """A try to publish failed."""
        self.tell("publish.failed", step, self._root, **error_fields(error))

    def restored(
        self,
        step: int | None,
        url: str | None,
        seconds: float,
        nbytes: int | None,
        error: BaseException | None = None,
        spans: Mapping[int, Row] | None = None,
    ) -> None:
        """A state was loaded, or could not be. ``spans``: what ranks, counted from 0, were busy with; on the leader."""
        failed = error_fields(error) if error is not None else {}
        if not isinstance(error, NotFoundError):  # there may be no run yet
            self._keep(spans, kind="load", step=step, url=url, seconds=seconds, tensor_bytes=nbytes, **failed)
        self.tell("restore", step, url, seconds=seconds, tensor_bytes=nbytes, **failed)

    def _ended(self, step: int, handle: SaveHandle) -> None:
        error, stats = handle.durable.error(), stats_of(handle)
        blocked = stats.stall.seconds
        try:
            if error is not None:
                self.tell("save.failed", step, handle.url, blocked=blocked, **error_fields(error))
                self._keep(kind="save", step=step, url=handle.url, phase=stats.failed_in, seconds=stats.ended, **error_fields(error))
                return
            report, busy, ranks = handle.durable.result(), stats.busy, self._group.ranks  # busy counts them from 0
            self.tell(
                "save.durable",
                step,
                report.url,
                report.id,
                report.seconds,
                tensor_bytes=report.tensor_bytes,
                blocked=blocked,
                retries=stats.retries.again,
                throttled=stats.retries.throttled,
                slowest=ranks[max(busy, key=lambda i: busy[i])] if busy else None,
                stragglers=tuple(ranks[i] for i in stragglers(busy, report.seconds)),
            )
        finally:
            with self._going:
                self._saves -= 1
                self._going.notify_all()

    # ---- keeping

    def _keep(self, spans: Mapping[int, Row] | None = None, **fields: Any) -> None:
        """Add to the log of the run, in a thread of its own: nothing depends on whether that works."""
        if not self._keeps_log:
            return
        with self._going:  # saves end in threads of their own
            if self._log is None:
                self._log = ListenerThread(partial(_add, self._root))
        self._log.post((LogEntry(at=time.time(), rank=self._group.rank, ranks=self._group.size, **fields), spans or {}))

    # ---- telling

    def tell(self, kind: Kind, step: int | None, url: str | None, id: str | None = None, seconds: float | None = None, **more: Any) -> None:
        """Make an event of what happened, and hand it to the listeners with the alerts that follow from it."""
        if not self._threads and self._rules is None:
            return
        about = {"step": step, "url": url, "id": id, "seconds": seconds, **more}
        event = Event(kind=kind, at=time.time(), rank=self._group.rank, ranks=self._group.size, root=self._root, **about)
        with self._going:
            alerts = self._rules.follow(event, tiers=self._tiers) if self._rules is not None else []
            for one in (event, *alerts):
                for thread in self._threads:
                    thread.post(one)
        for alert in () if kind.endswith(".failed") else alerts:  # what failed is in the log already
            log.warning("%s: %s", alert.topic, alert.reason)

    def alert(self, topic: Topic, step: int, url: str, reason: str) -> None:
        """Tell of something that no event before it shows; on the leader. It is logged in any case."""
        if self._rules is not None:
            self.tell("alert", step, url, topic=topic, reason=reason)
        log.warning("%s: %s", topic, reason)

    def close(self) -> None:
        """Wait until the listeners have had all events, for a few seconds at most."""
        until = time.monotonic() + FLUSH
        with self._going:
            self._going.wait_for(lambda: self._saves == 0, FLUSH)
        for thread in self._threads:
            thread.close(until)
        if self._log is not None:
            self._log.close(until)


def error_fields(error: BaseException) -> dict[str, Any]:
    """What events and the run's log say of an error."""
    reason = error.message if isinstance(error, CkptError) else str(error)
    return {"error": type(error).__name__, "reason": reason, "failed_ranks": error.ranks if isinstance(error, RankFailedError) else ()}


# Notes saves that failed outside of a Checkpointer in the log of the run that they belong to, as a Checkpointer notes its own.

_STEP = re.compile(r"(.*[^/])/+step-(\d+)/*")


def note_failed_save(group: Members, url: str, error: BaseException, phase: str, seconds: float) -> None:
    """On the leading rank: note a failed save, if its URL lies in a run, that is, beside a log of one or other steps. Does not wait: a
    program that ends waits for the note (``events.FLUSH``)."""
    match = _STEP.fullmatch(str(url))  # as a Checkpointer names its steps; what is no str was refused, and has no run
    if match is None or group.rank != group.leader or not isinstance(error, Exception):  # who interrupts a save knows it
        return
    about = {"step": int(match[2]), "url": url, "phase": phase, "seconds": seconds, **error_fields(error)}
    entry = LogEntry(kind="save", at=time.time(), rank=group.rank, ranks=group.size, **about)
    thread: ListenerThread[Noted] = ListenerThread(partial(_add, match[1], alone=url.rstrip("/").rpartition("/")[2]))
    thread.post((entry, {}))
    thread.end()


def _add(root: str, noted: Noted, alone: str | None = None) -> None:
    """Add to the log of the run. ``alone``: a directory that makes no run of ``root`` if nothing is beside it."""
    entry, spans = noted
    try:
        backend = open_backend(root)
        names = {name.rstrip("/") for name in backend.list_dir()} - {alone} if alone is not None else {PATH}
        if any(name == PATH or name.startswith("step-") for name in names):
            tables = {rank: SpanTable.from_row(row) for rank, row in spans.items()}
            add_entry(backend, replace(entry, tables=tables))
    except CkptError as err:
        log.debug("the log of the run %s is not kept: %s", root, err)
