"""``ckpt-delta.json``: what a delta is made from, its files, and the digests of what it makes. It comes last and makes the delta exist."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import xxhash

from ckpt import settings
from ckpt.dtypes import DTYPES, DType
from ckpt.errors import CorruptError, FormatError
from ckpt.io_backends.checks import path_problem, read_checked
from ckpt.io_backends.registry import absolute_url
from ckpt.plan.layout.geometry import IntArray
from ckpt.text import parse_json

from .delta_changes import WIDTHS
from .safetensors import FileHeader, parse_header

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


MANIFEST = "ckpt-delta.json"
VERSION = 1
_FORMAT = "ckpt-delta"
_SIBLING = "../"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkedExport:
    """Another export: its ``url``, and the ``id`` that tells it from every other one that might lie there."""

    url: str
    id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaFile:
    """A file of a delta: ``head`` are the bytes of its header and of its table of sections, and ``digest`` the XXH3-128 of these."""

    path: str
    size: int
    head: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaTensor:
    """A tensor of the model."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaManifest:
    """``number`` counts the deltas since the anchor, from 1. ``tensors`` are those of the model, sorted by name. ``result`` is the digest
    of the whole model, ``changed`` counts elements, ``dense_bytes`` is the size of the model."""

    number: int
    base: LinkedExport
    anchor: LinkedExport
    tensors: tuple[DeltaTensor, ...]
    files: tuple[DeltaFile, ...]
    result: str
    changed: int
    dense_bytes: int

    @property
    def id(self) -> str:
        """XXH3-128 of all that it says, but for where other exports lie: they may move together."""
        return xxhash.xxh3_128_hexdigest(json.dumps({**self._fields(), "base": self.base.id, "anchor": self.anchor.id}).encode())

    def to_bytes(self, url: str) -> bytes:
        """As the file at ``url``. An export in the directory beside is named relative to it, so that a chain can move as a whole."""
        near = {key: {"url": _relative(export.url, url), "id": export.id} for key, export in (("base", self.base), ("anchor", self.anchor))}
        return json.dumps({**self._fields(), **near, "id": self.id}, indent=1).encode() + b"\n"

    def _fields(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "version": VERSION,
            "number": self.number,
            "changed": self.changed,
            "dense_bytes": self.dense_bytes,
            "result": self.result,
            "files": [{"path": f.path, "size": f.size, "head": f.head, "digest": f.digest} for f in self.files],
            "tensors": [[t.name, t.dtype.name, list(t.shape)] for t in self.tensors],
        }

    @classmethod
    def from_bytes(cls, data: bytes, url: str) -> DeltaManifest:
        """What the file at ``url`` says."""
        where = f"{url.rstrip('/')}/{MANIFEST}"
        try:
            fields = parse_json(data)
            known = fields["format"] == _FORMAT
            version = fields["version"]
        except (ValueError, KeyError, TypeError) as err:
            raise _damaged(f"is not a manifest of a delta ({err!r})", where) from err
        if not known or version != VERSION:
            raise FormatError(
                f"this is a delta of version {version!r}", where=where, hint=f"this software reads version {VERSION}: update it"
            )
        try:
            manifest = cls(
                number=_count(fields["number"]),
                base=_export(fields["base"], url),
                anchor=_export(fields["anchor"], url),
                tensors=tuple(DeltaTensor(name=_text(n), dtype=DTYPES[d], shape=tuple(map(_count, s))) for n, d, s in fields["tensors"]),
                files=tuple(_file(f) for f in fields["files"]),
                result=_text(fields["result"]),
                changed=_count(fields["changed"]),
                dense_bytes=_count(fields["dense_bytes"]),
            )
        except (KeyError, TypeError, ValueError) as err:
            raise _damaged(f"lacks or misspells a member ({err!r})", where) from err
        if fields.get("id") != manifest.id:
            raise _damaged(f"was changed after it was written: its id is {fields.get('id')}, should be {manifest.id}", where)
        names = [t.name for t in manifest.tensors]
        if names != sorted(set(names)):
            raise _damaged("has tensors that are not in the order of names, or twice", where)
        return manifest


def _file(fields: Mapping[str, Any]) -> DeltaFile:
    path = _text(fields["path"])
    if path_problem(path) is not None or "/" in path:
        raise ValueError(f"a file called {path!r}")
    return DeltaFile(path=path, size=_count(fields["size"]), head=_count(fields["head"]), digest=_text(fields["digest"]))


def _export(fields: Mapping[str, Any], url: str) -> LinkedExport:
    text = _text(fields["url"])
    beside = absolute_url(url).rstrip("/").rpartition("/")[0]
    if text.startswith(_SIBLING):
        name = text.removeprefix(_SIBLING)
        if not name or any(part in ("", ".", "..") for part in name.split("/")):
            raise ValueError(f"an export at {text!r}")
        text = f"{beside}/{name}"
    return LinkedExport(url=text, id=_text(fields["id"]))


