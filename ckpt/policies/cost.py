"""What saves have cost a job, and the interval between saves that loses least: the formula of Daly. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveCost:
    """One save that has ended, well or not, as the rank that measured it saw it. All times are in seconds."""

    began: float
    """By the clock of ``Moment.seconds``."""
    blocked: float
    """For how long training stood still."""
    slowed: float = 0.0
    """For how much longer than usual the steps took beside it, what they stood still left out. Below 0 if by chance they were faster."""
    durable: float | None = None
    """From the call to the commit; None if it failed."""

    @property
    def seconds(self) -> float:
        """What it cost training."""
        return max(0.0, self.blocked + self.slowed)


def daly(cost: float, mtbf: float) -> float:
    """Seconds of training between two saves that cost ``cost`` seconds each, for a job that fails every ``mtbf`` seconds on average.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22, 2006, equation 37: with x = cost / 2·mtbf
    it is √(2·cost·mtbf) · (1 + √x/3 + x/9) − cost for x < 1, else mtbf. The first factor is Young's approximation of 1974.
    """
    x = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - cost if x < 1 else mtbf
