"""The state of a checkpoint as nested Python values, as torch's own tools save it: module and optimizer dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ckpt.catalog import Grid
from ckpt.converters.select.selection import OutputSet, OutputTensor
from ckpt.errors import UsageError
from ckpt.formats.external.base import ExternalCatalog, ExternalContents
from ckpt.tree import child_path
from ckpt.view import StoredPerRank, StoredTensor, View

Leaf = Callable[[OutputTensor], Any]


def nested_state(chosen: OutputSet, leaf: Leaf) -> Any:
    """The state with ``leaf(tensor)`` in place of tensors. A ``PerRank`` value is a mapping from ranks to their values. Tensors that
    the state does not name are at its top, by name.

    Parameters of an optimizer are named within the module whose key their names begin with, as torch's ``get_optimizer_state_dict`` does.
    """
    return _Builder(chosen, leaf).built()


class _Builder:
    def __init__(self, chosen: OutputSet, leaf: Leaf) -> None:
        self.chosen = chosen
        self.leaf = leaf
        self.reached: set[str] = set()
        none = Grid(cuts=(), files=np.zeros(1, dtype=np.int32))
        entries = [w.entry(none) for w in chosen.tensors.values()]
        contents = ExternalContents(tensors=entries, files=(), state=chosen.state, ranks=chosen.ranks)
        source = chosen.catalog
        self.view = View(ExternalCatalog(contents, backend=source.backend, format=source.format, locate=lambda wanted: []))

    def built(self) -> Any:
        state = self.value(self.view.state(), "")
        rest = {name: self.leaf(wanted) for name, wanted in self.chosen.tensors.items() if name not in self.reached}
        if not rest:
            return _within_modules(state) if isinstance(state, dict) else state
        if (state is not None and not isinstance(state, dict)) or rest.keys() & (state or {}):
            hint = "leave it out: --exclude"
            raise UsageError(f"the state has no place for the tensor {min(rest)!r}", where=self.chosen.catalog.url, hint=hint)
        return _within_modules({**(state or {}), **rest})

    def value(self, value: Any, path: str) -> Any:
        if isinstance(value, StoredTensor):
            self.reached.add(value.name)
            return self.leaf(self.chosen.tensors[value.name])
        if isinstance(value, StoredPerRank):
            ranks = {r: self.view.per_rank(path, r) for r, values in sorted(self.chosen.ranks.items()) if path in values}
            return {r: self.value(child, path) for r, child in ranks.items()}
        if isinstance(value, Mapping):
            return {k: self.value(v, child_path(path, k) if isinstance(k, (str, int)) else path) for k, v in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.value(v, child_path(path, i)) for i, v in enumerate(value))
        return value


def _within_modules(state: dict[Any, Any]) -> dict[Any, Any]:
    modules = [key for key, value in state.items() if isinstance(key, str) and isinstance(value, dict) and not _is_optimizer(value)]
    return {k: _renamed(v, modules) if _is_optimizer(v) else v for k, v in state.items()}


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("state"), dict) and isinstance(value.get("param_groups"), list)


def _renamed(optimizer: dict[str, Any], modules: list[str]) -> dict[str, Any]:
    groups = optimizer["param_groups"]
    named = [*optimizer["state"], *(p for g in groups if isinstance(g, dict) for p in g.get("params", ()))]
    inside = [m for m in modules if all(isinstance(n, str) and n.startswith(f"{m}.") for n in named)]
    if not inside or not named or not all(isinstance(g, dict) for g in groups):
        return optimizer
    cut = len(inside[0]) + 1
    state = {name[cut:]: value for name, value in optimizer["state"].items()}
    return {**optimizer, "state": state, "param_groups": [{**g, "params": [p[cut:] for p in g.get("params", ())]} for g in groups]}