def _relative(export: str, url: str) -> str:
    beside = absolute_url(url).rstrip("/").rpartition("/")[0]
    whole = absolute_url(export).rstrip("/")
    return _SIBLING + whole.removeprefix(f"{beside}/") if whole.startswith(f"{beside}/") else whole


def _text(value: object) -> str:
    if type(value) is not str or not value or len(value) > 4096:
        raise ValueError(f"{value!r:.80} is not text")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.80} is not a count")
    return value


def _damaged(what: str, where: str) -> CorruptError:
    return CorruptError(f"the manifest of a delta {what}", where=where, hint="it is damaged: export again, with a full anchor")


# The files of a delta: safetensors files, whose first tensor is a table of sections. Reading and laying out; nothing is compared here.

# Each rank of an export has written one file. For each tensor NAME of which it found changes:
#
#     NAME.gaps      U8, U16 or U32     gaps between changed elements (delta_changes.py), section after section
#     NAME.values    dtype of NAME      the new values, section after section
#
# and for all of them together, changed or not:
#
#     ckpt.sections  I64 [n, 7]         tensor (number in the manifest), first and last element + 1 of its row-major flattening,
#                                       gap codes, values, XXH3-64 of gaps and values, XXH3-64 of the elements that they make
#
# A section without gap codes is dense, or, without values too, unchanged. The sections of all files tile every tensor: they are the
# chunks of what the delta makes, and so each chunk of it has a digest.


TABLE = "ckpt.sections"
GAPS, VALUES = ".gaps", ".values"
COLUMNS = 7
TENSOR, START, STOP, CODES, COUNT, STORED, RESULT = range(COLUMNS)
"""Columns of the table."""
_CODE_DTYPES = {width: DTYPES[f"uint{8 * width}"] for width in WIDTHS}


class WrittenTensor(NamedTuple):
    """What a file has of a tensor: bytes of a gap code, and how many codes and values."""

    number: int
    width: int
    codes: int
    values: int


class FileLayout(NamedTuple):
    """A file before it is written: its header, its size, and where the arrays of each tensor go, by number: gaps, then values."""

    header: bytes
    table: int
    size: int
    starts: Mapping[int, tuple[int, int]]


def lay_out(tensors: Sequence[DeltaTensor], stored: Sequence[WrittenTensor], sections: int) -> FileLayout:
    """A file of these tensors, and the table of so many sections first. Arrays come by item size, largest first: each is aligned."""
    arrays: list[tuple[int, int, int, str, DType, int]] = []
    for of in stored:
        name, dtype = tensors[of.number].name, tensors[of.number].dtype
        if of.codes:
            arrays.append((-of.width, of.number, 0, name + GAPS, _CODE_DTYPES[of.width], of.codes))
        if of.values:
            arrays.append((-dtype.itemsize, of.number, 1, name + VALUES, dtype, of.values))
    table = sections * COLUMNS * 8
    entries: dict[str, object] = {"__metadata__": {"format": "ckpt-delta"}}
    entries[TABLE] = {"dtype": "I64", "shape": [sections, COLUMNS], "data_offsets": [0, table]}
    at, places = table, {}
    for _, number, which, name, dtype, count in sorted(arrays):
        stop = at + count * dtype.itemsize
        entries[name] = {"dtype": dtype.safetensors, "shape": dtype.stored_shape((count,)), "data_offsets": [at, stop]}
        places[number, which] = at
        at = stop
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % 64)
    header = len(text).to_bytes(8, "little") + text
    starts = {of.number: (len(header) + places.get((of.number, 0), 0), len(header) + places.get((of.number, 1), 0)) for of in stored}
    return FileLayout(header, len(header), len(header) + at, starts)


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorSections:
    """The sections of one tensor, in order: they tile it. ``rows`` as in the table; ``files`` numbers the file that each is in;
    ``codes_at`` and ``values_at`` are byte offsets in it, ``widths`` bytes of a gap code."""

    rows: IntArray
    files: IntArray
    codes_at: IntArray
    values_at: IntArray
    widths: IntArray

    def overlapping(self, start: int, stop: int) -> range:
        """The sections that share an element with ``[start, stop)``."""
        first = int(np.searchsorted(self.rows[:, STOP], start, side="right"))
        return range(first, int(np.searchsorted(self.rows[:, START], stop, side="left")))


