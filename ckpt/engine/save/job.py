"""What all phases of one save on one rank share, what a job keeps between its saves, and the note of a save's progress."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ckpt import settings
from ckpt.errors import CancelledError, CkptError
from ckpt.formats.native.clearing import check_no_link
from ckpt.formats.native.commit import new_id
from ckpt.formats.native.runlog import ProgressFile
from ckpt.io_backends import checks
from ckpt.io_backends.checks import Retries
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend, real_url
from ckpt.net.call import FIRST_SIGN, Call
from ckpt.net.liveness import Members
from ckpt.telemetry.progress import BEGIN, PHASES, WRITE, SaveProgress, Standing, printable_host, reported, sign_interval
from ckpt.telemetry.spans import SaveMeter, Spans, Stall

from .base import REMEMBERED, RememberedBase
from .candidates import SeenVersions
from .leader import Tables
from .options import SaveOptions
from .plan import Plans
from .staging import Arena, Outcome

log = logging.getLogger("ckpt")


class PendingSave(Protocol):
    """A save in the background, as the job's next call waits for it."""

    captured: Outcome[None]
    durable: Outcome[Any]

    def wait(self) -> bool: ...

    def done(self) -> bool: ...

    def result(self) -> object: ...


@dataclass(eq=False)
class SaveCache:
    """What a job keeps between its saves. Threads that save with one group, as with two Checkpointers that one thread made, take turns:
    a save holds ``turn`` until it is over or in flight, and all of this, memory for copies too, serves one save at a time."""

    turn: threading.RLock = field(default_factory=threading.RLock)
    plans: Plans = field(default_factory=Plans)
    tables: list[Tables] = field(default_factory=list)
    arena: Arena = field(default_factory=Arena)
    seen: tuple[str, SeenVersions] | None = None
    """Of the run that the last save referred to: another run may have other tensors by these names."""
    bases: list[RememberedBase] = field(default_factory=list)
    """Saves that later ones may refer to without reading anything, the last one that was used last."""
    in_flight: PendingSave | None = None
    """The last save in the background, until the job's next call has seen how it ended."""
    blocked: BlockedTime | None = None
    """By the last save in the background."""

    def remember(self, saved: RememberedBase, base: object) -> None:
        """Take a save that is committed; ``base`` is what it referred to."""
        others = [b for b in self.bases if (b.run, b.name) != (saved.run, saved.name)]
        self.bases = [*sorted(others, key=lambda b: b is base), saved][-REMEMBERED:]

    def seen_in(self, run: str) -> SeenVersions:
        """What is remembered of the tensors since saves of this run refer to earlier ones."""
        if self.seen is None or self.seen[0] != run:
            self.seen = run, SeenVersions()
        return self.seen[1]

    def forget(self, url: str) -> None:
        """A save was committed at ``url`` that no later one may refer to."""
        run, _, name = url.rstrip("/").rpartition("/")
        place = None if run.endswith(":/") else real_url(run or "/")  # at the root of a storage there is no run
        self.bases = [b for b in self.bases if (b.run, b.name) != (place, name)]


_caches: WeakKeyDictionary[Members, SaveCache] = WeakKeyDictionary()


def save_cache(group: Members) -> SaveCache:
    """The cache of the job that saves with ``group``."""
    return _caches.get(group) or _caches.setdefault(group, SaveCache())


def wait_for_pending_save(group: Members) -> None:
    """Wait for the job's save in the background, before its next call."""
    cache = save_cache(group)
    handle = cache.in_flight
    if handle is None:
        return
    # An error that nobody has seen is raised here, by the next call of the job, on every rank that has it. A save may
    # be lost, but never without an exception.
    handle.wait()
    with cache.turn:
        if cache.in_flight is handle:  # no other thread has begun one since
            cache.in_flight, group.saves = None, False
    if not (handle.durable.error_reported or handle.captured.error_reported):
        handle.result()


