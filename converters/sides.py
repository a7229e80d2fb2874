"""One of two checkpoints that are compared: tensors and values by the names that they have in the comparison. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

from ckpt import tree
from ckpt.catalog import Catalog
from ckpt.dtypes import DType
from ckpt.errors import NamesError
from ckpt.geometry import Box
from ckpt.plan.views import View, part, whole

from .choosing import Views
from .elements import Elements

_T = TypeVar("_T")


class Renaming:
    """Other beginnings of names."""

    def __init__(self, beginnings: Mapping[str, str], where: str) -> None:
        self.beginnings = sorted(beginnings.items(), key=lambda pair: -len(pair[0]))
        self.where = where

    def of(self, found: Mapping[str, _T]) -> dict[str, _T]:
        """The same under other names."""
        now = {name: self._name(name) for name in found}
        if len(set(now.values())) < len(now):
            twice = next(name for name, count in Counter(now.values()).items() if count > 1)
            raise NamesError(f"two names become {twice!r}", where=self.where, hint="--rename with longer beginnings")
        return {now[name]: value for name, value in found.items()}

    def check(self, names: Iterable[str]) -> None:
        """Raise NamesError if none of these names has one of the beginnings."""
        names = list(names)
        idle = [old for old, _ in self.beginnings if not any(name.startswith(old) for name in names)]
        if idle:
            raise NamesError(f"no name begins with {', '.join(map(repr, idle))}", where=self.where, hint="`ckpt inspect` lists the names")

    def _name(self, name: str) -> str:
        return next((new + name.removeprefix(old) for old, new in self.beginnings if name.startswith(old)), name)


class Side:
    """One checkpoint: its tensors as views, without padding."""

    def __init__(self, catalog: Catalog, views: Views | None, renaming: Renaming, root: str | None = None) -> None:
        self.catalog = catalog
        self.elements = Elements(catalog)
        self._renaming = renaming
        made = self._views(views)
        if root is not None:
            made = {name[len(root) + 1 :]: view for name, view in made.items() if name.startswith(f"{root}.")}
            if not made:
                raise NamesError(f"no tensor lies below {root!r}", where=catalog.url, hint="`ckpt inspect` lists the names")
        renaming.check([*made, *self._values()])
        self.views = renaming.of(made)

    def _views(self, views: Views | None) -> dict[str, View]:
        entries = self.catalog.tensors
        if views is not None:
            made = views({name: entry.shape for name, entry in entries.items()})
            return {name: part(view, Box.whole(view.unpadded or view.shape)) for name, view in made.items()}
        found = {name: whole(name, entry.shape) for name, entry in entries.items()}
        for name, entry in entries.items():
            if entry.logical is not None:
                found[name] = part(found[name], Box.whole(entry.logical))
        return found

    def kind(self, name: str) -> DType:
        """dtype of a logical tensor."""
        return self.catalog.tensors[self.views[name].pieces[0].source].dtype

    def values(self) -> dict[str, str]:
        """Values by path, as text; those of one rank begin with ``rank <r>:``."""
        return self._renaming.of(self._values())

    def _values(self) -> dict[str, str]:
        found = dict(tree.leaves(self.catalog.state)) if self.catalog.state is not None else {}
        for rank, by_path in self.catalog.ranks.items():
            for path, node in by_path.items():
                found |= {f"rank {rank}: {path}{'.' if below else ''}{below}": leaf for below, leaf in tree.leaves(node)}
        return {path: tree.text(node) for path, node in found.items() if tree.tag_of(node) not in ("$tensor", "$tensors", "$per_rank")}
