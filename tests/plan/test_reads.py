"""Byte ranges against numpy: the address of every wanted element is enumerated, and every bound is counted byte by byte."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.catalog import Extent, Grid
from ckpt.errors import CorruptError
from ckpt.plan.layout.geometry import Box, strided_blocks
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.partition import runs_of
from ckpt.plan.layout.placement_base import Split
from ckpt.plan.layout.placements import Flat, Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.machines import NearFiles, spell, spelled
from ckpt.plan.reads import Copy, Part, RangeGroup, group_ranges, group_sizes, group_sorted, overlapping_chunks, parts_of, pieces
from ckpt.plan.shared_reads import MOST, Readers, SharedChunk, Sharing, shared_chunks
from tests.box_strategies import boxes_in, grids, shapes

ITEM_SIZES = st.sampled_from([1, 2, 4, 8, 16])


def extent_at(offset: int, length: int, path: str = "f") -> Extent:
    return Extent(path=path, offset=offset, length=length, digest=None)


def addresses(copy: Copy, extent: Extent, itemsize: int, box: Box) -> np.ndarray:
    """First byte in the file of every element of ``box``, increasing."""
    first = extent.offset + np.arange(copy.chunk_box.numel).reshape(copy.chunk_box.shape) * itemsize
    return first[box.relative_to(copy.chunk_box.offset).slices].ravel()


@st.composite
def copies(draw: st.DrawFn) -> tuple[Copy, Extent, int]:
    """A copy of a part of a chunk that starts anywhere in a tensor and in a file, and its item size."""
    shape, itemsize = draw(shapes(min_side=1)), draw(ITEM_SIZES)
    corner = tuple(draw(st.integers(0, 7)) for _ in shape)
    box = draw(boxes_in(shape, min_side=1)).shifted(corner)
    copy = Copy(chunk=3, chunk_box=Box(corner, shape), box=box)
    return copy, extent_at(draw(st.integers(0, 100)), math.prod(shape) * itemsize), itemsize


# ------------------------------------------------------------------------------------------------------------------ parts_of


@given(copies(), st.integers(0, 200))
def test_parts_are_the_runs_of_the_box_with_near_ones_together(given_copy: tuple[Copy, Extent, int], max_gap: int) -> None:
    copy, extent, itemsize = given_copy
    parts = parts_of(7, copy, extent, itemsize, whole_chunks=False, max_gap=max_gap)
    wanted = addresses(copy, extent, itemsize, copy.box)
    groups = np.split(wanted, np.flatnonzero(np.diff(wanted) - itemsize > max_gap) + 1)
    assert [(p.offset, p.end) for p in parts] == [(g[0], g[-1] + itemsize) for g in groups]
    for part, group in zip(parts, groups, strict=True):
        assert np.array_equal(addresses(copy, extent, itemsize, part.box), group)
        assert (part.path, part.copy) == ("f", 7)


@given(copies(), st.integers(0, 200))
def test_parts_read_at_most_the_gaps_too_much(given_copy: tuple[Copy, Extent, int], max_gap: int) -> None:
    copy, extent, itemsize = given_copy
    parts = parts_of(0, copy, extent, itemsize, whole_chunks=False, max_gap=max_gap)
    runs = 1 + np.count_nonzero(np.diff(addresses(copy, extent, itemsize, copy.box)) != itemsize)
    needed = copy.box.numel * itemsize
    assert needed <= sum(p.length for p in parts) <= needed + max_gap * (runs - len(parts))


@given(copies(), st.integers(0, 200))
def test_wanted_elements_lie_where_the_docstring_says(given_copy: tuple[Copy, Extent, int], max_gap: int) -> None:
    copy, extent, itemsize = given_copy
    for whole in (False, True):
        for part in parts_of(0, copy, extent, itemsize, whole_chunks=whole, max_gap=max_gap):
            blocks = strided_blocks(copy.chunk_box.shape, part.box.relative_to(copy.chunk_box.offset))
            runs = extent.offset + blocks.starts() * itemsize
            found = (runs[:, None] + np.arange(blocks.length) * itemsize).ravel()
            assert np.array_equal(found, addresses(copy, extent, itemsize, part.box))
            assert part.offset <= found[0]
            assert found[-1] + itemsize <= part.end


@given(copies(), st.integers(0, 200))
def test_whole_chunks_are_one_part(given_copy: tuple[Copy, Extent, int], max_gap: int) -> None:
    copy, extent, itemsize = given_copy
    whole = Part(path="f", offset=extent.offset, length=extent.length, copy=2, box=copy.box)
    assert parts_of(2, copy, extent, itemsize, whole_chunks=True, max_gap=max_gap) == [whole]


def test_a_column_is_cut_into_rows_only_where_gaps_are_wide() -> None:
    """Rows of 10 elements of 4 bytes: a column 3 wide leaves gaps of 28 bytes; the outer dimension's gaps are 28 + 80."""
    copy = Copy(chunk=0, chunk_box=Box((0, 0, 0), (2, 5, 10)), box=Box((0, 0, 2), (2, 3, 3)))
    extent = extent_at(1000, 400)

    def boxes(max_gap: int) -> list[tuple[int, int, str]]:
        parts = parts_of(0, copy, extent, 4, whole_chunks=False, max_gap=max_gap)
        return [(p.offset, p.length, str(p.box)) for p in parts]

    assert boxes(108) == [(1008, 292, "[0:2,0:3,2:5]")]
    assert boxes(107) == boxes(28) == [(1008, 92, "[0:1,0:3,2:5]"), (1208, 92, "[1:2,0:3,2:5]")]
    assert [b[:2] for b in boxes(27)] == [(1008 + 40 * r + 200 * i, 12) for i in range(2) for r in range(3)]
    assert boxes(27)[4] == (1248, 12, "[1:2,1:2,2:5]")


