"""Saving once more before a deadline: the end of a capacity block or of a Slurm job, or one's own."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone

from ckpt.errors import UsageError

from .save import Moment, SavePolicy, check_positive

VARIABLES = (
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SLURM_JOB_END_TIME",
)
"""Each has seconds since 1970."""
_RECENT = 5
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
