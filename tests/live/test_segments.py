"""Segments: shared memory that others map, cannot write, and are never overwritten under."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash

from ckpt.dtypes import DTYPES
from ckpt.errors import CorruptError, NotFoundError
from ckpt.layout.geometry import Box
from ckpt.layout.tensor_layout import TensorLayout
from ckpt.live.segments.published import BlockCheck, PublishedSegment, SegmentLayout
from ckpt.live.segments.segment import BLOCK, MappedSegment, MemorySegment, SegmentAddress, SegmentPool, digest_of_digests
from ckpt.plan.ownership import TensorSpec
from tests.plan.layout_strategies import placed_tensors


def spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, DTYPES[dtype], shape, TensorLayout.replicated((0,)))


def sealed(values: np.ndarray[Any, Any]) -> tuple[MemorySegment, str]:
    segment = MemorySegment(values.nbytes)
    segment.data[:] = values.view(np.uint8)
    digests = segment.seal()
    return segment, digest_of_digests(digests)


def in_child(function: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """A process that runs ``function`` with one end of a pipe, and the other end."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=function, args=(there, *args), daemon=True)
    process.start()
    there.close()
    return process, here


def read_on_demand(pipe: Connection, address: tuple[int, int, str, int], digest: str) -> None:
    mapped = MappedSegment(SegmentAddress(*address), digest)
    pipe.send("mapped")
    pipe.recv()
    pipe.send(mapped.data.tobytes())
    pipe.recv()


def test_another_process_reads_it_and_keeps_it_from_being_used_again() -> None:
    values = np.arange(BLOCK, dtype=np.uint32)
    segment, digest = sealed(values)
    process, pipe = in_child(read_on_demand, tuple(segment.address()), digest)
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


def test_nobody_else_can_write_it() -> None:
    segment, digest = sealed(np.arange(4096, dtype=np.uint64))
    process, pipe = in_child(write_anyway, tuple(segment.address()))
    assert pipe.recv() == ["map: PermissionError", "write: PermissionError", "truncate: PermissionError"]
    process.join()
    assert (MappedSegment(segment.address(), digest).data.view(np.uint64) == np.arange(4096)).all()


def stray_write(pipe: Connection) -> None:
    segment, _ = sealed(np.arange(4096, dtype=np.uint64))
    segment.data[17] = 1
    pipe.send("written")


def test_a_stray_write_of_its_owner_does_not_go_unseen() -> None:
    process, _ = in_child(stray_write)
    process.join()
    assert process.exitcode == -signal.SIGSEGV


def test_another_token_size_or_process_is_not_mapped() -> None:
    segment, digest = sealed(np.arange(4096, dtype=np.uint64))
    at = segment.address()
    for wrong in (at._replace(token="ab" * 16), at._replace(nbytes=at.nbytes + 4096), at._replace(file=0), at._replace(pid=2**22 - 1)):
        with pytest.raises((NotFoundError, OSError)):
            MappedSegment(wrong, digest)
    with pytest.raises(CorruptError, match="not what its manifest says"):
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
