"""What to keep: policies over the steps of a run, and what no policy can turn off. They look at facts about checkpoints, never at storage.

Never removed are the highest committed step, also of those that the run has not abandoned, the one that was written last, what is tagged,
what a kept or unknown checkpoint uses, and the last whole checkpoint before a kept part.
What is not committed is left alone: whether it is an orphan or belongs to a save in progress is not for a policy to say.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from ckpt.errors import UsageError
from ckpt.settings import check_positive, check_whole

from .save import JoinedPolicy, Policy, flat


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """What policies know about one checkpoint of a run.

    Raises:
        UsageError: ``created`` has no time zone, or another value is not of its type.
    """

    step: int
    created: datetime
    """When it was committed, with a time zone."""
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    tags: frozenset[str] = frozenset()
    referred_by: tuple[int, ...] = ()
    """Steps that exist and whose checkpoints use bytes of this one."""
    base_of: tuple[int, ...] = ()
    """Steps that exist, are parts of a state, and came after this one, the last whole checkpoint before them: a restart loads it first."""
    committed: bool = True
    abandoned: bool = False
    """Whether the run went back to an earlier step since, and went on without this one."""

    def __post_init__(self) -> None:
        check_whole(self.step, "StepInfo.step", 0)
        check_aware(self.created, f"the time at which step {self.step} was created")
        for name, value in self.metrics.items():
            if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) > sys.float_info.max):
                raise UsageError(f"metric {name!r} of step {self.step} is not a float: {value!r}", hint="float(x) makes one of a tensor")
        if not isinstance(self.tags, frozenset):
            raise UsageError(f"the tags of step {self.step} are a frozenset, not {self.tags!r}")
        for step in self.users:
            check_whole(step, f"a step that refers to step {self.step}", 0)

    @property
    def users(self) -> tuple[int, ...]:
        """Steps that are not whole without this one."""
        return (*self.referred_by, *self.base_of)


class KeepPolicy(Policy, ABC):
    """Selects the steps of a run to keep, with reasons. Join policies with ``|``: kept is what any of them keeps.

    Your own policy is a subclass with :meth:`choose`.
    """

    __slots__ = ()

    @abstractmethod
    def choose(self, steps: Sequence[StepInfo], now: datetime | None) -> dict[int, str]:
        """The steps to keep, each with the reason in words, of ``steps``: committed ones, each number once, increasing."""

    def explain(self, steps: Sequence[StepInfo], now: datetime | None = None) -> dict[int, str | None]:
        """For each of ``steps`` why it is kept; None if this policy does not keep it. The lowest step first.

        Steps that are not committed are never kept by a policy. ``now`` has a time zone; only :class:`Within` looks at it.

        Raises:
            UsageError: a step is there twice, or ``now`` has no time zone.
        """
        if now is not None:
            check_aware(now, "now")
        ordered = sorted(steps, key=lambda s: s.step)
        for one, next_one in pairwise(ordered):
            if one.step == next_one.step:
                raise UsageError(f"there are two checkpoints of step {one.step}", hint="move one of them out of the run")
        committed = [s for s in ordered if s.committed]
        chosen = self.choose(committed, now)
        if any(s.abandoned for s in committed):  # they take the place of nothing that the run went on from
            chosen = {**chosen, **self.choose([s for s in committed if not s.abandoned], now)}
        return {s.step: chosen.get(s.step) if s.committed else None for s in ordered}

    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        return AnyKeep.of(self, other)


@dataclass(frozen=True, slots=True, repr=False)
class Latest(KeepPolicy):
    """The ``n`` highest steps. Of a run that went back to an earlier step, these are counted without those that it abandoned, too.

    Raises:
        UsageError: ``n`` is not a whole number of at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        check_whole(self.n, "Latest(n)", 1)

    def choose(self, steps: Sequence[StepInfo], now: datetime | None) -> dict[int, str]:
        return {s.step: repr(self) for s in steps[-self.n :]}


