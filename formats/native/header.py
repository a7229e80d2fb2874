"""Headers of data files, read and verified: what is in a ``Header`` is known to cover the file's data without hole or overlap."""

from __future__ import annotations

import json
import math
import re
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
from .recent import Recent

# One element of our F4 dtype is two of safetensors' 4-bit ones.
_BITS = {name: 4 if name == "F4" else 8 * d.itemsize for name, d in FROM_SAFETENSORS.items()}
_START = re.compile(rf'\{{"{METADATA}":\s*')
"""Metadata comes first wherever this software wrote the header."""
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
    text = _text(data, where)
    metadata, rest = _split(text, where)
    layout = _known.get((rest, file.size, file.header))
    entries = {} if layout is not None else _parse_json(rest, where)
    id, rank, digests = _metadata(metadata, len(entries) if layout is None else len(layout.keys), where)
    name = file.path.rpartition("/")[2]
    if not name.startswith(f"{id}-") or rank != file.rank:
        _damaged(f"it says that rank {rank} of save {id} wrote it, the index says rank {file.rank}", where)
    if layout is None:
        layout = _layout(entries, file, where)
    if len(rest) <= _KNOWN_BYTES:
        _known.put((rest, file.size, file.header), layout)
    own = [digests[at : at + CHUNK_DIGITS] for at in layout.places]
    chunks = map(StoredChunk, layout.dtypes, layout.shapes, layout.offsets, layout.lengths, own)
    return Header(id=id, rank=rank, chunks=dict(zip(layout.keys, chunks, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Layout:
    """The chunks of a file but for their digests, as columns. ``places`` of their digests among all of the file."""

    keys: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    offsets: Sequence[int]
    lengths: Sequence[int]
    places: Sequence[int]


_KNOWN_BYTES = 8 << 20

_known: Recent[tuple[str, int, int], _Layout] = Recent(16)
"""Layouts of files, by the JSON without its metadata, and the sizes of file and header: the steps of a job have equal ones."""


def _damaged(what: str, where: str) -> NoReturn:
    raise CorruptError(f"the data file is damaged: {what}", where=where, hint=_DAMAGED)


def _text(data: bytes, where: str) -> str:
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if len(data) != LENGTH_BYTES + length or len(data) % HEADER_BLOCK:
        _damaged(f"its header says {length} bytes of JSON, there are {len(data) - LENGTH_BYTES}", where)
    try:
        return data[LENGTH_BYTES:].decode()
    except ValueError as err:
        _damaged(f"its header is not JSON ({err})", where)


def _split(text: str, where: str) -> tuple[object, str]:
    """The metadata, and the JSON of the rest."""
    start = _START.match(text)
    if start is not None:
        try:
            metadata, end = json.JSONDecoder().raw_decode(text, start.end())
        except (ValueError, RecursionError) as err:
            _damaged(f"its header is not JSON ({err})", where)
        rest = text[end:].lstrip()
        if rest[:1] in (",", "}") and f'"{METADATA}"' not in rest:
            return metadata, "{" + rest[1:] if rest[0] == "," else "{" + rest
    entries = _parse_json(text, where)
    return entries.pop(METADATA, None), json.dumps(entries)


def _parse_json(text: str, where: str) -> dict[str, Any]:
    try:
        entries = json.loads(text)
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


def _layout(entries: Mapping[str, Any], file: DataFile, where: str) -> _Layout:
    keys = list(entries)
    dtypes, shapes, spans = _columns(entries, where)
    _check_cover(keys, spans, file.size - file.header, where)
    lengths = (spans[:, 1] - spans[:, 0]).tolist()
    kinds = list(zip(dtypes, shapes, strict=True))
    bits = {kind: _BITS.get(kind[0], -1) * math.prod(kind[1]) for kind in set(kinds)}
    for key, kind, length in zip(keys, kinds, lengths, strict=True):
        if bits[kind] != 8 * length or kind[0] not in _BITS:
            _damaged(f"{key!r}: {length} bytes do not hold {kind[0]} of shape {list(kind[1])}", where)
    place = {key: CHUNK_DIGITS * i for i, key in enumerate(sorted(keys))}
    offsets = (spans[:, 0] + file.header).tolist()
    return _Layout(keys=keys, dtypes=dtypes, shapes=shapes, offsets=offsets, lengths=lengths, places=[place[k] for k in keys])


def _columns(entries: Mapping[str, Any], where: str) -> tuple[list[str], list[tuple[int, ...]], IntArray]:
    """dtypes, shapes, and begins and ends ``[n, 2]`` relative to the start of the data."""
    try:
        dtypes = [e["dtype"] for e in entries.values()]
        shapes = [tuple(e["shape"]) for e in entries.values()]
        begins, ends = zip(*[e["data_offsets"] for e in entries.values()], strict=True) if entries else ((), ())
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
