"""What saves cost training, measured in the training loop: how long they block it, and how much slower they make it. No torch.

A save blocks training in the call that begins it, and where training waits for its copy or its end; that is timed (``Stall``). What goes on
in the background takes cores, memory and network from training; that shows only in steps that take longer than usual. So the time
from one call of ``Checkpointer.step`` to the next is compared: beside a save, and else. One step counts as at most two usual ones: what
takes longer than that is seldom the save, but an evaluation or a compilation. What a step stood still for the save is taken off before.
Steps that are faster than usual count too, so that chance cancels out.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Protocol

from ckpt.policies import SaveCost
from ckpt.tracing.stall import Stall

KEPT = 64
"""Saves, and steps beside none, that are remembered."""
_FEWEST = 3
"""Steps beside no save that tell what is usual."""
_MOST = 2.0
"""Usual steps that one step beside a save counts as at most."""


class Handle(Protocol):
    """What has to be known of a save: a ``SaveHandle``."""

    stall: Stall
    called: float
    """Seconds of ``stall`` that the call took which began it."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def took(self) -> float | None:
        """Seconds to the commit; None if it failed or is going on."""
        ...


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
        self._save: Handle | None = None
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
        if self._save is not None and self._save.done():
            self._end(self._save)

    def leave(self, now: float, *, step: bool) -> None:
        """The call is over. After one that was no step, the step goes on that was going on before."""
        if step:
            self._left = now
        elif self._left is not None:
            self._left += now - self._entered
        self._stood = self._save.stall.seconds if self._save is not None else 0.0

    def begun(self, save: Handle, now: float) -> None:
        """A save was begun in this call. What the call waited for the one before is that one's."""
        waited = 0.0
        if self._save is not None:
            waited = self._save.stall.seconds - self._stood
            self._end(self._save)
        save.stall.add(max(0.0, now - self._entered - waited - save.called))
        self._save, self._began, self._excess, self._fresh = save, self._entered, 0.0, False
        self._step = median(self._usual) if len(self._usual) >= _FEWEST else None
        self._stood = save.stall.seconds

    def _end(self, save: Handle) -> None:
        self._save = None
        cost = SaveCost(began=self._began, blocked=save.stall.seconds, slowed=self._excess, durable=save.took())
        self.saves = (*self.saves, cost)[-KEPT:]