def test_a_hundred_thousand_runs() -> None:
    n = 100_000
    copy = Copy(chunk=0, chunk_box=Box((0, 0), (n, 64)), box=Box((0, 8), (n, 16)))
    parts = parts_of(0, copy, extent_at(0, n * 128), 2, whole_chunks=False, max_gap=95)
    assert [p.offset for p in parts] == list(range(16, n * 128, 128))
    assert {p.length for p in parts} == {32}
    assert parts[-1].box == Box((n - 1, 8), (1, 16))
    reads = group_ranges(parts, max_gap=96, max_bytes=1 << 20)
    assert len(reads) == math.ceil(n * 128 / (1 << 20))
    assert [i for r in reads for i in r.members] == list(range(n))


def test_an_empty_box_needs_no_bytes() -> None:
    copy = Copy(chunk=0, chunk_box=Box((0, 0), (4, 3)), box=Box((1, 0), (0, 3)))
    for whole in (False, True):
        assert parts_of(0, copy, extent_at(0, 12), 1, whole_chunks=whole, max_gap=0) == []


def test_an_extent_that_does_not_fit_its_chunk_is_named() -> None:
    copy = Copy(chunk=0, chunk_box=Box((2, 0), (4, 3)), box=Box((2, 0), (1, 3)))
    with pytest.raises(CorruptError, match=r"chunk \[2:6,0:3\] takes 48 bytes, but bytes 8 to 55 .*\(47 bytes\)") as caught:
        parts_of(0, copy, extent_at(8, 47, path="data/x"), 4, whole_chunks=False, max_gap=0)
    assert caught.value.where == "data/x"


# ------------------------------------------------------------------------------------------------------------------ group_ranges

FILE_SIZE = 300


@st.composite
def byte_ranges(draw: st.DrawFn) -> list[Part]:
    """Parts of two files in any order: near, far, touching, overlapping and identical."""
    ranges = st.tuples(st.sampled_from("ab"), st.integers(0, 250), st.integers(1, 50))
    drawn = draw(st.lists(ranges, max_size=25))
    drawn += draw(st.lists(st.sampled_from(drawn), max_size=5)) if drawn else []
    return [Part(path=p, offset=o, length=n, copy=i, box=Box((), ())) for i, (p, o, n) in enumerate(draw(st.permutations(drawn)))]


def count_bytes(ranges: list[Part] | list[RangeGroup]) -> dict[str, np.ndarray]:
    """How often each byte of each file is in a range."""
    times = {path: np.zeros(FILE_SIZE, dtype=np.int64) for path in "ab"}
    for r in ranges:
        times[r.path][r.offset : r.offset + r.length] += 1
    return times


