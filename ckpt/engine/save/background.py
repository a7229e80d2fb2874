"""Saves that go on while training does: a handle with two futures, *captured* (the state may change again) and *durable* (committed).

Invariants: one save of a job is in flight at a time. The background uses the job's store and connections of its own, never collectives.
An error is raised by the handle, or else by the job's next call; it is never only logged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from ckpt.concurrency import Pending, gc_paused, program_ends, waiting_once
from ckpt.errors import BusyError, CkptError, DeadlineError, RankFailedError
from ckpt.io_backends.checks import Retries
from ckpt.net.group import Group
from ckpt.telemetry.spans import Stall

from .capture import Capture
from .job import BlockedTime, Heartbeat, SaveJob, save_cache, wait_for_pending_save
from .options import SaveOptions, SaveReport
from .save import OnFailure, RankShare, begin, prepare, stage, write_and_commit
from .staging import CaptureFence, CpuBackoff, Outcome, in_trace

log = logging.getLogger("ckpt")

When = Literal["lazy", "eager"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgress:
    """How far a save in the background is on this rank, in bytes of tensors."""

    captured: int
    written: int
    total: int
    phase: Literal["capture", "write", "done", "failed"]


@dataclass(frozen=True, kw_only=True, eq=False)
class BackgroundRun:
    """What a save in the background works with. ``then`` is run on the leading rank when the save is committed, before its handle says so;
    ``failed`` is called when the handle has said why the save failed."""

    job: SaveJob
    share: RankShare
    capture: Capture
    then: Callable[[], None] | None
    failed: OnFailure | None


@dataclass(kw_only=True, eq=False)
class BackgroundStats:
    """What a save in the background costs and how it went, for the loop that pays for it and for the run's log."""

    stall: Stall
    """How long this rank has waited: in the call, in ``fence``, ``wait`` and ``result``, and optimizers in ``step``."""
    called: float = 0.0
    """Seconds that the call took, of these."""
    ended: float | None = None
    """Seconds from the call to the commit or the failure; None while the save goes on."""
    failed_in: str | None = None
    """The phase that it failed in, if it failed."""
    retries: Retries = field(default_factory=Retries)
    """What the storage refused on all ranks; on the leader, when the save is committed."""
    busy: Mapping[int, float] = field(default_factory=dict)
    """Seconds that each rank, counted from 0, was busy with the save; on the leader, when it is committed."""


