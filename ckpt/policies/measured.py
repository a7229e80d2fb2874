"""Policies that go by what the job's own saves have cost it (``Moment.saves``): as often as it pays, and once more before a deadline.

A deadline is the end of a capacity block or of a Slurm job, or one's own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from statistics import median

from ckpt.errors import UsageError
from ckpt.settings import check_positive

from .save import Moment, SaveCost, SavePolicy, daly

_RECENT = 5
"""Saves that are looked at for what one costs."""


@dataclass(frozen=True, slots=True, repr=False)
class EveryBudget(SavePolicy):
    """As often as ``percent`` of the job's time pays for: saves block and slow training for no more than that, as measured.

    Each save is a debt of the seconds that it cost, whatever made it due, and time pays it off at ``percent`` seconds per hundred. One is
    due when nothing is owed, the cost of the last is known, and that was begun ``least_seconds`` ago. The first, of which nothing is known,
    is due so long after the job began. A save that comes late earns credit for as much as the one before cost, and never for more: time
    without saves cannot be spent on many at once.

    Raises:
        UsageError: ``percent`` is not above 0 and below 100, or ``least_seconds`` is not positive.
    """

    percent: float = 1.0
    least_seconds: float = field(default=60.0, kw_only=True)

    def __post_init__(self) -> None:
        check_positive(self.percent, "EveryBudget(percent)")
        check_positive(self.least_seconds, "EveryBudget(least_seconds)")
        if self.percent >= 100:
            raise UsageError(f"EveryBudget(percent) is below 100, not {self.percent!r}", hint="1.0 is one second of a hundred")

    def reason(self, now: Moment) -> str | None:
        if now.measuring or _since(now) < self.least_seconds or self.owed(now.saves, now.seconds) > 0:
            return None
        words = f"{self.percent:g} % of the time pays for a save"
        return f"{words}: the last one cost {now.saves[-1].seconds:.3g} s" if now.saves else f"{words}: the first one shows what it costs"

    def owed(self, saves: tuple[SaveCost, ...], seconds: float) -> float:
        """Seconds of cost that time has not paid for yet."""
        # A leaky bucket: cost fills it, time drains it at ``percent``, to one save's cost below empty and no further.
        debt, at, credit = 0.0, 0.0, 0.0
        for save in saves:
            debt = max(-credit, debt - self.percent / 100 * max(0.0, save.began - at)) + save.seconds
            at, credit = save.began, save.seconds
        return debt - self.percent / 100 * max(0.0, seconds - at)


@dataclass(frozen=True, slots=True, repr=False)
class EveryOptimal(SavePolicy):
    """At the interval that loses least time, by the formula of Daly, for a job that fails every ``mtbf_hours`` hours on average.

    What a save costs is measured: the median of the last five, the seconds that each blocked and slowed training. Saves are at least
    ``least_seconds`` apart, and the first is due so long after the job began.

    Raises:
        UsageError: an argument is not a positive number.
    """

    mtbf_hours: float
    least_seconds: float = field(default=60.0, kw_only=True)

    def __post_init__(self) -> None:
        check_positive(self.mtbf_hours, "EveryOptimal(mtbf_hours)")
        check_positive(self.least_seconds, "EveryOptimal(least_seconds)")

    def reason(self, now: Moment) -> str | None:
        interval = self.interval(now.saves)
        if now.measuring or _since(now) < interval:
            return None
        return f"every {interval:.3g} s loses least if the job fails every {self.mtbf_hours:g} hours"

    def interval(self, saves: tuple[SaveCost, ...]) -> float:
        """Seconds from the beginning of one save to that of the next."""
        if not saves:
            return self.least_seconds
        cost = median(save.seconds for save in saves[-_RECENT:])
        return max(self.least_seconds, daly(cost, 3600 * self.mtbf_hours) + cost)


def _since(now: Moment) -> float:
    """Seconds since the last save was begun, or since the job began; a clock that went back counts as if it had gone on."""
    return abs(now.seconds - (now.last_saved_at or 0.0))


# Before a deadline.

VARIABLES = (
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SLURM_JOB_END_TIME",
)
"""Each has seconds since 1970."""
_SAVES = 2
"""That the longest save counts for: one may be going on when the last one is due, and is waited for."""
_EARLIEST, _LATEST = 1e9, 1e11
"""No deadline in seconds since 1970 is outside: less is a duration, and more are milliseconds."""


def machine_deadline(environ: Mapping[str, str] = os.environ) -> datetime | None:
    """When this job loses its machines, as SageMaker and MLP set it for capacity blocks, and Slurm for jobs (``SLURM_JOB_END_TIME``); the
    earliest of them, and None if no variable is set.

    Raises:
        UsageError: a variable is no time.
    """
    times = []
    for name in VARIABLES:
        if text := environ.get(name, "").strip():
            try:
                seconds = float(text)
            except ValueError:
                seconds = math.nan
            if not _EARLIEST <= seconds < _LATEST:
                raise UsageError(f"{name}={text} is not a time in seconds since 1970", hint=f"unset {name}, or give Before() a time")
            times.append(datetime.fromtimestamp(seconds, timezone.utc))
    return min(times, default=None)


@dataclass(frozen=True, slots=True, repr=False)
class Before(SavePolicy):
    """Due once, in time for the save to be durable before ``deadline``: that is the job's last save, as with :class:`OnPreemption`.

    What it leaves room for is measured: twice the longest of the last five saves, two steps, and ``reserve`` seconds beside. Until a
    save was measured, only the reserve counts.

    Args:
        deadline: a datetime with a time zone, or seconds since 1970; :func:`machine_deadline` has that of the machines. None: never due.

    Raises:
        UsageError: ``deadline`` is no such time, or ``reserve`` is negative.
    """

    deadline: datetime | float | None
    reserve: float = field(default=120.0, kw_only=True)

    def __post_init__(self) -> None:
        check_positive(self.reserve, "Before(reserve)", zero=True)
        if isinstance(self.deadline, datetime):
            if self.deadline.tzinfo is None:
                raise UsageError("Before(deadline) has no time zone", hint="datetime.now(timezone.utc) + timedelta(hours=4)")
            object.__setattr__(self, "deadline", self.deadline.timestamp())
        if self.deadline is not None:
            check_positive(self.deadline, "Before(deadline)")
            if not _EARLIEST <= self._seconds < _LATEST:
                hint = "add a duration to the clock: time.time() + 3600; divide milliseconds by 1000"
                raise UsageError(f"Before(deadline) is a time in seconds since 1970, not {self.deadline!r}", hint=hint)

    def reason(self, now: Moment) -> str | None:
        if not self.ends(now):
            return None
        return f"before {datetime.fromtimestamp(self._seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"

    def ends(self, now: Moment) -> bool:
        return now.time is not None and not now.ended and now.time + self.needed(now) >= self._seconds

    def needed(self, now: Moment) -> float:
        """Seconds to leave for the save."""
        longest = max((save.durable for save in now.saves[-_RECENT:] if save.durable is not None), default=0.0)
        return self.reserve + _SAVES * longest + 2 * now.step_seconds

    @property
    def _seconds(self) -> float:
        return math.inf if self.deadline is None else float(self.deadline)  # type: ignore[arg-type]  # no datetime since __post_init__
