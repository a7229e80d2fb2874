"""Any layout to any other is the identity: ranks that exist only as numpy arrays save in one layout and load in another.

The source's memory is cut by the oracle, chunks go through ownership to storage, and the target's memory, filled through the plan, has
to be what the oracle cuts of the same tensor.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.catalog import Extent, Grid, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.formats.native.datafile import ChunkSpec, plan_data_files
from ckpt.plan.layout.geometry import Box, strided_blocks
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import Flat, Interleaved, Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.ownership import ChunkAssignment, TensorSpec, assign
from ckpt.plan.reads import Copy, common_box, group_ranges, overlapping_chunks, parts_of
from tests.plan.layout_strategies import layouts, local_array, meshes, numbered, tensor_lists, tensor_shapes
from tests.plan.limits import small_chunks

ID = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _limits() -> Iterator[None]:
    """Chunks of at most 96 bytes, and cells of at least 48 are divided: so small tensors show what large ones do."""
    with small_chunks(96, 48):
        yield


def global_array(t: TensorSpec, seed: int) -> np.ndarray:
    """Elements that differ from each other and between tensors, as unsigned integers of the tensor's item size."""
    kind = np.dtype(f"<u{t.dtype.itemsize}")
    return (numbered(t.shape) + 1 + 37 * seed).astype(kind)


# --------------------------------------------------------------------------------------------------------------- the two sides


def chunk_bytes(t: TensorSpec, owned: ChunkAssignment, chunk: int, array: np.ndarray) -> bytes:
    """A chunk as its writer takes it from its own memory, which must have all of it in one piece."""
    box, rank = owned.box(chunk), int(owned.owners[chunk])
    local = local_array(t.layout, array, rank)
    assert local is not None
    if box.numel == 0:
        return b""
    (piece,) = [p for p in t.layout.pieces(t.shape, rank) if p.box.contains(box)]
    held = local[piece.local.slices].reshape(piece.box.shape)
    return held[box.relative_to(piece.box.offset).slices].tobytes()


def grid_of(owned: ChunkAssignment) -> Grid:
    return Grid(cuts=owned.cuts, boxes=owned.boxes, files=owned.owners.astype(np.int32))


@dataclass(eq=False)
class Target:
    """One rank's memory of one tensor, and how often each of its elements was written."""

    wanted: TensorSpec
    rank: int
    memory: np.ndarray
    times: np.ndarray

    @classmethod
    def empty(cls, wanted: TensorSpec, rank: int) -> Target:
        shape = wanted.layout.local_shape(wanted.shape, rank)
        return cls(wanted, rank, np.zeros(shape, dtype=f"<u{wanted.dtype.itemsize}"), np.zeros(shape, dtype=np.int64))

    def copies(self, grid: Grid, within: Box) -> list[Copy]:
        boxes = [p.box.intersect(within) for p in self.wanted.layout.pieces(self.wanted.shape, self.rank)]
        return [c for b in boxes if b is not None for c in overlapping_chunks(grid, b)]

    def put(self, box: Box, values: np.ndarray) -> None:
        (piece,) = [p for p in self.wanted.layout.pieces(self.wanted.shape, self.rank) if p.box.contains(box)]
        to = box.relative_to(piece.box.offset).slices
        for array, new in ((self.memory, values), (self.times, None)):
            view = array[(*piece.local.slices, ...)].reshape(piece.box.shape)  # the dots keep a scalar a view
            assert np.shares_memory(view, array) or array.size == 0
            view[to] = view[to] + 1 if new is None else new

    def check(self, array: np.ndarray) -> None:
        expected = local_array(self.wanted.layout, array, self.rank)
        assert expected is not None
        assert self.memory.shape == expected.shape
        assert np.array_equal(self.memory, expected)
        assert (self.times == 1).all()


def targets_of(wanted: Sequence[TensorSpec], rank: int) -> list[Target]:
    return [Target.empty(t, rank) for t in wanted if rank in t.layout.ranks()]


