"""When a training loop saves: asks the policy after each step, and sees that all ranks save after the same one. What a policy needs is
measured here: what saves cost, and notices of preemption.

    step n ends ─┬─ rank_part of the policy: follows from step numbers alone, so every rank comes to the same answer, without a message
                 └─ leader_part: clocks, costs and signals, which only the leader asks; it proposes a step, and the ranks agree on the
                    first step that none of them has passed (``net.group``)

A notice of preemption may come to any rank. It is passed to the leader, and counts there as one more reason: the save that follows from it
is the last one.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, Any

from ckpt.errors import UsageError, storage_failed
from ckpt.net.group import Due, Group, StepAgreement
from ckpt.policies import Moment, SaveCost, SavePolicy
from ckpt.settings import check_whole
from ckpt.state.torch_objects import check_state

if TYPE_CHECKING:
    from ckpt.engine.save.background import BackgroundStats

# What saves cost training, measured in the training loop: how long they block it, and how much slower they make it.
#
# A save blocks training in the call that begins it, and where training waits for its copy or its end; that is timed (``Stall``). What
# goes on in the background takes cores, memory and network from training; that shows only in steps that take longer than usual. So the
# time from one call of ``Checkpointer.step`` to the next is compared: beside a save, and else. One step counts as at most two usual ones:
# what takes longer than that is seldom the save, but an evaluation or a compilation. What a step stood still for the save is taken off
# before. Steps that are faster than usual count too, so that chance cancels out.

KEPT = 64
"""Saves, and steps beside none, that are remembered."""
_FEWEST = 3
"""Steps beside no save that tell what is usual."""
_MOST = 2.0
"""Usual steps that one step beside a save counts as at most."""


class CostMeter:
    """One rank's end. It asks no clock: ``now`` are seconds since the job began."""

    def __init__(self) -> None:
        self.saves: tuple[SaveCost, ...] = ()
        """The newest last."""
        self._usual: deque[float] = deque(maxlen=KEPT)
        self._entered = 0.0
        self._left: float | None = None
        self._stood = 0.0
        """What the save in flight had blocked when this call was entered, or the last one left."""
        self._save: BackgroundStats | None = None
        self._began = 0.0
        self._step: float | None = None
        """What is usual, as it was known when the save in flight was begun."""
        self._excess = 0.0
        self._fresh = False
        """A step beside no save has come after the last one."""

    @property
    def measuring(self) -> bool:
        """Whether it cannot be said yet what the last save costs, or what the next one will: a save is going on, or no step beside none
        has come after it. Else a job that saves again and again would never learn what a step usually takes."""
        return self._save is not None or not self._fresh or len(self._usual) < _FEWEST

    @property
    def step_seconds(self) -> float:
        """What a step usually takes beside no save; 0 if none was seen."""
        return median(self._usual) if self._usual else 0.0

    def enter(self, now: float, *, step: bool) -> None:
        """A call of the training loop begins; ``step``: a step of training is over."""
        self._entered = now
        stood = self._save.stall.seconds if self._save is not None else 0.0
        if step and self._left is not None:
            took = now - self._left
            if self._save is None:
                self._usual.append(took)
                self._fresh = True
            elif self._step is not None:
                self._excess += min(took - (stood - self._stood), _MOST * self._step) - self._step
        elif self._left is not None:
            self._left += stood - self._stood
        self._stood = stood
        if self._save is not None and self._save.ended is not None:
            self._end(self._save)

    def leave(self, now: float, *, step: bool) -> None:
        """The call is over. After one that was no step, the step goes on that was going on before."""
        if step:
            self._left = now
        elif self._left is not None:
            self._left += now - self._entered
        self._stood = self._save.stall.seconds if self._save is not None else 0.0

    def begun(self, save: BackgroundStats, now: float) -> None:
        """A save was begun in this call. What the call waited for the one before is that one's."""
        waited = 0.0
        if self._save is not None:
            waited = self._save.stall.seconds - self._stood
            self._end(self._save)
        save.stall.add(max(0.0, now - self._entered - waited - save.called))
        self._save, self._began, self._excess, self._fresh = save, self._entered, 0.0, False
        self._step = median(self._usual) if len(self._usual) >= _FEWEST else None
        self._stood = save.stall.seconds

    def _end(self, save: BackgroundStats) -> None:
        self._save = None
        durable = save.ended if save.failed_in is None else None
        cost = SaveCost(began=self._began, blocked=save.stall.seconds, slowed=self._excess, durable=durable)
        self.saves = (*self.saves, cost)[-KEPT:]


