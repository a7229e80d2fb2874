"""Data files: what their headers say, how keys name chunks, and where their chunks lie (docs/format.md §6, §10).

Invariants: a data file is a valid safetensors file; its size and all offsets are known before any digest; every uncoded chunk starts at
a multiple of its item size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt import settings
from ckpt.catalog import DataFile
from ckpt.dtypes import DType
from ckpt.errors import CoverageError, StateError
from ckpt.plan.layout.geometry import Box, IntArray
from ckpt.plan.reads import group_sizes

from .codecs import CODECS
from .paths import data_path, data_prefix

# Keys of chunks in data files (docs/format.md §6, §10).
#
# ``parse_key`` inverts ``chunk_key`` and ``coded_key``: a key that ends in ``]`` always carries a box, one that ends in ``]#codec`` always
# a box and a codec.

NAME_BYTES = 4096
METADATA = "__metadata__"

Ranges = tuple[tuple[int, int] | None, ...]
"""Per dimension ``(start, stop)`` in elements, or None where the box spans the dimension."""

_NUMBER = "(?:0|[1-9][0-9]*)"
_RANGE = f"(?:{_NUMBER}:{_NUMBER}|:)"
_BOX = re.compile(rf"\[((?:{_RANGE}(?:,{_RANGE})*)?)\]\Z")
_CODEC = re.compile(r"\]#([a-z0-9-]+)\Z")


def chunk_key(name: str, box: Box, shape: Sequence[int], dtype: DType) -> str:
    """The key of the uncoded chunk ``box`` of a tensor of global ``shape``, all in elements of ``dtype``."""
    shape = tuple(shape)
    if box.shape == shape and is_plain(name, shape, dtype):
        return name
    return name + box_text(box, shape)


def coded_key(name: str, box: Box, shape: Sequence[int], codec: str) -> str:
    """The key of the chunk ``box`` of a tensor of global ``shape``, coded with ``codec``: it always carries its box."""
    return f"{name}{box_text(box, shape)}#{codec}"


def box_text(box: Box, shape: Sequence[int]) -> str:
    """The box as keys have it: ``[0:128,:]``."""
    ranges = [":" if s == n else f"{o}:{o + s}" for o, s, n in zip(box.offset, box.shape, shape, strict=True)]
    return f"[{','.join(ranges)}]"


def is_plain(name: str, shape: tuple[int, ...], dtype: DType) -> bool:
    """Whether a whole tensor goes by its bare name: if the name cannot be mistaken and the entry has the tensor's own dimensions."""
    return is_bare(name) and len(dtype.stored_shape(shape)) == len(shape)


def is_bare(name: str) -> bool:
    """Whether a name cannot be mistaken for a key with a box or a codec, or for the metadata."""
    return not ("]" in name and (name.endswith("]") or _CODEC.search(name))) and name != METADATA


def parse_key(key: str) -> tuple[str, Ranges | None, str | None]:
    """The name, the ranges and the codec of a key. No ranges: the bare name of a whole tensor. No codec: the chunk's bytes as they are."""
    coded = _CODEC.search(key)
    codec = None if coded is None else coded[1]
    boxed = key if coded is None else key[: coded.start() + 1]
    if not boxed.endswith("]"):
        return key, None, None
    at = boxed.rfind("[")
    match = _BOX.match(boxed, at) if at > 0 else None
    if match is None:
        raise ValueError(f"{key!r} does not end in a box")
    text = match[1]
    return key[:at], tuple(_range(r) for r in text.split(",")) if text else (), codec


def _range(text: str) -> tuple[int, int] | None:
    start, stop = text.split(":")
    if not start:
        return None
    if int(stop) < int(start):
        raise ValueError(f"range {text!r} ends before it starts")
    return int(start), int(stop)


