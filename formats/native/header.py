"""Headers of data files, read and verified: what is in a ``Header`` is known to cover the file's data without hole or overlap."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt.catalog import DataFile, TensorEntry
from ckpt.errors import CorruptError, FormatError
from ckpt.plan.layout.geometry import Box, IntArray
from ckpt.text import number_of, parse_json, parse_object

from .datafile import CHUNK_DIGITS, CHUNK_DIGITS_128, DIGESTS_128, HEADER_BLOCK, LENGTH_BYTES, METADATA, NO_DIGEST_128, box_text
from .header_layout import BITS, Columns, HeaderLayout, Names, read_layout, recall, remember

_START = re.compile(rf'\{{"{METADATA}":\s*'.encode())
"""Metadata comes first wherever this software wrote the header."""
_OURS = re.compile(
    rf'\{{"{METADATA}":\{{"ckpt\.version":"1","ckpt\.id":"([0-9a-z]+)","ckpt\.rank":"([0-9]{{1,9}})","ckpt\.digests":"'.encode()
)
"""The metadata up to the digests, which may be long, where they come last, or those of 128 bits do."""
_NO_METADATA = f'{{"{METADATA}":0'.encode()
_DAMAGED = "restore this file from a copy, or load another checkpoint"


class StoredChunk(NamedTuple):
    """An entry of a header: safetensors ``dtype`` and ``shape``; ``offset`` in the file and ``length`` in bytes; XXH3-64 in hex."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int
    digest: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Header:
    """The header of one data file: the save's ``id``, the writing ``rank``, and its chunks, in the order of the file's JSON. ``start`` is
    where its data begin; ``digests`` are those of all chunks, in the order of their keys; ``text`` is its JSON without the metadata."""

    id: str
    rank: int
    start: int
    layout: HeaderLayout
    digests: bytes
    text: bytes | memoryview
    digests128: bytes = b""
    """XXH3-128 of all chunks before coding, in the order of ``digests``, as hex; zeros for a chunk without. Empty: none has one."""

    @cached_property
    def chunks(self) -> Mapping[str, StoredChunk]:
        """All chunks by key."""
        columns, digests = self.layout.columns, self.digests.decode()
        own = [digests[at : at + CHUNK_DIGITS] for at in (CHUNK_DIGITS * columns.places).tolist()]
        offsets = (columns.offsets + self.start).tolist()
        rows = zip(columns.kinds.tolist(), offsets, columns.lengths.tolist(), own, strict=True)
        return {key: StoredChunk(*columns.kind[kind], *row) for key, (kind, *row) in zip(self.layout.keys_in(self.text), rows, strict=True)}

    @cached_property
    def strong_digests(self) -> Mapping[str, str]:
        """XXH3-128 in hex of the chunks that have one, before coding, by key."""
        text, width = self.digests128.decode(), CHUNK_DIGITS_128
        places = zip(self.layout.keys_in(self.text), self.layout.columns.places.tolist(), strict=True) if text else ()
        digests = ((key, text[width * place : width * (place + 1)]) for key, place in places)
        return {key: digest for key, digest in digests if digest != NO_DIGEST_128}


def parse_header(data: bytes, file: DataFile, where: str) -> Header:
    """Read the first ``file.header`` bytes of a data file; ``where`` is its URL, for messages."""
    if len(data) != file.header:
        _damaged(f"its header has {len(data)} bytes, in the index {file.header}", where)
    computed = xxhash.xxh3_128_hexdigest(data)
    if computed != file.digest:
        _damaged(f"the digest of its header is {computed}, in the index {file.digest}", where)
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if len(data) != LENGTH_BYTES + length or len(data) % HEADER_BLOCK:
        _damaged(f"its header announces {length} bytes of JSON, there are {len(data) - LENGTH_BYTES}", where)
    metadata, rest = _split(data)
    size = file.size - file.header
    layout = None if rest is None else recall(rest, size)
    known, text = layout is not None, b""
    if rest is not None and layout is None:
        text = bytes(rest)
        layout = read_layout(text, size)
    entries: dict[str, Any] = {}
    if rest is None or (layout is None and f'"{METADATA}"'.encode() in text):
        entries = _parse_json(data[LENGTH_BYTES:], where)
        metadata, text = entries.pop(METADATA, None), b"," + json.dumps(entries).encode()[1:]
    elif layout is None:
        entries = _parse_json(_NO_METADATA + text, where)
        if entries.pop(METADATA) != 0:
            _damaged("its header has metadata twice", where)
    id, rank, digests, digests128 = _metadata(metadata, len(entries) if layout is None else len(layout.columns.offsets), where)
    name = file.path.rpartition("/")[2]
    if not name.startswith(f"{id}-") or rank != file.rank:
        _damaged(f"it names rank {rank} of save {id} as its writer, the index rank {file.rank}", where)
    if layout is None:
        layout = _layout(entries, text, file, where)
    if not known:
        remember(layout, size)
    return Header(
        id=id,
        rank=rank,
        start=file.header,
        layout=layout,
        digests=digests,
        text=rest if known and rest is not None else layout.text,  # whoever keeps a header keeps its text once
        digests128=digests128,
    )


