"""When to save: policies over :class:`Moment`, what a training loop knows at the end of a step; and the interval that loses least.

A policy has no memory: all that it needs to know about the past is in the moment. So asking twice gives one answer, and a save that was
due and put off is still due at the next step.

All ranks must decide alike. ``rank_part`` is the part of a policy that looks at step numbers only: every rank computes it for itself, and
comes to the same. ``leader_part`` looks at clocks and signals, which differ between ranks: only the leader evaluates it, and then the ranks
agree on a step (``net/group.py``).

Also here: what keeping policies share with them, and the policies for what a save stores, ``Anchor`` and ``TrustFrozen``.
"""

from __future__ import annotations

import math
import signal
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, TypeVar, cast

from ckpt.errors import UsageError
from ckpt.settings import check_positive, check_whole


class Policy:
    """A rule as a value: immutable, comparable, and shown as the call that makes it."""

    __slots__ = ()

    def __repr__(self) -> str:
        this: object = self
        if not is_dataclass(this):
            return object.__repr__(self)
        shown = []
        for position, field in enumerate(fields(this)):
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                shown.append(repr(value) if position == 0 and not field.kw_only else f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class JoinedPolicy(Policy):
    """Several policies of one side as one. Equal if their members are, in order."""

    policies: tuple[Policy, ...]

    def __eq__(self, other: object) -> bool:
        return self.policies == other.policies if isinstance(other, JoinedPolicy) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.policies)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


P = TypeVar("P", bound=Policy)


def flat(policies: Iterable[P]) -> tuple[P, ...]:
    """``policies``, with the members of joined ones in their place, each once."""
    distinct: list[P] = []
    for policy in policies:
        members = cast(tuple[P, ...], policy.policies) if isinstance(policy, JoinedPolicy) else (policy,)
        distinct += [member for member in members if member not in distinct]
    return tuple(distinct)


@dataclass(frozen=True)
class Anchor:
    """Every ``every``-th save is an anchor, whole by itself; those between are stored as differences from it where that is shorter.

    The first save of a process is one, and so is the one after a save that failed.
    """

    every: int = 10
    trust: TrustFrozen | None = None
    """Which frozen tensors are not hashed by every save."""

    def __post_init__(self) -> None:
        check_whole(self.every, "Anchor(every)", 1, "Anchor(every=10)")
        trust: object = self.trust
        if trust is not None and not isinstance(trust, TrustFrozen):
            hint = "Anchor(trust=ckpt.policies.TrustFrozen(hash_every=10))"
            raise UsageError(f"Anchor(trust=) is a TrustFrozen, not {self.trust!r}", hint=hint)


@dataclass(frozen=True, kw_only=True)
class TrustFrozen:
    """Saves refer to frozen tensors without hashing them, as long as torch has not seen them change.

    **You vouch that nothing writes to them past torch**: through ``.data``, numpy, raw pointers or kernels that do not count versions, or
    through another tensor in their memory that is not saved (torch counts the two apart).
    Changes that torch counts, and tensors in other memory, are noticed by every save. Whatever else happens is noticed by every
    ``hash_every``-th save, which hashes all: it fails with :class:`ckpt.errors.ConsistencyError`, and the saves before it may have old
    bytes.

    ``names``: globs of names. Of these, only modules' parameters without gradients are trusted, and of these none that an optimizer of the
    state has state for, or updates with ``fused=True``. All else is hashed by every save: buffers and tensors of state dicts, too, since
    kernels of torch write to such tensors and count nothing.
    """

    names: str | Sequence[str] = "*"
    hash_every: int = 10

    def __post_init__(self) -> None:
        globs = [self.names] if isinstance(self.names, str) else list(self.names) if isinstance(self.names, Iterable) else []
        if not globs or not all(isinstance(glob, str) for glob in globs):
            raise UsageError(f"TrustFrozen(names=) is a glob of names, or several, not {self.names!r}", hint='TrustFrozen(names="model.*")')
        if not isinstance(self.names, str):
            object.__setattr__(self, "names", tuple(globs))
        check_whole(self.hash_every, "TrustFrozen(hash_every)", 1, "TrustFrozen(hash_every=10)")

    def covers(self, name: str) -> bool:
        """Whether a tensor may be trusted."""
        return any(fnmatchcase(name, glob) for glob in ((self.names,) if isinstance(self.names, str) else self.names))