# Notices that the job will be stopped: signals set a flag, and the handlers that were there before still run.
#
#     SIGTERM on any rank ──► flag ──► that rank's next step() passes it to the leader ──► OnPreemption is due
#     all ranks agree on a step that none has passed ──► save ──► committed ──► Checkpointer.preempted is True on every rank
#
# The handler itself only sets the flag: it may run between any two bytecodes, also while the job's store or a lock is in use.
# Handlers can be set in the main thread only; elsewhere nothing is watched, and ``watch`` says so.

log = logging.getLogger("ckpt")

State = Mapping[str, Any]


class Preemption:
    """``noticed`` is set once one of the signals has come."""

    def __init__(self, signals: Sequence[int]) -> None:
        self.signals = signals
        self.noticed = threading.Event()
        self._before: dict[int, Any] = {}

    def watch(self) -> None:
        """Set the handlers."""
        if threading.current_thread() is not threading.main_thread():
            log.warning("signals are not watched: the Checkpointer was not made in the main thread")
            return
        for number in self.signals:
            try:
                self._before[number] = signal.signal(number, self._handle)
            except (OSError, TypeError, ValueError) as err:
                self.restore()
                hint = "name signals that a process can handle, such as signal.SIGTERM"
                raise UsageError(f"signal {number!r} cannot be watched: {err}", hint=hint) from None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Nothing but a flag: a lock taken here could be held by the very code that the signal interrupted.
        self.noticed.set()
        before: Callable[[int, FrameType | None], Any] | int | None = self._before.get(number)
        if callable(before):  # not the default action, which would end the process before it has saved
            before(number, frame)

    def restore(self) -> None:
        """Put back the handlers that were there before."""
        if self._before and threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before.clear()


