"""Data files of flat shards, as thousands of ranks would write them: all zeros, so that only headers take room.

The header of a rank says the same as that of any other rank whose chunks have these shapes, but for its number and the boxes. So the code
that saves plans one header for each set of shapes, and those of other ranks are put together from its pieces: at 16,384 ranks that takes a
minute instead of ten. ``saved`` gives what the code that saves encodes for any rank, to compare.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt.catalog import DataFile
from ckpt.engine.save.plan import chunks_of, specs_of
from ckpt.formats.native.datafile import HEADER_BLOCK, LENGTH_BYTES, DataFilePlan, box_text, plan_data_files
from ckpt.formats.native.paths import data_path
from ckpt.plan.ownership import ChunkAssignment, TensorSpec


@dataclass(frozen=True, eq=False)
class _Mould:
    """A planned file, its JSON after the digests in pieces, for each place between two of them the grid whose box belongs there, and the
    digests."""

    plan: DataFilePlan
    pieces: Sequence[bytes]
    grids: Sequence[int]
    digests: npt.NDArray[np.uint64]


@dataclass(eq=False)
class FlatFiles:
    """The data files of a job whose ranks have one chunk of each tensor each, and never all of it."""

    tensors: Sequence[TensorSpec]
    assignments: Mapping[str, ChunkAssignment]
    id: str
    _moulds: dict[tuple[tuple[int, ...], ...], _Mould] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._globals = {t.name: t for t in self.tensors}
        grids = {id(o): o for o in self.assignments.values()}
        numbers = {key: i for i, key in enumerate(grids)}
        self._grid = {name: numbers[id(o)] for name, o in self.assignments.items()}
        if not all(len(np.unique(o.owners)) == len(o.owners) == len(o.cell_holders) for o in grids.values()):
            raise ValueError("some ranks have no chunk of a tensor, or several")
        shapes = {self._grid[t.name]: t.shape for t in self.tensors}
        # Of each grid the shape of its tensors, and the number of each rank's chunk.
        self._chunks = [(o, shapes[i], np.argsort(o.owners, kind="stable").tolist()) for i, o in enumerate(grids.values())]

    def planned(self, rank: int) -> DataFilePlan:
        """What the code that saves plans for a rank."""
        (plan,) = plan_data_files(specs_of(chunks_of(self.assignments, rank), self._globals), id=self.id, rank=rank)
        return plan

    def header(self, rank: int) -> tuple[bytes, DataFile]:
        """The header of a rank's file, and what an index says of it."""
        boxes = [o.box(chunks[rank]) for o, _, chunks in self._chunks]
        key = tuple(box.shape for box in boxes)
        if key not in self._moulds:
            self._moulds[key] = self._mould(rank)
        mould = self._moulds[key]
        texts = [box_text(box, shape).encode() for box, (_, shape, _) in zip(boxes, self._chunks, strict=True)]
        parts = [mould.pieces[0]]
        for grid, piece in zip(mould.grids, mould.pieces[1:], strict=True):
            parts += (texts[grid], piece)
        plan = mould.plan
        before, after = plan.parts[0].replace(b'rank":"%d"' % plan.rank, b'rank":"%d"' % rank), b"".join(parts)
        size = LENGTH_BYTES + len(before) + plan.digest_order.size * 16 + len(after)
        header = -(-size // HEADER_BLOCK) * HEADER_BLOCK
        path, data = data_path(self.id, rank), plan.size - plan.header
        own = replace(plan, rank=rank, path=path, parts=(before, after), header=header, size=header + data)
        encoded = own.encode_header(mould.digests)
        return encoded, own.row(encoded)

    def _mould(self, rank: int) -> _Mould:
        plan, specs = self.planned(rank), specs_of(chunks_of(self.assignments, rank), self._globals)
        zeros = {n: xxhash.xxh3_64_intdigest(bytes(n)) for n in set(plan.lengths.tolist())}
        pieces, grids, rest = [], [], plan.parts[1]
        for i in np.argsort(plan.offsets, kind="stable").tolist():
            name, box = specs[i].name.encode(), box_text(specs[i].box, specs[i].shape).encode()
            at = rest.index(b'"' + name + box + b'"') + 1 + len(name)
            pieces.append(rest[:at])
            grids.append(self._grid[specs[i].name])
            rest = rest[at + len(box) :]
        return _Mould(plan, [*pieces, rest], grids, np.array([zeros[n] for n in plan.lengths.tolist()], dtype=np.uint64))

    def write(self, directory: str, rank: int) -> DataFile:
        """A rank's file below ``directory``: its header, and a hole for the data."""
        header, row = self.header(rank)
        path = os.path.join(directory, row.path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(header)
            file.truncate(row.size)
        return row

    def saved(self, rank: int) -> bytes:
        """The header as the code that saves encodes it, of zeros."""
        plan = self.planned(rank)
        return plan.encode_header([xxhash.xxh3_64_intdigest(bytes(n)) for n in plan.lengths.tolist()])
