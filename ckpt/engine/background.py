"""Saves that go on while training does: a handle with two futures, *captured* (the state may change again) and *durable* (committed).

Invariants: one save of a job is in flight at a time. The background uses the job's store and connections of its own, never collectives.
An error is raised by the handle, or else by the job's next call; it is never only logged.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ckpt.errors import BusyError, CkptError
from ckpt.group import Group
from ckpt.workers import Pending

from .garbage import uncollected
from .save import Save, SaveOptions, SaveReport, When

log = logging.getLogger("ckpt")

Busy = Literal["wait", "refuse"]


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

    def __init__(self, save: Save) -> None:
        self.url = save.call.url
        self.captured: Future[None] = Future()
        self.durable: Future[SaveReport] = Future()
        self._save: Save | None = save
        self._total = save.plan.nbytes
        self._seen = False
        self._hook: Any = None

    def __repr__(self) -> str:
        return f"<ckpt save of {self.url}: {self.progress().phase}>"

    # ---- for the caller

    def fence(self) -> None:
        """Wait until the state may change again. Call it before you change the state by hand; an optimizer's step does it by itself.

        Raises what capturing raised.
        """
        self.captured.exception()
        self._seen = self._seen or self.captured.exception() is not None
        self.captured.result()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the save ended, well or not, within ``timeout`` seconds. Raises nothing."""
        try:
            self.durable.exception(timeout)
        except (FutureTimeoutError, TimeoutError):
            return False
        return True

    def done(self) -> bool:
        """Whether the save ended, well or not."""
        return self.durable.done()

    def result(self, timeout: float | None = None) -> SaveReport:
        """What the save did; waits for it.

        Raises:
            TimeoutError: it is still going on after ``timeout`` seconds.
            CkptError: as ``ckpt.save`` would have.
        """
        error = self.durable.exception(timeout)
        self._seen = self._seen or error is not None
        return self.durable.result()

    def progress(self) -> Progress:
        """How far it is. Cheap."""
        save = self._save
        if self.durable.done() or save is None:
            failed = self.durable.done() and self.durable.exception() is not None
            full = 0 if failed else self._total
            return Progress(captured=full, written=full, total=self._total, phase="failed" if failed else "done")
        captured = save.capture.captured if save.capture is not None else 0
        written = save.writer.written if save.writer is not None else 0
        phase: Literal["capture", "write"] = "write" if self.captured.done() else "capture"
        return Progress(captured=captured, written=min(written, self._total), total=self._total, phase=phase)

    def cancel(self) -> None:
        """Ask for the save to end, on all ranks. Nothing is committed, unless this rank has written its share already: ask ``durable``."""
        save = self._save
        if save is not None:
            save.cancelled.set()

    # ---- the work

    def start(self, when: When) -> None:
        save = self._save
        assert save is not None and save.capture is not None
        _in_flight[save.call.group] = self
        if when == "eager":
            capture: Pending[None] | None = None
            self.captured.set_result(None)
        else:
            _capturing.add(self)
            self._hook = register_optimizer_step_pre_hook(_before_step)
            capture = Pending(self._capture_rest, "ckpt-capture")
        # Not a daemon: a program that ends waits for the save that it began.
        threading.Thread(target=self._run, args=(save, capture), name="ckpt-save").start()

    def _capture_rest(self) -> None:
        save = self._save
        assert save is not None and save.capture is not None
        try:
            save.capture.rest(1, save.beat)
            self.captured.set_result(None)
        except BaseException as err:  # noqa: BLE001  the save fails with it
            self.captured.set_exception(err)
        finally:
            _capturing.discard(self)
            self._hook.remove()

    def _run(self, save: Save, capture: Pending[None] | None) -> None:
        try:
            try:
                report = save.run(lambda: None)
            except BaseException as err:
                if save.capture is not None:
                    save.capture.stage.fail(err)
                raise
            finally:
                if capture is not None:
                    capture.wait()
        except BaseException as err:  # noqa: BLE001  raised by the handle or by the job's next call
            log.error("the save of %s in the background failed: %s", self.url, err)
            self._save = None
            self.durable.set_exception(err)
        else:
            self._save = None
            self.durable.set_result(report)


_in_flight: WeakKeyDictionary[Group, SaveHandle] = WeakKeyDictionary()
"""The last save in the background of each job."""
_capturing: WeakSet[SaveHandle] = WeakSet()


def fence() -> None:
    """Wait until every save in the background of this process has captured its state. Raises nothing: the saves' handles do."""
    for handle in list(_capturing):
        handle.captured.exception()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    fence()


def settle(group: Group, busy: Busy = "wait") -> None:
    """End what is in flight before the job's next call.

    Raises:
        BusyError: a save is going on, and ``busy`` is ``"refuse"``.
        CkptError: the last save failed, and nobody has been told.
    """
    handle = _in_flight.get(group)
    if handle is None:
        return
    if busy == "refuse" and not handle.done():
        raise BusyError(f"the save of {handle.url} is still going on", hint='wait for its handle, or save with when_busy="wait"')
    handle.wait()
    del _in_flight[group]
    error = handle.durable.exception()
    if error is not None and not handle._seen:
        handle._seen = True
        raise error


def start_save(url: str, state: object, group: Group, options: SaveOptions, when: When) -> SaveHandle:
    """Begin a save in the background; collective over ``group``."""
    save = Save(group.call("save", url, options.timeout), options)
    try:
        with uncollected():
            save.prepare(state)
            capture = save.stage()
            if when == "eager":
                capture.everything(options.threads, save.beat)
            else:
                capture.what_may_change()
    except BaseException as err:
        mistake = err

        def fail() -> dict[str, Any]:
            raise mistake

        save.call.agree("begin", fail, lambda rows: None)
        raise
    handle = SaveHandle(save)
    handle.start(when)
    return handle


__all__ = ["Busy", "CkptError", "Pending", "Progress", "SaveHandle", "fence", "settle", "start_save"]
