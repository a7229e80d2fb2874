"""A load of parts of rows and columns that very many ranks wrote: every file is looked into, by the code that loads, and is a real one.
What it takes may grow with the files, but what is kept of one is little."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import xxhash

from benchmarks.flat_files import FlatFiles
from benchmarks.scale_load import FlatCheckpoint, flat, in_eighths
from ckpt.dtypes import dtype
from ckpt.engine.load.chunk_scan import ChunkScan
from ckpt.engine.load.reader import Reader, TensorLoad
from ckpt.errors import CorruptError
from ckpt.formats.native import header_layout
from ckpt.plan.ownership import TensorSpec, assign
from ckpt.state.tensors import LocalShard, LocalTensor
from tests.api.checked import empty_directory

FEW, MANY = 512, 4096
SHAPES = {"wq": (8192, 16), "wo": (8192, 16), "norm": (8192,)}
LAYERS = 4
RANK = 3
GROWTH, NOISE = 1.1, 0.05
"""Most exponent with which CPU seconds may grow with the files, beside so many seconds."""
OF_A_FILE, LOOKED_INTO = 1000, 1024
"""Most bytes that are kept of a file, and how many are looked into for that: a header takes 5,000."""


@dataclass
class Load:
    """What rank 3 of 8 loads of the weights, into memory that is filled with ones."""

    catalog: FlatCheckpoint
    files: FlatFiles
    jobs: list[TensorLoad]

    def reader(self) -> Reader:
        return Reader(catalog=self.catalog, verify="full", threads=1)

    def scan(self) -> ChunkScan:
        scan = self.reader().plan(self.jobs).scan
        assert scan is not None
        return scan


@pytest.fixture(scope="module")
def load_of() -> Iterator[Callable[[int], Load]]:
    """Loads by how many ranks wrote what they load."""
    made: dict[int, Load] = {}
    with empty_directory() as place:

        def load_of(ranks: int) -> Load:
            return made.get(ranks) or made.setdefault(ranks, written(f"{place}/{ranks}", ranks))

        yield load_of


def written(directory: str, ranks: int) -> Load:
    names = [(f"layers.{i}.{part}", shape) for i in range(LAYERS) for part, shape in SHAPES.items()]
    kinds = (("bfloat16", "model.{}"), ("float32", "optim.{}.exp_avg"))
    tensors = [TensorSpec(form.format(name), dtype(kind), shape, flat(ranks)) for kind, form in kinds for name, shape in names]
    files = FlatFiles(tensors, assign(tensors, merge_flat_shards=True), "0123456789abcdef")
    assert all(files.header(rank)[0] == files.saved(rank) for rank in (0, 9, 10, ranks // 2, ranks - 1))
    catalog = FlatCheckpoint(files, directory, ranks)
    for rank in range(ranks):
        catalog.write(rank)
    wanted = [in_eighths(t) for t in tensors if t.dtype.name == "bfloat16"]
    jobs = []
    for t in wanted:
        held = [LocalShard(p.box, torch.ones(p.box.shape, dtype=torch.bfloat16)) for p in t.layout.pieces(t.shape, RANK)]
        jobs.append(TensorLoad(LocalTensor(t, held, t.name), catalog.tensors[t.name]))
    return Load(catalog, files, jobs)


def test_what_is_read_is_what_is_wanted(load_of: Callable[[int], Load], monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are in chunks of all files, which are read whole to be checked; rows are in an eighth of them."""
    load = load_of(FEW)
    backend, lengths = load.catalog.backend, list[int]()
    read_into = backend.read_into

    def counted(path: str, offset: int, memory: memoryview) -> None:
        lengths.append(len(memory))
        read_into(path, offset, memory)

    monkeypatch.setattr(backend, "read_into", counted)
    reader = load.reader()
    reader.load(load.jobs)
    assert all(not part.memory.any() for job in load.jobs for part in job.target.parts)
    columns, rows, norms = 8192 * 16 * 2, 1024 * 16 * 2, 8192 * 2
    assert reader.bytes_needed == LAYERS * (columns // 8 + rows + norms)
    assert sum(lengths) == reader.fetch.read == LAYERS * (columns + rows + norms)
    assert reader.fetch.verified == reader.fetch.read
    # By name, "norm" and "wo" follow one another in the file of each rank, and in an eighth of the files "wq" comes next, then "norm".
    assert len(lengths) == LAYERS * FEW * 7 // 8 + FEW // 8


def test_the_box_of_each_key_is_compared_in_each_file(load_of: Callable[[int], Load]) -> None:
    """What another rank wrote, under this one's number, is not taken, though all but the boxes is the same."""
    load = load_of(FEW)
    scan, (files, place, row) = load.scan(), (load.files, load.catalog.url, load.catalog.rows[12])
    scan.look_up(11)
    header, other = files.header(13)
    moved = header.replace(b'rank":"13"', b'rank":"12"')
    assert (other.size, other.header) == (row.size, row.header)
    load.catalog.rows[12] = replace(row, digest=xxhash.xxh3_128_hexdigest(moved))
    try:
        with open(os.path.join(place, row.path), "r+b") as file:
            file.write(moved)
        with pytest.raises(CorruptError, match="index and data files are of different saves"):
            scan.look_up(12)
    finally:
        load.catalog.write(12)
        load.catalog.drop(12)


def test_seconds_grow_with_the_files_at_most(load_of: Callable[[int], Load]) -> None:
    def cost(ranks: int) -> float:
        load = load_of(ranks)
        header_layout.forget()
        began = time.thread_time()
        scan = load.scan()
        assert len(scan.files) == ranks
        for number in scan.files:
            scan.runs(scan.look_up(number).stored.alike)
        return time.thread_time() - began

    (few, many) = (min(cost(ranks) for _ in range(2)) for ranks in (FEW, MANY))
    print(f"{few:.3f} CPU s for {FEW:,} files, {many:.3f} for {MANY:,}")
    assert many <= (few + NOISE) * (MANY / FEW) ** GROWTH


def test_what_is_kept_of_a_file_is_little(load_of: Callable[[int], Load]) -> None:
    def peak(ranks: int) -> int:
        load = load_of(ranks)
        header_layout.forget()
        tracemalloc.start()
        try:
            scan = load.scan()
            for number in scan.files[:LOOKED_INTO]:
                scan.runs(scan.look_up(number).stored.alike)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few, many = peak(FEW), peak(MANY)
    print(f"{few / 1e6:.2f} MB for {FEW:,} files, {many / 1e6:.2f} for {MANY:,}")
    assert many - few <= OF_A_FILE * (MANY - FEW)