# What saves have cost a job, and the interval between saves that loses least: the formula of Daly. Pure.


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What is known at the end of a training step. The first three fields must be equal on all ranks; the others are the leader's."""

    step: int
    """The step that has just ended."""
    started_step: int
    """The step of the checkpoint that the job went on from; for a job that restored none, one less than its first step (−1 at least)."""
    last_saved_step: int | None = None
    """The step of the last save that was begun, or of the checkpoint restored since; None if there is none."""
    seconds: float = 0.0
    """Since the job began, by the leader's clock."""
    last_saved_at: float | None = None
    """``seconds`` when the last save was begun; None if this job has not saved."""
    preempted: bool = False
    """A notice has come that the job will be stopped, and no save was begun since."""
    measuring: bool = False
    """What the last save costs is not known yet: it is going on, or what a step usually takes has not been seen."""
    time: float | None = None
    """Seconds since 1970, by the leader's clock; None if it is not known."""
    step_seconds: float = 0.0
    """What a step usually takes beside no save; 0 if that is not known yet."""
    ended: bool = False
    """The job's last save is durable."""
    saves: tuple[SaveCost, ...] = ()
    """What the last saves of this job have cost it, those that have ended, the newest last."""

    def __post_init__(self) -> None:
        check_whole(self.step, "Moment.step", 0)
        check_whole(self.started_step, "Moment.started_step", -1)
        if self.last_saved_step is not None:
            check_whole(self.last_saved_step, "Moment.last_saved_step", 0)
        for name, value in (("seconds", self.seconds), ("last_saved_at", self.last_saved_at)):
            if value is not None and not math.isfinite(value):
                raise UsageError(f"Moment.{name} is a finite number of seconds, not {value!r}")

    @property
    def since(self) -> int:
        """Steps up to this one are dealt with: saved, or before the job. If steps went back, only the step itself is open."""
        since = self.started_step if self.last_saved_step is None else self.last_saved_step
        return since if since <= self.step else self.step - 1


class SavePolicy(Policy, ABC):
    """Decides when a save is due. Join policies with ``|``: due when any of them is.

    Your own policy is a subclass with :meth:`reason`; unless it sets ``needs_leader`` to False, the leader alone is asked.
    """

    __slots__ = ()
    needs_leader: ClassVar[bool] = True
    """False only if every rank gives the same answer, because the answer follows from step numbers alone."""

    @abstractmethod
    def reason(self, now: Moment) -> str | None:
        """Why a save is due, in words; None if it is not. :meth:`due` is the question to ask."""

    def due(self, now: Moment) -> str | None:
        """Why a save is due, in words; None if it is not, and always None for a step that is saved."""
        return None if now.last_saved_step == now.step else self.reason(now)

    @property
    def rank_part(self) -> SavePolicy | None:
        """The part that every rank answers alike; None if there is none."""
        return None if self.needs_leader else self

    @property
    def leader_part(self) -> SavePolicy | None:
        """The part that only the leader may answer; None if there is none, and then no rank ever has to ask another."""
        return self if self.needs_leader else None

    def ends(self, now: Moment) -> bool:
        """Whether a save that is due now is the job's last one: training is to end when it is durable."""
        return bool(self.watched_signals) and now.preempted

    @property
    def watched_signals(self) -> tuple[int, ...]:
        """The signals that set ``Moment.preempted``. Your own policy that looks at it names them here."""
        return ()

    def __or__(self, other: SavePolicy) -> SavePolicy:
        return AnySave.of(self, other)


@dataclass(frozen=True, slots=True, repr=False)
class EveryMinutes(SavePolicy):
    """Due when the last save was begun ``minutes`` ago, whatever made it due; before the first, that long after the job began.

    If the clock goes back, a save comes late by as much, but never by more than twice ``minutes``.

    Raises:
        UsageError: ``minutes`` is not a positive number.
    """

    minutes: float

    def __post_init__(self) -> None:
        check_positive(self.minutes, "EveryMinutes(minutes)")

    def reason(self, now: Moment) -> str | None:
        passed = now.seconds - (now.last_saved_at or 0.0)
        words = "every minute" if self.minutes == 1 else f"every {self.minutes:g} minutes"
        return words if abs(passed) >= 60 * self.minutes else None


