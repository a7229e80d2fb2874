"""Segments: shared memory that others map, cannot write, and are never overwritten under."""

from __future__ import annotations

import ctypes
import os
import random
import signal
from itertools import pairwise
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import xxhash

from ckpt import settings
from ckpt.dtypes import DTYPES
from ckpt.errors import CorruptError, NotFoundError
from ckpt.live.filling import plan_filling
from ckpt.live.holdings import Holdings, LiveCatalog, Manifest
from ckpt.live.segment import (
    BLOCK,
    BlockCheck,
    BlockDigests,
    MemorySegment,
    PublishedSegment,
    SegmentAddress,
    SegmentLayout,
    SegmentPool,
    digest_of_digests,
)
from ckpt.live.segment_reader import LocalHolder, MappedSegment, SegmentMappings, SegmentShare, SharedChecks, check_local
from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import TensorSpec
from ckpt.plan.tables import Joined
from ckpt.plan.transfers import Want, plan_transfers
from ckpt.state.tensors import LocalShard, LocalTensor
from ckpt.telemetry.spans import Spans
from tests.distributed.ranks import in_process
from tests.live.jobs import until
from tests.plan.layout_strategies import placed_tensors


def spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, DTYPES[dtype], shape, TensorLayout.replicated((0,)))


def sealed(values: np.ndarray[Any, Any]) -> tuple[MemorySegment, str]:
    segment = MemorySegment(values.nbytes)
    segment.data[:] = values.view(np.uint8)
    digests = segment.seal()
    return segment, digest_of_digests(digests)


def read_on_demand(pipe: Connection, address: tuple[int, int, str, int], digest: str) -> None:
    mapped = MappedSegment(SegmentAddress(*address), digest)
    pipe.send("mapped")
    pipe.recv()
    pipe.send(mapped.data.tobytes())
    pipe.recv()


def test_another_process_reads_it_and_keeps_it_from_being_used_again() -> None:
    values = np.arange(BLOCK, dtype=np.uint32)
    segment, digest = sealed(values)
    process, pipe = in_process(read_on_demand, tuple(segment.address()), digest)
    assert pipe.recv() == "mapped"
    pool = SegmentPool()
    pool.give(segment)
    other = pool.take(values.nbytes)  # somebody reads the first one
    assert other is not segment
    pipe.send("read")
    assert pipe.recv() == values.tobytes()
    os.kill(process.pid, signal.SIGKILL)  # a dead reader has no lease
    process.join()
    assert pool.take(values.nbytes) is segment
    with pytest.raises(NotFoundError, match="dropped before it was taken"):
        MappedSegment(SegmentAddress(os.getpid(), segment._file, "00" * 16, values.nbytes), digest)


