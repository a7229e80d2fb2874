"""Conversion into our own format (docs/format.md): a checkpoint like any other, with digests, small chunks, and the state. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from ckpt.catalog import Contents, DataFile, Grid
from ckpt.errors import CkptError, ConflictError
from ckpt.formats.native.commit import CommitRecord
from ckpt.formats.native.datafile import HEADER_LIMIT, ChunkSpec, DataFilePlan, plan_data_files
from ckpt.formats.native.paths import data_path
from ckpt.formats.native.writer import previous_files, read_record, write_index
from ckpt.geometry import Box, row_major_strides
from ckpt.io_backends.protocol import Backend

from .choosing import Chosen, Wanted, choose
from .target import Layout, OutFile, Planned, Target, in_groups
from .windows import Item

CHUNK = 64 << 20
FILE = 4 << 30
"""Bytes of a data file, about, unless the caller says."""


def plan(chosen: Chosen, layout: Layout) -> Planned:
    """Data files and index."""
    specs = [spec for wanted in chosen.stored for spec in _chunks(wanted)]
    plans: list[DataFilePlan] = []
    places: dict[str, list[int]] = {}
    files: list[OutFile] = []
    for group in in_groups([s.nbytes for s in specs], layout.shard_size or FILE):
        members = [specs[i] for i in group]
        for made in plan_data_files(members, id=layout.id, rank=0, limit=HEADER_LIMIT):
            made = replace(made, path=data_path(layout.id, 0, len(plans)))
            mine = members[made.first : made.first + len(made)]
            for spec in mine:
                places.setdefault(spec.name, []).append(len(plans))
            plans.append(made)
            files.append(_file(made, mine))

    def finish(backend: Backend) -> None:
        _commit(backend, chosen, plans, places, layout)

    return Planned(files=tuple(files), digest="xxh3", finish=finish)


def _chunks(wanted: Wanted) -> list[ChunkSpec]:
    boxes = [Box.whole(wanted.shape)] if not wanted.nbytes else _cells(wanted)
    return [ChunkSpec(name=wanted.name, box=b, shape=wanted.shape, dtype=wanted.dtype) for b in boxes]


def _cells(wanted: Wanted) -> list[Box]:
    """The chunks, cell by cell of a regular grid, row by row."""
    cuts = _cuts(wanted)
    grid = Grid(cuts=cuts, files=np.zeros(1, dtype=np.int32))
    return [grid.box(i) for i in range(len(grid))]


def _cuts(wanted: Wanted) -> tuple[tuple[int, ...], ...]:
    """Cuts along the first axes: as many as it takes for rows to fit into a chunk."""
    steps = row_major_strides(wanted.shape)
    cuts = []
    for n, step in zip(wanted.shape, steps, strict=True):
        count = max(1, CHUNK // (step * wanted.dtype.itemsize)) if n else 1
        cuts.append((*range(0, n, count), n) if n else (0, 0))
    return tuple(cuts)


def _file(made: DataFilePlan, specs: Sequence[ChunkSpec]) -> OutFile:
    order = np.argsort(made.offsets, kind="stable").tolist()
    items = tuple(Item(specs[i].name, specs[i].box, int(made.offsets[i]), specs[i].dtype.itemsize) for i in order)

    def ends(digests: Sequence[int]) -> list[tuple[int, bytes]]:
        by_chunk = [0] * len(digests)
        for i, digest in zip(order, digests, strict=True):
            by_chunk[i] = digest
        return [(0, made.encode_header(by_chunk))]

    return OutFile(path=made.path, size=made.size, items=items, ends=ends)


def _commit(backend: Backend, chosen: Chosen, plans: Sequence[DataFilePlan], places: dict[str, list[int]], layout: Layout) -> None:
    rows: list[DataFile] = [made.row(backend.read(made.path, 0, made.header)) for made in plans]
    grids: dict[tuple[object, ...], Grid] = {}
    tensors = []
    for name in sorted(chosen.tensors):
        wanted = chosen.tensors[name]
        files = places[wanted.alias or name]
        cuts = _cuts(wanted) if wanted.nbytes else tuple((0, n) for n in wanted.shape)
        files = files[:1] if len(set(files)) == 1 else files
        key = (cuts, tuple(files))
        if key not in grids:
            grids[key] = Grid(cuts=cuts, files=np.array(files, dtype=np.int32))
        tensors.append(wanted.entry(grids[key]))
    contents = Contents(tensors=tuple(tensors), files=tuple(rows), state=chosen.state, ranks=chosen.ranks)
    gone = previous_files(backend, layout.previous) if layout.previous is not None else ()
    try:
        write_index(backend, contents, id=layout.id, world_size=chosen.catalog.world_size, previous=layout.previous)
    except ConflictError:
        if not _committed(backend, layout.id):
            raise
        return  # by another process of this conversion
    for path in gone:
        with suppress(CkptError):  # the checkpoint is committed; what stays is debris
            backend.delete(path)


def _committed(backend: Backend, id: str) -> bool:
    data = read_record(backend)
    return data is not None and CommitRecord.from_bytes(data, backend.url).id == id


TARGET = Target(name="native", choose=choose, plan=plan, replaces=True)
"""For ``ckpt.converters.target``."""
