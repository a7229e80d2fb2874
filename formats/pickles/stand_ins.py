"""What stands in a read pickle for everything that is not plain data. Inert: none of them does anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Global(NamedTuple):
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
        return str(self.of) if isinstance(self.of, Global) else ""

    def attributes(self) -> dict[str, Any]:
        """The attributes that an object of a plain class would have; those in slots count too."""
        states = self.state if isinstance(self.state, tuple) and len(self.state) == 2 else (self.state,)
        found: dict[str, Any] = {}
        for state in states:
            if isinstance(state, dict):
                found.update((k, v) for k, v in state.items() if isinstance(k, str))
        return found


PLAIN_KEYS = frozenset({str, int, float, bool, complex, bytes, type(None), Global, Made})
"""Kinds of value that are quickly hashed."""
_MAX_KEY_PARTS = 1000


def is_key(value: Any) -> bool:
    """Whether a value can be hashed, and quickly: hashing walks tuples as often as they are contained, without a limit to their depth."""
    waiting, parts = [value], 0
    while waiting:
        part = waiting.pop()
        parts += 1
        if parts > _MAX_KEY_PARTS:
            return False
        if type(part) in (tuple, frozenset):
            waiting += part
        elif type(part) not in PLAIN_KEYS:
            return False
    return True