@dataclass(frozen=True, slots=True, repr=False)
class Within(KeepPolicy):
    """What was created in the last ``days`` and ``hours``, counted back from the newest checkpoint, or from now if that is earlier.

    So a run that is stopped keeps what it has, and a clock that is far off, today or when a checkpoint was made, removes nothing more.

    Raises:
        UsageError: a value is negative or no number, or both are 0.
    """

    days: float = field(default=0, kw_only=True)
    hours: float = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_positive(self.days, "Within(days)", zero=True)
        check_positive(self.hours, "Within(hours)", zero=True)
        try:
            span = self.span
        except OverflowError:
            raise UsageError(f"{self!r} is longer than time can be counted", hint="All() keeps everything") from None
        if not span:
            raise UsageError("Within() needs a time", hint="such as Within(hours=36) or Within(days=7)")

    @property
    def span(self) -> timedelta:
        """``days`` and ``hours`` together."""
        return timedelta(days=self.days, hours=self.hours)

    def choose(self, steps: Sequence[StepInfo], now: datetime | None) -> dict[int, str]:
        if not steps:
            return {}
        newest = max(s.created for s in steps)
        end = newest if now is None else min(newest, now)
        return {s.step: repr(self) for s in steps if end - s.created <= self.span}


@dataclass(frozen=True, slots=True, repr=False)
class Best(KeepPolicy):
    """The ``n`` steps with the highest (``mode="max"``) or lowest (``mode="min"``) value of a metric; of equal ones the later step.

    A step without the metric, or with a value that is not finite, is never among them.

    Raises:
        UsageError: ``metric`` is empty, ``n`` is less than 1, or ``mode`` is left out or neither of the two.
    """

    metric: str
    n: int = 1
    if TYPE_CHECKING:
        mode: Literal["max", "min"] = field(kw_only=True)
    else:  # left out it is refused below, like any other wrong value
        mode: Literal["max", "min"] = field(kw_only=True, default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise UsageError(f"Best(metric) is the name of a metric, not {self.metric!r}")
        check_whole(self.n, "Best(n)", 1)
        if self.mode not in ("max", "min"):
            hint = f'Best({self.metric!r}, mode="min") keeps the lowest value, mode="max" the highest'
            raise UsageError(f'Best(mode) is "max" or "min", not {self.mode!r}', hint=hint)

    def choose(self, steps: Sequence[StepInfo], now: datetime | None) -> dict[int, str]:
        values = {s.step: s.metrics[self.metric] for s in steps if self.metric in s.metrics}
        return {step: f"{self!r}: {values[step]:g}" for step in self.ranked(values)}

    def ranked(self, values: Mapping[int, float]) -> list[int]:
        """The steps that have the best of ``values``, which are by step; the best first."""
        sign = 1 if self.mode == "max" else -1
        finite = [step for step, value in values.items() if math.isfinite(value)]
        return sorted(finite, key=lambda step: (sign * values[step], step), reverse=True)[: self.n]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Tagged(KeepPolicy):
    """What has a tag that fits one of ``globs``; without a glob, what has any tag.

    Retention keeps everything that is tagged, with this policy or without.

    Raises:
        UsageError: a glob is empty or no string.
    """

    globs: tuple[str, ...]

    def __init__(self, *globs: str) -> None:
        for glob in globs:
            if not isinstance(glob, str) or not glob:
                raise UsageError(f"a glob of Tagged is a string such as 'release*', not {glob!r}")
        object.__setattr__(self, "globs", tuple(dict.fromkeys(globs)))

    def __repr__(self) -> str:
        return f"Tagged({', '.join(map(repr, self.globs))})"

    def choose(self, steps: Sequence[StepInfo], now: datetime | None) -> dict[int, str]:
        fits = {s.step: any(fnmatchcase(tag, glob) for tag in s.tags for glob in self.globs or ("*",)) for s in steps}
        return {step: repr(self) for step, fit in fits.items() if fit}


@dataclass(frozen=True, slots=True, repr=False)
class All(KeepPolicy):
    """Everything."""

    def choose(self, steps: Sequence[StepInfo], now: datetime | None) -> dict[int, str]:
        return {s.step: repr(self) for s in steps}


class AnyKeep(JoinedPolicy, KeepPolicy):
    """What any of ``policies`` keeps. Made by ``|`` and by :func:`ckpt.policies.AnyOf`."""

    __slots__ = ()
    policies: tuple[KeepPolicy, ...]

    @classmethod
    def of(cls, *policies: KeepPolicy) -> KeepPolicy:
        """Join policies; nested ones become one, equal ones too."""
        for policy in policies:
            check_keeping(policy)
        members = flat(policies)
        return members[0] if len(members) == 1 else cls(members)

    def choose(self, steps: Sequence[StepInfo], now: datetime | None) -> dict[int, str]:
        reasons: dict[int, list[str]] = {}
        for policy in self.policies:
            for step, reason in policy.choose(steps, now).items():
                reasons.setdefault(step, []).append(reason)
        return {step: "; ".join(given) for step, given in reasons.items()}


def check_keeping(policy: object) -> None:
    """Raise UsageError unless ``policy`` says what to keep."""
    if not isinstance(policy, KeepPolicy):
        hint = "Latest, EverySteps, Within, Best, Tagged, All and AnyOf of these do"
        raise UsageError(f"{policy!r} does not say what to keep", hint=hint)


def check_aware(when: object, what: str) -> None:
    """Raise UsageError unless ``when`` is a datetime with a time zone; ``what`` names it."""
    if not isinstance(when, datetime) or when.utcoffset() is None:
        raise UsageError(f"{what} is a datetime with a time zone, not {when!r}", hint="datetime.now(timezone.utc) is one")


# What may be removed.

_NAMED = 3
"""So many referring steps are named in a reason; the others are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What is to become of one checkpoint, and why."""

    step: int
    outcome: Literal["kept", "removed", "left"]
    """``left``: it is not committed, and retention does not judge it."""
    reasons: tuple[str, ...]
    """At least one: rules that no policy turns off first, then what the policy says, then the steps that refer to it."""

    def __str__(self) -> str:
        return f"{self.outcome}: {'; '.join(self.reasons)}"


@dataclass(frozen=True, slots=True)
class Verdicts:
    """One verdict for each step, the lowest first."""

    verdicts: tuple[Verdict, ...]
    removed: tuple[int, ...]
    """The steps to remove, in an order that is safe to stop at any point: a checkpoint comes after those that use its bytes."""

    @property
    def kept(self) -> tuple[int, ...]:
        """The steps to keep, the lowest first."""
        return tuple(v.step for v in self.verdicts if v.outcome == "kept")

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __len__(self) -> int:
        return len(self.verdicts)


def retention(keep: KeepPolicy, steps: Sequence[StepInfo], now: datetime, *, abandoned: bool = True) -> Verdicts:
    """Judge all ``steps`` of a run. ``abandoned=False``: of those that the run has abandoned only what is tagged or used stays.

    A step that refers to another and is not among the committed ``steps`` may be a save in progress, so what it refers to is kept.

    Raises:
        UsageError: a step is there twice, ``now`` has no time zone, or ``keep`` is not a keeping policy.
    """
    check_keeping(keep)
    check_aware(now, "now")
    explained = keep.explain(steps, now)
    committed = sorted((s for s in steps if s.committed), key=lambda s: s.step)
    live = [s for s in committed if not s.abandoned]
    judged = committed if abandoned else live
    last_written = {max(some, key=lambda s: (s.created, s.step)).step for some in (judged, live) if some}
    newest = {s.step for s in (*live[-1:], *judged[-1:])}
    reasons: dict[int, list[str]] = {s.step: [] for s in committed}
    for s in committed:  # why no policy can remove it, references apart
        if s.step in newest:
            reasons[s.step].append("highest" if s.abandoned else "newest")
        elif s.step in last_written:
            reasons[s.step].append("written last")
        if s.tags:
            reasons[s.step].append(f"tagged {', '.join(map(repr, sorted(s.tags)))}")
    for s in judged:
        reason = explained[s.step]
        if reason is not None:
            reasons[s.step].append(reason)
    kept = _with_what_they_use(committed, {step for step, why in reasons.items() if why})
    for s in committed:
        referrers, parts = ([r for r in users if r != s.step and (r in kept or r not in reasons)] for users in (s.referred_by, s.base_of))
        reasons[s.step] += _of_steps(referrers, "refers to it", "refer to it")
        reasons[s.step] += _of_steps(parts, "is a part, and may lie over it", "are parts, and may lie over it")
    left_behind = {s.step for s in committed if s.abandoned}
    verdicts = []
    for step in explained:
        if step not in reasons:
            verdicts.append(Verdict(step=step, outcome="left", reasons=("not committed",)))
        elif reasons[step]:
            verdicts.append(Verdict(step=step, outcome="kept", reasons=tuple(reasons[step])))
        else:
            why = (*(["abandoned"] if step in left_behind else []), "no rule keeps it")
            verdicts.append(Verdict(step=step, outcome="removed", reasons=why))
    return Verdicts(tuple(verdicts), _users_first([s for s in committed if s.step not in kept]))


def without_metric(keep: KeepPolicy, steps: Sequence[StepInfo]) -> tuple[Best, ...]:
    """The rules of ``keep`` for the best steps that keep none, because no committed step has their metric: a typing error, perhaps."""
    committed = [s for s in steps if s.committed]
    best = [rule for rule in flat([keep]) if isinstance(rule, Best)] if committed else []
    return tuple(rule for rule in best if not any(rule.metric in s.metrics for s in committed))


def _with_what_they_use(committed: Sequence[StepInfo], kept: set[int]) -> set[int]:
    """``kept``, what steps outside ``committed`` refer to, and what any of these refer to, and so on."""
    known = {s.step for s in committed}
    used: dict[int, list[int]] = {}
    for s in committed:
        for referrer in s.users:
            used.setdefault(referrer, []).append(s.step)
    # The transitive closure of "uses bytes of": a kept checkpoint needs those that it refers to, and these need theirs.
    needed = set(kept)
    open_ends = [*kept, *(r for r in used if r not in known)]
    while open_ends:
        new = [step for step in used.get(open_ends.pop(), ()) if step not in needed]
        needed.update(new)
        open_ends += new
    return needed


def _of_steps(users: Iterable[int], one: str, several: str) -> list[str]:
    steps = sorted(set(users))
    if len(steps) < 2:
        return [f"step {step} {one}" for step in steps]
    named = ", ".join(map(str, steps[:_NAMED]))
    more = f" and {len(steps) - _NAMED} more" if len(steps) > _NAMED else ""
    return [f"steps {named}{more} {several}"]


def _users_first(steps: Sequence[StepInfo]) -> tuple[int, ...]:
    """All ``steps``, each after those that refer to it; where that leaves a choice, the lower one first."""
    # A depth-first search without recursion, since chains of references may be thousands long. A step is listed after
    # all that refer to it: wherever removing stops, nothing that remains refers to something that is gone.
    referrers = {s.step: iter(sorted(r for r in s.users if r != s.step)) for s in steps}
    order: dict[int, None] = {}
    begun: set[int] = set()
    for first in sorted(referrers):
        path = [] if first in begun else [first]
        while path:
            step = path[-1]
            begun.add(step)
            following = next((r for r in referrers[step] if r in referrers and r not in begun), None)  # goes on where it was
            if following is not None:
                path.append(following)
            else:
                order[path.pop()] = None
    return tuple(order)