@given(byte_ranges(), st.integers(0, 30), st.integers(1, 120))
def test_each_part_is_in_one_read_that_covers_it(parts: list[Part], max_gap: int, max_length: int) -> None:
    reads = group_ranges(parts, max_gap=max_gap, max_bytes=max_length)
    assert sorted(i for r in reads for i in r.members) == list(range(len(parts)))
    assert [(r.path, r.offset) for r in reads] == sorted((r.path, r.offset) for r in reads)
    for read in reads:
        members = [parts[i] for i in read.members]
        assert {p.path for p in members} == {read.path}
        assert (read.offset, read.offset + read.length) == (min(p.offset for p in members), max(p.end for p in members))


@given(byte_ranges(), st.integers(0, 30), st.integers(1, 120))
def test_reads_keep_the_limits(parts: list[Part], max_gap: int, max_length: int) -> None:
    for read in group_ranges(parts, max_gap=max_gap, max_bytes=max_length):
        members = [parts[i] for i in read.members]
        assert read.length <= max_length or (read.offset, read.length) in {(p.offset, p.length) for p in members}
        needed = count_bytes(members)[read.path][read.offset : read.offset + read.length] > 0
        unneeded = np.flatnonzero(np.diff(np.concatenate([[True], needed, [True]]).astype(int)))
        assert all(stop - start <= max_gap for start, stop in unneeded.reshape(-1, 2).tolist())


@given(byte_ranges(), st.integers(0, 30), st.integers(1, 120))
def test_reads_are_joined_wherever_the_limits_allow(parts: list[Part], max_gap: int, max_length: int) -> None:
    reads = group_ranges(parts, max_gap=max_gap, max_bytes=max_length)
    for read, after in itertools.pairwise(reads):
        first = parts[after.members[0]]
        near = read.path == after.path and first.offset - (read.offset + read.length) <= max_gap
        assert not near or first.end - read.offset > max_length


@given(byte_ranges(), st.integers(0, 30), st.integers(1, 120))
def test_over_read_is_bounded(parts: list[Part], max_gap: int, max_length: int) -> None:
    reads = group_ranges(parts, max_gap=max_gap, max_bytes=max_length)
    needed, read, twice = count_bytes(parts), count_bytes(reads), halves(parts)
    assert all((read[path][needed[path] > 0] > 0).all() for path in "ab")
    assert all(twice[path][read[path] > 1].all() for path in "ab")
    distinct = sum(np.count_nonzero(times) for times in read.values())
    assert distinct <= sum(np.count_nonzero(times) for times in needed.values()) + max_gap * (len(parts) - len(reads))


def halves(parts: list[Part]) -> dict[str, np.ndarray]:
    """Bytes that two parts share of which neither covers the other: only these may be read more than once."""
    found = {path: np.zeros(FILE_SIZE, dtype=bool) for path in "ab"}
    for a in parts:
        for b in parts:
            if a.path == b.path and a.offset < b.offset < a.end < b.end:
                found[a.path][b.offset : a.end] = True
    return found


@given(byte_ranges(), st.integers(0, 30))
def test_without_a_limit_on_length_no_byte_is_read_twice(parts: list[Part], max_gap: int) -> None:
    reads = group_ranges(parts, max_gap=max_gap, max_bytes=FILE_SIZE)
    needed, read = count_bytes(parts), count_bytes(reads)
    assert all((times <= 1).all() for times in read.values())
    assert sum(r.length for r in reads) <= sum(np.count_nonzero(t) for t in needed.values()) + max_gap * (len(parts) - len(reads))


@given(byte_ranges(), st.integers(0, 30), st.integers(1, 120))
def test_a_covered_part_opens_no_read(parts: list[Part], max_gap: int, max_length: int) -> None:
    for read in group_ranges(parts, max_gap=max_gap, max_bytes=max_length):
        first = parts[read.members[0]]
        others = [p for i, p in enumerate(parts) if p.path == first.path and i not in read.members]
        assert not any(p.offset <= first.offset and first.end <= p.end for p in others)


def test_a_chunk_that_two_targets_want_is_read_once() -> None:
    extent = extent_at(4096, 800)
    wanted = [Box((0, 0), (10, 5)), Box((0, 5), (10, 5))]
    parts = [
        p
        for i, box in enumerate(wanted)
        for p in parts_of(i, Copy(chunk=0, chunk_box=Box((0, 0), (10, 10)), box=box), extent, 8, whole_chunks=True, max_gap=0)
    ]
    assert group_ranges(parts, max_gap=0, max_bytes=100) == [RangeGroup("f", 4096, 800, [0, 1])]


