"""Conversion into our own format (docs/format.md): a checkpoint like any other, with digests, small chunks, and the state. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ckpt.catalog import Catalog, Contents, DataFile, Grid
from ckpt.converters.pipeline.target import OutputFile, OutputOptions, OutputPlan, Target
from ckpt.converters.pipeline.windows import FileItem, cuts_at
from ckpt.converters.select.loadable import choose_loadable
from ckpt.converters.select.selection import OutputSet, OutputTensor, seams_of
from ckpt.errors import ConflictError
from ckpt.formats.journal import CheckpointJournal
from ckpt.formats.native.datafiles.datafile import HEADER_LIMIT, ChunkSpec, DataFilePlan, plan_data_files
from ckpt.formats.native.paths import data_path
from ckpt.formats.native.writer import committed_id, write_index
from ckpt.io_backends.protocol import Backend
from ckpt.layout.geometry import row_major_strides
from ckpt.plan.reads import group_sizes
from ckpt.reread import read_alike
from ckpt.settings import limits


def plan(chosen: OutputSet, layout: OutputOptions) -> OutputPlan:
    """Data files and index."""
    grids = {wanted.name: _grid(wanted, chosen.catalog) for wanted in chosen.stored}
    specs = [
        ChunkSpec(name=w.name, box=grids[w.name].box(i), shape=w.shape, dtype=w.dtype)
        for w in chosen.stored
        for i in range(len(grids[w.name]))
    ]
    plans: list[DataFilePlan] = []
    places: dict[str, list[int]] = {}
    files: list[OutputFile] = []
    for group in group_sizes([s.nbytes for s in specs], layout.shard_size or limits.DATA_FILE):
        members = [specs[i] for i in group]
        for made in plan_data_files(members, id=layout.id, rank=0, limit=HEADER_LIMIT):
            made = replace(made, path=data_path(layout.id, 0, len(plans)))
            mine = members[made.first : made.first + len(made)]
            for spec in mine:
                places.setdefault(spec.name, []).append(len(plans))
            plans.append(made)
            files.append(_file(made, mine))

    def finish(backend: Backend) -> None:
        placed = {name: Grid(cuts=grid.cuts, files=np.array(places[name], dtype=np.int32)) for name, grid in grids.items()}
        _commit(backend, chosen, plans, placed, layout)

    return OutputPlan(files=tuple(files), digest="xxh3", finish=finish)


def _grid(wanted: OutputTensor, catalog: Catalog) -> Grid:
    """How a tensor is cut into chunks: where it was cut already, as far as that is."""
    cuts = _cuts(wanted, seams_of(catalog, wanted.view)) if wanted.nbytes else tuple((0, n) for n in wanted.shape)
    return Grid(cuts=cuts, files=np.zeros(1, dtype=np.int32))


def _cuts(wanted: OutputTensor, seams: Sequence[int] = ()) -> tuple[tuple[int, ...], ...]:
    """Cuts along the first axes: as many as it takes for rows to fit into a chunk; of the first axis, at ``seams`` where there are some."""
    cuts = []
    for axis, (n, step) in enumerate(zip(wanted.shape, row_major_strides(wanted.shape), strict=True)):
        count = max(1, limits.CHUNK // max(1, step * wanted.dtype.itemsize))
        cuts.append(cuts_at(0, n, count, () if axis else seams))
    return tuple(cuts)


def _file(made: DataFilePlan, specs: Sequence[ChunkSpec]) -> OutputFile:
    order = np.argsort(made.offsets, kind="stable").tolist()
    items = tuple(FileItem(specs[i].name, specs[i].box, int(made.offsets[i]), specs[i].dtype.itemsize) for i in order)

    def ends(digests: Sequence[int]) -> list[tuple[int, bytes]]:
        by_chunk = [0] * len(digests)
        for i, digest in zip(order, digests, strict=True):
            by_chunk[i] = digest
        return [(0, made.encode_header(by_chunk))]

    return OutputFile(path=made.path, size=made.size, items=items, ends=ends)


def _commit(backend: Backend, chosen: OutputSet, plans: Sequence[DataFilePlan], grids: Mapping[str, Grid], layout: OutputOptions) -> None:
    headers = (read_alike(backend, made.path, partial(backend.read, made.path, 0, made.header)) for made in plans)
    rows: list[DataFile] = [made.row(header) for made, header in zip(plans, headers, strict=True)]
    tensors = tuple(w.entry(grids[w.alias or name]) for name, w in chosen.tensors.items())
    contents = Contents(tensors=tensors, files=tuple(rows), state=chosen.state, ranks=chosen.ranks)
    if committed_id(backend) == layout.id:
        return  # by a process that died before it had told
    journal = CheckpointJournal(backend, id=layout.id, previous=layout.previous, resumable=True)
    try:
        record = chosen.catalog.record
        write_index(journal, contents, world_size=chosen.catalog.world_size, lost=() if record is None else record.lost)
    except ConflictError:
        if committed_id(backend) != layout.id:  # else another process has just finished it
            raise
    journal.remove_replaced()


TARGET = Target(name="native", computes=True, choose=choose_loadable, plan=plan, replaces=True)
"""For ``ckpt.converters.pipeline.target``."""