class SaveSchedule:
    """One rank's end. ``answered``: the job's last save is durable, which a notice of preemption or a deadline asked for."""

    def __init__(self, policy: SavePolicy, group: Group, timeout: float) -> None:
        self.costs = CostMeter()
        self.answered = False
        self._group = group
        self._rank_part, self._leader_part = policy.rank_part, policy.leader_part
        self._began = time.monotonic()
        self._started_step: int | None = None
        self._last_step: int | None = None
        self._last_at: float | None = None
        self._before: tuple[int | None, float | None] = None, None
        try:
            signals = tuple(dict.fromkeys(policy.watched_signals))  # a handler that was set twice would be the one before itself
        except TypeError as err:
            hint = "a property that gives a tuple: return (signal.SIGTERM,)"
            raise UsageError(f"watched_signals of {policy!r} are not numbers of signals: {err}", hint=hint) from err
        self._preemption = Preemption(signals)
        self._agreement: StepAgreement | None = None
        if signals:
            self._preemption.watch()
        if self._leader_part is not None and group.size > 1:
            self._agreement = StepAgreement(group, group.own_store(), timeout)
            self._agreement.start()

    @property
    def now(self) -> float:
        """Seconds since the job began."""
        return time.monotonic() - self._began

    @contextmanager
    def timed(self, *, step: bool = False) -> Iterator[None]:
        """Around a call of the training loop; ``step``: a step of training is over. The time of any other call is not that of a step."""
        self.costs.enter(self.now, step=step)
        try:
            yield
        finally:
            self.costs.leave(self.now, step=step)

    def resumed(self, step: int, *, saved: bool) -> None:
        """Training goes on after ``step``; ``saved``: from a checkpoint of this run, which needs no other of that step."""
        self._started_step = step
        self._last_step = step if saved else None

    def due(self, n: int) -> Due | None:
        """Why the state after step ``n`` is to be saved, the same on all ranks; None if it is not. May wait for other ranks."""
        if self._started_step is None:
            self._started_step = n - 1
        noticed = self._preemption.noticed.is_set()
        if self._agreement is not None:
            if noticed:
                self._agreement.ask()
            noticed = noticed or self._agreement.asked.is_set()
        moment = Moment(
            step=n,
            started_step=self._started_step,
            last_saved_step=self._last_step,
            seconds=self.now,
            last_saved_at=self._last_at,
            preempted=noticed and not self.answered,
            measuring=self.costs.measuring,
            time=time.time(),
            step_seconds=self.costs.step_seconds if self._leader_part is not None else 0.0,
            ended=self.answered,
            saves=self.costs.saves,
        )
        reason = self._rank_part.due(moment) if self._rank_part is not None else None
        if self._leader_part is None:
            return Due(reason=reason) if reason is not None else None
        if self._agreement is None:
            reason = reason or self._leader_part.due(moment)
            return Due(reason=reason, final=self._leader_part.ends(moment)) if reason is not None else None
        if self._group.rank == self._group.leader and not self._agreement.pending:
            of_leader = self._leader_part.due(moment)
            if of_leader is not None:
                self._agreement.propose(n, Due(reason=of_leader, final=self._leader_part.ends(moment)))
        # Whether it is the last save follows from what was agreed, not from what this rank has heard of meanwhile.
        return self._agreement.due(n) or (Due(reason=reason) if reason is not None else None)

    def begun(self, n: int) -> None:
        """Step ``n`` is being saved."""
        self._before = self._last_step, self._last_at
        self._last_step, self._last_at = n, self.now

    def failed(self) -> None:
        """The last save failed. Several ranks do not come here at the same step, so each must still count that step as dealt with."""
        step, self._last_at = self._before
        if self._group.size == 1:
            self._last_step = step

    def stop(self) -> None:
        """The loop is over."""
        self._preemption.restore()
        if self._agreement is not None:
            self._agreement.stop()


class FailedSaves:
    """How many saves in a row the storage has failed, and whether training goes on all the same. The ranks of a job count the same saves,
    and each save ends alike on all of them, so they come to one answer without a message."""

    def __init__(self, limit: int, *, leads: bool) -> None:
        check_whole(limit, "Checkpointer(give_up_after)", 1)
        self.passed_over: BaseException | None = None
        """What the last save failed with, if training went on."""
        self._limit, self._leads = limit, leads
        self._count = 0

    def tolerates(self, error: BaseException) -> bool:
        """Whether training goes on if the next save ends with this."""
        return self._count + 1 < self._limit and storage_failed(error)

    def count(self, what: str, error: BaseException | None, *, level: int = logging.WARNING) -> BaseException | None:
        """A save has ended; gives what is to be raised. ``level``: of the line in the log, if training goes on."""
        goes_on = error is not None and self.tolerates(error)
        self._count = self._count + 1 if error is not None else 0
        self.passed_over = error if goes_on else None
        if goes_on and self._leads:
            message = "%s, and training goes on (failure %d in a row; %d end it): %s"
            log.log(level, message, what, self._count, self._limit, error)
        return None if goes_on else error


def check_step(n: object) -> None:
    """Raise UsageError unless ``n`` is the number of a training step."""
    check_whole(n, "a step", 0, "give the number of the step as an int")


def state_of(given: State | Callable[[], State]) -> State:
    """The state, or what the function makes that gives it."""
    if not isinstance(given, dict) and callable(given) and not hasattr(given, "state_dict"):
        given = given()
    check_state(given)
    return given  # type: ignore[return-value]  # no model comes here


def metric_values(metrics: Mapping[str, float] | None) -> dict[str, float]:
    try:
        return {str(name): float(value) for name, value in (metrics or {}).items()}
    except (AttributeError, TypeError, ValueError):
        raise UsageError(f"metrics= are numbers by name, not {metrics!r}", hint='metrics={"loss": float(loss)}') from None
