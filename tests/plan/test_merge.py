"""Merged flat ranges: ranks send each other the edges of their ranges, and what each then writes is whole rows of the tensor.

The oracle scatters a real array with numpy's own flattening, moves the fragments as messages, and puts chunks back by their boxes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import assume, event, example, given
from hypothesis import strategies as st

from ckpt.dtypes import DTYPES
from ckpt.plan.flat import FAN_IN, MOST_MOVED
from ckpt.plan.layout.geometry import flat_to_boxes
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.partition import range_boxes
from ckpt.plan.layout.placement_base import Split
from ckpt.plan.layout.placements import Flat, Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import ChunkAssignment, Fragment, TensorSpec, assign, fragments
from tests.plan.layout_strategies import layouts, local_array, meshes, numbered, tensor_lists
from tests.plan.limits import small_chunks
from tests.plan.test_ownership import bytes_written, gpt2

F32, U8 = DTYPES["float32"], DTYPES["uint8"]


@pytest.fixture
def small_limits() -> Iterator[None]:
    """Chunks of at most 64 bytes, and blocks of at least 32 are not gathered: so small tensors show what large ones do."""
    with small_chunks(64, 32):
        yield


@st.composite
def flat_tensors(draw: st.DrawFn) -> TensorSpec:
    """One tensor that is flat over a mesh dimension and perhaps sharded or replicated over others."""
    mesh = draw(meshes())
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 24, 40]), min_size=1, max_size=3)))
    assume(math.prod(shape) <= 4000)
    free = draw(st.permutations(mesh.names))
    over = free.pop()
    splits: list[Split] = []
    for name in free:
        how = draw(st.sampled_from(["replicas", "rows", "sizes", "columns"]))
        if how == "rows" or (how == "sizes" and splits):
            splits.append(Shard(0, name))
        elif how == "sizes":
            cuts = sorted(draw(st.integers(0, shape[0])) for _ in range(mesh.size(name) - 1))
            splits.append(Shard(0, name, tuple(b - a for a, b in zip([0, *cuts], [*cuts, shape[0]], strict=True))))
        elif how == "columns":
            splits.append(Shard(-1, name))
    return TensorSpec("w", DTYPES[draw(st.sampled_from(["uint8", "float32"]))], shape, TensorLayout(mesh, (*splits, Flat(over))))


def all_fragments(
    tensors: Sequence[TensorSpec], owned: dict[str, ChunkAssignment]
) -> tuple[dict[int, list[Fragment]], dict[int, list[Fragment]]]:
    """What each rank sends and receives."""
    found = {r: fragments(tensors, owned, r) for t in tensors for r in t.layout.mesh.ranks}
    return {r: out for r, (out, _) in found.items()}, {r: into for r, (_, into) in found.items()}


def held(t: TensorSpec, rank: int) -> np.ndarray:
    """Positions in the tensor's flattening of what a rank has in memory, in the order of that memory."""
    local = local_array(t.layout, numbered(t.shape), rank)
    return np.zeros(0, dtype=np.int64) if local is None else local.reshape(-1)


def check(tensors: Sequence[TensorSpec]) -> None:
    """Scatter random arrays, move the fragments, and compare every chunk with the array."""
    owned = assign(tensors, merge_flat_shards=True)
    sends, receives = all_fragments(tensors, owned)
    messages: dict[tuple[int, int], list[tuple[Fragment, np.ndarray]]] = defaultdict(list)
    arrays = {t.name: np.random.default_rng(i).integers(0, 1 << 40, t.shape) for i, t in enumerate(tensors)}
    memory = {(t.name, r): np.full(math.prod(t.shape), -1) for t in tensors for r in t.layout.mesh.ranks}
    for t in tensors:
        for r in t.layout.mesh.ranks:
            memory[t.name, r][held(t, r)] = arrays[t.name].reshape(-1)[held(t, r)]
    for rank, out in sends.items():
        for f in out:
            data = memory[f.name, rank][f.start : f.stop].copy()
            assert f.source == rank != f.target
            assert len(data) > 0
            assert (data != -1).all(), "a rank sends what it does not have"
            messages[rank, f.target].append((f, data))
    for rank, into in receives.items():
        for f in into:
            sent, data = messages[f.source, rank].pop(0)
            assert sent == f
            assert (memory[f.name, rank][f.start : f.stop] == -1).all(), "a rank receives what it has"
            memory[f.name, rank][f.start : f.stop] = data
    assert not any(messages.values())
    for t in tensors:
        mine, times = owned[t.name], np.zeros(t.shape, dtype=np.int64)
        for chunk, owner in enumerate(mine.owners.tolist()):
            box = mine.box(chunk)
            times[box.slices] += 1
            at = numbered(t.shape)[box.slices].reshape(-1)
            assert (memory[t.name, owner][at] == arrays[t.name].reshape(-1)[at]).all()
        assert (times == 1).all()


