"""Objects with ``state_dict`` and ``load_state_dict`` in a state, and the containers around them.

Objects take what was stored as they like, and may refuse it: they are asked before anything else changes. A dict, list or set of the state
stays the same object and gets new contents.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.errors import StateError
from ckpt.tree import SCALARS


def is_stateful(value: object) -> bool:
    has_both = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return has_both and not isinstance(value, type)


def state_of(value: Any, path: str) -> Any:
    """What an object of the state gives of itself."""
    try:
        return value.state_dict()
    except (AttributeError, NotImplementedError) as err:
        kind = type(value)
        hint = "leave it out of the state, or put what it is made of there"
        if kind.__module__.startswith("accelerate."):
            hint = "Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)), or leave it out of the state"
        text = f"the state_dict() of a {kind.__qualname__} fails: {type(err).__name__}: {err}"
        raise StateError(text, where=path, hint=hint) from err


def restore_in_place(old: Any, new: Any) -> Any:
    """Put ``new`` into the containers that ``old`` is made of, as far as both are alike, and return what stands for it now.

    An object with ``state_dict`` and ``load_state_dict`` among the old values takes the new one with ``load_state_dict``. Where the
    kinds differ, the answer is ``new``.
    """
    if type(old) in SCALARS:
        return new
    if is_stateful(old):
        old.load_state_dict(new)
        return old
    if isinstance(old, dict) and isinstance(new, dict):
        items = {key: restore_in_place(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(items)
        return old
    if isinstance(old, list) and isinstance(new, list):
        old[:] = [*map(restore_in_place, old, new), *new[len(old) :]]
        return old
    if isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)
        return old
    return new


def like(template: Any, new: Any) -> Any:
    """``new`` with mappings of the types that ``template`` has: an ``OrderedDict``, ``defaultdict`` or ``Counter`` is stored as a dict."""
    if isinstance(template, dict) and isinstance(new, dict):
        made = copy.copy(template)
        made.clear()
        made.update({key: like(template.get(key), value) for key, value in new.items()})
        return made
    if isinstance(template, (list, tuple)) and type(new) is type(template):
        return type(new)([*map(like, template, new), *new[len(template) :]])
    return new


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
