"""Who writes what: chunks tile every tensor, each is written by a rank that has it, bytes are balanced, and all ranks agree unasked."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import given as cases
from hypothesis import strategies as st

from ckpt import settings
from ckpt.dtypes import DTYPES, dtype
from ckpt.errors import ConsistencyError, CoverageError
from ckpt.plan import ownership
from ckpt.plan.external_assignment import AssignedBox, assign_boxes
from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placement_base import Split
from ckpt.plan.layout.placements import Flat, Interleaved, Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.machines import balanced, bytes_of, runs
from ckpt.plan.ownership import ChunkAssignment, TensorSpec, assign
from tests.plan.layout_strategies import local_array, meshes, numbered, tensor_lists
from tests.plan.limits import small_chunks

F32, BF16 = DTYPES["float32"], DTYPES["bfloat16"]


@pytest.fixture
def small_limits() -> Iterator[None]:
    """Chunks of at most 64 bytes, and cells of at least 32 are divided: so small tensors show what large ones do."""
    with small_chunks(64, 32):
        yield


def same(a: ChunkAssignment, b: ChunkAssignment) -> bool:
    """Equal in grid and writers."""
    if (a.cuts is None) != (b.cuts is None):
        return False
    grids = a.cuts == b.cuts if a.boxes is None or b.boxes is None else all(map(np.array_equal, a.boxes, b.boxes))
    return bool(grids) and np.array_equal(a.owners, b.owners) and np.array_equal(a.holders, b.holders)


def bytes_written(tensors: Sequence[TensorSpec], owned: dict[str, ChunkAssignment]) -> Counter[int]:
    """Rank → bytes that it writes."""
    found: Counter[int] = Counter()
    for t in tensors:
        for chunk, rank in enumerate(owned[t.name].owners.tolist()):
            found[rank] += owned[t.name].box(chunk).numel * t.dtype.itemsize
    return found


# ---------------------------------------------------------------------------------------------------------- any layouts


@pytest.mark.usefixtures("small_limits")
@given(meshes().flatmap(tensor_lists))
def test_chunks_tile_and_are_written_by_a_holder(tensors: list[TensorSpec]) -> None:
    owned = assign(tensors)
    assert owned.keys() == {t.name for t in tensors}
    for t in tensors:
        mine = owned[t.name]
        times, ids = np.zeros(t.shape, dtype=np.int64), numbered(t.shape)
        locals_ = {r: a for r in t.layout.mesh.ranks if (a := local_array(t.layout, ids, r)) is not None}
        assert len(mine.owners) == len(mine.holders) > 0
        for chunk, (owner, holders) in enumerate(zip(mine.owners.tolist(), mine.holders.tolist(), strict=True)):
            box = mine.box(chunk)
            times[box.slices] += 1
            assert owner in holders
            assert box.numel * t.dtype.itemsize <= max(64, t.dtype.itemsize)
            assert box.numel or not math.prod(t.shape)
            elements = ids[box.slices].ravel()
            having = {r for r, a in locals_.items() if np.isin(elements, a).all()}
            assert set(holders) == having if box.numel else set(holders) <= having
        assert (times == 1).all()
        assert mine.replicas == mine.holders.shape[1]


@pytest.mark.usefixtures("small_limits")
@given(meshes().flatmap(tensor_lists))
def test_written_by_and_held_by_count_chunks(tensors: list[TensorSpec]) -> None:
    for t, mine in ((t, assign(tensors)[t.name]) for t in tensors):
        for rank in t.layout.mesh.ranks:
            assert mine.written_by(rank) == [i for i, r in enumerate(mine.owners.tolist()) if r == rank]
            assert mine.chunks_on(rank) == [i for i, held in enumerate(mine.holders.tolist()) if rank in held]


@pytest.mark.usefixtures("small_limits")
@given(meshes().flatmap(tensor_lists), st.randoms())
def test_the_order_of_tensors_does_not_matter(tensors: list[TensorSpec], random: object) -> None:
    shuffled = list(tensors)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first, second = assign(tensors), assign(shuffled)
    assert all(same(first[t.name], second[t.name]) for t in tensors)


@pytest.mark.usefixtures("small_limits")
@given(meshes().flatmap(lambda mesh: tensor_lists(mesh, 8)))
def test_every_rank_comes_to_the_same_result_alone(tensors: list[TensorSpec]) -> None:
    """A rank knows the tensors that it holds a part of, and no others."""
    together = assign(tensors)
    for rank in {r for t in tensors for r in t.layout.mesh.ranks}:
        known = [t for t in tensors if rank in t.layout.ranks()]
        alone = assign(known)
        assert all(same(alone[t.name], together[t.name]) for t in known)


@given(meshes().flatmap(tensor_lists))
def test_small_cells_are_written_whole(tensors: list[TensorSpec]) -> None:
    """With the real limits no tensor of these tests is divided further than its layout divides it."""
    owned = assign(tensors)
    for t in tensors:
        tiling = t.layout.tiling(t.shape)
        assert owned[t.name].cuts == tiling.cuts
        assert len(owned[t.name].owners) == len(tiling.holders)


# --------------------------------------------------------------------------------------------------------------- chunk sizes


@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        ((100_000, 4096), ()),
        ((3, 100_000_000), ()),
        ((100_000_000,), ()),
        ((2, 3, 50_000_000), ()),
        ((128_256, 16_384), (Shard(0, "tp"),)),
        ((16_384, 53_248), (Shard(1, "tp"), Shard(0, "dp"))),
        ((5, 70_000_000), (Shard(1, "tp"), Flat("dp"))),
    ],
    ids=str,
)
def test_no_chunk_is_larger_than_64_mib(shape: tuple[int, ...], splits: tuple[Split, ...]) -> None:
    mesh = Mesh.of({"dp": 4, "tp": 2})
    owned = assign([TensorSpec("w", F32, shape, TensorLayout(mesh, splits))])["w"]
    sizes = [owned.box(i).numel * 4 for i in range(len(owned.owners))]
    assert sum(sizes) == 4 * math.prod(shape)
    assert max(sizes) <= 64 << 20
    # Not far below it either: chunks that are needlessly small cost a header entry and a request each.
    per_rank = 4 * math.prod(shape) / 8
    assert len(sizes) <= 8 * 2 * math.ceil(per_rank / (64 << 20)) + 8 * 3


def test_chunks_are_rows_where_rows_are_small_enough() -> None:
    owned = assign([TensorSpec("w", F32, (100_000, 4096), TensorLayout(Mesh.of({"dp": 2})))])["w"]
    assert owned.cuts is not None
    assert owned.cuts[1] == (0, 4096)


@pytest.mark.parametrize("split", [(), (Flat("tp"),)], ids=["cuts", "boxes"])
def test_a_replica_writes_neighbouring_rows(split: tuple[Split, ...]) -> None:
    """However many chunks its part is."""
    owned = assign([TensorSpec("w", F32, (240_000, 4096), TensorLayout(Mesh.of({"dp": 4, "tp": 1}), split))])["w"]
    owners = owned.owners.tolist()
    assert len(owners) == 4 * 15
    assert sorted(set(owners)) == [0, 1, 2, 3]
    assert all(owners[15 * i : 15 * i + 15] == [owners[15 * i]] * 15 for i in range(4))


def test_an_element_larger_than_a_chunk_is_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "CHUNK", 8)
    ownership._assignment.cache_clear()
    owned = assign([TensorSpec("w", DTYPES["complex128"], (2, 3), TensorLayout(Mesh.of({"dp": 1})))])["w"]
    ownership._assignment.cache_clear()
    assert len(owned.owners) == 6


# ------------------------------------------------------------------------------------------------------------------- balance


def gpt2(layers: int = 12, hidden: int = 768) -> list[tuple[str, tuple[int, ...]]]:
    """GPT-2's tensors: 148 in the smallest."""
    found: list[tuple[str, tuple[int, ...]]] = [
        ("wte", (50257, hidden)),
        ("wpe", (1024, hidden)),
        ("ln_f.w", (hidden,)),
        ("ln_f.b", (hidden,)),
    ]
    for i in range(layers):
        for part, shape in [
            ("qkv", (3 * hidden, hidden)),
            ("proj", (hidden, hidden)),
            ("up", (4 * hidden, hidden)),
            ("down", (hidden, 4 * hidden)),
        ]:
            found += [(f"h.{i}.{part}.w", shape), (f"h.{i}.{part}.b", shape[:1])]
        found += [(f"h.{i}.{ln}.{x}", (hidden,)) for ln in ("ln_1", "ln_2") for x in ("w", "b")]
    return found