def _damaged(what: str, where: str) -> NoReturn:
    raise CorruptError(f"the data file is damaged: {what}", where=where, hint=_DAMAGED)


def _split(data: bytes) -> tuple[object, memoryview | None]:
    """The metadata, and the JSON after it, from its comma on; None if it has to be parsed as a whole."""
    # Large headers are not copied.
    stop = data.rfind(b"}") + 1
    ours = _OURS.match(data, LENGTH_BYTES)
    quote = last = data.find(b'"', ours.end()) if ours is not None else -1
    if data[quote : quote + len(DIGESTS_128)] == DIGESTS_128:
        last = data.find(b'"', quote + len(DIGESTS_128))
    if ours is not None and data[last : last + 2] == b'"}':
        end = last + 2
        id, rank, digests = ours[1].decode(), ours[2].decode(), data[ours.end() : quote]
        metadata: object = {
            "ckpt.version": "1",
            "ckpt.id": id,
            "ckpt.rank": rank,
            "ckpt.digests": digests,
            **({"ckpt.digests128": data[quote + len(DIGESTS_128) : last]} if last > quote else {}),
        }
    else:
        start = _START.match(data, LENGTH_BYTES)
        if start is None:
            return None, None
        end = data.find(b"}", start.end()) + 1
        try:
            metadata = parse_json(data[start.end() : end])
        except ValueError:  # a brace in a string, or damage
            return None, None
    first = end + len(data[end : end + 64]) - len(data[end : end + 64].lstrip())
    if data[first : first + 1] not in (b",", b"}") or data[stop:].strip():
        return None, None
    return metadata, memoryview(data)[first:stop]


def _parse_json(text: bytes, where: str) -> dict[str, Any]:
    try:
        return parse_object(text)
    except ValueError as err:
        _damaged(f"of its header: {err}", where)


def _metadata(metadata: object, count: int, where: str) -> tuple[str, int, bytes, bytes]:
    if not isinstance(metadata, dict) or "ckpt.version" not in metadata:
        _damaged(f"its header has no {METADATA} of ckpt", where)
    if metadata["ckpt.version"] != "1":
        raise FormatError(
            f"the data file is of version {metadata['ckpt.version']!r}; this software reads version '1'",
            where=where,
            hint="use a newer release of this software",
        )
    id, rank, digests = (metadata.get(f"ckpt.{m}") for m in ("id", "rank", "digests"))
    try:
        number = number_of(rank) if isinstance(rank, str) else None
    except ValueError:
        number = None
    if number is None or not isinstance(id, str):
        _damaged(f"it does not say who wrote it (id {id!r}, rank {rank!r})", where)
    digits = _digits(digests, count, CHUNK_DIGITS, where)
    digits128 = _digits(metadata["ckpt.digests128"], count, CHUNK_DIGITS_128, where) if "ckpt.digests128" in metadata else b""
    return id, number, digits, digits128


def _digits(digests: object, count: int, width: int, where: str) -> bytes:
    digits = digests if isinstance(digests, bytes) else digests.encode(errors="replace") if isinstance(digests, str) else b"?"
    if len(digits) != width * count or digits.translate(None, b"0123456789abcdef"):
        _damaged(f"its header does not have {count} digests of {width} hex digits", where)
    return digits


def _layout(entries: Mapping[str, Any], text: bytes, file: DataFile, where: str) -> HeaderLayout:
    keys = list(entries)
    dtypes, shapes, spans = _columns(entries, where)
    _check_cover(keys, spans, file.size - file.header, where)
    lengths = spans[:, 1] - spans[:, 0]
    codes: dict[tuple[str, tuple[int, ...]], int] = {}
    kinds = [codes.setdefault(kind, len(codes)) for kind in zip(dtypes, shapes, strict=True)]
    kind = list(codes)
    bits = [BITS.get(dtype, -1) * math.prod(shape) for dtype, shape in kind]
    for key, code, length in zip(keys, kinds, lengths.tolist(), strict=True):
        if bits[code] != 8 * length or kind[code][0] not in BITS:
            _damaged(f"{key!r}: {length} bytes do not hold {kind[code][0]} of shape {list(kind[code][1])}", where)
    place = {key: i for i, key in enumerate(sorted(keys))}
    places = np.array([place[k] for k in keys], dtype=np.int64)
    columns = Columns(kind=kind, kinds=np.array(kinds, dtype=np.int64), offsets=spans[:, 0].copy(), lengths=lengths, places=places)
    return HeaderLayout(columns, text, keys)


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


# Looks chunks of many tensors up in one header at once.
#
# What is found in one header holds for all of its layout but for the boxes and the digests. So it is kept, sorted and ready to be read, and
# for each further file the boxes in its keys are compared and its digests are picked.

