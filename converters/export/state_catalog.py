"""The state of a running job as a catalog: what a save of it would store, and which rank has it. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from ckpt.catalog import CatalogDefaults, Extent, Grid, TensorEntry
from ckpt.errors import UsageError
from ckpt.io_backends.protocol import Backend
from ckpt.layout.geometry import IntArray
from ckpt.plan.tables import Joined


@dataclass(frozen=True, kw_only=True, eq=False)
class StateCatalog(CatalogDefaults):
    """See ``ckpt.catalog.Catalog``; ``owners`` has for each tensor the rank that gives each chunk, ``url`` is where it goes."""

    url: str
    backend: Backend
    tensors: Mapping[str, TensorEntry]
    owners: Mapping[str, IntArray]
    state: Any
    world_size: int
    format: str = "a running job"
    ranks: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, joined: Joined, state: Any, *, url: str, backend: Backend, world_size: int) -> StateCatalog:
        """From the tables and values of all ranks, joined."""
        somewhere = np.zeros(1, dtype=np.int32)
        grids = {id(o): Grid(cuts=o.cuts, boxes=o.boxes, files=somewhere) for o in joined.assignments.values()}
        entries = {
            name: TensorEntry(name=name, dtype=t.dtype, shape=t.shape, logical=t.logical, grid=grids[id(joined.assignments[name])])
            for name, t in joined.tensors.items()
        }
        owners = {name: assignments.owners for name, assignments in joined.assignments.items()}
        for name, target in joined.aliases.items():
            entries[name], owners[name] = replace(entries[target], name=name, alias=target), owners[target]
        return cls(url=url, backend=backend, tensors=entries, owners=owners, state=state, world_size=world_size)

    def extents(self, entry: TensorEntry, chunks: Sequence[int] | Iterable[int]) -> list[Extent]:
        """Refused."""
        self._refuse()

    def extents_of(self, wanted: Sequence[tuple[TensorEntry, int]]) -> list[Extent]:
        """Refused."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError("the tensors of a running job are in no file", where=self.url)
