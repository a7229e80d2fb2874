"""Saves that go on while training does: a handle with two futures, *captured* (the state may change again) and *durable* (committed).

Invariants: one save of a job is in flight at a time. The background uses the job's store and connections of its own, never collectives.
An error is raised by the handle, or else by the job's next call; it is never only logged.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ckpt.concurrency.gc_paused import uncollected
from ckpt.concurrency.workers import Pending
from ckpt.coordination.call import Call
from ckpt.coordination.group import Group
from ckpt.coordination.members import Members
from ckpt.engine.devices import watch_graphs
from ckpt.errors import BusyError
from ckpt.io_backends.retries import Retries
from ckpt.tracing.profiling import in_trace
from ckpt.tracing.stall import Stall

from .capture import Capture
from .quiescence import quiescent
from .save import Save, SaveOptions, SaveReport, When
from .writer import RankWriter

log = logging.getLogger("ckpt")

Busy = Literal["wait", "refuse"]

R = TypeVar("R")


class Outcome(Future[R]):
    """A future that remembers whether anybody was told of its error. It cannot be cancelled: a save ends on all ranks or on none."""

    def __init__(self) -> None:
        super().__init__()
        self.told = False
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> R:
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = self.error(timeout)
        self.told = self.told or error is not None
        return error

    def error(self, timeout: float | None = None) -> BaseException | None:
        """The error, for this module's own use: nobody is told."""
        with quiescent():
            return super().exception(timeout)


class _Untold(NamedTuple):
    """For how long training waited for a save, and how much of that its spans have."""

    stall: Stall
    told: float

    @property
    def seconds(self) -> float:
        return max(0.0, self.stall.seconds - self.told)


_untold: WeakKeyDictionary[Members, _Untold] = WeakKeyDictionary()
"""Of the last save in the background of each job."""


