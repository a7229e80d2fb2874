"""What saving and keeping policies share: they are written as they are called, and their arguments are checked when they are made. And the
policies for what a save stores: ``Anchor`` and ``TrustFrozen``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
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


@dataclass(frozen=True)
class Anchor:
    """Every ``every``-th save is an anchor, whole by itself; those between are stored as differences from it where that is shorter.

    The first save of a process is one, and so is the one after a save that failed.
    """

    every: int = 10

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise UsageError(f"Anchor(every=) is a number of saves, at least 1, not {self.every!r}", hint="Anchor(every=10)")


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
        if not isinstance(self.hash_every, int) or isinstance(self.hash_every, bool) or self.hash_every < 1:
            raise UsageError(
                f"TrustFrozen(hash_every=) is a number of saves, at least 1, not {self.hash_every!r}", hint="TrustFrozen(hash_every=10)"
            )

    def covers(self, name: str) -> bool:
        """Whether a tensor may be trusted."""
        return any(fnmatchcase(name, glob) for glob in ((self.names,) if isinstance(self.names, str) else self.names))