def mapped_files() -> set[str]:
    """The memory of segments that this process maps, by inode."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        return {line.split()[4] for line in maps if "memfd:ckpt-segment" in line}


def test_what_a_sink_has_mapped_shows_the_next_version_and_is_read_under_a_lease_alone() -> None:
    values = np.arange(BLOCK, dtype=np.uint32)
    segment, digest = sealed(values)
    first, mappings, others = segment.address(), SegmentMappings(), mapped_files()
    for version in range(4):
        if version:
            assert segment.renew(), "between takes the owner may fill it"
            segment.data[:] = (values + version).view(np.uint8)
            digest = digest_of_digests(segment.seal())
        taken = MappedSegment(segment.address(), digest, mappings)
        assert not segment.renew(), "during a take the owner may not"
        taken.populate(0, values.nbytes)
        assert taken.data.tobytes() == (values + version).tobytes()
        mappings.end()
    with pytest.raises(NotFoundError, match="dropped before it was taken"):
        MappedSegment(first, digest, mappings)
    assert segment.renew(), "a version that is gone is not leased"
    assert mapped_files() <= others
    mappings.close()


def publish_and_wait(pipe: Connection) -> None:
    segments = [sealed(np.arange(number * 4096, dtype=np.uint64)) for number in (1, 2)]
    pipe.send([(tuple(segment.address()), digest) for segment, digest in segments])
    pipe.recv()
    segments.pop()[0].close()
    pipe.send("closed")
    pipe.recv()


def test_memory_that_its_owner_lets_go_of_is_not_kept_by_a_sink_that_waits() -> None:
    process, pipe = in_process(publish_and_wait)
    mappings, others = SegmentMappings(), mapped_files()
    taken = [MappedSegment(SegmentAddress(*at), digest, mappings) for at, digest in pipe.recv()]
    assert len(mapped_files() - others) == 2
    mappings.end()
    taken.clear()
    pipe.send("close one")
    assert pipe.recv() == "closed"
    for left in (1, 0):
        assert until(lambda left=left: len(mapped_files() - others) == left)
        process.kill()
        process.join()
    assert until(lambda: not mappings._watched), "and nobody looks any more"


def write_anyway(pipe: Connection, address: tuple[int, int, str, int]) -> None:
    import mmap

    path = f"/proc/{address[0]}/fd/{address[1]}"
    outcomes = []
    for attempt in ("map", "write", "truncate"):
        try:
            file = os.open(path, os.O_RDWR)
            if attempt == "map":
                mmap.mmap(file, 4096)
            elif attempt == "write":
                os.pwrite(file, b"x", 5000)
            else:
                os.ftruncate(file, 0)
            outcomes.append(f"{attempt}: done")
        except OSError as err:
            outcomes.append(f"{attempt}: {type(err).__name__}")
    pipe.send(outcomes)


@hypothesis.given(
    cuts=st.lists(st.integers(0, 3 * BLOCK + 17), max_size=12), lacking=st.integers(0, 13), order=st.randoms(use_true_random=False)
)
def test_blocks_are_hashed_as_they_are_filled_or_at_the_end(cuts: list[int], lacking: int, order: random.Random) -> None:
    """In any order, of any ranges; one of them may never be reported."""
    values = np.random.default_rng(3).integers(0, 256, 3 * BLOCK + 17, dtype=np.uint8)
    filled = np.zeros_like(values)
    digests = BlockDigests(filled)
    ends = sorted({*cuts, 0, len(values)})
    ranges = list(pairwise(ends))
    order.shuffle(ranges)
    for number, (start, stop) in enumerate(ranges):
        filled[start:stop] = values[start:stop]
        if number != lacking:
            digests.filled(start, stop)
    left = digests.left
    assert digests.rest(2).tolist() == [xxhash.xxh3_64_intdigest(values[at : at + BLOCK].data) for at in range(0, len(values), BLOCK)]
    if lacking >= len(ranges):
        assert left == 0
    else:
        start, stop = ranges[lacking]
        assert left == min(-(-stop // BLOCK) * BLOCK, len(values)) - start // BLOCK * BLOCK


def test_nobody_else_can_write_it() -> None:
    segment, digest = sealed(np.arange(4096, dtype=np.uint64))
    process, pipe = in_process(write_anyway, tuple(segment.address()))
    assert pipe.recv() == ["map: PermissionError", "write: PermissionError", "truncate: PermissionError"]
    process.join()
    assert (MappedSegment(segment.address(), digest).data.view(np.uint64) == np.arange(4096)).all()


def stray_write(pipe: Connection) -> None:
    segment, _ = sealed(np.arange(4096, dtype=np.uint64))
    with pytest.raises(ValueError, match="read-only"):
        segment.data[17] = 1
    ctypes.memset(segment.data.ctypes.data + 17, 1, 1)
    pipe.send("written")


def test_a_stray_write_of_its_owner_does_not_go_unseen() -> None:
    process, _ = in_process(stray_write)
    process.join()
    assert process.exitcode == -signal.SIGSEGV


def test_another_token_size_or_process_is_not_mapped() -> None:
    segment, digest = sealed(np.arange(4096, dtype=np.uint64))
    at = segment.address()
    for wrong in (at._replace(token="ab" * 16), at._replace(nbytes=at.nbytes + 4096), at._replace(file=0), at._replace(pid=2**22 - 1)):
        with pytest.raises((NotFoundError, OSError)):
            MappedSegment(wrong, digest)
    with pytest.raises(CorruptError, match="differ from those in its manifest"):
        MappedSegment(at, "00" * 16)


@hypothesis.given(
    case=st.lists(
        st.tuples(placed_tensors(), st.sampled_from(["uint8", "bfloat16", "float32", "float64", "complex128"])), min_size=1, max_size=4
    )
)
def test_boxes_follow_each_other_aligned_whatever_the_layouts(case: list[Any]) -> None:
    tensors = [TensorSpec(f"t{i}", DTYPES[kind], shape, layout) for i, ((layout, shape), kind) in enumerate(case)]
    for rank in range(3):
        placed = SegmentLayout.of(tensors, rank)
        assert SegmentLayout.of(tensors[::-1], rank).all() == placed.all()
        at = 0
        for box in placed.all():
            assert box.start == at and at % box.tensor.dtype.itemsize == 0
            at += box.nbytes
        assert at == placed.nbytes
        for tensor in tensors:
            boxes = {piece.box for piece in tensor.layout.pieces(tensor.shape, rank)}
            assert {b.box for b in placed.boxes.get(tensor.name, ())} == boxes


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 77, 3 * BLOCK + 5])
def test_a_flipped_byte_is_found_where_it_is_needed_and_nowhere_else(at: int) -> None:
    rows = 3 * BLOCK // 1024 + 1
    tensor = spec("weight", "float32", (rows, 256))
    layout = SegmentLayout.of([tensor], 0)
    segment = MemorySegment(layout.nbytes)
    segment.data[:] = np.random.default_rng(0).integers(0, 256, layout.nbytes, dtype=np.uint8)
    expected = segment.data.copy()
    digests = segment.seal()
    assert [xxhash.xxh3_64_intdigest(expected[i : i + BLOCK].data) for i in range(0, layout.nbytes, BLOCK)] == digests.tolist()
    published = PublishedSegment(segment, layout, digests, "here")
    with pytest.raises(NotFoundError, match="not complete"):
        published.holdings()
    published.numbers = {"weight": 3}
    holdings = published.holdings()
    out = bytearray(256 * 4)
    holdings.gather(3, Box((5, 0), (1, 256)), memoryview(out))
    assert out == expected[5 * 1024 : 6 * 1024].tobytes()
    flipped = segment.data.copy()
    flipped[min(at, layout.nbytes - 1)] ^= 4
    check = BlockCheck(flipped, digests, layout, "rank 0")
    bad = min(at, layout.nbytes - 1) // BLOCK
    for number in range(len(digests)):
        row = Box((number * (BLOCK // 1024), 0), (1, 256))
        if number == bad:
            with pytest.raises(CorruptError, match="tensor weight: bytes .* have changed since they were published"):
                check.box("weight", row)
        else:
            check.box("weight", row)


def test_pulls_of_one_time_share_what_they_have_compared_and_later_ones_do_not() -> None:
    layout = SegmentLayout.of([spec("w", "uint8", (2 * BLOCK, 1))], 0)
    data = np.random.default_rng(2).integers(0, 256, layout.nbytes, dtype=np.uint8)
    owner: Any = SimpleNamespace(data=data)  # its mapping can be written, as memory that fails would be
    published = PublishedSegment(owner, layout, BlockDigests(data).rest(), "here")
    published.numbers = {"w": 0}

    def take(holdings: Holdings, row: int) -> None:
        holdings.gather(0, Box((row, 0), (1, 1)), memoryview(bytearray(1)))

    first = published.holdings()
    take(first, 5)
    data[[5, BLOCK + 5]] ^= 1
    second = published.holdings()
    take(second, 5)  # of this block the first one's look counts
    del first
    for late, row in ((second, BLOCK), (published.holdings(), 5)):
        with pytest.raises(CorruptError, match="have changed since they were published"):
            take(late, row)


def test_ranks_of_one_take_share_what_they_have_compared_and_nothing_older() -> None:
    tensor = spec("w", "uint8", (3 * BLOCK + 5, 1))
    layout = SegmentLayout.of([tensor], 0)
    data = np.random.default_rng(1).integers(0, 256, layout.nbytes, dtype=np.uint8)
    digests = BlockDigests(data).rest()
    manifest = Manifest(run="ab", step=1, number=1, ranks=(0,), tables=(), state="", own={}, segments={0: (layout.nbytes, "")})
    leader, other = SharedChecks(), SharedChecks()
    told = leader.begin(manifest)

    def check(checked: Any, start: int, stop: int) -> None:
        BlockCheck(data, digests, layout, "rank 0", checked).range(start, stop, "w")

    check(leader.open(manifest, told)[0], 0, 2 * BLOCK)
    data[[5, 3 * BLOCK]] ^= 1
    check(other.open(manifest, told)[0], 0, 3 * BLOCK)  # of the first two blocks the leader's look counts
    for late, first in ((other.open(manifest, told)[0], 3 * BLOCK), (other.open(manifest, leader.begin(manifest))[0], 0), (None, 0)):
        with pytest.raises(CorruptError, match="have changed since they were published"):
            check(late, first, first + 1)
    assert leader.begin(manifest)[0] == told[0], "the next take uses the same memory"
    leader.close()
    assert SharedChecks().open(manifest, told) == {}, "whoever cannot open it compares all"


ROWS, COLUMNS = 24, 40
SPLIT = TensorLayout(Mesh(("dp",), (2,), range(2)), (Shard(0, "dp"),))


def drawn_box(draw: st.DrawFn) -> Box:
    offset = draw(st.integers(0, ROWS - 1)), draw(st.integers(0, COLUMNS - 1))
    return Box(offset, (draw(st.integers(1, ROWS - offset[0])), draw(st.integers(1, COLUMNS - offset[1]))))


@st.composite
def wanted_parts(draw: st.DrawFn) -> list[Box]:
    """Boxes of a receiver: one, or two that are neighbours and lie in different memory."""
    box = drawn_box(draw)
    if box.shape[0] == 1 or draw(st.booleans()):
        return [box]
    middle = draw(st.integers(1, box.shape[0] - 1))
    return [box.narrowed(0, box.offset[0], box.offset[0] + middle), box.narrowed(0, box.offset[0] + middle, box.end[0])]


@hypothesis.given(boxes=wanted_parts(), piece=st.sampled_from([8, 64, 160, 1000, 1 << 20]))
def test_requests_for_a_mapped_segment_are_joined_and_bring_all_that_is_wanted(boxes: list[Box], piece: int) -> None:
    info = TensorSpec("w", DTYPES["int32"], (ROWS, COLUMNS), SPLIT)
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.int32).view(ROWS, COLUMNS)
    catalog = LiveCatalog.of(Joined(tensors={"w": info}, assignments={}, aliases={}), {}, url="live", world_size=2)
    target = LocalTensor(info, [LocalShard(box, torch.full(box.shape, -1, dtype=torch.int32)) for box in boxes], "w")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "PIECE", piece)
        plan = plan_filling([(target, catalog.tensors["w"])], catalog, rank=7, near=frozenset())
    copies = 0
    for rank in plan.transfers.shares:
        layout = SegmentLayout.of([info], rank)
        segment = MemorySegment(layout.nbytes)
        (mine,) = (part.box for part in SPLIT.pieces((ROWS, COLUMNS), rank))
        segment.data[:] = whole[mine.slices].contiguous().view(torch.uint8).numpy().ravel()
        digest = digest_of_digests(segment.seal())
        holder = LocalHolder(rank, MappedSegment(segment.address(), digest), layout, SegmentShare.of(plan, rank, layout))
        assert check_local({rank: holder}, {}, 0.3, 1, lambda: None, Spans(on=False)) == ({rank: holder}, [])
        holder.copy(plan, lambda nbytes: None)
        copies += len(holder.share.copies)
    assert all(torch.equal(part.memory, whole[part.box.slices]) for part in target.parts)
    assert copies <= 2 * len(boxes), "one for each box of the receiver and each of the source, however small the pieces are"


@hypothesis.given(boxes=st.lists(st.composite(drawn_box)(), min_size=1, max_size=6), at_least=st.sampled_from([1, 200, 1000, 1 << 20]))
def test_what_is_sent_as_it_lies_is_what_would_be_packed(boxes: list[Box], at_least: int) -> None:
    tensor = TensorSpec("w", DTYPES["int16"], (ROWS, COLUMNS), TensorLayout.replicated((0,)))
    layout = SegmentLayout.of([tensor], 0)
    segment = MemorySegment(layout.nbytes)
    segment.data.view(np.int16)[:] = np.arange(ROWS * COLUMNS)
    published = PublishedSegment(segment, layout, segment.seal(), "here")
    published.numbers = {"w": 0}
    catalog = LiveCatalog.of(Joined(tensors={"w": tensor}, assignments={}, aliases={}), {}, url="live", world_size=1)
    entry = catalog.tensors["w"]
    want = Want("w", 0, 2, entry.grid, catalog.holders(entry), tuple(boxes))
    requests = plan_transfers([want], rank=7, piece=4096).shares[0].requests
    holdings = published.holdings()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "WORTH_A_CALL", at_least)
        for piece in range(len(requests.pieces)):
            packed, sent = bytearray(4096), bytearray(4096)
            length = holdings.pack(requests, piece, memoryview(packed))
            assert b"".join(holdings.views(requests, piece, memoryview(sent))) == bytes(packed[:length])
    damaged = PublishedSegment(segment, layout, published.digests ^ np.uint64(1), "here")
    damaged.numbers = {"w": 0}
    with pytest.raises(CorruptError, match="tensor w"):
        damaged.holdings().views(requests, 0, memoryview(bytearray(4096)))