class BackgroundSave(Save):
    """A save whose state may have changed before it was captured: what is written counts only once all is captured and found unchanged."""

    def __init__(self, call: Call, options: SaveOptions) -> None:
        super().__init__(call, options)
        self.stall = Stall()
        before = _untold.get(call.group)
        self.waited = before.seconds if before is not None else 0.0
        """Seconds for which training waited for the save before, and which no spans have yet."""
        _untold[call.group] = _Untold(self.stall, 0.0)

    def stalled(self) -> dict[str, int]:
        """See ``Save.stalled``. Training may wait for this save later, too: the spans of the next one have that."""
        blocked = self.stall.seconds
        _untold[self.call.group] = _Untold(self.stall, blocked)
        return {"blocked": round(1e6 * blocked), "waited": round(1e6 * self.waited)}

    def compared(self, writer: RankWriter) -> dict[str, str]:
        assert self.capture is not None
        self.capture.result()
        self.capture.compare(writer.digests)
        self.heartbeat.give()
        return super().compared(writer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a save in the background is on this rank, in bytes of tensors."""

    captured: int
    written: int
    total: int
    phase: Literal["capture", "write", "done", "failed"]


class SaveHandle:
    """A save in the background, as :func:`ckpt.save_async` gives it.

    ``captured`` and ``durable`` are :class:`concurrent.futures.Future`: the first has no result, the second a :class:`SaveReport`. Both
    raise what went wrong.
    """

    def __init__(self, save: BackgroundSave) -> None:
        self.url = save.call.url
        self.captured: Outcome[None] = Outcome()
        self.durable: Outcome[SaveReport] = Outcome()
        self._save: BackgroundSave | None = save
        self._total = save.plan.nbytes
        self.stall = save.stall
        """How long this rank has waited: in the call, in ``fence``, ``wait`` and ``result``, and optimizers in ``step``."""
        self.called = 0.0
        """Seconds that the call took, of these."""
        self.retries = Retries()
        """What the storage refused on all ranks; on the leader, when the save is committed."""
        self.busy: Mapping[int, float] = {}
        """Seconds that each rank, counted from 0, was busy with the save; on the leader, when it is committed."""
        self.failed_in: str | None = None
        """The phase that it failed in, if it failed."""
        self.ran: float | None = None
        """Seconds from the call to the failure."""

    def __repr__(self) -> str:
        return f"<ckpt save of {self.url}: {self.progress().phase}>"

    # ---- for the caller

    @in_trace("ckpt.wait")
    def fence(self) -> None:
        """Wait until the state may change again. Call it before you change the state by hand; an optimizer's step does it by itself.

        Raises what capturing raised.
        """
        self._hurry()
        with self.stall:
            self.captured.result()

    def _hurry(self) -> None:
        """Somebody waits."""
        save = self._save
        if save is not None and save.capture is not None:
            save.capture.stage.throttle.hurry()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the save ended, well or not, within ``timeout`` seconds. Raises nothing."""
        self._hurry()
        try:
            with self.stall:
                self.durable.error(timeout)
        except (FutureTimeoutError, TimeoutError):
            return False
        return True

    def told(self) -> bool:
        """Whether somebody asked for the error that this save ended with."""
        return self.durable.told or self.captured.told

    def done(self) -> bool:
        """Whether the save ended, well or not."""
        return self.durable.done()

    def result(self, timeout: float | None = None) -> SaveReport:
        """What the save did; waits for it.

        Raises:
            TimeoutError: it is still going on after ``timeout`` seconds.
            CkptError: as ``ckpt.save`` would have.
        """
        self._hurry()
        with self.stall:
            return self.durable.result(timeout)

    def took(self) -> float | None:
        """Seconds from the call to the commit; None if it failed or is going on."""
        return self.durable.result().seconds if self.durable.done() and self.durable.error() is None else None

    def progress(self) -> Progress:
        """How far it is. Cheap."""
        save = self._save
        if self.durable.done():
            failed = self.durable.error() is not None
            full = 0 if failed else self._total
            return Progress(captured=full, written=full, total=self._total, phase="failed" if failed else "done")
        if save is None:  # about to be done
            return Progress(captured=self._total, written=self._total, total=self._total, phase="write")
        captured = save.capture.captured if save.capture is not None else 0
        written = save.writer.written if save.writer is not None else 0
        phase: Literal["capture", "write"] = "write" if self.captured.done() else "capture"
        return Progress(captured=captured, written=min(written, self._total), total=self._total, phase=phase)

    def cancel(self) -> None:
        """Ask for the save to end, on all ranks. Nothing is committed, unless this rank has written its share already: ask ``durable``."""
        save = self._save
        if save is not None:
            save.heartbeat.cancelled.set()

    # ---- the work

    def start(self, threads: int, then: Callable[[], None] | None = None, *, now: bool = False) -> None:
        """Begin to capture, with so many threads, and to write; ``now``: write only when all is captured. ``then`` is run on the leading
        rank when the save is committed, before the handle says so."""
        save = self._save
        assert save is not None and save.capture is not None
        watch_steps()
        if save.devices:
            watch_graphs(fence)
        _in_flight[save.call.group] = self
        with _lock:
            _capturing.add(self)
        if now:
            self._hurry()
            self._capture(save, save.capture, threads)
        capture = None if now else partial(self._capture, save, save.capture, threads)
        # One thread, which starts the other: a thread that is started keeps the caller waiting until it runs.
        # Not a daemon: a program that ends waits for the save that it began.
        threading.Thread(target=self._run, args=(save, capture, then), name="ckpt-save").start()

    def _capture(self, save: BackgroundSave, capture: Capture, threads: int) -> None:
        error: BaseException | None = None
        try:
            capture.run(threads, save.heartbeat.give)
        except BaseException as err:  # noqa: BLE001  the save fails with it
            error = err
        self._captured(error)

    def _captured(self, error: BaseException | None) -> None:
        with _lock:
            _capturing.discard(self)
        if error is None:
            self.captured.set_result(None)
        else:
            self.captured.set_exception(error)

    def _run(self, save: BackgroundSave, capture: Callable[[], None] | None, then: Callable[[], None] | None) -> None:
        try:
            capturing = None if capture is None else Pending(capture, "ckpt-capture")
            try:
                report = save.run(lambda: None)
                if then is not None and save.call.is_leader:
                    then()
            except BaseException as err:
                if save.capture is not None:
                    save.capture.stage.fail(err)
                raise
            finally:
                if capturing is not None:
                    capturing.wait()
        except BaseException as err:  # noqa: BLE001  raised by the handle or by the job's next call
            log.error("the save of %s in the background failed: %s", self.url, err)
            self.failed_in, self.ran, self._save = save.call.phase_name, time.perf_counter() - save.began, None
            if not self.captured.done():  # no thread could be started for it
                self._captured(err)
            self.durable.set_exception(err)
        else:
            self._save, self.busy, self.retries = None, save.busy, save.retries
            self.durable.set_result(report)


_in_flight: WeakKeyDictionary[Members, SaveHandle] = WeakKeyDictionary()
"""The last save in the background of each job."""
_capturing: set[SaveHandle] = set()
_lock = threading.Lock()
"""Of ``_capturing``."""


def fence() -> None:
    """Wait until every save in the background of this process has captured its state. Raises nothing: the saves' handles do."""
    with _lock:
        handles = list(_capturing)
    if handles:
        _outwait(handles)


@in_trace("ckpt.wait")
def _outwait(handles: Sequence[SaveHandle]) -> None:
    for handle in handles:
        handle._hurry()
        with handle.stall:
            handle.captured.error()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    fence()


@cache
def watch_steps() -> None:
    """Make every optimizer's step wait for what is being captured.

    Once for the life of the process: torch goes through its table of hooks while a step waits in one of them, so that no hook may be
    removed from there, or added, at the end of a capture.
    """
    register_optimizer_step_pre_hook(_before_step)


def refuse_if_busy(group: Group, url: str, timeout: float) -> None:
    """Raise BusyError on all ranks if a save of the job is still going on for any of them: the ranks' saves do not end at one moment."""
    handle = _in_flight.get(group)
    mine = handle is not None and not handle.done()
    call = group.call("save", url, timeout, overlaps=True)
    if call.map_reduce("busy", lambda: {"busy": mine}, lambda rows: any(row["busy"] for row in rows.values())):
        raise BusyError("a save of this job is still going on", where=url, hint='wait for its handle, or save with when_busy="wait"')


def settle(group: Group) -> None:
    """End what is in flight before the job's next call.

    Raises:
        CkptError: the last save failed, and nobody has been told.
    """
    handle = _in_flight.get(group)
    if handle is None:
        return
    handle.wait()
    del _in_flight[group]
    if not handle.told():
        handle.result()


@in_trace("ckpt.save")
def start_save(
    url: str, state: object, group: Group, options: SaveOptions, when: When, then: Callable[[], None] | None = None
) -> SaveHandle:
    """Begin a save in the background; collective over ``group``. ``then``: see ``SaveHandle.start``."""
    began = time.perf_counter()
    save = BackgroundSave(group.call("save", url, options.timeout), options)
    try:
        with uncollected():
            save.prepare(state)
            capture = save.stage()
            if when == "lazy":
                capture.capture_volatile()
    except BaseException as err:
        mistake = err

        def fail() -> dict[str, Any]:
            raise mistake

        save.call.map_reduce("begin", fail, lambda rows: None)
        raise
    handle = SaveHandle(save)
    # Who waits for the copy should not share the cores with the writing, but a stage smaller than the state is emptied only by writing.
    now = when == "eager" and all(segment.waits_for is None for segment in capture.stage.segments)
    handle.start(1 if when == "lazy" else options.threads, then, now=now)
    if when == "eager":
        handle._hurry()
        handle.captured.error()  # waits
    handle.called = time.perf_counter() - began
    handle.stall.add(handle.called)
    return handle


def _forget_parent() -> None:
    """In a forked child no thread of the parent goes on: there is nothing to wait for."""
    global _lock
    _lock = threading.Lock()
    _capturing.clear()
    _in_flight.clear()
    _untold.clear()


os.register_at_fork(after_in_child=_forget_parent)
