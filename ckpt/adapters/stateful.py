"""Objects of a state that take what was stored as they like, and may refuse it: they are asked before anything else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, eq=False)
class StatefulObject:
    """An object with ``load_state_dict`` at a path of the state: ``take`` gives it the stored state, ``old`` is what it had before."""

    path: str
    target: Any
    take: Callable[[], None]
    old: Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Refusal:
    """An object at ``path`` raised ``error``. ``undone``: it and those asked before it have taken back their old state."""

    path: str
    error: Exception
    undone: bool


def take_all(objects: Sequence[StatefulObject]) -> Refusal | None:
    """Let the objects take their stored state. If one refuses, it and those before it get back what they had."""
    taken: list[tuple[StatefulObject, Any]] = []
    for each in objects:
        taken.append((each, _copied(each.old)))
        try:
            each.take()
        except Exception as err:  # noqa: BLE001  whatever an object of the user's raises: the caller raises it
            undone = [_given_back(before, old) for before, old in reversed(taken)]
            return Refusal(path=each.path, error=err, undone=all(undone))
    return None


def _copied(old: Any) -> Any:
    try:
        return copy.deepcopy(old)
    except Exception:  # noqa: BLE001  a lock, a file, what only is there before the first load: no reason not to load
        return None


def _given_back(each: StatefulObject, old: Any) -> bool:
    if old is None:
        return False
    try:
        each.target.load_state_dict(old)
    except Exception:  # noqa: BLE001  an object that refuses its own state: the error of the load says that the state was touched
        return False
    return True
