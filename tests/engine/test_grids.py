"""Which data file has each chunk, where ranks write several: against each rank's own plan."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given

from ckpt import settings
from ckpt.catalog import DataFile
from ckpt.dtypes import DTYPES
from ckpt.engine.save.index_rows import Chunking, Grids
from ckpt.engine.save.plan import chunks_of, specs_of
from ckpt.formats.native import datafile
from ckpt.formats.native.datafile import coded_groups
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import ChunkAssignment, TensorSpec, assign
from tests.plan.layout_strategies import meshes, tensor_lists
from tests.plan.limits import small_chunks


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
