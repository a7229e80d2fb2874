"""Writes the golden checkpoint with coded chunks: ``python -m tests.golden.generate_codecs v1-codecs``. Kept beside what it wrote; run
it for a new version only.

What it holds is known without it: ``expected_bytes`` says it in integer arithmetic.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from ckpt.catalog import Contents, DataFile, Grid, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.formats.native.commit import CODED
from ckpt.formats.native.datafile import ChunkSpec
from ckpt.formats.native.writer import CheckpointJournal, write_index
from ckpt.io_backends.registry import open_backend
from ckpt.plan.layout.geometry import Box
from tests.formats.native_sample import coded_plans, write_file

HERE = Path(__file__).parent
ID = "0mwcodecs0000001"

TENSORS: dict[str, tuple[str, tuple[int, ...], int, str | None]] = {
    "weights": ("bfloat16", (64, 48), 3, "planes-zstd"),
    "upcast": ("float32", (30, 40), 2, "planes-zstd"),
    "numbers": ("int64", (500,), 2, "zstd"),
    "fp8": ("float8_e4m3fn", (700,), 1, "planes-zstd"),
    "pairs": ("complex128", (120,), 1, "planes-zstd"),
    "blocks": ("int16", (300, 1024), 1, "planes-zstd"),
    "frames": ("uint8", (1_200_000,), 1, "zstd"),
    "noise": ("uint8", (256,), 1, "planes-zstd"),
    "plain": ("float32", (20, 3), 2, None),
    "scalar": ("float32", (), 1, "zstd"),
    "empty": ("int64", (0, 3), 1, "zstd"),
    "name[0:1]#zstd": ("int32", (400,), 2, "zstd"),
}
"""name → dtype, global shape, number of parts along the first dimension, dealt out to two ranks in turn, and the codec that is tried.
``noise``, ``scalar`` and ``empty`` gain nothing and are not coded."""

STATE = {"step": 7, "tensors": {"$map": [[name, {"$tensor": name}] for name in TENSORS]}}


def expected_bytes(name: str) -> bytes:
    """The row-major bytes of a tensor."""
    dtype, shape, _, _ = TENSORS[name]
    count, size = int(np.prod(shape)), DTYPES[dtype].itemsize
    mixed = (np.arange(count, dtype=np.uint64) * 2654435761 + sum(name.encode())) % 2**32  # a multiplicative hash: digits without order
    data = np.zeros((count, size), dtype=np.uint8)
    if name == "noise":
        data[:, 0] = np.arange(256) * 167 % 256
    elif name in ("numbers", "name[0:1]#zstd"):
        data[:] = (np.arange(count, dtype="<u8") * 3).astype(f"<u{size}").view("u1").reshape(count, size)
    elif name in ("blocks", "frames"):
        data[:, -1] = np.arange(count) // 1000 % 7
    else:  # low bytes without order, the highest with few values; some have zeros below
        for p in range({"upcast": 2, "pairs": 8}.get(name, 0), size - 1):
            data[:, p] = mixed >> 8 & 255
        data[:, -1] = 0x3C + (mixed >> 29)
    return data.tobytes()


def main(version: str) -> None:
    backend = open_backend(str(HERE / version))
    rows: list[DataFile] = []
    where: dict[str, list[int]] = {name: [-1] * parts for name, (_, _, parts, _) in TENSORS.items()}
    for rank in (0, 1):
        own = [(name, part) for name, (_, _, parts, _) in TENSORS.items() for part in range(rank, parts, 2)]
        specs = [spec(name, part) for name, part in own]
        data = [array(c.name)[c.box.slices].tobytes() for c in specs]
        for plan, here, stored in coded_plans(specs, data, [TENSORS[name][3] for name, _ in own], ID, rank):
            for name, part in own[here]:
                where[name][part] = len(rows)
            rows.append(write_file(backend, plan, stored[here]))
    contents = Contents(tensors=tuple(entry(name, where[name]) for name in TENSORS), files=tuple(rows), state=STATE)
    write_index(CheckpointJournal(backend, id=ID, previous=None), contents, world_size=2, features=(CODED,))


def array(name: str) -> np.ndarray:
    dtype, shape, _, _ = TENSORS[name]
    return np.frombuffer(expected_bytes(name), dtype=np.uint8).reshape(*shape, DTYPES[dtype].itemsize)


def cuts(name: str) -> tuple[tuple[int, ...], ...]:
    _, shape, parts, _ = TENSORS[name]
    return tuple(tuple(shape[0] * i // parts for i in range(parts + 1)) if d == 0 else (0, n) for d, n in enumerate(shape))


def spec(name: str, part: int) -> ChunkSpec:
    dtype, shape, _, _ = TENSORS[name]
    first = cuts(name)[0][part : part + 2] if shape else ()
    box = Box((first[0], *(0 for _ in shape[1:])), (first[1] - first[0], *shape[1:])) if shape else Box((), ())
    return ChunkSpec(name=name, box=box, shape=shape, dtype=DTYPES[dtype])


def entry(name: str, files: list[int]) -> TensorEntry:
    dtype, shape, _, _ = TENSORS[name]
    return TensorEntry(name=name, dtype=DTYPES[dtype], shape=shape, grid=Grid(cuts=cuts(name), files=np.array(files, dtype=np.int32)))


if __name__ == "__main__":
    main(sys.argv[1])