@dataclass(frozen=True, slots=True, init=False, repr=False)
class AtSteps(SavePolicy):
    """Due at these steps, or where steps are skipped, at the first one after: ``AtSteps(1, 10, 100)`` or ``AtSteps([1, 10, 100])``.

    Raises:
        UsageError: there is none, or one is not a whole number of at least 0.
    """

    needs_leader: ClassVar[bool] = False
    steps: tuple[int, ...]
    """Increasing."""

    def __init__(self, *steps: int | Iterable[int]) -> None:
        each = [step for given in steps for step in (given if isinstance(given, Iterable) else (given,))]
        for step in each:
            check_whole(step, "a step of AtSteps", 0)
        if not each:
            raise UsageError("AtSteps() has no steps")
        object.__setattr__(self, "steps", tuple(sorted(set(each))))

    def __repr__(self) -> str:
        return f"AtSteps({', '.join(map(str, self.steps))})"

    def reason(self, now: Moment) -> str | None:
        reached = bisect_right(self.steps, now.step)
        if reached == 0 or self.steps[reached - 1] <= now.since:
            return None
        step = self.steps[reached - 1]
        return f"at step {step}" if step == now.step else f"at step {step}, which was skipped"


@dataclass(frozen=True, slots=True, repr=False)
class OnPreemption(SavePolicy):
    """Due once when a notice comes that the job will be stopped: when one of ``signals`` comes to any rank. The default is what Slurm
    (``--signal``), Kubernetes and torchrun send before they stop a job. Handlers that were there before run too."""

    signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "signals", tuple(int(signal.Signals(number)) for number in self.signals))
        except (TypeError, ValueError):
            text = f"OnPreemption(signals=) takes numbers of signals, not {self.signals!r}"
            raise UsageError(text, hint="OnPreemption(signals=[signal.SIGTERM, signal.SIGUSR1])") from None
        if not self.signals:
            raise UsageError("OnPreemption(signals=) names no signal", hint="leave OnPreemption out if nothing is watched")
        for number in {signal.SIGKILL, signal.SIGSTOP}.intersection(self.signals):
            text = f"no process can watch {signal.Signals(number).name}"
            raise UsageError(text, hint="OnPreemption(signals=[signal.SIGTERM, signal.SIGUSR1])")

    def reason(self, now: Moment) -> str | None:
        return "preempted" if now.preempted else None

    @property
    def watched_signals(self) -> tuple[int, ...]:
        return tuple(self.signals)


class AnySave(JoinedPolicy, SavePolicy):
    """Due when any of ``policies`` is. Made by ``|`` and by :func:`ckpt.policies.AnyOf`."""

    __slots__ = ()
    policies: tuple[SavePolicy, ...]

    @classmethod
    def of(cls, *policies: SavePolicy) -> SavePolicy:
        """Join policies; nested ones become one, equal ones too."""
        for policy in policies:
            check_saving(policy)
        members = flat(policies)
        return members[0] if len(members) == 1 else cls(members)

    def reason(self, now: Moment) -> str | None:
        return "; ".join(reason for policy in self.policies if (reason := policy.reason(now))) or None

    def ends(self, now: Moment) -> bool:
        return any(policy.ends(now) for policy in self.policies)

    @property
    def rank_part(self) -> SavePolicy | None:
        return self._part([policy.rank_part for policy in self.policies])

    @property
    def leader_part(self) -> SavePolicy | None:
        return self._part([policy.leader_part for policy in self.policies])

    @property
    def watched_signals(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(number for policy in self.policies for number in policy.watched_signals))

    @staticmethod
    def _part(parts: list[SavePolicy | None]) -> SavePolicy | None:
        there = [part for part in parts if part is not None]
        return AnySave.of(*there) if there else None


def check_saving(policy: object) -> None:
    """Raise UsageError unless ``policy`` says when to save."""
    if not isinstance(policy, SavePolicy):
        hint = "EverySteps, EveryMinutes, EveryBudget, EveryOptimal, AtSteps, OnPreemption, Before and AnyOf of these do"
        raise UsageError(f"{policy!r} does not say when to save", hint=hint)