def name_problem(name: str) -> str | None:
    """Why a name cannot be stored, or None."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return f"the name {name!r} has a lone surrogate and cannot be written as UTF-8"
    if not 1 <= size <= NAME_BYTES:
        return f"the name {name[:80]!r} has {size} bytes; a name has 1 to {NAME_BYTES}"
    return f"the name {name!r} has a NUL character" if "\0" in name else None


HEADER_LIMIT = 100_000_000
"""Most bytes of JSON in a header, padding included; safetensors readers refuse more."""
HEADER_BLOCK = 4096
"""The data of a file starts at a multiple of this many bytes."""
LENGTH_BYTES = 8
ID_DIGITS = 16
CHUNK_DIGITS = 16
CHUNK_DIGITS_128 = 32
NO_DIGEST_128 = "0" * CHUNK_DIGITS_128
"""Stands for the digest of a chunk that has none of 128 bits."""
DIGESTS_128 = b'","ckpt.digests128":"'
CODED_CHUNKS = 16_384
"""Most chunks of such a file: its header stays far below ``HEADER_LIMIT`` with names of any sensible length."""

_NO_DIGESTS: Mapping[int, str] = {}
_encode_text = json.encoder.encode_basestring
_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


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
    has_128: bool = False
    """Whether the header has digests of 128 bits, besides."""

    def __len__(self) -> int:
        return len(self.offsets)

    def labelled(self, id: str) -> DataFilePlan:
        """The same file of another save. All ids have the same length, so nothing moves; the cost does not grow with the chunks."""
        if len(id) != ID_DIGITS:
            raise ValueError(f"{id!r} is not an id")
        name = self.path[len(data_prefix(id)) :]
        return replace(self, path=f"{data_prefix(id)}{name}", parts=(_header_start(id, self.rank), self.parts[1]))

    def encode_header(self, digests: Sequence[int] | npt.NDArray[np.uint64], digests128: Mapping[int, str] = _NO_DIGESTS) -> bytes:
        """The first ``header`` bytes of the file, given the XXH3-64 of each chunk in the order of ``offsets``, and the XXH3-128 of some
        before coding, in hex by their place in it."""
        if len(digests) != len(self.offsets):
            raise ValueError(f"{len(digests)} digests for {len(self)} chunks of {self.path}")
        values = np.asarray(digests, dtype=np.uint64)[self.digest_order]
        before, after = self.parts
        more = ""
        if self.has_128:
            more = DIGESTS_128.decode() + "".join(digests128.get(place, NO_DIGEST_128) for place in self.digest_order.tolist())
        text = before + values.astype(">u8").tobytes().hex().encode() + more.encode() + after
        length = self.header - LENGTH_BYTES
        return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)

    def row(self, header: bytes) -> DataFile:
        """The row of ``files.arrow`` of this file with this header."""
        return DataFile(path=self.path, size=self.size, header=self.header, digest=xxhash.xxh3_128_hexdigest(header), rank=self.rank)


def plan_data_file(chunks: Sequence[ChunkSpec], *, id: str, rank: int) -> DataFilePlan:
    """Lay out one file with all ``chunks``, of rank ``rank`` of the save ``id``, however long its header becomes."""
    _check_names(chunks)
    return _lay_out(_raw_entries(chunks), 0, id, rank)


def plan_data_files(
    chunks: Sequence[ChunkSpec], *, id: str, rank: int, limit: int = HEADER_LIMIT, has_128: bool = False
) -> list[DataFilePlan]:
    """Lay out ``chunks`` in as few files as headers of at most ``limit`` bytes of JSON roughly allow; none if there are no chunks.
    ``has_128``: headers have room for digests of 128 bits."""
    _check_names(chunks)
    plans = _split(_raw_entries(chunks), 0, id, rank, limit, has_128=has_128) if chunks else []
    return [plan if number == 0 else replace(plan, path=data_path(id, rank, number)) for number, plan in enumerate(plans)]


def coded_groups(raw_lengths: Sequence[int]) -> list[slice]:
    """Which chunks go into one file each, where some may be coded: neighbours, as many as ``settings.CODED_FILE`` and ``CODED_CHUNKS``
    allow.

    It depends on the sizes before coding alone, so that every rank can tell where another one's chunks are.
    """
    return [slice(g.start, g.stop) for g in group_sizes(raw_lengths, settings.CODED_FILE, CODED_CHUNKS)]


class CodedFiles:
    """``coded_groups`` of ``ranks`` ranks at once, as their chunks come: in which of its files each is."""

    def __init__(self, ranks: int) -> None:
        self._number = np.zeros(ranks, dtype=np.int32)
        self._size = np.zeros(ranks, dtype=np.int64)
        self._chunks = np.zeros(ranks, dtype=np.int64)

    def put(self, ranks: IntArray, lengths: IntArray) -> npt.NDArray[np.int32]:
        """The next chunk of each of these ranks, no rank twice: the numbers of their files."""
        # The rule of ``group_sizes``, one step for many ranks at once: a rank's next chunk begins a new file if the
        # current one has any and would become too large or has too many chunks.
        size, chunks = self._size[ranks], self._chunks[ranks]
        full = (chunks > 0) & ((size + lengths > settings.CODED_FILE) | (chunks == CODED_CHUNKS))
        self._number[ranks] += full
        self._size[ranks] = np.where(full, 0, size) + lengths
        self._chunks[ranks] = np.where(full, 0, chunks) + 1
        numbers: npt.NDArray[np.int32] = self._number[ranks]
        return numbers


def plan_coded_file(
    chunks: Sequence[ChunkSpec],
    codecs: Sequence[str | None],
    lengths: Sequence[int],
    *,
    id: str,
    rank: int,
    number: int,
    has_128: bool = False,
) -> DataFilePlan:
    """Lay out file ``number`` of a rank, with all ``chunks``. Those with a codec take ``lengths`` bytes, the others stay as they are."""
    _check_names(chunks)
    entries = _raw_entries(chunks)
    coded: dict[str, ChunkSpec] = {}
    for i, (chunk, codec, length) in enumerate(zip(chunks, codecs, lengths, strict=True)):
        if codec is None:
            if length != entries[i].length:
                raise ValueError(f"{length} bytes for the uncoded chunk {entries[i].key} of {entries[i].length}")
            continue
        if codec not in CODECS or not 0 < length <= entries[i].length:
            raise ValueError(f"{length} bytes of {codec!r} for the chunk {entries[i].key} of {entries[i].length}")
        coded[chunk.name] = chunk
        key = coded_key(chunk.name, chunk.box, chunk.shape, codec)
        entries[i] = _Entry(key, f'{{"dtype":"U8","shape":[{length}],"data_offsets":[', length, _LAST)
    plan = _lay_out(entries, 0, id, rank, coded, has_128=has_128)
    if plan.header - LENGTH_BYTES > HEADER_LIMIT:
        raise StateError(f"the header of {plan.path} would have {plan.header} bytes, of {HEADER_LIMIT}", hint="use shorter names")
    return replace(plan, path=data_path(id, rank, number))


class _Entry(NamedTuple):
    """A chunk as a header has it: its JSON up to the offsets, its stored bytes, and its place: larger ``align`` first."""

    key: str
    form: str
    length: int
    align: int


_LAST = 0
"""The place of coded chunks, which have no item size."""


def _split(entries: Sequence[_Entry], first: int, id: str, rank: int, limit: int, *, has_128: bool) -> list[DataFilePlan]:
    plan = _lay_out(entries, first, id, rank, has_128=has_128)
    if plan.header - LENGTH_BYTES <= limit:
        return [plan]
    if len(entries) == 1:
        raise ValueError(f"a header limit of {limit} bytes is too small for the chunk {entries[0].key}")
    # Halving instead of estimating: how long a header is depends on names and offsets. It happens only with millions
    # of chunks, so a layout that is made twice costs nothing that counts.
    half = len(entries) // 2
    halves = (entries[:half], first), (entries[half:], first + half)
    return [plan for part, number in halves for plan in _split(part, number, id, rank, limit, has_128=has_128)]


def _check_names(chunks: Sequence[ChunkSpec]) -> None:
    for name in {c.name for c in chunks}:
        problem = name_problem(name)
        if problem is not None:
            raise StateError(problem, hint="rename the tensor")


def _raw_entries(chunks: Iterable[ChunkSpec]) -> list[_Entry]:
    """Chunks that are cut alike share all but their names."""
    alike: dict[tuple[object, ...], tuple[bool, str, str, int, int]] = {}
    entries = []
    for c in chunks:
        box = c.box
        cut = (box.offset, box.shape, c.shape, id(c.dtype))
        known = alike.get(cut)
        if known is None:
            known = alike[cut] = _alike(c)
        bare, ranges, form, length, align = known
        entries.append(_Entry(c.name if bare and is_bare(c.name) else c.name + ranges, form, length, align))
    if len({e.key for e in entries}) < len(entries):
        twice = next(a for a, b in pairwise(sorted(e.key for e in entries)) if a == b)
        raise CoverageError(f"the chunk {twice} is given twice", where=twice, hint="each element has to be saved by one rank, once")
    return entries


def _alike(c: ChunkSpec) -> tuple[bool, str, str, int, int]:
    """Whether a key has no box if the name allows it, the box as text, the JSON up to the offsets, length and item size."""
    stored = c.dtype.stored_shape(c.box.shape)
    form = f'{{"dtype":"{c.dtype.safetensors}","shape":[{",".join(map(str, stored))}],"data_offsets":['
    return c.box.shape == c.shape and len(stored) == len(c.shape), box_text(c.box, c.shape), form, c.nbytes, c.dtype.itemsize


def _lay_out(
    entries: Sequence[_Entry], first: int, id: str, rank: int, coded: Mapping[str, ChunkSpec] | None = None, *, has_128: bool = False
) -> DataFilePlan:
    lengths = np.array([e.length for e in entries], dtype=np.int64)
    # All item sizes are powers of two: after everything of a larger item size, any smaller one is aligned.
    order = np.argsort([-e.align for e in entries], kind="stable")
    ends = np.cumsum(lengths[order])
    starts = np.zeros_like(lengths)
    starts[order] = ends - lengths[order]
    keys = [e.key for e in entries]
    before, after = _header_start(id, rank), _header_end([entries[i] for i in order.tolist()], ends.tolist(), coded or {})
    # Every digest is CHUNK_DIGITS long, so the length of the header is known before any digest is. That fixes all
    # offsets, and chunks can be written before the header is.
    length = len(before) + len(after) + CHUNK_DIGITS * len(entries)
    length += len(DIGESTS_128) + CHUNK_DIGITS_128 * len(entries) if has_128 else 0
    header = -(-(LENGTH_BYTES + length) // HEADER_BLOCK) * HEADER_BLOCK
    return DataFilePlan(
        path=data_path(id, rank),
        rank=rank,
        first=first,
        offsets=starts + header,
        lengths=lengths,
        size=header + int(lengths.sum()),
        header=header,
        digest_order=np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.intp),
        parts=(before, after),
        has_128=has_128,
    )


def _header_start(id: str, rank: int) -> bytes:
    """The JSON before the digests."""
    return f'{{"{METADATA}":{{"ckpt.version":"1","ckpt.id":"{id}","ckpt.rank":"{rank}","ckpt.digests":"'.encode()


def _header_end(entries: Sequence[_Entry], ends: Sequence[int], coded: Mapping[str, ChunkSpec]) -> bytes:
    """The JSON after the digests: what else is to be known of tensors with ``coded`` chunks, and all entries, in the order of the file."""
    more = ""
    if coded:
        dtypes, shapes = {n: c.dtype.name for n, c in coded.items()}, {n: c.shape for n, c in coded.items()}
        more = f',"ckpt.dtypes":{_encode_text(_dumps(dtypes))},"ckpt.shapes":{_encode_text(_dumps(shapes))}'
    begins = [0, *ends][: len(ends)]
    texts = [f",{_encode_text(e.key)}:{e.form}{a},{b}]}}" for e, a, b in zip(entries, begins, ends, strict=True)]
    return f'"{more}}}{"".join(texts)}}}'.encode()
