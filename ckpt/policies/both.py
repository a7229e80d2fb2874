"""Policies that serve saving and keeping alike, EverySteps and what joins policies of one side; and policies as data: JSON for
configurations, the short text of ``--keep``."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timezone
from statistics import median
from typing import Any, ClassVar, overload

from ckpt.errors import UsageError
from ckpt.settings import check_positive, check_whole

from .keep import All, AnyKeep, Best, KeepPolicy, Latest, StepInfo, Tagged, Within
from .save import AnySave, AtSteps, EveryMinutes, JoinedPolicy, Moment, OnPreemption, SaveCost, SavePolicy, daly, flat

# Policies that go by what the job's own saves have cost it (``Moment.saves``): as often as it pays, and once more before a deadline.
#
# A deadline is the end of a capacity block or of a Slurm job, or one's own.

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
        UsageError: a variable is not a time.
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
        UsageError: ``deadline`` is not such a time, or ``reserve`` is negative.
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


class BothPolicy(SavePolicy, KeepPolicy):
    """Policies: when to save, and which checkpoints to keep."""

    __slots__ = ()

    @overload  # type: ignore[override]  # wider than the bases': the result is of the side of what it is joined to
    def __or__(self, other: BothPolicy) -> BothPolicy: ...
    @overload
    def __or__(self, other: SavePolicy) -> SavePolicy: ...
    @overload
    def __or__(self, other: KeepPolicy) -> KeepPolicy: ...
    def __or__(self, other: SavePolicy | KeepPolicy) -> SavePolicy | KeepPolicy:
        return join((self, other))


@dataclass(frozen=True, slots=True, repr=False)
class EverySteps(BothPolicy):
    """The steps ``start``, ``start + n``, ``start + 2n`` and so on, but not step 0; where one is skipped, the first step after it.

    To save: due at those steps. To keep: of the checkpoints from each of those steps to the next, the first.

    Raises:
        UsageError: ``n`` is less than 1, ``start`` less than 0, or one is not a whole number.
    """

    needs_leader: ClassVar[bool] = False
    n: int
    start: int = 0

    def __post_init__(self) -> None:
        check_whole(self.n, "EverySteps(n)", 1)
        check_whole(self.start, "EverySteps(start)", 0)

    def mark(self, step: int) -> int | None:
        """The last of the steps that this policy names, up to ``step``; None if there is none yet."""
        mark = self.start + (step - self.start) // self.n * self.n
        return mark if mark >= max(self.start, 1) else None

    def reason(self, now: Moment) -> str | None:
        mark = self.mark(now.step)
        return None if mark is None or mark <= now.since else self._words(mark, now.step)

    def choose(self, steps: Sequence[StepInfo], now: datetime | None) -> dict[int, str]:
        first: dict[int, int] = {}
        for s in steps:
            mark = self.mark(s.step)
            if mark is not None:
                first.setdefault(mark, s.step)
        return {step: self._words(mark, step) for mark, step in first.items()}

    def _words(self, mark: int, step: int) -> str:
        words = "every step" if self.n == 1 else f"every {self.n} steps"
        return words if mark == step else f"{words} (the first after {mark})"


class AnyBoth(AnySave, AnyKeep, BothPolicy):  # type: ignore[misc]  # its members are of both sides
    """:class:`AnySave` and :class:`AnyKeep` of the same policies. Made by ``|`` and by :func:`AnyOf`."""

    __slots__ = ()
    policies: tuple[BothPolicy, ...]


@overload
def AnyOf(*policies: BothPolicy) -> BothPolicy: ...
@overload
def AnyOf(*policies: SavePolicy) -> SavePolicy: ...
@overload
def AnyOf(*policies: KeepPolicy) -> KeepPolicy: ...
def AnyOf(*policies: SavePolicy | KeepPolicy) -> SavePolicy | KeepPolicy:
    """The policies of one side joined, as by ``|``: due when any of them is, or kept what any of them keeps.

    Raises:
        UsageError: there is none, or they are not of one side.
    """
    return join(policies)


def join(policies: Sequence[SavePolicy | KeepPolicy]) -> SavePolicy | KeepPolicy:
    """:func:`AnyOf` of policies whose side only the run shows."""
    both = [p for p in policies if isinstance(p, BothPolicy)]
    saving = [p for p in policies if isinstance(p, SavePolicy)]
    keeping = [p for p in policies if isinstance(p, KeepPolicy)]
    if not policies:
        raise UsageError("AnyOf() has no policies")
    if len(both) == len(policies):
        members = flat(both)
        return members[0] if len(members) == 1 else AnyBoth(members)
    if len(saving) == len(policies):
        return AnySave.of(*saving)
    if len(keeping) == len(policies):
        return AnyKeep.of(*keeping)
    raise UsageError(
        f"{', '.join(map(repr, policies))} cannot be joined: they do not all say when to save, nor all what to keep",
        hint="give those for saving and those for keeping apart",
    )


# Whether what a caller gives as ``save=`` and ``keep=`` are policies of that side; if not, what was probably meant.


def check_arguments(**given: object) -> None:
    """Raise UsageError unless each argument is a policy of its side: ``save`` and ``every`` of when to save, others of what to keep."""
    for name, value in given.items():
        saves = name in ("save", "every")
        if isinstance(value, SavePolicy if saves else KeepPolicy):
            continue
        wanted = "when to save" if saves else "what to keep"
        if isinstance(value, SavePolicy | KeepPolicy):
            other = "what to keep" if saves else "when to save"
            meant = f"keep={value!r}, and {name}=EverySteps(500)" if saves else f"save={value!r}"
            raise UsageError(f"{name}= selects {wanted}, but {value!r} is a policy of {other}", hint=meant)
        number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        call = "EverySteps" if saves else "Latest"
        meant = f"{name}={call}({value if number else 500 if saves else 3})"
        raise UsageError(f"{name}= is a policy of {wanted}, not {value!r}", hint=f"{meant}; docs/policies.md has the others")


# Policies as data.

_CLASSES: dict[str, Any] = {  # type[SavePolicy | KeepPolicy], each with arguments of its own
    cls.__name__: cls
    for cls in (EverySteps, EveryMinutes, EveryBudget, EveryOptimal, AtSteps, OnPreemption, Before, Latest, Within, Best, Tagged, All)
}
_LISTED = {"AtSteps": "steps", "Tagged": "globs", "AnyOf": "policies"}
"""Those whose arguments are one list → its name."""

_RULES: dict[str, tuple[str, str, Callable[[dict[str, Any]], KeepPolicy]]] = {
    "latest": ("latest=3", r"(?P<n>\d{1,18})", lambda p: Latest(int(p["n"]))),
    "every": (
        "every=1000 or every=1000:500 (from step 500)",
        r"(?P<n>\d{1,18})(?::(?P<start>\d{1,18}))?",
        lambda p: EverySteps(int(p["n"]), start=int(p["start"] or 0)),
    ),
    "within": (
        "within=7d, within=36h or within=1d12h",
        r"(?=.)(?:(?P<days>\d{1,9}(?:\.\d{1,9})?)d)?(?:(?P<hours>\d{1,9}(?:\.\d{1,9})?)h)?",
        lambda p: Within(days=float(p["days"] or 0), hours=float(p["hours"] or 0)),
    ),
    "best": (
        "best=loss:min or best=accuracy:max:3",
        r"(?P<metric>.+?):(?P<mode>min|max)(?::(?P<n>\d{1,18}))?",
        lambda p: Best(p["metric"], int(p["n"] or 1), mode=p["mode"]),
    ),
    "tagged": ("tagged or tagged=release*", r"(?P<glob>.*)", lambda p: Tagged(p["glob"]) if p["glob"] else Tagged()),
    "all": ("all", "", lambda p: All()),
}
"""By name an example, the form of what follows the name, and what makes a policy of its parts."""
KEEP_RULES = {name: example for name, (example, _, _) in _RULES.items()}
"""The rules that :func:`parse_keep` knows, each with an example."""


def to_json(policy: SavePolicy | KeepPolicy) -> dict[str, object]:
    """The policy as a JSON object: ``{"policy": "EverySteps", "n": 500, "start": 0}``; joined ones are ``AnyOf`` with ``policies``.

    Raises:
        UsageError: it is, or has in it, a policy of another class than those of ``ckpt.policies``.
    """
    given: Any = policy
    if isinstance(given, JoinedPolicy):
        return {"policy": "AnyOf", "policies": [to_json(p) for p in given.policies]}  # type: ignore[arg-type]  # of these sides
    name = type(given).__name__
    if _CLASSES.get(name) is not type(given):
        raise UsageError(f"{policy!r} cannot be written as JSON", hint=f"these can: {', '.join(_CLASSES)}")
    values = {f.name: getattr(given, f.name) for f in fields(given)}
    return {"policy": name, **{key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}}


def from_json(node: object) -> SavePolicy | KeepPolicy:
    """The policy that :func:`to_json` wrote. Arguments that have a default may be left out.

    Raises:
        UsageError: ``node`` is not such an object.
    """
    if not isinstance(node, Mapping) or not isinstance(node.get("policy"), str):
        raise UsageError(f"{node!r} is not a policy", hint='a policy is an object such as {"policy": "Latest", "n": 3}')
    name, arguments = node["policy"], {key: value for key, value in node.items() if key != "policy"}
    if name not in _CLASSES and name != "AnyOf":
        raise UsageError(f"there is no policy {name!r}", hint=f"there are {', '.join([*_CLASSES, 'AnyOf'])}")
    if name in _LISTED:
        values = arguments.pop(_LISTED[name], None)
        if not isinstance(values, list) or arguments:
            raise UsageError(f"{name} has one argument, a list: {_LISTED[name]!r}", where=repr(node))
        return join([from_json(v) for v in values]) if name == "AnyOf" else _CLASSES[name](*values)
    try:
        made: SavePolicy | KeepPolicy = _CLASSES[name](**arguments)
    except TypeError as err:
        names = ", ".join(f.name for f in fields(_CLASSES[name])) or "none"
        raise UsageError(f"{name} cannot be made: {err}", where=repr(node), hint=f"its arguments are: {names}") from err
    return made


def parse_keep(text: str) -> KeepPolicy:
    """The keeping policy that ``text`` stands for: one of the forms in :data:`KEEP_RULES`.

    Raises:
        UsageError: it stands for none; the hint has the forms.
    """
    name, equals, value = text.strip().partition("=")
    if name not in KEEP_RULES:
        raise UsageError(f"there is no rule {name!r} to keep checkpoints by", where=text, hint=f"one of {'; '.join(KEEP_RULES.values())}")
    if equals and not value:
        raise UsageError(f"{name}= has no value", where=text, hint=KEEP_RULES[name])
    _, form, make = _RULES[name]
    match = re.fullmatch(form, value, re.ASCII)
    if match is None:
        raise UsageError(f"the rule {name!r} has another form", where=text, hint=KEEP_RULES[name])
    try:
        return make(match.groupdict())
    except UsageError as err:
        raise UsageError(err.message, where=text, hint=err.hint or KEEP_RULES[name]) from err