def imbalance(tensors: Sequence[TensorSpec], ranks: int) -> float:
    """Bytes of the busiest rank over the mean."""
    written = bytes_written(tensors, assign(tensors))
    assert sum(written.values()) == sum(t.nbytes for t in tensors)
    return max(written.values()) * ranks / sum(written.values())


@pytest.mark.parametrize("hidden", [256, 768])
@pytest.mark.parametrize("replicas", [2, 4, 8, 64])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda d: d.name)
def test_replicas_share_the_bytes_of_a_model(replicas: int, hidden: int, dtype: object) -> None:
    assert isinstance(dtype, type(F32))
    layout = TensorLayout(Mesh.of({"dp": replicas}))
    weights = [TensorSpec(name, dtype, shape, layout) for name, shape in gpt2(hidden=hidden)]
    assert len(weights) == 148
    assert imbalance(weights, replicas) <= 1.05
    adam = [TensorSpec(f"{t.name}.{m}", F32, t.shape, layout) for t in weights for m in ("exp_avg", "exp_avg_sq")]
    steps = [TensorSpec(f"{t.name}.step", F32, (), layout) for t in weights]
    assert imbalance(weights + adam + steps, replicas) <= 1.05


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_replicas_share_many_small_tensors(replicas: int) -> None:
    """None of these is divided, so only the dealing of whole tensors can balance them."""
    layout = TensorLayout(Mesh.of({"dp": replicas}))
    sizes = [100 * (7 * i % 151) for i in range(1, 151)]
    assert imbalance([TensorSpec(f"t{i}", F32, (n,), layout) for i, n in enumerate(sizes)], replicas) <= 1.05


