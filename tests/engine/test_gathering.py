"""A load of parts of rows and columns that very many ranks wrote: every file is looked into, by the code that loads, and is a real one.
What it takes may grow with the files, but what is kept of one is little."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import given as cases
from hypothesis import strategies as st

from benchmarks.flat_files import FlatFiles
from benchmarks.scale_load import FlatCheckpoint, flat, in_eighths
from ckpt import settings
from ckpt.catalog import DataFile
from ckpt.dtypes import DTYPES, dtype
from ckpt.engine.load.chunk_scan import ChunkScan
from ckpt.engine.load.reader import Reader, TensorLoad
from ckpt.engine.save.index_rows import Chunking, Grids
from ckpt.engine.save.plan import chunks_of, specs_of
from ckpt.engine.save.replicas import Replicas, replica_problems
from ckpt.errors import CorruptError
from ckpt.formats.native import datafile, header_layout
from ckpt.formats.native.datafile import coded_groups
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Flat, Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import ChunkAssignment, TensorSpec, assign, replicated_chunks
from ckpt.state.tensors import LocalShard, LocalTensor, parts_of
from tests.api.checked import empty_directory
from tests.plan.layout_strategies import coordinate_of, local_array, meshes, numbered, placed_tensors, tensor_lists
from tests.plan.limits import small_chunks

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


# ------------------------------------------------- Which data file has each chunk, where ranks write several: against each rank's own plan.


@pytest.fixture
def small_limits() -> Iterator[None]:
    """Small chunks, and few of them in a file."""
    with small_chunks(32) as patch:
        patch.setattr(settings, "CODED_FILE", 80)
        patch.setattr(datafile, "CODED_CHUNKS", 5)
        yield


def dealt(
    owned: dict[str, ChunkAssignment], tensors: dict[str, TensorSpec], ranks: Sequence[int]
) -> tuple[list[DataFile], dict[tuple[str, int], int]]:
    """The rows of all files, and the row of each chunk, as each rank says by itself."""
    files, found = [], {}
    for position, rank in enumerate(ranks):
        chunks = chunks_of(owned, rank)
        for group in coded_groups([c.nbytes for c in specs_of(chunks, tensors)]):
            found |= {(c.name, c.number): len(files) for c in chunks[group]}
            files.append(DataFile(path=f"{len(files)}", size=1, header=1, digest="", rank=position))
    return files, found


@pytest.mark.usefixtures("small_limits")
@given(meshes().flatmap(tensor_lists))
def test_coded_chunks_are_where_their_ranks_put_them(tensors: list[TensorSpec]) -> None:
    owned, by_name = assign(tensors), {t.name: t for t in tensors}
    ranks = sorted({r for t in tensors for r in t.layout.mesh.ranks})
    files, right = dealt(owned, by_name, ranks)
    grids = Grids(files, owned, by_name, ranks, Chunking(coded=True))
    assert {(t.name, i): grids.of(t.name).file(i) for t in tensors for i in range(len(owned[t.name].owners))} == right


def test_files_of_many_ranks_are_told_apart_without_planning_each_again() -> None:
    """And tensors whose chunks are in files of one number on all ranks share a grid: else the index would have one for each."""
    costs = {}
    for ranks in (512, 4096):
        layout = TensorLayout(Mesh.of({"dp": ranks}), (Shard(0, "dp"),))
        tensors = {f"w{i:02}": TensorSpec(f"w{i:02}", DTYPES["float32"], (ranks, 1 << 22), layout) for i in range(40)}  # 16 MiB each
        owned = assign(tensors.values())
        files = [DataFile(path=f"{r}-{n}", size=1, header=1, digest="", rank=r) for r in range(ranks) for n in range(5)]
        began = time.thread_time()
        grids = Grids(files, owned, tensors, range(ranks), Chunking(coded=True))
        made = {name: grids.of(name) for name in sorted(tensors)}
        costs[ranks] = time.thread_time() - began
        assert len({id(grid) for grid in made.values()}) == 5
        assert [made[f"w{i:02}"].file(ranks - 1) for i in (0, 7, 8, 39)] == [5 * ranks - 5, 5 * ranks - 5, 5 * ranks - 4, 5 * ranks - 1]
    print(costs)
    assert costs[4096] < 8**1.1 * (costs[512] + 0.05)


# ------------------------------------------------------------------------------------------------------------------------------------------
# Replicas of tensors in any layout, on ranks that are none: equal bytes agree whatever the layout, one changed byte is named.

Digests = dict[str, str]


def digests_of(spec: TensorSpec, rank: int, changed: int | None) -> dict[str, Digests]:
    """What a rank says of its replicas; on the one that is ``changed`` this element of the rank's memory is another one."""
    array = local_array(spec.layout, numbered(spec.shape), rank)
    assert array is not None
    memory = torch.from_numpy(np.ascontiguousarray(array).copy())
    if changed is not None:
        memory.view(-1)[changed] = -1
    local = LocalTensor(spec, parts_of(spec, memory, rank), spec.name)
    assignments = assign([spec])
    chunks = chunks_of(assignments, rank)
    replicas = Replicas(assignments, replicated_chunks(assignments, rank), lambda _: local, rank, chunks)
    replicas.hash(1, lambda: None)
    written = [xxhash.xxh3_64_intdigest(local.gather(c.box).contiguous().numpy().tobytes() if c.box.numel else b"") for c in chunks]
    return {ranks: dict(digests) for ranks, digests in replicas.digests(written).items()}