@pytest.mark.usefixtures("small_limits")
@given(st.lists(flat_tensors(), min_size=1, max_size=1))
def test_every_chunk_is_whole_once_the_fragments_have_moved(tensors: list[TensorSpec]) -> None:
    event(f"merged: {assign(tensors, merge_flat_shards=True)['w'].merged}")
    check(tensors)


@pytest.mark.usefixtures("small_limits")
@given(meshes().flatmap(lambda mesh: tensor_lists(mesh, 8)))
def test_any_tensors_of_a_job(tensors: list[TensorSpec]) -> None:
    check(tensors)


@pytest.mark.usefixtures("small_limits")
@given(flat_tensors())
def test_merged_chunks(t: TensorSpec) -> None:
    """Each is one range of the flattening and of whole rows, is not too large, and its owner holds the cell that it is said to."""
    mine = assign([t], merge_flat_shards=True)["w"]
    assume(mine.merged)
    assert mine.cuts is not None
    assert (np.diff([n for c in mine.cuts for n in c]) != 0).all()
    at = 0
    for chunk, (owner, cell) in enumerate(zip(mine.owners.tolist(), mine.cell.tolist(), strict=True)):
        box = mine.box(chunk)
        elements = numbered(t.shape)[box.slices].reshape(-1)
        assert elements.tolist() == list(range(at, at + len(elements)))
        assert len(elements) * t.dtype.itemsize <= max(64, t.dtype.itemsize)
        assert owner in mine.cell_holders[cell]
        at += len(elements)
    assert at == math.prod(t.shape)
    holders = mine.cell_holders.ravel().tolist()
    assert len(set(holders)) == len(holders)
    assert set(holders) >= {r for r in t.layout.mesh.ranks if len(held(t, r))}
    alike = {tuple(held(t, r)) for r in mine.cell_holders[0].tolist()}
    assert len(alike) == 1


