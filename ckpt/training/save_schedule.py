"""When a training loop saves: asks the policy after each step, and sees that all ranks save after the same one.

    step n ends ─┬─ rank_part of the policy: follows from step numbers alone, so every rank comes to the same answer, without a message
                 └─ leader_part: clocks, costs and signals, which only the leader asks; it proposes a step, and the ranks agree on the
                    first step that none of them has passed (``step_agreement.py``)

A notice of preemption may come to any rank. It is passed to the leader, and counts there as one more reason: the save that follows from it
is the last one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ckpt.coordination.group import Group
from ckpt.coordination.step_agreement import Due, StepAgreement
from ckpt.errors import UsageError
from ckpt.policies import Moment, SavePolicy

from .cost_meter import CostMeter
from .preemption import Preemption


class SaveSchedule:
    """One rank's end. ``answered``: the save that a notice of preemption asked for is durable."""

    def __init__(self, policy: SavePolicy, group: Group, timeout: float, signals: Sequence[int]) -> None:
        self.costs = CostMeter()
        self.answered = False
        self._group = group
        self._rank_part, self._leader_part = policy.rank_part, policy.leader_part
        self._began = time.monotonic()
        self._started_step: int | None = None
        self._last_step: int | None = None
        self._last_at: float | None = None
        self._before: tuple[int | None, float | None] = None, None
        self._preemption = Preemption(signals)
        self._agreement: StepAgreement | None = None
        if policy.watches_preemption:
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
        preempted = self._preempted() and not self.answered
        moment = Moment(
            step=n,
            started_step=self._started_step,
            last_saved_step=self._last_step,
            seconds=self.now,
            last_saved_at=self._last_at,
            preempted=preempted,
            measuring=self.costs.measuring,
            saves=self.costs.saves,
        )
        reason = self._rank_part.due(moment) if self._rank_part is not None else None
        if self._leader_part is None:
            return Due(reason=reason) if reason is not None else None
        if self._agreement is None:
            reason = reason or self._leader_part.due(moment)
            return Due(reason=reason, final=preempted) if reason is not None else None
        if self._group.rank == self._group.leader and not self._agreement.pending:
            of_leader = self._leader_part.due(moment)
            if of_leader is not None:
                self._agreement.propose(n, Due(reason=of_leader, final=preempted))
        # Whether it is the last save follows from what was agreed, not from what this rank has heard of meanwhile.
        return self._agreement.due(n) or (Due(reason=reason) if reason is not None else None)

    def _preempted(self) -> bool:
        here = self._preemption.noticed.is_set()
        if self._agreement is None:
            return here
        if here:
            self._agreement.ask()
        return here or self._agreement.asked.is_set()

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


def check_step(n: object) -> None:
    """Raise UsageError unless ``n`` is the number of a training step."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise UsageError(f"a step is a whole number of at least 0, not {n!r}", hint="give the number of the step as an int")
