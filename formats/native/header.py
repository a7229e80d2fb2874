"""Headers of data files, read and verified: what is in a ``Header`` is known to cover the file's data without hole or overlap."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import xxhash

from ckpt.catalog import DataFile
from ckpt.dtypes import FROM_SAFETENSORS
from ckpt.errors import CorruptError, FormatError
from ckpt.geometry import IntArray

from .datafile import CHUNK_DIGITS, HEADER_BLOCK, LENGTH_BYTES
from .keys import METADATA
from .paths import is_digest

# One element of our F4 dtype is two of safetensors' 4-bit ones.
_BITS = {name: 4 if name == "F4" else 8 * d.itemsize for name, d in FROM_SAFETENSORS.items()}
_DAMAGED = "restore this file from a copy, or load another checkpoint"


class StoredChunk(NamedTuple):
    """An entry of a header: safetensors ``dtype`` and ``shape``; ``offset`` in the file and ``length`` in bytes; XXH3-64 in hex."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The header of one data file: the save's ``id``, the writing ``rank``, and its chunks by key, in the order of the file's JSON."""

    id: str
    rank: int
    chunks: Mapping[str, StoredChunk]


def parse_header(data: bytes, file: DataFile, where: str) -> Header:
    """Read the first ``file.header`` bytes of a data file; ``where`` is its URL, for messages.

    Raises:
        CorruptError: the bytes are not those that ``file`` describes, or the entries do not cover the data exactly.
        FormatError: the file is of a version that this software does not know.
    """
    if len(data) != file.header:
        _damaged(f"its header has {len(data)} bytes, the index says {file.header}", where)
    found = xxhash.xxh3_128_hexdigest(data)
    if found != file.digest:
        _damaged(f"the digest of its header is {found}, the index says {file.digest}", where)
    entries = _parse_json(data, where)
    metadata = entries.pop(METADATA, None)
    id, rank, digests = _metadata(metadata, len(entries), where)
    name = file.path.rpartition("/")[2]
    if not name.startswith(f"{id}-") or rank != file.rank:
        _damaged(f"it says that rank {rank} of save {id} wrote it, the index says rank {file.rank}", where)
    chunks = _chunks(entries, digests, file, where)
    return Header(id=id, rank=rank, chunks=chunks)


def _damaged(what: str, where: str) -> NoReturn:
    raise CorruptError(f"the data file is damaged: {what}", where=where, hint=_DAMAGED)


def _parse_json(data: bytes, where: str) -> dict[str, Any]:
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if len(data) != LENGTH_BYTES + length or len(data) % HEADER_BLOCK:
        _damaged(f"its header says {length} bytes of JSON, there are {len(data) - LENGTH_BYTES}", where)
    try:
        entries = json.loads(data[LENGTH_BYTES:].decode())
    except (ValueError, RecursionError) as err:
        _damaged(f"its header is not JSON ({err})", where)
    if not isinstance(entries, dict):
        _damaged("its header is not a JSON object", where)
    return entries


def _metadata(metadata: object, count: int, where: str) -> tuple[str, int, str]:
    if not isinstance(metadata, dict) or "ckpt.version" not in metadata:
        _damaged(f"its header has no {METADATA} of ckpt", where)
    if metadata["ckpt.version"] != "1":
        raise FormatError(
            f"the data file is of version {metadata['ckpt.version']!r}; this software reads version '1'",
            where=where,
            hint="use a newer release of this software",
        )
    id, rank, digests = (metadata.get(f"ckpt.{m}") for m in ("id", "rank", "digests"))
    if not isinstance(id, str) or not isinstance(rank, str) or not (rank.isascii() and rank.isdigit() and len(rank) < 10):
        _damaged(f"it does not say who wrote it (id {id!r}, rank {rank!r})", where)
    if not is_digest(digests, CHUNK_DIGITS * count):
        _damaged(f"its header does not have {count} digests of {CHUNK_DIGITS} hex digits", where)
    return id, int(rank), str(digests)


def _chunks(entries: Mapping[str, Any], digests: str, file: DataFile, where: str) -> dict[str, StoredChunk]:
    keys = list(entries)
    dtypes, shapes, spans = _columns(entries, where)
    _check_cover(keys, spans, file.size - file.header, where)
    lengths = (spans[:, 1] - spans[:, 0]).tolist()
    for key, dtype, shape, length in zip(keys, dtypes, shapes, lengths, strict=True):
        if _BITS.get(dtype, 0) * math.prod(shape) != 8 * length or dtype not in _BITS:
            _damaged(f"{key!r}: {length} bytes do not hold {dtype} of shape {list(shape)}", where)
    place = {key: CHUNK_DIGITS * i for i, key in enumerate(sorted(keys))}
    own = [digests[place[k] : place[k] + CHUNK_DIGITS] for k in keys]
    offsets = (spans[:, 0] + file.header).tolist()
    return dict(zip(keys, map(StoredChunk, dtypes, shapes, offsets, lengths, own), strict=True))


def _columns(entries: Mapping[str, Any], where: str) -> tuple[list[str], list[tuple[int, ...]], IntArray]:
    """dtypes, shapes, and begins and ends ``[n, 2]`` relative to the start of the data."""
    try:
        dtypes = [e["dtype"] for e in entries.values()]
        shapes = [tuple(e["shape"]) for e in entries.values()]
        begins, ends = [], []
        for e in entries.values():
            begin, end = e["data_offsets"]
            begins.append(begin)
            ends.append(end)
        spans = np.array([begins, ends], dtype=np.int64).T
    except (TypeError, KeyError, ValueError, OverflowError) as err:
        _damaged(f"an entry of its header lacks a dtype, shape or data_offsets ({err!r})", where)
    sizes = [n for shape in shapes for n in shape]
    if {*map(type, begins), *map(type, ends), *map(type, sizes)} - {int} or {*map(type, dtypes)} - {str} or min(sizes, default=0) < 0:
        _damaged("an entry of its header has a dtype, shape or data_offsets of the wrong type", where)
    return dtypes, shapes, spans


def _check_cover(keys: Sequence[str], spans: IntArray, size: int, where: str) -> None:
    """Chunks in the order of their bytes must follow each other from 0 to ``size``."""
    if np.any(spans[:, 1] < spans[:, 0]):
        _damaged("an entry of its header ends before it starts", where)
    order = np.lexsort((spans[:, 1], spans[:, 0]))
    begins, ends = spans[order, 0], spans[order, 1]
    expected = np.concatenate([np.zeros(1, dtype=np.int64), ends])
    bad = np.flatnonzero(begins != expected[:-1])
    if len(bad):
        at = bad[0]
        kind = "a hole" if begins[at] > expected[at] else "an overlap"
        _damaged(f"{kind} before {keys[order[at]]!r}, which starts at byte {begins[at]} of the data, not {expected[at]}", where)
    if expected[-1] != size:
        _damaged(f"its chunks end at byte {expected[-1]} of the data, which has {size} bytes", where)
