"""Data files: what their headers say and where their chunks lie (docs/format.md §6).

Invariants: a data file is a valid safetensors file; its size and all offsets are known before any digest; every chunk starts at a
multiple of its item size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt.catalog import DataFile
from ckpt.dtypes import DType
from ckpt.errors import CoverageError, StateError
from ckpt.geometry import Box, IntArray

from .keys import METADATA, chunk_key, name_problem
from .paths import data_path

HEADER_LIMIT = 100_000_000
"""Most bytes of JSON in a header, padding included; safetensors readers refuse more."""
HEADER_BLOCK = 4096
"""The data of a file starts at a multiple of this many bytes."""
LENGTH_BYTES = 8
CHUNK_DIGITS = 16

_encode_text = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSpec:
    """A chunk to be stored: ``box`` of the tensor ``name``, whose global ``shape`` counts elements of ``dtype``."""

    name: str
    box: Box
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class DataFilePlan:
    """A data file before it is written.

    Its chunks are numbers ``first`` to ``first + len(plan) - 1`` of the chunks that were planned. ``offsets`` and ``lengths``, int64
    ``[n]``, give for each of them, in that order, where its bytes go, counted from the start of the file. ``size`` and ``header`` are in
    bytes; the data starts at ``header``.
    """

    path: str
    rank: int
    first: int
    offsets: IntArray
    lengths: IntArray
    size: int
    header: int
    digest_order: npt.NDArray[np.intp]
    """Position of each chunk in ``ckpt.digests``: entry i is the chunk whose digest comes i-th."""
    parts: tuple[bytes, bytes]
    """The JSON before and after the digests."""

    def __len__(self) -> int:
        return len(self.offsets)

    def encode_header(self, digests: Sequence[int]) -> bytes:
        """The first ``header`` bytes of the file, given the XXH3-64 of each chunk in the order of ``offsets``."""
        if len(digests) != len(self):
            raise ValueError(f"{len(digests)} digests for {len(self)} chunks of {self.path}")
        values = np.fromiter(digests, dtype=np.uint64, count=len(digests))[self.digest_order]
        before, after = self.parts
        text = before + values.astype(">u8").tobytes().hex().encode() + after
        length = self.header - LENGTH_BYTES
        return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)

    def row(self, header: bytes) -> DataFile:
        """The row of ``files.arrow`` of this file with this header."""
        return DataFile(path=self.path, size=self.size, header=self.header, digest=xxhash.xxh3_128_hexdigest(header), rank=self.rank)


def plan_data_file(chunks: Sequence[ChunkSpec], *, id: str, rank: int) -> DataFilePlan:
    """Lay out one file with all ``chunks``, of rank ``rank`` of the save ``id``, however long its header becomes.

    Raises:
        StateError: a name cannot be stored.
        CoverageError: two chunks are the same box of the same tensor.
    """
    _check_names(chunks)
    return _lay_out(chunks, 0, id, rank)


def plan_data_files(chunks: Sequence[ChunkSpec], *, id: str, rank: int, limit: int = HEADER_LIMIT) -> list[DataFilePlan]:
    """Lay out ``chunks`` in as few files as headers of at most ``limit`` bytes of JSON roughly allow; none if there are no chunks.

    Raises:
        StateError: a name cannot be stored.
        CoverageError: two chunks are the same box of the same tensor.
        ValueError: ``limit`` is too small for a single chunk.
    """
    _check_names(chunks)
    plans = _split(chunks, 0, id, rank, limit) if chunks else []
    return [replace(plan, path=data_path(id, rank, number)) for number, plan in enumerate(plans)]


def _split(chunks: Sequence[ChunkSpec], first: int, id: str, rank: int, limit: int) -> list[DataFilePlan]:
    plan = _lay_out(chunks, first, id, rank)
    if plan.header - LENGTH_BYTES <= limit:
        return [plan]
    if len(chunks) == 1:
        raise ValueError(f"a header limit of {limit} bytes is too small for the chunk {chunks[0].name}{chunks[0].box}")
    half = len(chunks) // 2
    return _split(chunks[:half], first, id, rank, limit) + _split(chunks[half:], first + half, id, rank, limit)


def _check_names(chunks: Sequence[ChunkSpec]) -> None:
    for name in {c.name for c in chunks}:
        problem = name_problem(name)
        if problem is not None:
            raise StateError(problem, hint="rename the tensor")


def _lay_out(chunks: Sequence[ChunkSpec], first: int, id: str, rank: int) -> DataFilePlan:
    keys = [chunk_key(c.name, c.box, c.shape, c.dtype) for c in chunks]
    lengths = np.array([c.nbytes for c in chunks], dtype=np.int64)
    # All item sizes are powers of two: after everything of a larger item size, any smaller one is aligned.
    order = np.argsort([-c.dtype.itemsize for c in chunks], kind="stable")
    starts = np.zeros_like(lengths)
    starts[order] = np.cumsum(lengths[order]) - lengths[order]
    parts = _header_parts(_entries(chunks, keys, starts, lengths, order), id, rank)
    length = sum(map(len, parts)) + CHUNK_DIGITS * len(keys)
    header = -(-(LENGTH_BYTES + length) // HEADER_BLOCK) * HEADER_BLOCK
    return DataFilePlan(
        path=data_path(id, rank),
        rank=rank,
        first=first,
        offsets=starts + header,
        lengths=lengths,
        size=header + int(lengths.sum()),
        header=header,
        digest_order=_sorted_keys(keys),
        parts=parts,
    )


def _sorted_keys(keys: Sequence[str]) -> npt.NDArray[np.intp]:
    order = sorted(range(len(keys)), key=keys.__getitem__)
    for a, b in pairwise(order):
        if keys[a] == keys[b]:
            raise CoverageError(f"the chunk {keys[a]} is given twice", where=keys[a], hint="each element has to be saved by one rank, once")
    return np.array(order, dtype=np.intp)


def _entries(chunks: Sequence[ChunkSpec], keys: Sequence[str], starts: IntArray, lengths: IntArray, order: npt.NDArray[np.intp]) -> str:
    """The JSON members of all chunks, in the order of the file."""
    begins, ends = starts.tolist(), (starts + lengths).tolist()
    texts = []
    for i in order.tolist():
        dtype = chunks[i].dtype
        shape = ",".join(map(str, dtype.stored_shape(chunks[i].box.shape)))
        texts.append(f'{_encode_text(keys[i])}:{{"dtype":"{dtype.safetensors}","shape":[{shape}],"data_offsets":[{begins[i]},{ends[i]}]}}')
    return ",".join(texts)


def _header_parts(entries: str, id: str, rank: int) -> tuple[bytes, bytes]:
    before = f'{{"{METADATA}":{{"ckpt.version":"1","ckpt.id":"{id}","ckpt.rank":"{rank}","ckpt.digests":"'
    return before.encode(), f'"}}{"," if entries else ""}{entries}}}'.encode()
