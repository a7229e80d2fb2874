"""Mirrors: each has the bytes, in another domain; owner, mirror and leader know the same files without a message."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt import settings
from ckpt.catalog import DataFile
from ckpt.dtypes import DTYPES
from ckpt.engine.save import index_rows as grids_module
from ckpt.engine.save import plan as plan_module
from ckpt.engine.save.index_rows import Chunking, Grids
from ckpt.engine.save.plan import RankPlan, plan_mirrored
from ckpt.formats.native import datafile
from ckpt.formats.native.datafile import plan_data_files
from ckpt.formats.native.paths import data_number
from ckpt.plan import ownership
from ckpt.plan.copies import MirrorPlacement, missing_copies
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Interleaved, Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec, assign
from tests.plan.layout_strategies import local_array, meshes, numbered, tensor_lists


@pytest.fixture(params=[None, 400])
def small_limits(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small chunks, dealt out to replicas from 9 bytes on; and headers that are too long for one file, or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "CHUNK", 32)
        patch.setattr(settings, "UNDIVIDED", 9)
        if request.param is not None:
            for module in (plan_module, grids_module):
                patch.setattr(module, "plan_data_files", partial(plan_data_files, limit=request.param))
            patch.setattr(datafile, "HEADER_BLOCK", 16)
        ownership._assignment.cache_clear()
        yield
    ownership._assignment.cache_clear()


def placed(domains: dict[int, str], copies: int) -> MirrorPlacement:
    return MirrorPlacement(domains=domains, copies=copies)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[TensorSpec], MirrorPlacement]:
    mesh = draw(meshes())
    names = st.sampled_from([f"host{n}" for n in range(draw(st.integers(1, 6)))])
    return draw(tensor_lists(mesh)), placed({rank: draw(names) for rank in sorted(mesh.ranks)}, draw(st.integers(1, 3)))


def plan_of(tensors: list[TensorSpec], mirrors: MirrorPlacement, rank: int) -> RankPlan:
    """From the tensors that the rank has, as in a job: it knows of no others."""
    mine = [t for t in tensors if local_array(t.layout, numbered(t.shape), rank) is not None]
    return plan_mirrored(mine, assign(mine), mirrors, rank=rank)


def chunks_in(plan: RankPlan, file: int) -> list[tuple[str, int]]:
    of = plan.files[file]
    return [(c.name, c.number) for c in plan.chunks[of.first : of.first + len(of)]]


@pytest.mark.usefixtures("small_limits")
@given(jobs())
def test_all_who_write_a_file_have_its_bytes_and_make_it_alike(job: tuple[list[TensorSpec], MirrorPlacement]) -> None:
    tensors, mirrors = job
    by_name, assignments = {t.name: t for t in tensors}, assign(tensors)
    elements = {
        (t.name, r): set() if (local := local_array(t.layout, numbered(t.shape), r)) is None else {*local.ravel().tolist()}
        for t in tensors
        for r in mirrors.domains
    }
    files: dict[str, dict[int, list[tuple[str, int]]]] = {}
    layouts: dict[str, set[tuple[int, bytes]]] = {}
    rows, expected = [], {}
    for rank in mirrors.domains:
        plan = plan_of(tensors, mirrors, rank)
        own = len(plan.files) - plan.mirrored
        assert all((f.rank == mirrors.positions[rank]) == (n < own) for n, f in enumerate(plan.files))
        for n, f in enumerate(plan.files):
            chunks = chunks_in(plan, n)
            files.setdefault(f.path, {})[rank] = chunks
            layouts.setdefault(f.path, set()).add((f.size, b"".join(f.parts) + f.offsets.tobytes() + f.digest_order.tobytes()))
            if n < own:
                expected |= dict.fromkeys(chunks, len(rows))
                rows.append(DataFile(path=f.path, size=f.size, header=f.header, digest="", rank=f.rank))
    assert sorted(expected) == sorted((name, i) for name, o in assignments.items() for i in range(len(o.owners)))
    for path, writers in files.items():
        assert len(layouts[path]) == 1 and len({tuple(chunks) for chunks in writers.values()}) == 1
        assert len({mirrors.domains[rank] for rank in writers}) == len(writers)
        for name, number in next(iter(writers.values())):
            box = set(numbered(by_name[name].shape)[assignments[name].box(number).slices].ravel().tolist())
            assert all(box <= elements[name, rank] for rank in writers)
            there = {mirrors.domains[rank] for rank in assignments[name].holders[number].tolist()}
            assert len(writers) == min(mirrors.copies + 1, len(there))
    grids = Grids(rows, assignments, by_name, list(mirrors.domains), Chunking(mirrors=mirrors))
    assert {(name, i): grids.of(name).file(i) for name, i in expected} == expected


def model(mesh: Mesh, *split: str) -> list[TensorSpec]:
    layout = TensorLayout(mesh, tuple(Shard(0, over) for over in split))
    return [TensorSpec(f"w{n}", DTYPES["float32"], (4096, 64), layout) for n in range(3)]


@pytest.mark.usefixtures("small_limits")
def test_several_cells_of_one_rank_are_mirrored_in_the_order_of_their_owner() -> None:
    layout = TensorLayout(Mesh.of({"pp": 2, "dp": 3}), (Interleaved(1, "pp", groups=2),))
    tensors = [TensorSpec("w", DTYPES["float64"], (2, 3, 3), layout)]
    mirrors = placed({rank: f"host{int(rank == 2)}" for rank in range(6)}, 1)
    writers: dict[str, list[list[tuple[str, int]]]] = {}
    for rank in range(6):
        plan = plan_of(tensors, mirrors, rank)
        for n, f in enumerate(plan.files):
            writers.setdefault(f.path, []).append(chunks_in(plan, n))
    assert {len(each) for each in writers.values()} == {1, 2}
    assert all(chunks == several[0] for several in writers.values() for chunks in several)


def on_hosts(ranks: int, per_host: int) -> dict[int, str]:
    return {rank: f"host{rank // per_host:05}" for rank in range(ranks)}


def test_replicas_on_other_hosts_leave_one_file_and_no_copy() -> None:
    """Data parallelism, and HSDP whose shards are within hosts or over two: ranks that are alike mirror each other."""
    for mesh, split in (
        (Mesh.of({"dp": 16}), ()),
        (Mesh.of({"dp": 4, "shard": 4}), ("shard",)),
        (Mesh.of({"dp": 2, "shard": 8}), ("shard",)),
    ):
        mirrors = placed(on_hosts(16, 4), 1)
        plans = [plan_of(model(mesh, *split), mirrors, rank) for rank in range(16)]
        assert {(len(p.files), p.mirrored) for p in plans} == {(2, 1)}
        holders = {f.path: {mirrors.domains[r] for r, p in enumerate(plans) if f.path in {g.path for g in p.files}} for f in plans[0].files}
        assert {len(there) for there in holders.values()} == {2}


@pytest.mark.parametrize(
    ("mesh", "split", "survived"),
    [
        (Mesh.of({"dp": 16}), (), 112),  # mirrors and copies go the same way
        (Mesh.of({"shard": 16}), ("shard",), 112),
        (Mesh.of({"dp": 2, "shard": 8}), ("shard",), 111),  # pairs of replicas, and the neighbours that have the norm
    ],
)
def test_pairs_of_sixteen_machines_that_may_be_lost(mesh: Mesh, split: tuple[str, ...], survived: int) -> None:
    tensors, mirrors = [*model(mesh, *split), TensorSpec("norm", DTYPES["float32"], (64,), TensorLayout(mesh))], placed(on_hosts(16, 1), 1)
    files: dict[str, set[int]] = {}
    for rank in range(16):
        for f in plan_of(tensors, mirrors, rank).files:
            files.setdefault(f.path, set()).add(rank)
    for path, _, target in missing_copies(files, mirrors.names, mirrors.copies):
        files[path].add(target)
    assert {len(machines) for machines in files.values()} == {2}
    pairs = list(combinations(range(16), 2))
    assert sum(all(not machines <= {*lost} for machines in files.values()) for lost in pairs) == survived and len(pairs) == 120


def test_replicated_norms_beside_tensor_parallel_weights_share_their_file() -> None:
    mesh = Mesh.of({"dp": 4, "tp": 4})
    tensors = [*model(mesh, "tp"), TensorSpec("norm", DTYPES["float32"], (64,), TensorLayout(mesh, ()))]
    plans = [plan_of(tensors, placed(on_hosts(16, 4), 1), rank) for rank in range(16)]
    assert {(len(p.files), p.mirrored) for p in plans} == {(2, 1)}


def test_a_job_of_many_machines_is_planned_in_time() -> None:
    """The leader's part grows with ranks, and not with their square, where every rank has everything."""
    costs = {}
    for ranks in (1024, 8192):
        mesh, domains = Mesh.of({"dp": ranks}), on_hosts(ranks, 8)
        tensors = [TensorSpec(f"w{n}", DTYPES["float32"], (ranks * 64, 256), TensorLayout(mesh)) for n in range(20)]
        assignments = assign(tensors)
        began = time.thread_time()
        mirrors = placed(domains, 1)
        plan = plan_mirrored(tensors, assignments, mirrors, rank=5)
        files = [
            DataFile(path=plan.files[0].path.replace("-00005-14.", f"-{r:05}-{1 + (r ^ 8)}."), size=1, header=1, digest="", rank=r)
            for r in domains
        ]
        assert data_number(files[5].path) == 14
        grids = Grids(files, assignments, {t.name: t for t in tensors}, range(ranks), Chunking(mirrors=mirrors))
        assert len({id(grids.of(t.name)) for t in tensors}) <= 20
        costs[ranks] = time.thread_time() - began
        assert np.array_equal(grids.of("w3").files, assignments["w3"].owners)
    print(costs)
    assert costs[8192] < 8**1.3 * (costs[1024] + 0.1)
