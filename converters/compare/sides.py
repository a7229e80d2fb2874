"""One of two checkpoints that are compared: tensors and values by the names that they have in the comparison. No torch."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ckpt.catalog import Catalog
from ckpt.converters.select.selection import Views
from ckpt.dtypes import DType, dtype
from ckpt.errors import NamesError
from ckpt.plan import tree
from ckpt.plan.layout.geometry import Box
from ckpt.plan.views import LogicalTensor, part, whole

from .elements import Elements, Raw, raw_dtype

_T = TypeVar("_T")
_GROUPS = "param_groups"


class Renaming:
    """Other beginnings of names."""

    def __init__(self, beginnings: Mapping[str, str], where: str) -> None:
        self.beginnings = sorted(beginnings.items(), key=lambda pair: -len(pair[0]))
        self.where = where

    def of(self, by_name: Mapping[str, _T]) -> dict[str, _T]:
        """The same under other names."""
        now = {name: self.name(name) for name in by_name}
        if len(set(now.values())) < len(now):
            twice = next(name for name, count in Counter(now.values()).items() if count > 1)
            raise NamesError(f"two names become {twice!r}", where=self.where, hint="--rename with longer beginnings")
        return {now[name]: value for name, value in by_name.items()}

    def check(self, names: Iterable[str]) -> None:
        """Raise NamesError if none of these names has one of the beginnings."""
        names = list(names)
        idle = [old for old, _ in self.beginnings if not any(name.startswith(old) for name in names)]
        if idle:
            raise NamesError(f"no name begins with {', '.join(map(repr, idle))}", where=self.where, hint="`ckpt inspect` lists the names")

    def name(self, name: str) -> str:
        """What one name becomes."""
        return next((new + name.removeprefix(old) for old, new in self.beginnings if name.startswith(old)), name)


class Inlined(NamedTuple):
    """A tensor that is in the state itself, as the step of an optimizer may be."""

    dtype: DType
    elements: Raw


class Side:
    """One checkpoint: its tensors as views, without padding."""

    def __init__(
        self, catalog: Catalog, views: Views | None, renaming: Renaming, root: str | None = None, about_storage: Collection[str] = ()
    ) -> None:
        """``about_storage``: paths of values that are not compared."""
        self.catalog = catalog
        self._about_storage = about_storage
        self.elements = Elements(catalog)
        self._renaming = renaming
        made = self._views(views)
        if root is not None:
            made = {name[len(root) + 1 :]: view for name, view in made.items() if name.startswith(f"{root}.")}
            if not made:
                raise NamesError(f"no tensor lies below {root!r}", where=catalog.url, hint="`ckpt inspect` lists the names")
        if renaming.beginnings:
            renaming.check([*made, *(path for path, _ in self._values())])
        self.views = renaming.of(made)

    def _views(self, views: Views | None) -> dict[str, LogicalTensor]:
        entries = self.catalog.tensors
        if views is not None:
            made = views({name: entry.shape for name, entry in entries.items()})
            return {name: part(view, Box.whole(view.unpadded or view.shape)) for name, view in made.items()}
        by_name = {name: whole(name, entry.shape) for name, entry in entries.items()}
        for name, entry in entries.items():
            if entry.logical is not None:
                by_name[name] = part(by_name[name], Box.whole(entry.logical))
        return by_name

    def kind(self, name: str) -> DType:
        """dtype of a logical tensor."""
        return self.catalog.tensors[self.views[name].pieces[0].source].dtype

    def values(self) -> Iterator[tuple[str, tree.Node]]:
        """Path and node of each value; those of one rank begin with ``rank <r>:``."""
        return iter(self._renaming.of(dict(self._values())).items()) if self._renaming.beginnings else self._values()

    def inlined(self, name: str) -> Inlined | None:
        """The tensor that the state itself has under this name, if it has one there."""
        node = self._inlined.get(name)
        if node is None:
            return None
        kind, shape, data = node["$inline"]
        kind_of = dtype(kind)
        return Inlined(kind_of, np.frombuffer(base64.b64decode(data), raw_dtype(kind_of)).reshape(shape))

    @cached_property
    def _inlined(self) -> dict[str, Any]:
        leaves = tree.leaves(self.catalog.state) if self.catalog.state is not None else ()
        tagged = ((path, node) for path, node in leaves if type(node) is dict and tree.tag_of(node) == "$inline")
        return self._renaming.of({path: node for path, node in tagged if not self._of_storage(path)})

    def _values(self) -> Iterator[tuple[str, tree.Node]]:
        for path, node in tree.leaves(self.catalog.state) if self.catalog.state is not None else ():
            if self._about_storage and self._of_storage(path):
                continue
            if type(node) in tree.SCALARS:  # of which there may be millions
                yield path, node
            elif _is_value(node):
                yield path, self._listed(path, node)
        for rank, by_path in self.catalog.ranks.items():
            for path, node in by_path.items():
                for below, leaf in tree.leaves(node):
                    if _is_value(leaf):
                        at = f"rank {rank}: {path}{'.' if below else ''}{below}"
                        yield at, self._listed(at, leaf)

    def _listed(self, path: str, node: tree.Node) -> tree.Node:
        """Parameter groups that name their parameters as torch has them: options and names in one mapping, and names as the states have
        them."""
        groups = _groups(node) if path.endswith(_GROUPS) else None
        if groups is None:
            return node
        head = f"{path.removesuffix(_GROUPS)}state."
        called = self._renaming.name(path).removesuffix(_GROUPS) + "state."

        def name(of: str) -> str:
            return self._renaming.name(f"{head}{of}.").removeprefix(called).removesuffix(".")

        return [{**options, "params": [name(n) for n in names]} for options, names in groups]

    def _of_storage(self, path: str) -> bool:
        return any(path == about or path.startswith(f"{about}.") for about in self._about_storage)


def _is_value(node: tree.Node) -> bool:
    return type(node) in tree.SCALARS or tree.tag_of(node) not in ("$tensor", "$tensors", "$per_rank")


def _groups(node: tree.Node) -> list[tuple[dict[str, Any], list[str]]] | None:
    """Options and names of each group, in either form; None if it is another node, or names no parameters."""
    if isinstance(node, dict) and "$param_groups" in node:
        groups = [(g["options"], g["params"]) for g in node["$param_groups"]]
    elif isinstance(node, list) and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in node):
        groups = [({k: v for k, v in g.items() if k != "params"}, g["params"]) for g in node if isinstance(g, dict)]
    else:
        return None
    plain = all(isinstance(o, dict) and tree.tag_of(o) is None and all(isinstance(n, str) for n in names) for o, names in groups)
    return groups if plain else None
