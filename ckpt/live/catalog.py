"""A live state as a catalog: tensors whose chunks lie in the memory of ranks, as their layouts cut them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from ckpt.catalog import CatalogDefaults, Extent, Grid, TensorEntry
from ckpt.errors import UsageError
from ckpt.io_backends.protocol import Backend
from ckpt.layout.geometry import IntArray
from ckpt.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec
from ckpt.plan.tables import Joined
from ckpt.plan.views import LogicalTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LiveCatalog(CatalogDefaults):
    """See ``ckpt.catalog.Catalog``. A chunk is a cell of a tensor's tiling: what the same ranks have. ``url`` is what messages call it."""

    url: str
    tensors: Mapping[str, TensorEntry]
    layouts: Mapping[str, TensorLayout]
    """Of each tensor that is no alias."""
    numbers: Mapping[str, int]
    """The number by which peers know a tensor: its place among the sorted names, aliases left out."""
    state: Any
    world_size: int
    ranks: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    own: Sequence[tuple[int, TensorSpec]] = ()
    """Tensors of single ranks, with their places among the ranks."""
    views: Mapping[str, LogicalTensor] = field(default_factory=dict)
    """Of a state in other names: of what each tensor that is no alias is made (``ckpt.live.naming.renaming``)."""
    sources: Mapping[str, TensorEntry] = field(default_factory=dict)
    """The tensors of which these are made."""
    translation: str = ""
    """A digest of ``views``, by which ranks compare theirs."""
    format: str = "a live state"

    @classmethod
    def of(
        cls,
        joined: Joined,
        state: Any,
        *,
        url: str,
        world_size: int,
        ranks: Mapping[int, Mapping[str, Any]] | None = None,
        own: Iterable[tuple[int, TensorSpec]] = (),
    ) -> LiveCatalog:
        """From the tables and values of all ranks, joined. ``ranks``: what ``PerRank`` values each place among the ranks has, by path;
        ``own``: places, and the tensors in these values."""
        somewhere = np.zeros(1, dtype=np.int32)
        grids: dict[tuple[TensorLayout, tuple[int, ...]], Grid] = {}
        known: dict[tuple[int, tuple[int, ...]], Grid] = {}  # by identity: a model has very many tensors and few layouts
        entries: dict[str, TensorEntry] = {}
        layouts: dict[str, TensorLayout] = {}
        own = list(own)
        for place, tensor in [*((None, t) for t in joined.tensors.values()), *own]:
            grid = known.get((id(tensor.layout), tensor.shape))
            if grid is None:
                tiling = tensor.layout.tiling(tensor.shape)
                grid = grids.setdefault((tensor.layout, tensor.shape), Grid(cuts=tiling.cuts, boxes=tiling.boxes, files=somewhere))
                known[id(tensor.layout), tensor.shape] = grid
            layouts[tensor.name] = tensor.layout
            entries[tensor.name] = TensorEntry(
                name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, logical=tensor.logical, grid=grid, rank=place
            )
        for name, target in joined.aliases.items():
            entries[name] = replace(entries[target], name=name, alias=target)
        numbers = {name: number for number, name in enumerate(sorted(layouts))}
        return cls(
            url=url, tensors=entries, layouts=layouts, numbers=numbers, state=state, world_size=world_size, ranks=ranks or {}, own=own
        )

    def with_values(self, state: Any, ranks: Mapping[int, Mapping[str, Any]]) -> LiveCatalog:
        """The same tensors with the values of another moment."""
        return replace(self, state=state, ranks=ranks)

    def number(self, entry: TensorEntry) -> int:
        """The number of the tensor that has an entry's bytes."""
        return self.numbers[entry.alias or entry.name]

    def holders(self, entry: TensorEntry) -> IntArray:
        """The ranks that have each chunk, ``[chunks, replicas]``."""
        return self.layouts[entry.alias or entry.name].tiling(entry.shape).holders

    @property
    def backend(self) -> Backend:
        """Refused: nothing of it is stored."""
        return self._refuse()

    def extents(self, entry: TensorEntry, chunks: Sequence[int] | Iterable[int]) -> list[Extent]:
        """How long each chunk is; it is in no file, and its bytes have no digest yet."""
        size = entry.dtype.itemsize
        return [Extent(path="", offset=0, length=entry.grid.box(chunk).numel * size, digest=None) for chunk in chunks]

    def extents_of(self, wanted: Sequence[tuple[TensorEntry, int]]) -> list[Extent]:
        """The same for chunks of many tensors."""
        return [self.extents(entry, [chunk])[0] for entry, chunk in wanted]

    def _refuse(self) -> NoReturn:
        raise UsageError(
            "the tensors of a live state lie in the memory of ranks: nothing of them can be read before they are moved",
            where=self.url,
            hint="where names= makes one parameter of several, leave the optimizer out: nobody can see whether their steps are equal",
        )
