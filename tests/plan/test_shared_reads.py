"""Who wants what of a chunk, against a count of single elements; and who reads it."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt.catalog import Grid
from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.partition import runs_of
from ckpt.plan.layout.placement_base import Split
from ckpt.plan.layout.placements import Flat, Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.machines import NearFiles, spell, spelled
from ckpt.plan.shared_reads import MOST, Readers, SharedChunk, Sharing, shared_chunks

LAYOUTS: tuple[tuple[Split, ...], ...] = (
    (),
    (Shard(0, "a"),),
    (Shard(1, "b"),),
    (Shard(0, "a"), Shard(1, "b")),
    (Shard(0, "b"), Shard(0, "a")),
    (Flat("a"),),
    (Shard(1, "b"), Flat("a")),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Grid, TensorLayout, tuple[int, ...], Box, dict[int, int] | None]:
    shape = (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    cuts = tuple(tuple(sorted({0, n, *draw(st.lists(st.integers(1, n), max_size=3))})) for n in shape)
    sizes = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    layout = TensorLayout(Mesh(("a", "b"), sizes, range(10, 10 + sizes[0] * sizes[1])), draw(st.sampled_from(LAYOUTS)))
    near = draw(st.none() | st.fixed_dictionaries({r: st.integers(0, 1) for r in layout.mesh.ranks}))
    stored = Box((0, 0), (draw(st.integers(1, shape[0])), shape[1]))
    return Grid(cuts=cuts, files=np.zeros(1, dtype=np.int32)), layout, shape, stored, near


@given(cases())
def test_every_rank_finds_the_same(case: tuple[Grid, TensorLayout, tuple[int, ...], Box, dict[int, int] | None]) -> None:
    grid, layout, shape, stored, near = case
    held = {rank: np.zeros(shape, dtype=int) for rank in layout.mesh.ranks}
    for rank, count in held.items():
        for piece in layout.pieces(shape, rank):
            if (box := piece.box.intersect(stored)) is not None:
                count[box.slices] += 1
    for rank in held:
        here = None if near is None else {r for r in held if near[r] == near[rank]}
        found, mine = shared_chunks(grid, layout, shape, stored, rank, here)
        by_chunk = {shared.chunk: shared for shared in found}
        wanted = 0
        for chunk in range(len(grid)):
            weights = {r: int(count[grid.box(chunk).slices].sum()) for r, count in held.items()}
            wanted += weights[rank] > 0
            sharing = {r: n for r, n in weights.items() if n and (near is None or near[r] == near[rank])}
            if rank not in sharing or len(sharing) == 1:
                assert chunk not in by_chunk
                continue
            assert by_chunk[chunk].box == grid.box(chunk)
            assert dict(zip(by_chunk[chunk].sharing.ranks, by_chunk[chunk].weights.tolist(), strict=True)) == sharing
            assert by_chunk[chunk].wanted == sum(sharing.values())
        assert mine == wanted


@given(cases(), st.data())
def test_what_is_near_is_not_sent(
    case: tuple[Grid, TensorLayout, tuple[int, ...], Box, dict[int, int] | None], data: st.DataObject
) -> None:
    """Each chunk goes to all ranks that want it, once; and none that has its file near gets it from another machine."""
    grid, layout, shape, stored, _ = case
    ranks = list(layout.mesh.ranks)
    files = data.draw(st.lists(st.integers(0, 3), min_size=len(grid), max_size=len(grid)))
    grid = Grid(cuts=grid.cuts, files=np.array(files, dtype=np.int32))
    machine = {rank: data.draw(st.integers(0, 2)) for rank in ranks}
    here = [data.draw(st.frozensets(st.integers(0, 3))) for _ in range(3)]
    near = NearFiles(
        json.loads(json.dumps(spelled([runs_of(here[machine[rank]]) for rank in ranks]))), spell([machine[r] for r in ranks]), ranks
    )
    everyone: dict[int, set[int]] = {}
    for rank in ranks:
        for shared in shared_chunks(grid, layout, shape, stored, rank, None)[0]:
            everyone.setdefault(shared.chunk, set()).update(shared.sharing.ranks)
    blocks: dict[int, dict[tuple[int, ...], set[int]]] = {}
    for rank in ranks:
        found = shared_chunks(grid, layout, shape, stored, rank, None, near)[0]
        for shared, reader in zip(found, Readers(found).of(5), strict=True):
            assert rank in shared.sharing.ranks
            blocks.setdefault(shared.chunk, {}).setdefault(shared.sharing.ranks, set()).add(reader)
    for chunk, sharing in blocks.items():
        has = {r for r in everyone[chunk] if files[chunk] in here[machine[r]]}
        assert sum(map(len, sharing)) == len({r for block in sharing for r in block})  # no rank is in two
        for block, readers in sharing.items():
            (reader,) = readers  # all name the same
            assert reader in block and (reader in has or not has)
            assert all(machine[r] == machine[reader] for r in has.intersection(block))
    for chunk, wanting in everyone.items():
        has = {r for r in wanting if files[chunk] in here[machine[r]]}
        alone = wanting - {r for block in blocks.get(chunk, ()) for r in block}
        assert alone <= has  # who shares with nobody has it near


def test_what_many_ranks_have_near_takes_few_bytes() -> None:
    """512 machines of 8 ranks, each of which has its own 8 files and those of the next."""
    runs = [runs_of(f % 4096 for f in range(rank // 8 * 8, rank // 8 * 8 + 16)) for rank in range(4096)]
    assert len(json.dumps(spelled(runs))) < 100  # all but the last machine are one row


@given(st.data())
def test_blocks_of_what_is_near_are_those_of_a_list_of_all_ranks(data: st.DataObject) -> None:
    ranks = sorted(data.draw(st.sets(st.integers(0, 99), min_size=1, max_size=20)))
    machine = {rank: data.draw(st.integers(0, 3)) for rank in ranks}
    files = {rank: data.draw(st.frozensets(st.integers(0, 2))) for rank in ranks}
    near = NearFiles(spelled([runs_of(files[r]) for r in ranks]), spell([machine[r] for r in ranks]), ranks)
    wanting = [rank for rank in ranks if data.draw(st.booleans())]
    file, turn, most = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 50)), data.draw(st.integers(1, 5))
    shares = near.among(np.array(wanting, dtype=np.int64))(file)
    for place, rank in enumerate(wanting):
        own, everyone = next(g for g in groups(wanting, machine, files, file, turn) if rank in g[1])
        first = everyone.index(rank) // most * most
        block = everyone[first : first + most]
        places, readers = shares.block(place, turn % shares.turns(), most)
        assert [wanting[p] for p in places.tolist()] == block
        assert [wanting[p] for p in places.tolist()][:readers] == [r for r in block if r in own]


def groups(
    ranks: list[int], machine: dict[int, int], files: dict[int, frozenset[int]], file: int, turn: int
) -> list[tuple[list[int], list[int]]]:
    """Of each machine that has the file near: its ranks, and with them the others that it reads for."""
    near: dict[int, list[int]] = {}
    for rank in ranks:
        if file in files[rank]:
            near.setdefault(machine[rank], []).append(rank)
    others = [rank for rank in ranks if file not in files[rank]]
    found = [(mine, [*mine, *(r for i, r in enumerate(others) if (turn + i) % len(near) == n)]) for n, mine in enumerate(near.values())]
    return found or [([], ranks)]


def test_very_many_ranks_share_in_blocks() -> None:
    layout = TensorLayout(Mesh(("a",), (3 * MOST - 2,), range(3 * MOST - 2)))
    grid = Grid(cuts=((0, 5),), files=np.zeros(1, dtype=np.int32))
    blocks = {shared_chunks(grid, layout, (5,), Box.whole((5,)), rank, None)[0][0].sharing.ranks for rank in range(3 * MOST - 2)}
    assert sorted(len(b) for b in blocks) == [MOST - 2, MOST, MOST]
    assert sorted(r for b in blocks for r in b) == list(range(3 * MOST - 2))


@given(st.lists(st.integers(1, 20), min_size=2, max_size=6), st.integers(0, 1000), st.integers(1, 3))
def test_ranks_read_in_proportion_to_what_they_want(weights: list[int], first: int, step: int) -> None:
    ranks, times = list(range(5, 5 + len(weights))), 400
    chunk = SharedChunk(0, Box((), ()), Sharing(tuple(ranks), tuple(ranks)), np.array(weights), sum(weights))
    readers = Readers([chunk])
    counts = Counter(readers.of(number)[0] for number in range(first, first + step * times, step))
    for rank, weight in zip(ranks, weights, strict=True):
        assert abs(counts[rank] / times - weight / sum(weights)) < 0.02


def test_chunks_of_many_tensors_are_spread() -> None:
    """Two chunks per tensor, on three ranks: the middle one wants a third of each chunk."""
    box, parts = Box((), ()), (((0, 1), (2, 1)), ((1, 2), (1, 2)))
    readers = Readers([SharedChunk(n, box, Sharing(r, r), np.array(w), sum(w)) for n, (r, w) in enumerate(parts)])
    counts = Counter(reader for tensor in range(300) for reader in readers.of(2 * tensor))
    assert max(counts.values()) - min(counts.values()) < 12