def problems_of(spec: TensorSpec, changed: tuple[int, int] | None = None) -> list[str]:
    rows: dict[str, list[tuple[list[int], Digests]]] = defaultdict(list)
    for rank in sorted(spec.layout.ranks()):
        element = changed[1] if changed is not None and changed[0] == rank else None
        for ranks, digests in digests_of(spec, rank, element).items():
            rows[ranks].append(([rank], digests))
    return [text for variants in rows.values() for text in replica_problems(variants)]


@cases(placed_tensors(), st.data())
def test_replicas_of_any_layout_are_compared(case: tuple[TensorLayout, tuple[int, ...]], data: st.DataObject) -> None:
    layout, shape = case
    spec = TensorSpec("w", DTYPES["int64"], shape, layout)
    before, settings.UNDIVIDED = settings.UNDIVIDED, data.draw(st.sampled_from([16, settings.UNDIVIDED]))
    try:
        assert problems_of(spec) == []
        holds = {r: local.size for r in sorted(layout.ranks()) if (local := local_array(layout, numbered(shape), r)) is not None}
        rank = data.draw(st.sampled_from([r for r, size in holds.items() if size] or [-1]))
        if rank < 0:
            return
        found = problems_of(spec, (rank, data.draw(st.integers(0, holds[rank] - 1))))
    finally:
        settings.UNDIVIDED = before
    cut = {s.over for s in layout.splits}
    where, at = coordinate_of(layout.mesh, rank), dict(layout.at)
    assert where is not None
    others = [
        other
        for other in layout.ranks() - {rank}
        if all((coordinate_of(layout.mesh, other) or {})[name] == where[name] for name in where if name in cut)
    ]
    assert bool(found) is bool(others), at
    assert all(text.startswith("tensor w") and f"rank {rank}" in text for text in found) or len(others) == 1


def test_a_flat_range_that_ends_left_of_where_it_begins() -> None:
    """It is three boxes, of which the last ends before the first one begins."""
    layout = TensorLayout(Mesh(("dp", "tp"), (3, 2)), (Flat("dp", (185, 92, 11)),))
    spec = TensorSpec("w", DTYPES["int64"], (24, 12), layout)
    assert problems_of(spec) == []
    assert all("rank 2 ≠ rank 3" in text for text in problems_of(spec, (3, 5)))