Sought = Sequence[tuple[Sequence[TensorEntry], Box]]
"""Tensors of one shape and dtype, and the chunk that is sought of each of them; several such groups."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Alike:
    """Where files of one layout have chunks that are sought, in the order of their bytes: each is the chunk of tensor ``members[i]`` of
    group ``groups[i]``. ``offsets`` count from the start of the data, ``digests`` are places of them. ``boxes``: for each group where in
    the text the boxes of its keys are, ``[tensors, bytes]``, or None if not all of it have a key with a box, uncoded."""

    groups: IntArray
    members: IntArray
    offsets: IntArray
    lengths: IntArray
    digests: IntArray
    boxes: Sequence[IntArray | None]
    all_boxes: IntArray
    """The same for all groups, one after another."""


class Stretches(NamedTuple):
    """Chunks in one file: ``start`` is where its data begin, ``digests`` are XXH3-64 in hex (``S16``)."""

    alike: Alike
    start: int
    digests: npt.NDArray[np.bytes_]


class Known:
    """What was found in layouts, as long as these are kept. ``names``: the rows of groups of tensors, by the ids of both."""

    def __init__(self) -> None:
        self.layouts: WeakKeyDictionary[HeaderLayout, dict[tuple[object, ...], Alike]] = WeakKeyDictionary()
        self.names: dict[tuple[int, int], tuple[Names, Sequence[TensorEntry], IntArray | None]] = {}


def find_alike(header: Header, sought: Sought, known: Known) -> Stretches:
    """The chunks that are sought, but those of groups of which not all are there under a key with a box, uncoded.

    Each key is compared: its name when its layout was made, its box in every file.
    """
    layout = header.layout
    texts = [box_text(box, entries[0].shape).encode() for entries, box in sought]
    key = tuple((id(entries), box.shape, len(text)) for (entries, box), text in zip(sought, texts, strict=True))
    kept = known.layouts.get(layout)
    if kept is None:
        kept = known.layouts.setdefault(layout, {})
    alike = kept.get(key)
    if alike is None:
        alike = kept[key] = _find(layout, sought, texts, known)
    given = np.frombuffer(header.text, dtype=np.uint8)
    expected = b"".join([text * len(places) for text, places in zip(texts, alike.boxes, strict=True) if places is not None])
    if given[alike.all_boxes].tobytes() != expected:  # seldom: the index is of other files
        alike = _without(
            alike, [g for g, places in enumerate(alike.boxes) if places is None or (given[places].tobytes() != texts[g] * len(places))]
        )
    digests = np.frombuffer(header.digests, dtype=f"S{CHUNK_DIGITS}")
    return Stretches(alike, header.start, digests[alike.digests])


def _find(layout: HeaderLayout, sought: Sought, texts: Sequence[bytes], known: Known) -> Alike:
    boxes: list[IntArray | None] = []
    rows_of_boxes: list[IntArray] = []
    for (entries, box), text in zip(sought, texts, strict=True):
        rows = _rows(layout, entries, box, known)
        if rows is not None:
            assert layout.ends is not None
            rows_of_boxes.append(rows)
            boxes.append(layout.ends[rows][:, None] + np.arange(-len(text), 0))  # a box has but one bracket that opens: it is all of it
        else:
            boxes.append(None)
    none = np.zeros(0, dtype=np.int64)
    all_rows = np.concatenate([none, *rows_of_boxes])
    groups = np.concatenate([none, *(np.full(len(b), i, dtype=np.int64) for i, b in enumerate(boxes) if b is not None)])
    members = np.concatenate([none, *(np.arange(len(rows)) for rows in rows_of_boxes)])
    columns = layout.columns
    order = np.lexsort((-columns.lengths[all_rows], columns.offsets[all_rows]))
    rows = all_rows[order]
    return Alike(
        groups=groups[order],
        members=members[order],
        offsets=columns.offsets[rows],
        lengths=columns.lengths[rows],
        digests=columns.places[rows],
        boxes=boxes,
        all_boxes=np.concatenate([none, *(places.ravel() for places in boxes if places is not None)]),
    )


def _rows(layout: HeaderLayout, entries: Sequence[TensorEntry], box: Box, known: Known) -> IntArray | None:
    """The rows of a layout that are chunks of this shape of ``entries``."""
    columns, first = layout.columns, entries[0]
    names = columns.names
    if names is None or box.shape == first.shape:
        return None
    key = id(names), id(entries)
    if key not in known.names:
        numbers = [names.rows.get(f"{e.name if e.alias is None else e.alias}[".encode(), -1) for e in entries]
        known.names[key] = names, entries, None if -1 in numbers else np.array(numbers, dtype=np.int64)
    rows = known.names[key][2]
    if rows is None:
        return None
    kinds = columns.kinds[rows]
    right = (kinds == kinds[0]).all() and columns.kind[int(kinds[0])] == (first.dtype.safetensors, first.dtype.stored_shape(box.shape))
    return rows if right else None


def _without(alike: Alike, groups: Sequence[int]) -> Alike:
    stays = ~np.isin(alike.groups, groups)
    boxes = [None if group in groups else places for group, places in enumerate(alike.boxes)]
    return Alike(
        groups=alike.groups[stays],
        members=alike.members[stays],
        offsets=alike.offsets[stays],
        lengths=alike.lengths[stays],
        digests=alike.digests[stays],
        boxes=boxes,
        all_boxes=np.concatenate([np.zeros(0, dtype=np.int64), *(places.ravel() for places in boxes if places is not None)]),
    )
