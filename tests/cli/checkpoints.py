"""Small native checkpoints, and a look at where their chunks lie that uses json and struct alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt.catalog import Contents, DataFile, Grid, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.formats.native.commit import new_id, read_record
from ckpt.formats.native.datafile import ChunkSpec, DataFilePlan, plan_data_file
from ckpt.formats.native.writer import CheckpointJournal, write_index
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend
from ckpt.plan.layout.geometry import even_cuts

Arrays = Mapping[str, npt.NDArray[Any]]


def write_checkpoint(
    url: str,
    arrays: Arrays,
    *,
    ranks: int = 2,
    state: object = None,
    rank_values: Mapping[int, Mapping[str, Any]] | None = None,
    aliases: Mapping[str, str] | None = None,
    left_out: frozenset[str] = frozenset(),
    commit: bool = True,
) -> None:
    """Save ``arrays`` cut by rows over ``ranks`` data files; scalars are in the first. The index does not know those ``left_out``."""
    backend, id = open_backend(url), new_id()
    backend.prepare()
    entries = {name: _entry(name, array, ranks) for name, array in arrays.items()}
    rows = []
    for rank in range(ranks):
        specs = [
            ChunkSpec(name=name, box=entry.grid.box(n), shape=entry.shape, dtype=entry.dtype)
            for name, entry in entries.items()
            for n in range(len(entry.grid))
            if entry.grid.file(n) == rank
        ]
        plan = plan_data_file(specs, id=id, rank=rank)
        rows.append(plan.row(_write_data(backend, plan, [arrays[s.name][s.box.slices].tobytes() for s in specs])))
    known = [entry for name, entry in entries.items() if name not in left_out]
    known += [_alias(name, entries[target]) for name, target in (aliases or {}).items()]
    contents = Contents(tensors=tuple(known), files=tuple(rows), state=state, ranks=rank_values or {})
    if commit:
        write_index(CheckpointJournal(backend, id=id, previous=read_record(backend)), contents, world_size=ranks)


def _entry(name: str, array: npt.NDArray[Any], ranks: int) -> TensorEntry:
    if array.size < 2:
        grid = Grid(cuts=tuple((0, n) for n in array.shape), files=np.zeros(1, dtype=np.int32))
    else:
        grid = Grid(cuts=(even_cuts(array.shape[0], ranks), *((0, n) for n in array.shape[1:])), files=np.arange(ranks, dtype=np.int32))
    return TensorEntry(name=name, dtype=DTYPES[array.dtype.name], shape=array.shape, grid=grid)


def _alias(name: str, target: TensorEntry) -> TensorEntry:
    return TensorEntry(name=name, dtype=target.dtype, shape=target.shape, grid=target.grid, alias=target.name)


def _write_data(backend: Backend, plan: DataFilePlan, pieces: list[bytes]) -> bytes:
    header = plan.encode_header([xxhash.xxh3_64_intdigest(piece) for piece in pieces])
    with backend.create(plan.path, plan.size) as writer:
        writer.write(0, [header])
        for offset, piece in zip(plan.offsets.tolist(), pieces, strict=True):
            writer.write(offset, [piece])
        writer.commit()
    return header


def data_files(directory: Path) -> list[Path]:
    return sorted((directory / "data").iterdir())


def stored(path: Path) -> dict[str, tuple[int, int]]:
    """Key → first byte and one past the last, in the file, read as docs/format.md §6 says."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    entries = json.loads(data[8 : 8 + length])
    return {key: tuple(8 + length + at for at in e["data_offsets"]) for key, e in entries.items() if key != "__metadata__"}


def flip(path: Path, at: int) -> None:
    """Change one bit of byte ``at``."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def sample() -> dict[str, npt.NDArray[Any]]:
    """Tensors of several dtypes and shapes: a scalar, an empty one, and matrices."""
    random = np.random.default_rng(7)
    return {
        "model.wq.weight": random.standard_normal((10, 6)).astype(np.float32),
        "model.norm": random.standard_normal(7),
        "model.ids": random.integers(0, 99, (5, 2, 3), dtype=np.int16),
        "optimizer.step": np.array(12, dtype=np.int64),
        "empty": np.zeros((0, 4), dtype=np.float32),
    }


def files_of(directory: Path, tensors: tuple[TensorEntry, ...]) -> Contents:
    """An index that lists the data files of ``directory`` as they are, and ``tensors`` whatever they hold."""
    rows = []
    for rank, path in enumerate(data_files(directory)):
        data = path.read_bytes()
        header = 8 + struct.unpack_from("<Q", data)[0]
        digest = xxhash.xxh3_128_hexdigest(data[:header])
        rows.append(DataFile(path=f"data/{path.name}", size=len(data), header=header, digest=digest, rank=rank))
    return Contents(tensors=tensors, files=tuple(rows))
