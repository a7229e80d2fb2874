"""A lost index, made again from the data files alone (docs/format.md §9, §10)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import xxhash

from ckpt.catalog import Contents, DataFile, TensorEntry
from ckpt.dtypes import DTYPES, FROM_SAFETENSORS, DType
from ckpt.errors import CorruptError, FormatError, NotFoundError
from ckpt.formats.external import grid_of
from ckpt.io_backends.checks import read_alike
from ckpt.plan.layout.geometry import Box, find_fault
from ckpt.text import parse_json

from .codecs import WITHOUT_ANCHOR, is_known, unknown_codec
from .commit import CODED
from .datafile import HEADER_LIMIT, LENGTH_BYTES, METADATA, Ranges, chunk_key, coded_key, parse_key
from .header import Header, StoredChunk, parse_header
from .paths import data_prefix

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend, ObjectMeta

_WIDENED = {d.itemsize: d for d in DTYPES.values() if d.safetensors == "U8" and d.name != "uint8"}
"""Stored as U8 with a last dimension of this many bytes."""
_INCOMPLETE = "restore the missing data files of this save, or rebuild another one"


_Coded = Mapping[str, tuple[DType, tuple[int, ...]]]
"""dtype and global shape of the tensors that have coded chunks in a file, whose entries do not say it."""


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """What ``write_index`` needs to make the checkpoint exist again."""

    contents: Contents
    features: tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class _RebuiltTensor:
    """What the headers say of one tensor. One list item per chunk in ``keys``, ``codecs``, ``boxes`` and ``files``."""

    dtype: DType
    dims: int
    shape: tuple[int, ...] | None = None
    """Known if a chunk is coded."""
    keys: list[str] = field(default_factory=list)
    codecs: list[str | None] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    files: list[int] = field(default_factory=list)


def rebuild(backend: Backend, id: str) -> Rebuilt:
    """Tensors, grids and files of save ``id``. Aliases, padding, ranks of per-rank tensors and state are lost.

    Whole rows at the end of a tensor that are lost together with their data file cannot be noticed unless another chunk of it is
    coded: no other header says the global shape.
    """
    entries = list(backend.list_prefix(data_prefix(id)))
    if not entries:
        raise NotFoundError(
            f"there are no data files of save {id!r}", where=backend.url, hint="ids are the first part of the names in data/"
        )
    files: list[DataFile] = []
    tensors: dict[str, _RebuiltTensor] = {}
    for number, entry in enumerate(entries):
        where = f"{backend.url.rstrip('/')}/{entry.path}"
        file, header, coded = _read(backend, entry, where)
        files.append(file)
        _collect(header, coded, number, tensors, where)
    tensor_entries = tuple(_tensor(name, tensors[name], backend.url) for name in sorted(tensors))
    features = (CODED,) if any(codec is not None for t in tensors.values() for codec in t.codecs) else ()
    return Rebuilt(contents=Contents(tensors=tensor_entries, files=tuple(files)), features=features)


def _read(backend: Backend, entry: ObjectMeta, where: str) -> tuple[DataFile, Header, _Coded]:
    data = read_alike(backend, entry.path, partial(_read_header, backend, entry, where))
    rank = entry.path.rpartition("/")[2].removesuffix(".safetensors").split("-")[1]
    if not (rank.isascii() and rank.isdigit()):
        raise CorruptError(f"the name of the data file {entry.path} has no rank", where=where, hint="remove it if it is not of this save")
    file = DataFile(path=entry.path, size=entry.size, header=len(data), digest=xxhash.xxh3_128_hexdigest(data), rank=int(rank))
    return file, parse_header(data, file, where), _coded_tensors(data, where)


def _read_header(backend: Backend, entry: ObjectMeta, where: str) -> bytes:
    start = backend.read(entry.path, 0, min(entry.size, LENGTH_BYTES))
    length = int.from_bytes(start, "little")
    if len(start) < LENGTH_BYTES or length > min(HEADER_LIMIT, entry.size - LENGTH_BYTES):
        raise CorruptError(f"the data file {entry.path} is truncated, or not a data file", where=where, hint=_INCOMPLETE)
    return backend.read(entry.path, 0, LENGTH_BYTES + length)


def _coded_tensors(data: bytes, where: str) -> _Coded:
    """From ``ckpt.dtypes`` and ``ckpt.shapes`` of a header that was parsed before."""
    if b'"ckpt.dtypes"' not in data:
        return {}
    metadata = parse_json(data[LENGTH_BYTES:])[METADATA]
    try:
        dtypes, shapes = parse_json(metadata["ckpt.dtypes"]), parse_json(metadata["ckpt.shapes"])
        coded = {name: (DTYPES[dtypes[name]], tuple(shape)) for name, shape in shapes.items()}
    except (KeyError, ValueError, TypeError, AttributeError) as err:
        _damaged(f"its ckpt.dtypes and ckpt.shapes cannot be read ({err!r})", where)
    sizes = [n for _, shape in coded.values() for n in shape]
    if {*map(type, sizes)} - {int} or min(sizes, default=0) < 0:
        _damaged("its ckpt.shapes are not shapes", where)
    return coded


def _damaged(what: str, where: str) -> NoReturn:
    raise CorruptError(f"the data file is damaged: {what}", where=where, hint=_INCOMPLETE)


def _collect(header: Header, coded: _Coded, file: int, tensors: dict[str, _RebuiltTensor], where: str) -> None:
    for key, chunk in header.chunks.items():
        try:
            name, ranges, codec = parse_key(key)
            shape: tuple[int, ...] | None = None
            if codec is None:
                dtype, inner = _elements(chunk, ranges)
                box = _box(ranges, inner)
            else:
                dtype, box, shape = _coded_place(chunk, ranges, coded.get(name))
        except ValueError as err:
            raise CorruptError(f"chunk {key!r} is not what its key says: {err}", where=where, hint=_INCOMPLETE) from err
        if codec is not None and not is_known(codec):
            raise unknown_codec(codec, f"chunk {key!r}", where)
        if codec in WITHOUT_ANCHOR:
            raise FormatError(
                f"chunk {key!r} is a difference from another checkpoint's chunk, and no data file says from which",
                where=where,
                hint="restore the index from a copy; the checkpoint that it differs from is whole by itself",
            )
        tensor = tensors.setdefault(name, _RebuiltTensor(dtype=dtype, dims=len(box.shape)))
        if (tensor.dtype, tensor.dims) != (dtype, len(box.shape)):
            raise CorruptError(f"chunk {key!r} is {dtype.name}, others of this tensor {tensor.dtype.name}", where=where, hint=_INCOMPLETE)
        if None not in (shape, tensor.shape) and shape != tensor.shape:
            raise CorruptError(f"chunk {key!r} is of a tensor of shape {shape}, others {tensor.shape}", where=where, hint=_INCOMPLETE)
        tensor.shape = tensor.shape if shape is None else shape
        tensor.keys.append(key)
        tensor.codecs.append(codec)
        tensor.boxes.append(box)
        tensor.files.append(file)


def _coded_place(
    chunk: StoredChunk, ranges: Ranges | None, known: tuple[DType, tuple[int, ...]] | None
) -> tuple[DType, Box, tuple[int, ...]]:
    if known is None:
        raise ValueError("it is coded, but its file has no dtype and shape of this tensor")
    dtype, shape = known
    if chunk.dtype != "U8" or len(chunk.shape) != 1 or ranges is None or len(ranges) != len(shape):
        raise ValueError(f"{chunk.dtype} of shape {list(chunk.shape)} cannot be a coded box of {list(shape)}")
    spans = [(0, n) if r is None else r for r, n in zip(ranges, shape, strict=True)]
    return dtype, Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans)), shape


def _elements(chunk: StoredChunk, ranges: Ranges | None) -> tuple[DType, tuple[int, ...]]:
    """dtype and shape in its elements: the inverse of ``DType.stored_shape``, which the number of ranges makes unambiguous."""
    shape = chunk.shape
    dims = len(shape) if ranges is None else len(ranges)
    if chunk.dtype == "F4":
        inner = (*shape[:-1], shape[-1] // 2) if shape else ()
        dtype, inner = FROM_SAFETENSORS["F4"], inner if dims else ()
    elif chunk.dtype == "U8" and len(shape) == dims + 1 and shape[-1] in _WIDENED:
        dtype, inner = _WIDENED[shape[-1]], shape[:-1]
    else:
        dtype, inner = FROM_SAFETENSORS[chunk.dtype], shape
    if dtype.stored_shape(inner) != shape or len(inner) != dims:
        raise ValueError(f"{chunk.dtype} of shape {list(shape)} cannot be a box of {dims} dimensions")
    return dtype, inner


def _box(ranges: Ranges | None, shape: tuple[int, ...]) -> Box:
    if ranges is None:
        return Box.whole(shape)
    if any(r is not None and r[1] - r[0] != s for r, s in zip(ranges, shape, strict=True)):
        raise ValueError(f"its shape is {list(shape)}")
    return Box(tuple(0 if r is None else r[0] for r in ranges), shape)


def _tensor(name: str, rebuilt: _RebuiltTensor, where: str) -> TensorEntry:
    offsets = np.array([b.offset for b in rebuilt.boxes], dtype=np.int64).reshape(len(rebuilt.boxes), rebuilt.dims)
    shapes = np.array([b.shape for b in rebuilt.boxes], dtype=np.int64).reshape(len(rebuilt.boxes), rebuilt.dims)
    # The global shape is stored in the index alone, which is lost. So it is taken from the chunks: the largest end in
    # each dimension. That finds every hole but rows missing at the very end, unless a coded chunk of the tensor says
    # the shape.
    ends = tuple((offsets + shapes).max(axis=0).tolist())
    shape = ends if rebuilt.shape is None else rebuilt.shape
    if any(e > n for e, n in zip(ends, shape, strict=True)):
        raise CorruptError(f"tensor {name!r}: a chunk leaves the shape {shape}", where=where, hint=_INCOMPLETE)
    fault = find_fault(shape, offsets, shapes)
    if fault is not None:
        what = "is in no data file" if fault.times == 0 else f"is stored {fault.times} times"
        raise CorruptError(f"tensor {name!r}: {fault.box} {what}", where=where, hint=_INCOMPLETE)
    for key, codec, box in zip(rebuilt.keys, rebuilt.codecs, rebuilt.boxes, strict=True):
        wanted = chunk_key(name, box, shape, rebuilt.dtype) if codec is None else coded_key(name, box, shape, codec)
        if key != wanted:
            raise CorruptError(f"tensor {name!r} is not whole: a key is {key!r}, not {wanted!r}", where=where, hint=_INCOMPLETE)
    grid, _ = grid_of(name, shape, [(b.offset, b.shape) for b in rebuilt.boxes], rebuilt.files, where)
    return TensorEntry(name=name, dtype=rebuilt.dtype, shape=shape, grid=grid)
