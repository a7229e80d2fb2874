"""The stored grids of a checkpoint: which data file has each chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ckpt.catalog import DataFile, Grid
from ckpt.formats.native.datafile import coded_groups, plan_data_files
from ckpt.plan.ownership import Global, Owned

from .plan import NO_ID, chunks_of, specs_of


class Grids:
    """Stored grids with files in place of ranks; tensors cut alike share one."""

    def __init__(
        self, files: Sequence[DataFile], owned: Mapping[str, Owned], tensors: Mapping[str, Global], ranks: Sequence[int], *, coded: bool
    ) -> None:
        self.owned = owned
        self.tensors = tensors
        self.coded = coded
        self.first: dict[int, int] = {}
        self.many: dict[int, int] = {}
        self.positions = {rank: i for i, rank in enumerate(ranks)}
        for row, f in enumerate(files):
            rank = ranks[f.rank]
            self.first.setdefault(rank, row)
            self.many[rank] = self.many.get(rank, 0) + 1
        self.by_rank = np.full(max(self.first, default=0) + 1, -1, dtype=np.int32)
        for rank, row in self.first.items():
            self.by_rank[rank] = row
        self.made: dict[int, Grid] = {}
        self.split = {rank: self._split(rank) for rank, n in self.many.items() if n > 1}

    def of(self, name: str) -> Grid:
        owned = self.owned[name]
        if self.split:
            return Grid(cuts=owned.cuts, boxes=owned.boxes, files=self._files(name))
        if id(owned) not in self.made:
            self.made[id(owned)] = Grid(cuts=owned.cuts, boxes=owned.boxes, files=self._files(name))
        return self.made[id(owned)]

    def _files(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        owners = self.owned[name].owners
        files: np.ndarray[tuple[int], np.dtype[np.int32]] = self.by_rank[owners]
        for rank, later in self.split.items():
            for chunk in np.flatnonzero(owners == rank).tolist():
                files[chunk] += later[name, chunk]
        return files[:1] if len(files) and (files == files[0]).all() else files

    def _split(self, rank: int) -> dict[tuple[str, int], int]:
        """For a rank with several files: in which of them each of its chunks is. It is the rank's own plan, made again."""
        chunks = chunks_of(self.owned, rank)
        specs = specs_of(chunks, self.tensors)
        if self.coded:
            spans = coded_groups([c.nbytes for c in specs])
        else:
            spans = [slice(f.first, f.first + len(f)) for f in plan_data_files(specs, id=NO_ID, rank=self.positions[rank])]
        return {(c.name, c.number): n for n, span in enumerate(spans) for c in chunks[span]}