def _forget_parent() -> None:
    """In a forked child no thread of the parent goes on: there is nothing to wait for."""
    for cache in _caches.values():
        cache.in_flight = cache.blocked = None
        cache.turn = threading.RLock()


os.register_at_fork(after_in_child=_forget_parent)


@dataclass(frozen=True, eq=False)
class Heartbeat:
    """Signs of life of a save in the background. Not the save itself: what the save starts holds this, and a reference cycle would keep the
    state's memory until the garbage collector finds it."""

    call: Call
    cancelled: threading.Event = field(default_factory=threading.Event)

    def beat(self) -> None:
        """A sign of life, from a rank that is meant to go on."""
        if self.cancelled.is_set():
            raise CancelledError("the save was cancelled", where=self.call.url)
        self.call.heartbeat()


class BlockedTime:
    """For how long training waited for one save in the background. Training may still wait for a save when its spans are written: the spans
    of the next save have the rest."""

    def __init__(self, before: BlockedTime | None) -> None:
        self.stall = Stall()
        self.waited = before.unreported if before is not None else 0.0
        """Seconds for which training waited for the save before, and which no spans have yet."""
        self._reported = 0.0

    @property
    def unreported(self) -> float:
        return max(0.0, self.stall.seconds - self._reported)

    def report(self) -> dict[str, int]:
        """Microseconds, for the spans."""
        self._reported = self.stall.seconds
        return {"blocked": round(1e6 * self._reported), "waited": round(1e6 * self.waited)}


@dataclass(frozen=True, kw_only=True, eq=False)
class SaveJob:
    """One rank's side of one save: what all of its phases share."""

    call: Call
    options: SaveOptions
    cache: SaveCache
    spans: Spans
    meter: SaveMeter
    beat: Callable[[], None]
    """Gives a sign of life."""
    notes: ProgressWriter | None
    """On the leader: leaves in the storage how far the save is."""
    blocked: BlockedTime | None
    """Of a save in the background."""
    refused_before: Retries
    """What storage had refused to this process when the save began."""
    began: float

    @classmethod
    def begin(cls, call: Call, options: SaveOptions, beat: Callable[[], None] | None = None, blocked: BlockedTime | None = None) -> SaveJob:
        interval, meter = settings.progress(), SaveMeter()
        call.signer = meter.sign
        return cls(
            call=call,
            options=options,
            cache=save_cache(call.group),
            spans=Spans(on=options.spans, ranks=call.group.size),
            meter=meter,
            beat=call.heartbeat if beat is None else beat,
            notes=ProgressWriter(call, interval) if call.is_leader and interval != 0 else None,
            blocked=blocked,
            refused_before=checks.total(),
            began=time.perf_counter(),
        )

    @contextmanager
    def noted(self) -> Iterator[None]:
        """While the block runs, tell how far the save is: the caller's function, and, on the leader, a note in the storage."""
        if (notes := self.notes) is not None:
            timer = threading.Timer(FIRST_SIGN, notes.run)
            timer.args = (timer.finished,)
            timer.name, timer.daemon = "ckpt-progress", True
            try:
                timer.start()
                notes.timer = timer
            except RuntimeError as err:  # the system gives no more threads
                log.debug("how far the save %s is is not noted: %s", self.call.url, err)
        progress, meter = self.options.progress, self.meter
        try:
            with nullcontext() if progress is None else reported(progress, lambda: (meter.done, meter.total)):
                yield
        except BaseException:
            self.cache.bases.clear()  # the base may no longer be what this process remembers: the next save reads it
            raise
        finally:
            if notes is not None:
                notes.stop()


# How far a save is, left in its storage for ``ckpt watch`` by a thread of the leader.
#
# Invariants: nothing waits for this thread for longer than ``_JOIN`` seconds, and no save fails of it. It writes nothing before a save has
# taken ``FIRST_SIGN`` seconds. The file is gone before the commit, unless the storage hangs; then it goes when the storage answers.