@st.composite
def journeys(draw: st.DrawFn) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """The same tensors in two unrelated layouts."""
    source = draw(tensor_lists(draw(meshes()), 4))
    mesh = draw(meshes())
    return source, [TensorSpec(t.name, t.dtype, t.shape, draw(layouts(mesh, t.shape)), t.logical) for t in source]


def ranks_of(tensors: Sequence[TensorSpec]) -> list[int]:
    return sorted({r for t in tensors for r in t.layout.mesh.ranks})


# ---------------------------------------------------------------------------------------------------------- through the plan


@settings(max_examples=2 * settings.default.max_examples)
@given(journeys())
def test_any_layout_to_any_layout_is_the_identity(journey: tuple[list[TensorSpec], list[TensorSpec]]) -> None:
    source, wanted = journey
    arrays = {t.name: global_array(t, i) for i, t in enumerate(source)}
    owned = assign(source)
    stored = {(t.name, i): chunk_bytes(t, owned[t.name], i, arrays[t.name]) for t in source for i in range(len(owned[t.name].owners))}
    for rank in ranks_of(wanted):
        for target in targets_of(wanted, rank):
            name, array = target.wanted.name, arrays[target.wanted.name]
            for copy in target.copies(grid_of(owned[name]), Box.whole(array.shape)):
                chunk = np.frombuffer(stored[name, copy.chunk], dtype=array.dtype).reshape(copy.chunk_box.shape)
                target.put(copy.box, chunk[copy.box.relative_to(copy.chunk_box.offset).slices])
            target.check(array)


# ------------------------------------------------------------------------------------------------------------- through files


@dataclass(eq=False)
class Files:
    """The data files of a save, and where each chunk lies in them."""

    data: dict[str, bytes]
    extents: dict[tuple[str, int], Extent]


def saved(source: Sequence[TensorSpec], owned: dict[str, ChunkAssignment], arrays: dict[str, np.ndarray]) -> Files:
    """Each rank's files, laid out as the native format lays them out."""
    files = Files({}, {})
    for rank in ranks_of(source):
        chunks = [(t, i) for t in source for i in owned[t.name].written_by(rank)]
        specs = [ChunkSpec(name=t.name, box=owned[t.name].box(i), shape=t.shape, dtype=t.dtype) for t, i in chunks]
        for plan in plan_data_files(specs, id=ID, rank=rank):
            data = bytearray(b"\xee" * plan.size)
            for (t, i), offset, length in zip(chunks[plan.first :], plan.offsets.tolist(), plan.lengths.tolist(), strict=False):
                data[offset : offset + length] = chunk_bytes(t, owned[t.name], i, arrays[t.name])
                assert (t.name, i) not in files.extents
                files.extents[t.name, i] = Extent(path=plan.path, offset=offset, length=length, digest=None)
            files.data[plan.path] = bytes(data)
    return files


def needed_bytes(copy: Copy, extent: Extent, itemsize: int) -> np.ndarray:
    """Every byte of the file that the copy takes."""
    first = extent.offset + np.arange(copy.chunk_box.numel).reshape(copy.chunk_box.shape) * itemsize
    return (first[copy.box.relative_to(copy.chunk_box.offset).slices].ravel()[:, None] + np.arange(itemsize)).ravel()


