"""Policies that serve saving and keeping alike: EverySteps, and what joins policies of one side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, overload

from ckpt.errors import UsageError

from .keep import AnyKeep, KeepPolicy, StepInfo
from .policy import JoinedPolicy, check_whole, flat
from .save import AnySave, Moment, SavePolicy


class BothPolicy(SavePolicy, KeepPolicy):
    """Says when to save, and what to keep."""

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
        UsageError: ``n`` is less than 1, ``start`` less than 0, or one is no whole number.
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
        """See :meth:`SavePolicy.due`."""
        mark = self.mark(now.step)
        return None if mark is None or mark <= now.since else self._words(mark, now.step)

    def choose(self, steps: Sequence[StepInfo], now: datetime | None) -> dict[int, str]:
        """See :meth:`KeepPolicy.explain`."""
        first: dict[int, int] = {}
        for s in steps:
            mark = self.mark(s.step)
            if mark is not None:
                first.setdefault(mark, s.step)
        return {step: self._words(mark, step) for mark, step in first.items()}

    def _words(self, mark: int, step: int) -> str:
        words = "every step" if self.n == 1 else f"every {self.n} steps"
        return words if mark == step else f"{words} (the first after {mark})"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class AnyBoth(JoinedPolicy, BothPolicy):
    """:class:`AnySave` and :class:`AnyKeep` of the same policies. Made by ``|`` and by :func:`AnyOf`."""

    policies: tuple[BothPolicy, ...]

    def reason(self, now: Moment) -> str | None:
        """See :meth:`SavePolicy.due`."""
        return AnySave(self.policies).reason(now)

    @property
    def rank_part(self) -> SavePolicy | None:
        """See :attr:`SavePolicy.rank_part`."""
        return AnySave(self.policies).rank_part

    @property
    def leader_part(self) -> SavePolicy | None:
        """See :attr:`SavePolicy.leader_part`."""
        return AnySave(self.policies).leader_part

    def choose(self, steps: Sequence[StepInfo], now: datetime | None) -> dict[int, str]:
        """See :meth:`KeepPolicy.explain`."""
        return AnyKeep(self.policies).choose(steps, now)


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
            raise UsageError(f"{name}= says {wanted}, but {value!r} is a policy of {other}", hint=meant)
        number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        call = "EverySteps" if saves else "Latest"
        meant = f"{name}={call}({value if number else 500 if saves else 3})"
        raise UsageError(f"{name}= is a policy of {wanted}, not {value!r}", hint=f"{meant}; docs/policies.md has the others")