OBJECT_STORE = 5.0
"""Seconds between two notes on object stores, which take money for each."""
_JOIN = 2.0
_UNBEGUN = 5.0
"""Seconds for which ranks may come late before that is noted."""
_ARRIVES = 0.25
"""Seconds that the first signs take at most, as a rule."""
_RESTS = 4
"""Times as long as a note took it rests at least: the storage is busy with the save."""
_FAILURES = 3


@dataclass(eq=False)
class ProgressWriter:
    """The leader's thread of one save. ``id`` is set when the save has one; a save whose ranks do not all come is noted under another.
    ``interval``: see ``settings.progress``."""

    _call: Call
    _interval: float | None
    id: str = ""
    """Empty until the save has one."""
    timer: threading.Timer | None = None
    """Calls ``run`` once the save has taken ``FIRST_SIGN`` seconds."""

    def stop(self) -> None:
        """Remove what was noted. Again: nothing happens."""
        timer, self.timer = self.timer, None  # a circle
        if timer is not None:
            timer.cancel()
            timer.join(_JOIN)

    def run(self, stopped: threading.Event) -> None:
        """Note how far the save is until it is ``stopped``."""
        file: ProgressFile | None = None
        try:
            backend = open_backend(self._call.url)
            interval = self._interval or (OBJECT_STORE if backend.io_hints.coalesce_gap else 1.0)
            notes = _Notes(self._call, max(interval, sign_interval(self._call.group.size)))
            first = interval if self.id else max(interval, _UNBEGUN)
            if stopped.wait(max(_ARRIVES, first - FIRST_SIGN)):
                return
            failures, pause = 0, 0.0
            while failures < _FAILURES and not stopped.wait(pause):
                began = time.monotonic()
                try:
                    file = self._file(backend, file)
                    file.write(notes.note(file.id, pause or notes.interval))
                    failures = 0
                except CkptError as err:
                    failures += 1
                    log.debug("how far the save %s is cannot be noted: %s", self._call.url, err)
                pause = max(notes.interval, _RESTS * (time.monotonic() - began))
        except BaseException as err:  # noqa: BLE001  nobody needs it: the save goes on
            log.debug("how far the save %s is is not noted any more: %s", self._call.url, err)
        finally:
            if file is not None:
                with suppress(BaseException):
                    file.remove()

    def _file(self, backend: Backend, file: ProgressFile | None) -> ProgressFile:
        if file is None and not self.id:  # whoever has an id has looked
            check_no_link(backend)
        id = self.id or (file.id if file is not None else new_id())
        if file is not None and file.id != id:
            file.remove()
        return file if file is not None and file.id == id else ProgressFile(backend, id)


class _Notes:
    """What the leader notes of one save, again and again."""

    def __init__(self, call: Call, interval: float) -> None:
        self.interval = interval
        self._call = call
        self._began = time.time() - FIRST_SIGN
        self._standing = Standing(call.group.ranks, time.monotonic() - FIRST_SIGN)
        self._count = 0
        self._host = printable_host(socket.gethostname())

    def note(self, id: str, interval: float) -> SaveProgress:
        """How far the save is now. The next note comes after ``interval`` seconds."""
        signs = self._call.awaited()
        now = time.monotonic()
        self._standing.hear({position: sign for position, sign in signs.items() if sign is not None}, now)
        phase = BEGIN if self._call.phase_name == PHASES[BEGIN] else WRITE
        self._count += 1
        return SaveProgress(
            id=id,
            began=self._began,
            at=time.time(),
            count=self._count,
            interval=interval,
            ranks=self._call.group.size,
            phase=PHASES[phase],
            leader=self._call.group.leader,
            host=self._host,
            phases=self._standing.totals(signs, phase),
            awaited=len(signs),
            slowest=self._standing.slowest(signs, phase, now, self.interval),
        )
