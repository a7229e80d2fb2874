"""Which module the names of parameters lack, where one software names them in the whole state and another within their module. Pure.

    names in the state       model.layers.0.weight     what ``ckpt.save`` writes, and ``ckpt.load`` asks for
    names in the module            layers.0.weight     what ``get_optimizer_state_dict`` of torch and plain ``state_dict`` write

A path fits if, put in front of a name in the module, it gives a name in the state:

    in the state {m.0.w, m.1.0.w}, in the module {0.w, 1.0.w}:    m explains both,   m.1 explains 0.w alone   →  m
    in the state {model.w, ema.w}, in the module {w}:             model explains w,  ema explains it as well  →  nobody knows
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EnclosingModule:
    """``path`` of a module, and the names in the module that it explains; ``rivals``: other paths explain some of these too."""

    path: str
    explained: Set[str]
    rivals: bool


def enclosing_module(inner: Collection[str], outer: Collection[str]) -> EnclosingModule | None:
    """The module of the names ``inner``, by the names ``outer`` of the whole state. None if no path fits, if two fit and none of them
    explains all that the other one does and more, or if a name needs nothing in front.

    A caller decides what has to be explained in full: with ``rivals`` a path that leaves names unexplained is a guess.
    """
    inner = frozenset(inner)
    if not inner or not inner.isdisjoint(outer):
        return None
    explained: dict[str, set[str]] = {}
    for name in outer:
        at = name.find(".")
        while at >= 0:
            if name[at + 1 :] in inner:
                explained.setdefault(name[:at], set()).add(name[at + 1 :])
            at = name.find(".", at + 1)
    best = max(explained, key=lambda path: len(explained[path]), default=None)
    if best is None or any(path != best and not names < explained[best] for path, names in explained.items()):
        return None
    return EnclosingModule(path=best, explained=explained[best], rivals=len(explained) > 1)