@pytest.mark.parametrize(("copies", "shards"), [(2, 4), (4, 8), (8, 8)])
@pytest.mark.parametrize("kind", ["rows", "flat"])
def test_hsdp_shares_the_bytes(copies: int, shards: int, kind: str) -> None:
    mesh = Mesh.of({"rep": copies, "shard": shards})
    split: Split = Shard(0, "shard") if kind == "rows" else Flat("shard")
    tensors = [TensorSpec(name, F32, shape, TensorLayout(mesh, (split,))) for name, shape in gpt2()]
    assert imbalance(tensors, copies * shards) <= 1.05


def test_tensor_and_data_parallelism_share_the_bytes() -> None:
    mesh = Mesh.of({"dp": 8, "tp": 4})
    tensors = []
    for name, shape in gpt2():
        split: tuple[Split, ...] = (Shard(0, "tp"),) if name.endswith(".w") and len(shape) == 2 else ()
        split = (Interleaved(0, "tp", 3),) if "qkv.w" in name else split
        tensors.append(TensorSpec(name, BF16, shape, TensorLayout(mesh, split)))
    assert imbalance(tensors, 32) <= 1.05


@pytest.mark.parametrize("stacked", [True, False])
def test_experts_share_the_bytes(stacked: bool) -> None:
    """64 experts over 8 ranks, each with 4 replicas."""
    mesh = Mesh.of({"edp": 4, "ep": 8})
    tensors = []
    for layer in range(2):
        for part, shape in (("up", (512, 256)), ("down", (256, 512))):
            if stacked:
                tensors.append(TensorSpec(f"{layer}.{part}", BF16, (64, *shape), TensorLayout(mesh, (Shard(0, "ep"),))))
            else:
                at = [(("ep", (e // 8,)),) for e in range(64)]
                tensors += [TensorSpec(f"{layer}.{e}.{part}", BF16, shape, TensorLayout(mesh, (), at[e])) for e in range(64)]
    assert imbalance(tensors, 32) <= 1.05


def test_pipeline_stages_are_balanced_each_for_itself() -> None:
    mesh = Mesh.of({"pp": 2, "dp": 8})
    tensors = [TensorSpec(f"{s}.{name}", F32, shape, TensorLayout(mesh, (), (("pp", (s,)),))) for s in (0, 1) for name, shape in gpt2(4)]
    written = bytes_written(tensors, assign(tensors))
    for stage in (range(8), range(8, 16)):
        load = [written[r] for r in stage]
        assert max(load) * 8 / sum(load) <= 1.05


def test_a_tensor_depends_only_on_those_that_have_its_replicas() -> None:
    mesh = Mesh.of({"pp": 2, "dp": 4})
    mine = [TensorSpec(f"a{i}", F32, (100 + i,), TensorLayout(mesh, (), (("pp", (0,)),))) for i in range(9)]
    theirs = [TensorSpec(f"b{i}", F32, (200 - i,), TensorLayout(mesh, (), (("pp", (1,)),))) for i in range(5)]
    shared = [TensorSpec(f"c{i}", F32, (50,), TensorLayout(mesh)) for i in range(3)]
    alone = assign(mine)
    for others in (theirs, shared, [*theirs, *shared]):
        together = assign([*others, *mine])
        assert all(same(alone[t.name], together[t.name]) for t in mine)
    assert len({int(alone[t.name].owners[0]) for t in mine}) == 4


def test_the_same_shape_may_have_another_writer() -> None:
    """Tensors that are cut alike share a grid's cuts, not its writers."""
    layout = TensorLayout(Mesh.of({"dp": 4}))
    owned = assign([TensorSpec(f"t{i}", F32, (10, 10), layout) for i in range(8)])
    assert Counter(int(o.owners[0]) for o in owned.values()) == {0: 2, 1: 2, 2: 2, 3: 2}


# ------------------------------------------------------------------------------------------------------------------------------------------
# Boxes with owners that somebody else chose: every element is stored once, by its owner, and each rank alone finds its chunks.


def one(box: Box, owner: int, *, name: str = "w", shape: tuple[int, ...], kind: str = "float32") -> AssignedBox:
    return AssignedBox(name=name, dtype=dtype(kind), shape=shape, box=box, owner=owner)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Box, int]]]:
    """A tensor cut in two, again and again, wherever; each part belongs to some rank."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        first = tuple(at if d == dim else n for d, n in enumerate(box.shape))
        rest = tuple(n - at if d == dim else n for d, n in enumerate(box.shape))
        boxes += [Box(box.offset, first), Box(tuple(o + at if d == dim else o for d, o in enumerate(box.offset)), rest)]
    return shape, [(box, draw(st.integers(0, 3))) for box in draw(st.permutations(boxes))]


@cases(cut_tensors(), st.integers(4, 64))
def test_every_element_is_stored_once_by_its_owner(case: tuple[tuple[int, ...], list[tuple[Box, int]]], most: int) -> None:
    shape, boxes = case
    if 0 in shape:  # one box starts at the origin of an empty tensor: DCP's planner drops the others
        boxes = boxes[:1] if not any(boxes[0][0].offset) else [(Box.whole(shape), 0)]
    before, settings.CHUNK = settings.CHUNK, most
    try:
        found = assign_boxes(one(box, owner, shape=shape) for box, owner in boxes)
        alone = {r: assign_boxes(one(box, owner, shape=shape) for box, owner in boxes if owner == r) for _, r in boxes}
    finally:
        settings.CHUNK = before
    found.check()
    owned = found.assignments["w"]
    wanted, stored, times = (np.full(shape, -1) for _ in range(3))
    for box, owner in boxes:
        wanted[box.slices] = owner
    for chunk, owner in enumerate(owned.owners.tolist()):
        box = owned.box(chunk)
        assert box.numel * 4 <= max(most, 4)
        stored[box.slices] = owner
        times[box.slices] += 1
    assert (stored == wanted).all() and (times == 0).all()
    for rank, mine in alone.items():
        numbers = mine.assignments["w"].written_by(rank) if "w" in mine.assignments else []
        assert [mine.assignments["w"].box(i) for i in numbers] == [owned.box(i) for i in owned.written_by(rank)]


def test_regular_boxes_become_cuts_and_share_a_grid() -> None:
    rows = [Box((a, b), (2, 5)) for a, b in itertools.product((0, 2, 4), (0, 5))]
    found = assign_boxes(one(box, i % 2, name=name, shape=(6, 10)) for name in "ab" for i, box in enumerate(rows))
    assert found.assignments["a"] is found.assignments["b"]
    assert found.assignments["a"].cuts == ((0, 2, 4, 6), (0, 5, 10))
    assert found.assignments["a"].owners.tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("boxes", "times"),
    [([Box((0,), (3,))], 0), ([Box((0,), (3,)), Box((2,), (2,))], 2), ([Box((4,), (0,))], 0)],
    ids=["hole", "overlap", "nothing"],
)
def test_holes_and_overlaps_are_found(boxes: list[Box], times: int) -> None:
    found = assign_boxes(one(box, 0, shape=(4,)) for box in boxes)
    with pytest.raises(CoverageError, match=f"stored {times} times"):
        found.check()


def test_ranks_that_disagree_are_found() -> None:
    with pytest.raises(ConsistencyError, match="float32"):
        assign_boxes([one(Box((0,), (2,)), 0, shape=(4,)), one(Box((2,), (2,)), 1, shape=(4,), kind="int8")])


# --------------------------------------- How work is divided over processes: every item once, and no process with much more than its share.

SIZES = st.lists(st.integers(0, 1000), max_size=60)
PROCESSES = st.integers(1, 12)


@given(SIZES, PROCESSES)
def test_every_item_is_done_once(sizes: list[int], processes: int) -> None:
    for shares in (balanced(sizes, processes), runs(sizes, processes)):
        assert len(shares) == processes
        assert sorted(n for share in shares for n in share) == list(range(len(sizes)))
    assert [n for run in runs(sizes, processes) for n in run] == list(range(len(sizes)))


@given(SIZES, PROCESSES)
def test_shares_are_even_up_to_one_item(sizes: list[int], processes: int) -> None:
    counted = [max(1, size) for size in sizes]
    for shares in (balanced(sizes, processes), runs(sizes, processes)):
        most = max(sum(counted[n] for n in share) for share in shares)
        assert most <= sum(counted) / processes + max(counted, default=0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(2, 3))
def test_balanced_is_near_the_best(sizes: list[int], processes: int) -> None:
    """Graham's bound, against all ways there are."""
    loads = {(0,) * processes}
    for size in sizes:
        loads = {tuple(sorted((*load[:i], load[i] + size, *load[i + 1 :]))) for load in loads for i in range(processes)}
    best = min(max(load) for load in loads)
    assert 3 * max(sum(sizes[n] for n in share) for share in balanced(sizes, processes)) <= 4 * best


def test_files_of_one_size_go_round() -> None:
    assert balanced([7] * 5, 2) == [[0, 2, 4], [1, 3]]
    assert balanced([1, 9, 4], 4) == [[1], [2], [0], []]
    assert runs([5] * 6, 3) == [range(2), range(2, 4), range(4, 6)]


def test_only_a_share_without_items_has_no_bytes() -> None:
    sizes = [5, 0, 0]
    assert bytes_of(sizes, balanced(sizes, 4)) == [5, 1, 1, 0]
    assert bytes_of(sizes, runs(sizes, 2)) == [5, 2]