def longest_run(flags: np.ndarray) -> int:
    """Length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max(initial=0))


def load_rank(targets: list[Target], owned: dict[str, ChunkAssignment], files: Files, gap: int, length: int, whole: bool) -> None:
    """Read what one rank needs, as a load does, and assert that hardly more is read than that."""
    jobs = [(t, c) for t in targets for c in t.copies(grid_of(owned[t.wanted.name]), Box.whole(t.wanted.shape))]
    where = [files.extents[t.wanted.name, c.chunk] for t, c in jobs]
    parts = [
        part
        for i, ((t, c), extent) in enumerate(zip(jobs, where, strict=True))
        for part in parts_of(i, c, extent, t.wanted.dtype.itemsize, whole_chunks=whole, max_gap=gap)
    ]
    reads = group_ranges(parts, max_gap=gap, max_bytes=length)
    needed = {path: np.zeros(len(data), dtype=bool) for path, data in files.data.items()}
    times = {path: np.zeros(len(data), dtype=np.int64) for path, data in files.data.items()}
    for (t, c), extent in zip(jobs, where, strict=True):
        needed[extent.path][needed_bytes(c, extent, t.wanted.dtype.itemsize)] = True
        if whole:
            needed[extent.path][extent.offset : extent.offset + extent.length] = True
    for read in reads:
        span = slice(read.offset, read.offset + read.length)
        times[read.path][span] += 1
        unneeded = ~needed[read.path][span]
        assert longest_run(unneeded) <= gap
        assert not unneeded[0]
        assert not unneeded[-1]
        for part in (parts[i] for i in read.members):
            (t, copy), extent, itemsize = jobs[part.copy], where[part.copy], jobs[part.copy][0].wanted.dtype.itemsize
            blocks = strided_blocks(copy.chunk_box.shape, part.box.relative_to(copy.chunk_box.offset))
            starts = (extent.offset + blocks.starts() * itemsize - read.offset).tolist()
            buffer = files.data[read.path][span]
            values = b"".join(buffer[s : s + blocks.length * itemsize] for s in starts)
            t.put(part.box, np.frombuffer(values, dtype=t.memory.dtype).reshape(part.box.shape))
    assert all(times[path][needed[path]].all() for path in needed)
    if length >= max(map(len, files.data.values()), default=0):
        assert all((count <= 1).all() for count in times.values())


@given(journeys(), st.integers(0, 60), st.sampled_from([1, 40, 200, 1 << 20]), st.booleans())
def test_files_written_in_one_layout_are_read_in_another(
    journey: tuple[list[TensorSpec], list[TensorSpec]], gap: int, length: int, whole: bool
) -> None:
    source, wanted = journey
    arrays = {t.name: global_array(t, i) for i, t in enumerate(source)}
    owned = assign(source)
    files = saved(source, owned, arrays)
    for rank in ranks_of(wanted):
        targets = targets_of(wanted, rank)
        load_rank(targets, owned, files, gap, length, whole)
        for target in targets:
            target.check(arrays[target.wanted.name])


def test_a_realistic_journey_reads_every_byte_once() -> None:
    """FSDP over TP with a fused QKV, to another TP with pipeline stages: what all ranks read is what they hold, and no more."""
    train, serve = Mesh.of({"dp": 4, "tp": 2}), Mesh.of({"pp": 2, "tp": 3})
    shapes = {"qkv": (48, 24), "out": (24, 24), "up": (90, 24), "down": (24, 90), "norm": (24,)}
    before = {
        "qkv": (Interleaved(0, "tp", (24, 12, 12)), Shard(0, "dp")),
        "out": (Shard(1, "tp"), Shard(0, "dp")),
        "norm": (Shard(0, "dp"),),
    }
    before |= {"up": (Shard(0, "tp"), Shard(0, "dp")), "down": (Shard(1, "tp"), Flat("dp"))}
    after = {
        "qkv": (Interleaved(0, "tp", (24, 12, 12)),),
        "out": (Shard(1, "tp"),),
        "up": (Shard(0, "tp"),),
        "down": (Shard(1, "tp"),),
        "norm": (),
    }
    source, wanted = [], []
    for layer, (name, shape) in itertools.product(range(2), shapes.items()):
        source.append(TensorSpec(f"{layer}.{name}", DTYPES["float32"], shape, TensorLayout(train, before[name])))
        layout = TensorLayout(serve, after[name], (("pp", (layer,)),))
        wanted.append(TensorSpec(f"{layer}.{name}", DTYPES["float32"], shape, layout))
    arrays = {t.name: global_array(t, i) for i, t in enumerate(source)}
    owned = assign(source)
    files = saved(source, owned, arrays)
    assert sum(e.length for e in files.extents.values()) == sum(t.nbytes for t in source)
    for rank in ranks_of(wanted):
        targets = targets_of(wanted, rank)
        load_rank(targets, owned, files, gap=0, length=1 << 20, whole=False)
        for target in targets:
            target.check(arrays[target.wanted.name])


# ----------------------------------------------------------------------------------------------------------------- padding


@given(st.integers(1, 12), st.integers(0, 5), st.integers(0, 5), st.integers(1, 3), st.data())
def test_another_padding_keeps_what_is_real(rows: int, more: int, their_more: int, columns: int, data: st.DataObject) -> None:
    """A padded vocabulary in any layout, loaded with another padding in any other: real rows arrive, the rest is zero."""
    shape, real = (rows + their_more, columns), (rows, columns)
    source = TensorSpec("w", DTYPES["float32"], shape, data.draw(layouts(data.draw(meshes()), shape)), real)
    shape = (rows + more, columns)
    wanted = TensorSpec("w", DTYPES["float32"], shape, data.draw(layouts(data.draw(meshes()), shape)), real)
    array = global_array(source, 5)
    owned = assign([source])["w"]
    stored = [chunk_bytes(source, owned, i, array) for i in range(len(owned.owners))]
    entry = TensorEntry(name="w", dtype=source.dtype, shape=source.shape, grid=grid_of(owned), logical=real)
    expected = array
    if more != their_more:
        expected = np.zeros(shape, dtype=array.dtype)
        expected[:rows] = array[:rows]
    for target in [t for r in ranks_of([wanted]) for t in targets_of([wanted], r)]:
        for copy in target.copies(entry.grid, common_box(wanted, entry)):
            chunk = np.frombuffer(stored[copy.chunk], dtype=array.dtype).reshape(copy.chunk_box.shape)
            target.put(copy.box, chunk[copy.box.relative_to(copy.chunk_box.offset).slices])
        local = local_array(wanted.layout, expected, target.rank)
        assert local is not None
        assert np.array_equal(target.memory, local)


# ------------------------------------------------------------------------------------------------------ without a single element


@given(tensor_shapes(), st.data())
def test_tensors_without_elements_pass_too(shape: tuple[int, ...], data: st.DataObject) -> None:
    shape = (*shape[:1], 0, *shape[1:])
    t = TensorSpec("w", DTYPES["float32"], shape, data.draw(layouts(data.draw(meshes()), shape)))
    owned = assign([t])["w"]
    assert math.prod(shape) == 0
    assert len(owned.owners) >= 1
    files = saved([t], {"w": owned}, {"w": global_array(t, 0)})
    assert sum(e.length for e in files.extents.values()) == 0
    assert len(files.extents) == len(owned.owners)


@pytest.mark.parametrize("shape", [(), (0, 4), (0,)], ids=str)
@pytest.mark.parametrize("kind", ["whole", "flat"])
def test_a_state_of_one_tensor_of_no_or_one_element_is_saved(shape: tuple[int, ...], kind: str) -> None:
    """Through a real save and load: such tensors are chunks of no bytes, and flat ranges of no dimension."""
    import torch

    import ckpt
    from ckpt.plan.layout.layout import Layout
    from ckpt.plan.layout.placements import GlobalShape

    layout = Layout({"dp": 1}, [("*", Flat("dp"), GlobalShape(shape))]) if kind == "flat" else None
    tensor = torch.full((math.prod(shape),) if kind == "flat" else shape, 3.0)
    loaded = torch.zeros_like(tensor)
    with tempfile.TemporaryDirectory() as folder:
        url = str(Path(folder) / "c")
        ckpt.save(url, {"w": tensor}, layout=layout)
        ckpt.load(url, {"w": loaded}, layout=layout)
        assert ckpt.open(url)["w"].shape == shape
    assert torch.equal(loaded, tensor)
