"""A lost or damaged index, made again from what the data files say of themselves (docs/format.md §9, §10). No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import xxhash

from ckpt.catalog import Contents, DataFile, TensorEntry
from ckpt.dtypes import DTYPES, FROM_SAFETENSORS, DType
from ckpt.errors import CorruptError, FormatError, NotFoundError, UsageError
from ckpt.formats.external import grid_of
from ckpt.io_backends.checks import read_alike
from ckpt.io_backends.registry import open_backend
from ckpt.plan.layout.geometry import Box, find_fault
from ckpt.text import parse_json

from .catalog import read_index_file
from .codecs import WITHOUT_ANCHOR, is_known, unknown_codec
from .commit import (
    ALIASES,
    ANCHORS,
    APART,
    CODED,
    COMMIT_PATH,
    ELSEWHERE,
    LABELS,
    REFERENCED,
    VALUES,
    VIRTUAL,
    CommitRecord,
    is_ours,
    read_record,
)
from .datafile import HEADER_LIMIT, LENGTH_BYTES, METADATA, Ranges, chunk_key, coded_key, parse_key
from .header import Header, StoredChunk, parse_header
from .index import IndexCache, decode_files, decode_index, encode_index
from .paths import FILES, GRIDS, INDEX_LIMIT, STATE, TENSORS, data_prefix, id_of, index_path, is_reference, split_url
from .writer import CheckpointJournal, write_index

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
            raise CorruptError(f"chunk {key!r} differs from its key: {err}", where=where, hint=_INCOMPLETE) from err
        if codec is not None and not is_known(codec):
            raise unknown_codec(codec, f"chunk {key!r}", where)
        if codec in WITHOUT_ANCHOR:
            raise FormatError(
                f"chunk {key!r} is a difference from another checkpoint's chunk, and no data file names that checkpoint",
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
    # The global shape is stored in the index alone, which is lost. So it is taken from the chunks: the largest end in each dimension. That
    # finds every hole but rows missing at the very end, unless a coded chunk of the tensor says the shape.
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


# What comes from where
#
#   each data file's header     name, dtype, box, place and digest of every chunk in it: the tables of tensors, grids and files
#   index files whose digest    stay as they are. If the three tables are among them, aliases and padding are kept with them; if state.json
#   the commit record confirms  is, the values are
#   the commit record           number of ranks, metrics, tags; and the bytes of all tensors, which shows that no data file is missing
#
# Headers alone are read, and none of the chunks' bytes: `ckpt verify` compares these afterwards. The new index has the id of the data files
# and replaces the old one file by file, the record last. So a rebuild that is killed is begun again by the same command.

_TABLES = (TENSORS, GRIDS, FILES)


@dataclass(frozen=True, kw_only=True, slots=True)
class RebuildReport:
    """What was rebuilt, or with ``dry_run`` would be. ``rebuilt`` is False if the index is whole: then nothing is done."""

    url: str
    id: str
    rebuilt: bool
    files: int
    tensors: int
    bytes: int
    """Of all tensors, before coding."""
    lost: tuple[str, ...]
    """What could not be recovered, now or by an earlier rebuild: ``values``, ``aliases and padding``, ``metrics and tags``, and ``what lies
    in other checkpoints`` if nothing that is left says whether the save referred to those beside it, and it may have."""
    dry_run: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Index:
    """What is left of an index: its record, if it can be read, and the files that the record confirms, or repeats (``inline``)."""

    record_bytes: bytes | None
    record: CommitRecord | None
    files: Mapping[str, bytes]
    is_whole: bool = False


def rebuild_checkpoint(url: str, *, id: str | None = None, dry_run: bool = False) -> RebuildReport:
    """Make the index of the checkpoint at ``url`` again. The data files stay as they are.

    Args:
        id: of the save: the first part of the names in ``data/``. It is needed where no commit record says it; then nobody knows whether
            that save was ever whole. A tensor's last rows that are in no data file are not missed, unless they were coded.
        dry_run: only tell what would be done.
    """
    backend = open_backend(url)
    index = _left(backend)
    chosen = _chosen(backend, index, id)
    if index.record is not None and VIRTUAL in index.record.features:
        hint = "import it again: `ckpt import`"
        raise FormatError("a virtual checkpoint has no data files to rebuild its index from", where=url, hint=hint)
    refers = None if index.is_whole else _refers(backend, index, chosen)
    if refers:
        raise FormatError(
            "a checkpoint that refers to data files of others cannot be rebuilt: its own files do not say which",
            where=url,
            hint="restore the index from a copy; the checkpoints that it refers to are whole by themselves",
        )
    lost: tuple[str, ...] = ()
    if index.is_whole:
        features = () if index.record is None else index.record.features
        rebuilt = Rebuilt(contents=decode_index(index.files, "the index", anchored=ANCHORS in features), features=())
    else:
        rebuilt, lost = _rebuilt(backend, index, chosen)
        if refers is None and _may_refer(backend):
            lost = (*lost, ELSEWHERE)
    if index.record is not None:  # the values of an earlier rebuild are whole, but they are none
        lost = tuple(dict.fromkeys((*lost, *index.record.lost)))
    if not index.is_whole and not dry_run:
        _write(backend, index, rebuilt, lost, chosen)
    return RebuildReport(
        url=url,
        id=chosen,
        rebuilt=not index.is_whole,
        files=len(rebuilt.contents.files),
        tensors=sum(t.alias is None for t in rebuilt.contents.tensors),
        bytes=_tensor_bytes(rebuilt.contents),
        lost=lost,
        dry_run=dry_run,
    )


def _left(backend: Backend) -> _Index:
    data = read_record(backend)
    if data is None:
        return _Index(record_bytes=None, record=None, files={})
    try:
        record = CommitRecord.from_bytes(data, f"{backend.url.rstrip('/')}/{COMMIT_PATH}")
    except CorruptError:  # of a later version: FormatError
        return _Index(record_bytes=data, record=None, files={})
    files: dict[str, bytes | None] = {}
    is_whole = True
    for name in record.index:
        try:
            files[name] = read_index_file(backend, record, name)
        except CorruptError:
            files[name], is_whole = record.repeated(name), False
    there = {name: content for name, content in files.items() if content is not None}
    return _Index(record_bytes=data, record=record, files=there, is_whole=is_whole)


def _chosen(backend: Backend, index: _Index, id: str | None) -> str:
    if index.record is not None:
        if id not in (None, index.record.id):
            raise UsageError(f"save {index.record.id} is committed here, not {id}", where=backend.url, hint="leave --id out")
        return index.record.id
    saves = sorted({save for e in backend.list_prefix("data/") if (save := id_of(e.path)) is not None})
    if not saves:
        raise NotFoundError(
            "there are no data files of a checkpoint", where=backend.url, hint="check the URL; `ckpt ls` lists the checkpoints there"
        )
    if id is None and (len(saves) > 1 or index.record_bytes is None):
        what = (
            "the commit record is damaged"
            if index.record_bytes is not None
            else "there is no commit record: this save may never have finished"
        )
        raise UsageError(f"{what}; there are data files of {', '.join(saves)}", where=backend.url, hint=f"name the save: --id {saves[-1]}")
    if id is not None and id not in saves:
        raise NotFoundError(f"there are no data files of save {id}", where=backend.url, hint=f"there are some of {', '.join(saves)}")
    return saves[-1] if id is None else id


def _refers(backend: Backend, index: _Index, id: str) -> bool | None:
    """Whether the save has chunks in data files of others, which would be missing; None if nothing that is left of its index says it."""
    if index.record is not None:
        return REFERENCED in index.record.features
    try:
        rows = decode_files(backend.read_whole(index_path(id, FILES), INDEX_LIMIT), backend.url)
    except (NotFoundError, CorruptError):
        return None
    return any(is_reference(file.path) for file in rows)


def _may_refer(backend: Backend) -> bool:
    """Whether there is a checkpoint beside this one that others may refer to. Its own files do not say whether it did."""
    try:
        run, own = split_url(backend)
    except UsageError:
        return False
    here = open_backend(run)
    for entry in here.list_dir(""):
        data = read_record(here, entry) if entry.endswith("/") and entry.rstrip("/") != own else None
        if data is None:
            continue
        try:
            if CommitRecord.from_bytes(data, here.url).reusable:
                return True
        except (CorruptError, FormatError):
            if is_ours(data):
                return True
    return False


def _rebuilt(backend: Backend, index: _Index, id: str) -> tuple[Rebuilt, tuple[str, ...]]:
    """The new index, and what it lacks."""
    of_nothing = encode_index(Contents(tensors=(), files=()))
    where = f"{backend.url.rstrip('/')}/index-{id}"
    known = () if index.record is None else index.record.features
    lost: tuple[str, ...] = (LABELS,) if index.record is None else ()
    if _has_tables(index):
        tables = {name: index.files[name] for name in _TABLES}
        contents = decode_index({**of_nothing, **tables}, where, anchored=ANCHORS in known)
        rebuilt = Rebuilt(contents=contents, features=known)
    else:
        rebuilt, lost = rebuild(backend, id), (ALIASES, *lost)
    contents = rebuilt.contents
    # The last rows of a tensor, and whole tensors, leave no trace where their data file is gone.
    nbytes = _tensor_bytes(contents)
    if index.record is not None and nbytes != index.record.tensor_bytes:
        raise CorruptError(
            f"the data files have {nbytes:,} bytes of tensors, the commit record lists {index.record.tensor_bytes:,}",
            where=backend.url,
            hint=f"restore the missing data files, or move {COMMIT_PATH} away and take what is left: `ckpt rebuild --id {index.record.id}`",
        )
    if STATE in index.files:
        values = decode_index({**of_nothing, STATE: index.files[STATE]}, where)
        contents = replace(contents, state=values.state, ranks=values.ranks)
    if STATE not in index.files or APART in known:
        lost = (VALUES, *lost)
    return replace(rebuilt, contents=contents), lost


def _write(backend: Backend, index: _Index, rebuilt: Rebuilt, lost: tuple[str, ...], id: str) -> None:
    backend.prepare()
    record = index.record
    ranks = len({file.rank for file in rebuilt.contents.files})
    journal = CheckpointJournal(backend, id=id, previous=index.record_bytes, resumable=True)
    # Index files that stay, stay byte for byte: only so does the record confirm them for the next attempt, if this one is killed.
    cache = IndexCache(state=index.files.get(STATE))
    if _has_tables(index):
        cache.tables = {name: index.files[name] for name in (TENSORS, GRIDS)}
        cache.tensor_bytes = _tensor_bytes(rebuilt.contents)
    write_index(
        journal,
        rebuilt.contents,
        world_size=ranks if record is None else record.world_size,
        features=rebuilt.features,
        cache=cache,
        metrics=None if record is None else record.metrics,
        tags=() if record is None else record.tags,
        lost=lost,
        reusable=record is None or record.reusable,
    )


def _has_tables(index: _Index) -> bool:
    """Whether the tables that are left say all: with ``APART``, tensors of ranks are in files of their own."""
    return {*_TABLES} <= index.files.keys() and (index.record is None or APART not in index.record.features)


def _tensor_bytes(contents: Contents) -> int:
    """Of all tensors, before coding."""
    return sum(t.nbytes for t in contents.tensors if t.alias is None)
