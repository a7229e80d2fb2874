"""Who wants what of a chunk, against a count of single elements; and who reads it."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt.catalog import Grid
from ckpt.layout.geometry import Box
from ckpt.layout.mesh import Mesh
from ckpt.layout.placements import Flat, Shard, Split
from ckpt.layout.tensor_layout import TensorLayout
from ckpt.plan.shared_reads import MOST, reader_of, shared_chunks

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
            assert dict(zip(by_chunk[chunk].ranks, by_chunk[chunk].weights, strict=True)) == sharing
        assert mine == wanted


def test_very_many_ranks_share_in_blocks() -> None:
    layout = TensorLayout(Mesh(("a",), (3 * MOST - 2,), range(3 * MOST - 2)))
    grid = Grid(cuts=((0, 5),), files=np.zeros(1, dtype=np.int32))
    blocks = {shared_chunks(grid, layout, (5,), Box.whole((5,)), rank, None)[0][0].ranks for rank in range(3 * MOST - 2)}
    assert sorted(len(b) for b in blocks) == [MOST - 2, MOST, MOST]
    assert sorted(r for b in blocks for r in b) == list(range(3 * MOST - 2))


@given(st.lists(st.integers(1, 20), min_size=2, max_size=6), st.integers(0, 1000), st.integers(1, 3))
def test_ranks_read_in_proportion_to_what_they_want(weights: list[int], first: int, step: int) -> None:
    ranks, times = list(range(5, 5 + len(weights))), 400
    counts = Counter(reader_of(ranks, weights, number) for number in range(first, first + step * times, step))
    for rank, weight in zip(ranks, weights, strict=True):
        assert abs(counts[rank] / times - weight / sum(weights)) < 0.02


def test_chunks_of_many_tensors_are_spread() -> None:
    """Two chunks per tensor, on three ranks: the middle one wants a third of each chunk."""
    counts: Counter[int] = Counter()
    for tensor in range(300):
        counts[reader_of((0, 1), (2, 1), 2 * tensor)] += 1
        counts[reader_of((1, 2), (1, 2), 2 * tensor + 1)] += 1
    assert max(counts.values()) - min(counts.values()) < 12