class SaveHandle:
    """A save in the background, as :func:`ckpt.save_async` gives it.

    ``captured`` and ``durable`` are :class:`concurrent.futures.Future`: the first has no result, the second a :class:`SaveReport`. Both
    raise what went wrong.
    """

    def __init__(self, job: SaveJob, blocked: BlockedTime, cancelled: threading.Event, backoff: CpuBackoff) -> None:
        self._fence = CaptureFence(blocked.stall, backoff)
        self.url: str = job.call.url
        self.captured: Outcome[None] = self._fence.captured
        self.durable: Outcome[SaveReport] = Outcome()
        self._stats = BackgroundStats(stall=blocked.stall)
        # Not the job: whoever keeps a handle, the job's cache among them, would keep the group, and with it the job's store.
        self._meter = job.meter
        self._cancelled = cancelled
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<ckpt save of {self.url}: {self.progress().phase}>"

    # ---- for the caller

    def fence(self) -> None:
        """Wait until the state may change again. Call it before you change the state by hand; an optimizer's step does it by itself.

        Raises what capturing raised.
        """
        self._fence.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the save ended, well or not, within ``timeout`` seconds. Raises nothing."""
        self._hurry()
        try:
            with self._stats.stall:
                self.durable.error(timeout)
        except (FutureTimeoutError, TimeoutError):
            return False
        return True

    def done(self) -> bool:
        """Whether the save ended, well or not."""
        return self.durable.done()

    def result(self, timeout: float | None = None) -> SaveReport:
        """What the save did; waits for it.

        Raises:
            TimeoutError: it is still in progress after ``timeout`` seconds.
            CkptError: as ``ckpt.save`` would have.
        """
        self._hurry()
        try:
            with self._stats.stall:
                return self.durable.result(timeout)
        finally:
            # In a function of ``atexit`` the interpreter waits for no thread, and aborts if one still runs its last lines.
            if program_ends() and self.durable.done() and self._thread is not None:
                self._thread.join()

    def progress(self) -> RankProgress:
        """How far it is. Cheap."""
        meter = self._meter
        if self.durable.done():
            failed = self.durable.error() is not None
            full = 0 if failed else meter.total
            return RankProgress(captured=full, written=full, total=meter.total, phase="failed" if failed else "done")
        phase: Literal["capture", "write"] = "write" if self.captured.done() else "capture"
        return RankProgress(captured=meter.captured, written=meter.done, total=meter.total, phase=phase)

    def cancel(self) -> None:
        """Ask for the save to end, on all ranks. Nothing is committed, unless this rank has written its share already: ask ``durable``."""
        self._cancelled.set()

    # ---- the work

    def _hurry(self) -> None:
        """Take no more care of training's speed: somebody waits."""
        self._fence.backoff.haste.set()

    def _start(self, run: BackgroundRun, threads: int, *, now: bool = False) -> None:
        """Begin to capture, with so many threads, and to write; ``now``: write only when all is captured."""
        run.job.cache.in_flight = self
        run.job.call.group.saves = True
        self._fence.up(on_devices=bool(run.share.collected.shard_table.devices))
        copy = partial(self._capture, run.capture, threads, run.job.beat)
        if now:
            self._hurry()
            copy()
        # One thread, which starts the other: a thread that is started keeps the caller waiting until it runs.
        # Not a daemon: a program that ends waits for the save that it began.
        self._thread = threading.Thread(target=partial(self._run, run, None if now else copy), name="ckpt-save")
        self._thread.start()

    def _capture(self, capture: Capture, threads: int, alive: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            capture.run(threads, alive)
        except BaseException as err:  # noqa: BLE001  the save fails with it
            error = err
        self._fence.down(error)

    def _run(self, run: BackgroundRun, copy: Callable[[], None] | None) -> None:
        job = run.job
        try:
            # Two threads per save: this one agrees and writes, the other one copies. Writing a batch waits for its
            # copy, so an error on either side must end the other's waiting: ``stage.fail`` does.
            copying = None if copy is None else Pending(copy, "ckpt-capture")
            try:
                with job.noted():
                    with job.spans.span("agree"), job.call.phase("begin"):
                        writer, leader = begin(job, run.share)
                    committed = write_and_commit(job, run.share, writer, leader)
                if run.then is not None and leader is not None:
                    try:
                        run.then()
                    except Exception:  # whatever it is, the save is no worse for it: the checkpoint is there
                        log.exception("%s is committed and whole; what was to follow has failed", self.url)
            except BaseException as err:
                run.capture.stage.fail(err)
                raise
            finally:
                if copying is not None:
                    copying.wait()
        except BaseException as err:  # noqa: BLE001  raised by the handle or by the job's next call
            # All ranks hear of what one has raised, and the leader's log has it for all of them, unless it may be the one that is gone.
            gone = isinstance(err, DeadlineError) or (isinstance(err, RankFailedError) and err.departed)
            heard = not job.call.is_leader and isinstance(err, CkptError) and not gone
            log.log(logging.DEBUG if heard else logging.ERROR, "the save of %s in the background failed: %s", self.url, err)
            phase, seconds = job.call.phase_name, time.perf_counter() - job.began
            self._stats.failed_in, self._stats.ended = phase, seconds
            run.capture.stage.close()
            if not self.captured.done():  # no thread could be started for it
                self._fence.down(err)
            self.durable.set_exception(err)
            if run.failed is not None:
                run.failed(err, phase, seconds)
        else:
            stats = self._stats
            stats.busy, stats.retries, stats.ended = committed.busy, committed.retries, committed.report.seconds
            self.durable.set_result(committed.report)


class BackgroundSave:
    """What saves in the background, and waits for it."""

    _saving: SaveHandle | Pending[None] | None = None

    def wait(self) -> None:
        """Wait for the save in the background.

        Raises:
            CkptError: it failed.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()


def stats_of(handle: SaveHandle) -> BackgroundStats:
    """What a save costs and how it goes."""
    return handle._stats


def refuse_if_busy(group: Group, url: str, timeout: float) -> None:
    """Raise BusyError on all ranks if a save of the job is still going on for any of them: the ranks' saves do not end at one moment."""
    # The ranks' saves do not end at the same moment: on one rank the last save may be over and on another not. A rank
    # that decided alone would leave the others waiting in a call that it never makes, so all decide together.
    handle = save_cache(group).in_flight
    mine = handle is not None and not handle.done()
    call = group.call("save", url, timeout, overlaps=True)
    if call.map_reduce("busy", lambda: {"busy": mine}, lambda rows: any(row["busy"] for row in rows.values())):
        raise BusyError("a save of this job is still in progress", where=url, hint='wait for its handle, or save with when_busy="wait"')


@in_trace("ckpt.save")
def start_save(
    url: str,
    state: object,
    group: Group,
    options: SaveOptions,
    when: When,
    *,
    then: Callable[[], None] | None = None,
    failed: OnFailure | None = None,
) -> SaveHandle:
    """Begin a save in the background; collective over ``group``. ``then``, ``failed``: see ``BackgroundRun``; ``failed`` is also called
    where the save fails here."""
    began = time.perf_counter()
    cache = save_cache(group)
    with cache.turn:
        wait_for_pending_save(group)  # which another thread has begun since the caller looked
        blocked = cache.blocked = BlockedTime(cache.blocked)
        heartbeat = Heartbeat(group.call("save", url, options.timeout))
        job = SaveJob.begin(heartbeat.call, options, heartbeat.beat, blocked)
        try:
            with gc_paused(), waiting_once(options.timeout):
                share = prepare(job, state, background=True)
                capture = stage(job, share)
                if when == "lazy":
                    capture.capture_unfenced(share.collected.fenced(), options.threads, job.beat)
        except BaseException as err:
            # An error before the first message would leave the other ranks waiting in "begin" until the deadline.
            job.call.fail("begin", err)
            if failed is not None:
                failed(err, job.call.phase_name, time.perf_counter() - began)
            raise
        handle = SaveHandle(job, blocked, heartbeat.cancelled, capture.stage.backoff)
        # Who waits for the copy should not share the cores with the writing, but a stage smaller than the state is emptied only by writing.
        now = when == "eager" and all(segment.waits_for is None for segment in capture.stage.segments)
        run = BackgroundRun(job=job, share=replace(share, capture=capture), capture=capture, then=then, failed=failed)
        handle._start(run, 1 if when == "lazy" else options.threads, now=now)
        if when == "eager":
            handle._hurry()
            handle.captured.error()  # waits
        handle._stats.called = time.perf_counter() - began
        blocked.stall.add(handle._stats.called)
        return handle