def test_a_long_part_stays_alone() -> None:
    parts = [Part(path="f", offset=o, length=n, copy=0, box=Box((), ())) for o, n in [(0, 10), (10, 500), (510, 10), (520, 10)]]
    reads = group_ranges(parts, max_gap=0, max_bytes=100)
    assert [(r.offset, r.length, r.members) for r in reads] == [(0, 10, [0]), (10, 500, [1]), (510, 20, [2, 3])]


def test_limits_are_inclusive() -> None:
    parts = [Part(path="f", offset=o, length=n, copy=0, box=Box((), ())) for o, n in [(0, 60), (65, 35)]]
    assert group_ranges(parts, max_gap=5, max_bytes=100) == [RangeGroup("f", 0, 100, [0, 1])]
    assert len(group_ranges(parts, max_gap=5, max_bytes=99)) == 2
    assert len(group_ranges(parts, max_gap=4, max_bytes=100)) == 2


def test_nothing_to_read() -> None:
    assert group_ranges([], max_gap=0, max_bytes=1) == []


def naive_groups(ranges: list[Part], max_gap: int, max_bytes: int | None) -> list[tuple[str, int, int, list[int]]]:
    """The rule, byte by byte: the bytes of a group are a set, and a gap is counted out."""
    groups: list[tuple[str, set[int], list[int]]] = []
    for i in sorted(range(len(ranges)), key=lambda i: (ranges[i].path, ranges[i].offset, -ranges[i].length, i)):
        mine = set(range(ranges[i].offset, ranges[i].end))
        if groups and groups[-1][0] == ranges[i].path:
            _, span, members = groups[-1]
            together = set(range(min(span), max(span | mine) + 1))
            gap = len(together - span - mine)
            if mine <= span or (gap <= max_gap and (max_bytes is None or len(together) <= max_bytes)):
                span |= together
                members.append(i)
                continue
        groups.append((ranges[i].path, mine, [i]))
    return [(path, min(span), len(span), members) for path, span, members in groups]


@given(byte_ranges(), st.integers(0, 30), st.none() | st.integers(1, 120))
def test_groups_are_those_of_the_naive_rule(parts: list[Part], max_gap: int, max_bytes: int | None) -> None:
    groups = group_ranges(parts, max_gap=max_gap, max_bytes=max_bytes)
    assert [(g.path, g.offset, g.length, list(g.members)) for g in groups] == naive_groups(parts, max_gap, max_bytes)
    order = sorted((p for p in parts if p.path == "a"), key=lambda p: (p.offset, -p.length))
    sorted_groups = group_sorted([p.offset for p in order], [p.end for p in order], max_gap=max_gap, max_bytes=max_bytes)
    naive = naive_groups(order, max_gap, max_bytes)
    assert [(order[f].offset, stop, last - f) for f, last, stop in sorted_groups] == [(o, o + n, len(m)) for _, o, n, m in naive]


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 100), st.none() | st.integers(1, 5))
def test_sizes_fill_each_group(sizes: list[int], max_bytes: int, max_count: int | None) -> None:
    """Each group is the longest prefix of what is left that fits, and at least one."""
    left, expected = list(range(len(sizes))), []
    while left:
        fits = [n for n in range(1, len(left) + 1) if sum(sizes[i] for i in left[:n]) <= max_bytes and n <= (max_count or n)]
        expected.append(left[: max(fits, default=1)])
        left = left[len(expected[-1]) :]
    assert [list(g) for g in group_sizes(sizes, max_bytes, max_count)] == expected


def test_numbers_beyond_64_bits_are_grouped_too() -> None:
    """Offsets out of a damaged directory: the storage refuses them, with a clear error."""
    parts = [Part(path="f", offset=o, length=9, copy=0, box=Box((), ())) for o in (1 << 70, 3)]
    assert [g.offset for g in group_ranges(parts, max_gap=5, max_bytes=100)] == [3, 1 << 70]


# ------------------------------------------------------------------------------------------------------- from join to bytes


