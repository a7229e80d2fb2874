"""Small native checkpoints for tests. A tensor is its raw bytes, uint8 ``[*shape, itemsize]``, so that every dtype is treated alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from hypothesis import strategies as st

from ckpt.catalog import Catalog, Contents, DataFile, Grid, TensorEntry
from ckpt.dtypes import DTYPES, DType
from ckpt.formats.native.codecs import decode, encode
from ckpt.formats.native.commit import CODED, CommitRecord
from ckpt.formats.native.datafile import HEADER_LIMIT, ChunkSpec, DataFilePlan, coded_groups, plan_coded_file, plan_data_files
from ckpt.formats.native.writer import CheckpointJournal, write_index
from ckpt.io_backends.protocol import Backend
from ckpt.plan.layout.geometry import Box, cells
from tests.box_strategies import cuts_of, shapes, tilings

ID = "0123456789abcdef"


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One tensor, how it is cut, and which rank stores each chunk."""

    name: str
    dtype: DType
    data: np.ndarray
    cuts: tuple[tuple[int, ...], ...] | None = None
    boxes: tuple[Box, ...] | None = None
    ranks: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape[:-1]

    def chunks(self) -> list[Box]:
        if self.boxes is not None:
            return list(self.boxes)
        return [Box(tuple(o), tuple(s)) for o, s in zip(*(a.tolist() for a in cells(self.cuts)), strict=True)]

    def grid(self, files: Sequence[int]) -> Grid:
        numbers = np.array(files, dtype=np.int32)
        if self.cuts is not None:
            return Grid(cuts=self.cuts, files=numbers)
        boxes = tuple(np.array([getattr(b, side) for b in self.boxes], dtype=np.int64) for side in ("offset", "shape"))
        return Grid(boxes=boxes, files=numbers)


def sample(
    name: str, dtype: str, shape: tuple[int, ...], cuts: Sequence[Sequence[int]] | None = None, ranks: Sequence[int] = (0,)
) -> Sample:
    """A tensor of bytes that depend on its name, cut by ``cuts`` or whole; ``ranks`` are dealt out in turn."""
    kind = DTYPES[dtype]
    data = np.random.default_rng(list(name.encode())).integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8)
    if dtype == "bool":
        data &= 1
    made = tuple((0, n) for n in shape) if cuts is None else tuple(map(tuple, cuts))
    count = int(np.prod([len(c) - 1 for c in made]))
    return Sample(name=name, dtype=kind, data=data, cuts=made, ranks=tuple(ranks[i % len(ranks)] for i in range(count)))


def two_ranks() -> list[Sample]:
    """Every kind of thing, in a few hundred bytes: cuts, an odd name, a scalar, an empty tensor, sub-byte and widened dtypes."""
    return [
        sample("w", "float32", (4, 3), [[0, 1, 4], [0, 3]], ranks=(0, 1)),
        sample("layers.0/é[1]", "bfloat16", (3,), ranks=(1,)),
        sample("scalar", "float64", (), ranks=(1,)),
        sample("empty", "int8", (0, 5), ranks=(0,)),
        sample("c", "complex128", (2,), [[0, 1, 2]], ranks=(0, 1)),
        sample("f4", "float4_e2m1fn_x2", (2, 2), ranks=(0,)),
    ]


def coded_samples() -> list[Sample]:
    """Tensors that gain from coding, one that does not, and those that have nothing to gain: empty, or a single element."""
    weights = (np.random.default_rng(7).normal(0, 0.02, (96, 128)).astype("<f4").view("<u4") >> 16).astype("<u2").view("u1")
    upcast = np.zeros((60, 50, 4), dtype=np.uint8)
    upcast[..., 2:] = weights.reshape(-1, 2)[:3000].reshape(60, 50, 2)
    numbers = np.arange(2000, dtype="<i8").view("u1").reshape(2000, 8)

    def made(name: str, dtype: str, data: np.ndarray, cuts: Sequence[Sequence[int]], ranks: Sequence[int] = (0,)) -> Sample:
        like = sample(name, dtype, data.shape[:-1], cuts, ranks)
        return Sample(name=name, dtype=like.dtype, data=data, cuts=like.cuts, ranks=like.ranks)

    return [
        made("layers.0/é[1]", "bfloat16", weights.reshape(96, 128, 2), [[0, 32, 96], [0, 128]], ranks=(0, 1)),
        made("whole", "float32", upcast, [[0, 60], [0, 50]], ranks=(1,)),
        made("numbers]#zstd", "int64", numbers, [[0, 1500, 2000]], ranks=(1, 0)),
        made("half", "uint8", np.concatenate([np.zeros(500, "u1"), sample("n", "uint8", (500,)).data[:, 0]])[:, None], [[0, 500, 1000]]),
        made("c", "complex128", np.full((40, 16), 7, dtype=np.uint8), [[0, 10, 40]], ranks=(1,)),
        made("f4", "float4_e2m1fn_x2", np.zeros((300, 1), dtype=np.uint8), [[0, 300]]),
        sample("noise", "uint8", (3000,), [[0, 1000, 3000]], ranks=(0, 1)),
        sample("scalar", "float64", (), ranks=(1,)),
        sample("empty", "int8", (0, 5), ranks=(0,)),
    ]


