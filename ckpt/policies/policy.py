"""What saving and keeping policies share: they are written as they are called, and their arguments are checked when they are made."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from typing import TypeVar, cast

from ckpt.errors import UsageError


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


class JoinedPolicy(Policy):
    """Several policies of one side as one. Equal if their members are, in order."""

    __slots__ = ()
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


def check_whole(value: object, what: str, least: int) -> None:
    """Raise UsageError unless ``value`` is an int of at least ``least``; ``what`` names it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{what} is a whole number of at least {least}, not {value!r}")


def check_positive(value: object, what: str, *, zero: bool = False) -> None:
    """Raise UsageError unless ``value`` is a finite int or float above 0, or 0 if ``zero``; ``what`` names it."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
    if not good or (value == 0 and not zero):
        raise UsageError(f"{what} is a {'number that is not negative' if zero else 'positive number'}, not {value!r}")