@pytest.mark.usefixtures("small_limits")
@given(flat_tensors())
def test_little_moves(t: TensorSpec) -> None:
    """Less than a row at each boundary between two ranges, at most an eighth in all, and nothing of one dimension."""
    mine = assign([t], merge_flat_shards=True)["w"]
    assume(mine.merged)
    sends, _ = all_fragments([t], {"w": mine})
    moved = [f.stop - f.start for out in sends.values() for f in out]
    edges = {int(held(t, r)[0]) for r in t.layout.mesh.ranks if len(held(t, r))}
    blocks = TensorLayout(t.layout.mesh, t.layout.splits[:-1]).tiling(t.shape)
    assert blocks.cuts is not None
    largest = math.prod(max(np.diff(c)) for c in blocks.cuts)
    if largest * t.dtype.itemsize < 32:
        assert sum(moved) < math.prod(t.shape) or not moved
        return
    rows = next((d for d, c in enumerate(blocks.cuts) if max(np.diff(c)) > 1), len(t.shape) - 1)
    row = math.prod(t.shape[rows + 1 :])
    assert all(n < row for n in moved)
    assert sum(moved) <= (len(edges) - 1) * (row // 2)
    assert sum(moved) <= MOST_MOVED * math.prod(t.shape)
    if len(t.shape) == 1:
        assert not moved


@pytest.mark.usefixtures("small_limits")
@given(meshes().flatmap(lambda mesh: tensor_lists(mesh, 8)), st.randoms())
def test_every_rank_comes_to_the_same_result_alone_and_in_any_order(tensors: list[TensorSpec], random: object) -> None:
    together = assign(tensors, merge_flat_shards=True)
    for rank in {r for t in tensors for r in t.layout.mesh.ranks}:
        known = [t for t in tensors if rank in t.layout.ranks()]
        random.shuffle(known)  # type: ignore[attr-defined]
        alone = assign(known, merge_flat_shards=True)
        for t in known:
            a, b = alone[t.name], together[t.name]
            assert (a.cuts, a.merged, a.owners.tolist()) == (b.cuts, b.merged, b.owners.tolist())
        assert fragments(known, alone, rank) == fragments([t for t in tensors if t in known], together, rank)


@pytest.mark.usefixtures("small_limits")
@given(meshes().flatmap(tensor_lists))
def test_without_merge_nothing_moves(tensors: list[TensorSpec]) -> None:
    owned = assign(tensors)
    assert not any(o.merged for o in owned.values())
    assert all(fragments(tensors, owned, r) == ([], []) for t in tensors for r in t.layout.mesh.ranks)


# ------------------------------------------------------------------------------------------------------------ what is merged


def one(shape: tuple[int, ...], sizes: dict[str, int], *splits: Split, dtype: str = "float32") -> ChunkAssignment:
    """The grid of one tensor with the real limits."""
    t = TensorSpec("w", DTYPES[dtype], shape, TensorLayout(Mesh.of(sizes), splits))
    return assign([t], merge_flat_shards=True)["w"]


def moved(owned: ChunkAssignment) -> int:
    assert owned.flat is not None
    return owned.flat.moved


def test_boundaries_go_to_the_nearest_row_and_down_from_the_middle() -> None:
    """90 rows of 1000: 4 ranges of 22,500 elements end at rows 22.5, 45 and 67.5."""
    mine = one((90, 1000), {"dp": 4}, Flat("dp"))
    assert mine.cuts == ((0, 22, 45, 67, 90), (0, 1000))
    assert mine.owners.tolist() == [0, 1, 2, 3]
    t = TensorSpec("w", F32, (90, 1000), TensorLayout(Mesh.of({"dp": 4}), (Flat("dp"),)))
    found = {r: fragments([t], {"w": mine}, r) for r in range(4)}
    assert found[0][0] == [Fragment(name="w", chunk=1, start=22_000, stop=22_500, source=0, target=1)] == found[1][1]
    assert found[2][0] == [Fragment(name="w", chunk=3, start=67_000, stop=67_500, source=2, target=3)] == found[3][1]
    assert [len(found[r][0]) for r in range(4)] == [1, 0, 1, 0]


def test_one_dimension_moves_nothing() -> None:
    mine = one((100_001,), {"dp": 4}, Flat("dp"))
    assert mine.cuts == ((0, 25_001, 50_002, 75_003, 100_001),)
    assert moved(mine) == 0


def test_leading_dimensions_of_one_are_skipped() -> None:
    mine = one((1, 1, 90, 1000), {"dp": 4}, Flat("dp"))
    assert mine.cuts == ((0, 1), (0, 1), (0, 22, 45, 67, 90), (0, 1000))


def test_few_rows_keep_boxes() -> None:
    """3 rows among 4 ranks: a third would move."""
    mine = one((3, 50_000), {"dp": 4}, Flat("dp"))
    assert not mine.merged
    assert mine.boxes is not None


def test_few_rows_that_ranges_divide_are_cut_within() -> None:
    """Stacked experts: 8 of them on 32 ranks, so each is cut like a tensor of its own over 4."""
    mine = one((8, 90, 1000), {"dp": 32}, Flat("dp"))
    assert mine.cuts == (tuple(range(9)), (0, 22, 45, 67, 90), (0, 1000))
    assert mine.owners.tolist() == list(range(32))
    assert moved(mine) == 8 * 1000


def test_sharded_rows_are_merged_each_for_itself() -> None:
    mine = one((180, 1000), {"tp": 2, "dp": 4}, Shard(0, "tp"), Flat("dp"))
    assert mine.cuts == ((0, 22, 45, 67, 90, 112, 135, 157, 180), (0, 1000))
    assert mine.owners.tolist() == list(range(8))


def test_experts_of_ranks_are_merged_each_for_itself() -> None:
    mine = one((4, 90, 1000), {"dp": 4, "ep": 4}, Shard(0, "ep"), Flat("dp"))
    assert mine.cuts == ((0, 1, 2, 3, 4), (0, 22, 45, 67, 90), (0, 1000))
    assert mine.owners.tolist() == [dp * 4 + ep for ep in range(4) for dp in range(4)]


def test_sharded_columns_keep_boxes() -> None:
    """A row of a block is not contiguous with the next in the tensor."""
    assert not one((180, 1000), {"tp": 2, "dp": 4}, Shard(1, "tp"), Flat("dp")).merged


def test_chunks_stay_below_64_mib() -> None:
    for shape in [(1000, 200_000), (16, 40_000_000), (300_000_000,), (16, 3, 20_000_000)]:
        mine = one(shape, {"dp": 4}, Flat("dp"))
        assert mine.merged
        sizes = [mine.box(i).numel * 4 for i in range(len(mine.owners))]
        assert sum(sizes) == 4 * math.prod(shape)
        assert 16 << 20 < max(sizes) <= 64 << 20


def test_all_parts_of_a_row_have_one_owner() -> None:
    mine = one((16, 40_000_000), {"dp": 4}, Flat("dp"))
    owners = mine.owners.reshape(16, -1)
    assert owners.shape[1] > 1
    assert (owners == np.repeat(range(4), 4)[:, None]).all()


def test_small_tensors_go_whole_to_one_rank() -> None:
    tensors = [TensorSpec(f"t{i}", F32, (64, 64), TensorLayout(Mesh.of({"dp": 4}), (Flat("dp"),))) for i in range(8)]
    owned = assign(tensors, merge_flat_shards=True)
    assert all(o.cuts == ((0, 64), (0, 64)) for o in owned.values())
    assert Counter(int(o.owners[0]) for o in owned.values()) == {0: 2, 1: 2, 2: 2, 3: 2}
    check(tensors)


def test_small_tensors_of_very_many_ranks_are_not_gathered() -> None:
    """A rank would get a message from each of them."""
    mesh = Mesh.of({"dp": 2 * FAN_IN})
    mine = assign([TensorSpec("w", F32, (1024,), TensorLayout(mesh, (Flat("dp"),)))], merge_flat_shards=True)["w"]
    assert moved(mine) == 0
    assert len(mine.owners) == 2 * FAN_IN


def test_replicas_share_the_chunks_of_a_range_and_take_edges_from_their_own() -> None:
    t = TensorSpec("w", F32, (90, 1000), TensorLayout(Mesh.of({"rep": 2, "dp": 4}), (Flat("dp"),)))
    mine = assign([t], merge_flat_shards=True)["w"]
    assert mine.cuts == ((0, 11, 22, 34, 45, 56, 67, 79, 90), (0, 1000))
    assert mine.owners.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    edges = [f for r in range(8) for f in fragments([t], {"w": mine}, r)[0]]
    assert [(f.source, f.target) for f in edges] == [(0, 1), (2, 3)]
    check([t])


# --------------------------------------------------------------------------------------------------------------- balance


def imbalance(tensors: Sequence[TensorSpec], ranks: int) -> float:
    """Bytes of the busiest rank over the mean."""
    written = bytes_written(tensors, assign(tensors, merge_flat_shards=True))
    assert sum(written.values()) == sum(t.nbytes for t in tensors)
    return max(written.values()) * ranks / sum(written.values())


@pytest.mark.parametrize(("copies", "ranges"), [(1, 4), (1, 8), (2, 4), (4, 8), (8, 8), (64, 1)])
def test_a_model_is_balanced(copies: int, ranges: int) -> None:
    layout = TensorLayout(Mesh.of({"rep": copies, "dp": ranges}), (Flat("dp"),))
    tensors = [TensorSpec(f"{name}.{m}", F32, shape, layout) for name, shape in gpt2() for m in ("exp_avg", "exp_avg_sq")]
    assert imbalance(tensors, copies * ranges) <= 1.05


def test_blocks_of_a_tensor_parallel_model_are_balanced() -> None:
    layout = TensorLayout(Mesh.of({"dp": 8, "tp": 4}), (Shard(0, "tp"), Flat("dp")))
    assert imbalance([TensorSpec(name, F32, shape, layout) for name, shape in gpt2()], 32) <= 1.05


# ------------------------------------------------------------------------------------------------------------------ boxes


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple), st.data())
@example((1, 1), None)
def test_boxes_of_all_ranges_at_once(shape: tuple[int, ...], data: st.DataObject | None) -> None:
    inner = data.draw(st.lists(st.integers(0, math.prod(shape)), max_size=6)) if data else []
    cuts = [0, *sorted(inner), math.prod(shape)]
    number, offsets, shapes = range_boxes(shape, np.array(cuts))
    found = list(zip(number.tolist(), map(tuple, offsets.tolist()), map(tuple, shapes.tolist()), strict=True))
    expected = [(i, b.offset, b.shape) for i, (lo, hi) in enumerate(itertools.pairwise(cuts)) for b in flat_to_boxes(shape, lo, hi)]
    assert found == expected


@given(flat_tensors())
def test_the_tiling_is_what_the_ranks_hold(t: TensorSpec) -> None:
    tiling = t.layout.tiling(t.shape)
    if tiling.boxes is None:
        assert math.prod(t.shape) == 0
        return
    found = zip(*(map(tuple, a.tolist()) for a in (*tiling.boxes, tiling.holders)), strict=True)
    rows = [(offset, shape, rank) for offset, shape, holders in found for rank in holders]
    assert sorted(rows) == sorted((p.box.offset, p.box.shape, r) for r in t.layout.ranks() for p in t.layout.pieces(t.shape, r))


@pytest.mark.usefixtures("small_limits")
@given(st.data())
def test_layouts_with_stages_and_interleaved_parts(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(24, 3), (5, 12), (40,), (), (0, 4), (1, 24, 2)]))
    layout = data.draw(layouts(data.draw(meshes()), shape))
    check([TensorSpec("w", U8, shape, layout)])