def write_data(
    backend: Backend, samples: Iterable[Sample], *, id: str = ID, limit: int = HEADER_LIMIT, codec: str | None = None
) -> tuple[tuple[DataFile, ...], dict[str, list[int]]]:
    """Write all data files. Gives their rows and, for each tensor, the file of each of its chunks. A codec is used where it is worth it."""
    samples = list(samples)
    rows: list[DataFile] = []
    where = {s.name: [-1] * len(s.chunks()) for s in samples}
    for rank in sorted({r for s in samples for r in s.ranks}):
        own = [(s, i, box) for s in samples for i, box in enumerate(s.chunks()) if s.ranks[i] == rank]
        specs = [ChunkSpec(name=s.name, box=box, shape=s.shape, dtype=s.dtype) for s, _, box in own]
        parts = [s.data[box.slices].tobytes() for s, _, box in own]
        if codec is None:
            planned = [
                (plan, slice(plan.first, plan.first + len(plan)), parts) for plan in plan_data_files(specs, id=id, rank=rank, limit=limit)
            ]
        else:
            planned = coded_plans(specs, parts, [codec] * len(parts), id, rank)
        for plan, here, stored in planned:
            rows.append(write_file(backend, plan, stored[here]))
            for s, i, _ in own[here]:
                where[s.name][i] = len(rows) - 1
    return tuple(rows), where


def coded_plans(
    specs: Sequence[ChunkSpec], parts: Sequence[bytes], codecs: Sequence[str | None], id: str, rank: int
) -> list[tuple[DataFilePlan, slice, list[bytes]]]:
    """The files of a rank: plan, which chunks, and the stored bytes of all chunks. Each is coded if it has a codec and it is worth it."""
    stored, used = [], []
    for chunk, part, codec in zip(specs, parts, codecs, strict=True):
        blob = None if codec is None else encode(codec, memoryview(part), chunk.dtype.itemsize)
        stored.append(part if blob is None else bytes(blob))
        used.append(None if blob is None else codec)
    planned = []
    for number, here in enumerate(coded_groups([len(p) for p in parts])):
        plan = plan_coded_file(specs[here], used[here], [len(p) for p in stored[here]], id=id, rank=rank, number=number)
        planned.append((plan, here, stored))
    return planned


def write_file(backend: Backend, plan: DataFilePlan, parts: Sequence[bytes]) -> DataFile:
    header = plan.encode_header([xxhash.xxh3_64_intdigest(p) for p in parts])
    with backend.create(plan.path, plan.size) as writer:
        writer.write(0, [header])
        for offset, part in zip(plan.offsets.tolist(), parts, strict=True):
            writer.write(offset, [part])
        writer.commit()
    return plan.row(header)


def contents_of(samples: Iterable[Sample], rows: tuple[DataFile, ...], where: Mapping[str, list[int]], state: Any = None) -> Contents:
    entries = [TensorEntry(name=s.name, dtype=s.dtype, shape=s.shape, grid=s.grid(where[s.name])) for s in samples]
    return Contents(tensors=tuple(entries), files=rows, state=state)


def save(
    backend: Backend,
    samples: Iterable[Sample],
    *,
    id: str = ID,
    previous: bytes | None = None,
    state: Any = None,
    codec: str | None = None,
) -> CommitRecord:
    """A committed checkpoint of ``samples``. With a codec they must be such that a chunk at least is worth coding."""
    samples = list(samples)
    contents = contents_of(samples, *write_data(backend, samples, id=id, codec=codec), state)
    return write_index(
        CheckpointJournal(backend, id=id, previous=previous), contents, world_size=2, features=() if codec is None else (CODED,)
    )


def read(backend: Backend, catalog: Catalog, name: str) -> np.ndarray:
    """A whole tensor through the catalog: every digest is checked, and that every element is in exactly one chunk."""
    entry = catalog.tensors[name]
    data = np.zeros((*entry.shape, entry.dtype.itemsize), dtype=np.uint8)
    times = np.zeros(entry.shape, dtype=np.int64)
    for i, extent in enumerate(catalog.extents(entry, range(len(entry.grid)))):
        part = backend.read(extent.path, extent.offset, extent.length)
        assert xxhash.xxh3_64_hexdigest(part) == extent.digest, f"{name} chunk {i}"
        box = entry.grid.box(i)
        if extent.codec is not None:
            blob, part = part, bytearray(box.numel * entry.dtype.itemsize)
            decode(extent.codec, memoryview(blob), memoryview(part), entry.dtype.itemsize)
        data[box.slices] = np.frombuffer(part, dtype=np.uint8).reshape(*box.shape, entry.dtype.itemsize)
        times[box.slices] += 1
    assert (times == 1).all(), name
    return data


NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=8) | st.sampled_from(
    ["__metadata__", "a[0:1]", "a[:]#zstd", "a]#planes-zstd", "a#zstd", "a[]", "a", "]", "[", "a[:]", "a.b/c", "\u00e9", '"', "\\", "\n"]
)


@st.composite
def samples(draw: st.DrawFn) -> list[Sample]:
    """Up to five tensors of any dtype, cut regularly or not, over up to three ranks."""
    made = []
    for name in draw(st.lists(NAMES, max_size=5, unique=True)):
        shape = draw(shapes(max_dims=3))
        cuts = draw(cuts_of(shape))
        boxes = None
        if shape and 0 not in shape and draw(st.booleans()):
            cuts, boxes = None, tuple(draw(tilings(shape)))
        whole = sample(name, draw(st.sampled_from(sorted(DTYPES))), shape)
        count = len(boxes) if boxes is not None else len(cells(cuts)[0])
        ranks = tuple(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
        made.append(Sample(name=name, dtype=whole.dtype, data=whole.data, cuts=cuts, boxes=boxes, ranks=ranks))
    return made
