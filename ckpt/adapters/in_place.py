"""Loaded values in the place of old ones: a dict, list or set of the state stays the same object and gets new contents."""

from __future__ import annotations

import copy
from typing import Any

from ckpt.errors import StateError
from ckpt.tree import SCALARS


def is_stateful(value: object) -> bool:
    has_both = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return has_both and not isinstance(value, type)


def state_of(value: Any, path: str) -> Any:
    """What an object of the state gives of itself.

    Raises:
        StateError: only its class has a ``state_dict``: the object lacks what that needs.
    """
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