@given(shapes(min_side=1), st.data())
def test_what_is_read_rebuilds_every_target(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Two targets of one tensor whose chunks lie in two files, through join, parts_of and group_ranges, with numpy as memory and files."""
    grid, itemsize = data.draw(grids(shape)), 4
    targets = [data.draw(boxes_in(shape, min_side=1)) for _ in range(2)]
    whole, max_gap, max_length = data.draw(st.booleans()), data.draw(st.integers(0, 40)), data.draw(st.integers(1, 300))
    array = np.arange(1, math.prod(shape) + 1, dtype="<u4").reshape(shape)
    files = {"a": bytearray(b"\xff" * data.draw(st.integers(0, 9))), "b": bytearray()}
    extents = []
    for n, (offset, size) in enumerate(zip(*(a.tolist() for a in grid.all_boxes()), strict=True)):
        raw = array[Box(tuple(offset), tuple(size)).slices].tobytes()
        path = "ab"[n % 2]
        extents.append(extent_at(len(files[path]), len(raw), path=path))
        files[path] += raw

    jobs = [(t, copy) for t, target in enumerate(targets) for copy in overlapping_chunks(grid, target)]
    parts = [
        p for i, (_, copy) in enumerate(jobs) for p in parts_of(i, copy, extents[copy.chunk], itemsize, whole_chunks=whole, max_gap=max_gap)
    ]
    memory = [np.zeros(t.shape, dtype="<u4") for t in targets]
    times = [np.zeros(t.shape, dtype=np.int64) for t in targets]
    for read in group_ranges(parts, max_gap=max_gap, max_bytes=max_length):
        buffer = bytes(files[read.path][read.offset : read.offset + read.length])
        for part in (parts[i] for i in read.members):
            t, copy = jobs[part.copy]
            blocks = strided_blocks(copy.chunk_box.shape, part.box.relative_to(copy.chunk_box.offset))
            runs = extents[copy.chunk].offset + blocks.starts() * itemsize - read.offset
            values = b"".join(buffer[r : r + blocks.length * itemsize] for r in runs.tolist())
            to = part.box.relative_to(targets[t].offset).slices
            memory[t][to] = np.frombuffer(values, dtype="<u4").reshape(part.box.shape)
            times[t][to] += 1
    for t, target in enumerate(targets):
        assert np.array_equal(memory[t], array[target.slices])
        assert (times[t] == 1).all()


# --------------------------------------------------------- Who wants what of a chunk, against a count of single elements; and who reads it.

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


# ------------------------------------- Pieces of a chunk tile what they are cut from, lie where they say, and are no longer than asked for.


@given(st.data(), st.integers(-1, 60))
def test_pieces_tile_their_box(data: st.DataObject, limit: int) -> None:
    shape = data.draw(shapes(max_dims=4).filter(lambda s: 0 not in s))
    origin = tuple(data.draw(st.integers(0, 3)) for _ in shape)
    inner = data.draw(boxes_in(shape))
    chunk, cover = Box(origin, shape), Box(tuple(o + b for o, b in zip(origin, inner.offset, strict=True)), inner.shape)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    times = np.zeros(shape, dtype=np.int64)
    last = -1
    for piece in pieces(chunk, cover, limit):
        where = tuple(slice(o - b, o - b + n) for o, b, n in zip(piece.box.offset, origin, piece.box.shape, strict=True))
        inside = numbers[where]
        assert (inside.min(), inside.max()) == (piece.start, piece.start + piece.length - 1)
        assert piece.length <= max(limit, 1)
        assert piece.start > last
        last = piece.start
        times[where] += 1
    wanted = np.zeros(shape, dtype=np.int64)
    wanted[tuple(slice(o, o + n) for o, n in zip(inner.offset, inner.shape, strict=True))] = 1
    assert (times == wanted).all()


@given(shapes(max_dims=4).filter(lambda s: 0 not in s), st.integers(1, 60))
def test_pieces_of_a_whole_chunk_leave_no_byte_out(shape: tuple[int, ...], limit: int) -> None:
    end = 0
    for piece in pieces(Box.whole(shape), Box.whole(shape), limit):
        assert piece.start == end
        end = piece.start + piece.length
    assert end == math.prod(shape)


def test_an_empty_box_has_no_pieces() -> None:
    assert list(pieces(Box((0, 0), (4, 4)), Box((1, 2), (0, 2)), 8)) == []


def test_pieces_are_as_long_as_they_may_be() -> None:
    assert [p.length for p in pieces(Box.whole((10, 4)), Box.whole((10, 4)), 12)] == [12, 12, 12, 4]
    assert [p.length for p in pieces(Box.whole((1, 2, 6)), Box.whole((1, 2, 6)), 4)] == [4, 2, 4, 2]