def read_sections(backend: Backend, files: Sequence[DeltaFile], tensors: Sequence[DeltaTensor]) -> tuple[list[TensorSections], str]:
    """The tables of all files of a delta, by tensor; and the digest of what they make."""
    parts = [_file_sections(backend, tensors, file, number) for number, file in enumerate(files)]
    parts.append((np.empty((0, COLUMNS), np.int64), *(np.empty(0, np.int64) for _ in range(4))))
    columns = [np.concatenate([part[i] for part in parts]) for i in range(5)]
    order = np.lexsort((columns[0][:, START], columns[0][:, TENSOR]))
    rows, numbers, codes_at, values_at, widths = (column[order] for column in columns)
    bounds = np.searchsorted(rows[:, TENSOR], np.arange(len(tensors) + 1))
    by_tensor = []
    for number, tensor in enumerate(tensors):
        of = slice(bounds[number], bounds[number + 1])
        own = rows[of]
        edges = np.concatenate([own[:1, START], own[:, STOP]]) if len(own) else np.zeros(1, np.int64)
        if edges[0] != 0 or edges[-1] != tensor.numel or (own[1:, START] != own[:-1, STOP]).any() or (np.diff(edges) <= 0).any():
            _damaged_sections(backend.url, f"sections that do not tile tensor {tensor.name}")
        by_tensor.append(TensorSections(rows=own, files=numbers[of], codes_at=codes_at[of], values_at=values_at[of], widths=widths[of]))
    return by_tensor, result_digest(rows)


def result_digest(rows: IntArray) -> str:
    """The digest of the model that sections make, from their table in the order of tensors and elements: XXH3-128 of what names each
    section and of the digest of its elements."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(rows[:, [TENSOR, START, STOP, RESULT]], dtype="<i8").data)


def head_digest(head: bytes) -> str:
    """What a manifest says of the first bytes of a file."""
    return xxhash.xxh3_128_hexdigest(head)


def signed(digest: int) -> int:
    """A digest of 64 bits as the table has it."""
    return digest - (1 << 64) if digest >> 63 else digest


def _file_sections(backend: Backend, tensors: Sequence[DeltaTensor], file: DeltaFile, number: int) -> tuple[IntArray, ...]:
    """Rows, file numbers, places of codes and values, and widths of one file."""
    where = f"{backend.url.rstrip('/')}/{file.path}"
    if not 8 <= file.head <= min(file.size, settings.FOREIGN_TABLE):
        _damaged_sections(where, f"a head of {file.head:,} bytes in a file of {file.size:,}")

    def read() -> bytes:
        head = backend.read(file.path, 0, file.head)
        if head_digest(head) != file.digest:
            _damaged_sections(where, f"other bytes than its manifest says: its digest is {head_digest(head)}, should be {file.digest}")
        return head

    head = read_checked(backend, file.path, read, length=file.head)
    header = parse_header(head, file.size, where)
    table = header.tensors.get(TABLE)
    if table is None or len(table.shape) != 2 or table.shape[1] != COLUMNS or table.offset + table.length != file.head:
        _damaged_sections(where, "no table of sections")
    rows = np.frombuffer(head, "<i8", offset=table.offset).reshape(table.shape).astype(np.int64)
    if ((rows[:, :STORED] < 0) | (rows[:, :STORED] >= 1 << 61)).any() or (rows[:, TENSOR] >= len(tensors)).any():
        _damaged_sections(where, "a section that is in no tensor")
    codes_at, values_at, widths = (np.zeros(len(rows), np.int64) for _ in range(3))
    for tensor in np.unique(rows[:, TENSOR]).tolist():
        own = np.flatnonzero(rows[:, TENSOR] == tensor)
        codes_at[own], widths[own] = _places(header, tensors[tensor], GAPS, rows[own, CODES], where)
        values_at[own], _ = _places(header, tensors[tensor], VALUES, rows[own, COUNT], where)
    return rows, np.full(len(rows), number, np.int64), codes_at, values_at, widths


def _places(header: FileHeader, tensor: DeltaTensor, suffix: str, counts: IntArray, where: str) -> tuple[IntArray, int]:
    """Byte offsets of the parts of an array that have so many items each, and the size of an item."""
    total = int(counts.sum())
    array = header.tensors.get(tensor.name + suffix)
    if array is None:
        if total:
            _damaged_sections(where, f"no {tensor.name}{suffix}")
        return np.zeros(len(counts), np.int64), 0
    expected = _CODE_DTYPES.values() if suffix == GAPS else (tensor.dtype,)
    if array.dtype not in expected or array.length != total * array.dtype.itemsize:
        _damaged_sections(where, f"{array.length:,} bytes of {tensor.name}{suffix}, which its sections do not account for")
    ends = np.cumsum(counts) * array.dtype.itemsize
    return array.offset + ends - counts * array.dtype.itemsize, array.dtype.itemsize


def _damaged_sections(where: str, what: str) -> NoReturn:
    raise CorruptError(
        f"the delta has {what}", where=where, hint="a file is damaged, or of another delta: copy it again, or export a full anchor"
    )
