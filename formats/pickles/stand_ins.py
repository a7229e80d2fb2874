"""What stands in a read pickle for everything that is not plain data. Inert: none of them does anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class GlobalName(NamedTuple):
    """The name of a class, function or constant. It is not looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Persistent(NamedTuple):
    """A reference to something that the pickle keeps elsewhere: in ``torch.save`` archives, a storage."""

    id: Any


@dataclass(eq=False, slots=True)
class Made:
    """What a call would have made: ``of`` called with ``args`` and ``kwargs``, then given a ``state``, ``items`` and ``pairs``.

    Two of them are equal only if they are the same one.
    """

    of: Any
    args: Any = ()
    kwargs: Any = None
    state: Any = None
    items: list[Any] | None = None
    pairs: list[tuple[Any, Any]] | None = None

    @property
    def name(self) -> str:
        """What was called, as ``module.name``; empty if that has no name itself."""
        return str(self.of) if isinstance(self.of, GlobalName) else ""

    def attributes(self) -> dict[str, Any]:
        """The attributes that an object of a plain class would have; those in slots count too."""
        states = self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        attributes: dict[str, Any] = {}
        for state in states:
            if isinstance(state, dict):
                attributes.update((k, v) for k, v in state.items() if isinstance(k, str))
        return attributes


_QUICK_KEYS = frozenset({str, float, bool, bytes, type(None), GlobalName, Made})
"""Kinds of value that are quickly hashed, and of which nobody can make many with one hash."""
_PLAIN_KEYS = _QUICK_KEYS | {int, complex}
_MAX_KEY_PARTS = 1000
_MAX_ALIKE = 64
"""Different keys of one pickle that have the same hash; each is compared with all others."""
_FIRST_ALIKE = (1 << 61) - 1
"""Whole numbers from here on have the hashes of smaller ones."""


class Keys:
    """Tells which values of one pickle may be keys: those that are hashed and told apart quickly."""

    def __init__(self) -> None:
        self._alike: dict[int, set[Any]] = {}

    def allow(self, value: Any) -> bool:
        """Whether it may be a key, after all that were asked for before."""
        kind = type(value)
        if kind in _QUICK_KEYS or (kind is int and abs(value) < _FIRST_ALIKE):
            return True
        if not _is_hashed_quickly(value):
            return False
        alike = self._alike.setdefault(hash(value), set())
        alike.add(value)
        return len(alike) <= _MAX_ALIKE


def _is_hashed_quickly(value: Any) -> bool:
    """Hashing walks tuples as often as they are contained, without a limit to their depth."""
    waiting, parts = [value], 0
    while waiting:
        part = waiting.pop()
        parts += 1
        if parts > _MAX_KEY_PARTS:
            return False
        if type(part) in (tuple, frozenset):
            waiting += part
        elif type(part) not in _PLAIN_KEYS:
            return False
    return True
