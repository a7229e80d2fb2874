"""safetensors files: a single one, a Hugging Face directory with an index, or a directory of shards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ckpt.catalog import Extent, Format, TensorEntry
from ckpt.concurrency import map_tasks
from ckpt.dtypes import FROM_SAFETENSORS, DType
from ckpt.errors import CorruptError, FormatError
from ckpt.text import parse_json, parse_object

from .external import (
    ChunkRequests,
    ExternalCatalog,
    ExternalContents,
    ExternalFile,
    candidates,
    check_all_there,
    check_index,
    find_index,
    grid_of,
    one_chunk_grid,
    read_index,
    shown,
    sizes_of,
)

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


# The header of a safetensors file: 8 bytes with its length, JSON, then the bytes of all tensors without a gap.
#
# (Source: the README of https://github.com/huggingface/safetensors, and its limits.)

MAX_HEADER = 100_000_000
"""Bytes of a header, as in the safetensors library."""
FIRST = 32 << 10
"""Bytes that are read first: most headers are shorter."""


class TensorSpan(NamedTuple):
    """One tensor of a file: ``offset`` in bytes from the start of the file."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int

    @property
    def length(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class FileHeader(NamedTuple):
    """All tensors of a file by name, and what its ``__metadata__`` says."""

    tensors: Mapping[str, TensorSpan]
    metadata: Mapping[str, str]


def read_header(backend: Backend, path: str, size: int) -> FileHeader:
    """Read and check the header of a file of ``size`` bytes."""
    where = f"{backend.url.rstrip('/')}/{path}"
    data = backend.read(path, 0, min(size, FIRST))
    stop = data_start(data, size, where)
    if stop > len(data):
        data += backend.read(path, len(data), stop - len(data))
    return parse_header(data, size, where)


def data_start(data: bytes, size: int, where: str) -> int:
    """Where the bytes of tensors begin in a file of ``size`` bytes, of which ``data`` are the first."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > MAX_HEADER or 8 + length > size:
        _damaged(where, f"a header of {length:,} bytes in a file of {size:,}")
    return 8 + length


def parse_header(data: bytes, size: int, where: str) -> FileHeader:
    """Check the header of a file of ``size`` bytes, which is among its first bytes, ``data``."""
    start = data_start(data, size, where)
    content = _json(data[8:start], where)
    metadata = content.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        _damaged(where, "metadata that are not texts")
    tensors = {name: _stored(name, entry, start, where) for name, entry in content.items()}
    _check_cover(tensors, start, size, where)
    return FileHeader(tensors, {k: v for k, v in metadata.items() if isinstance(v, str)})


def _json(data: bytes, where: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        by_name = dict(pairs)
        if len(by_name) != len(pairs):
            twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
            _damaged(where, f"the same name twice in its header: {twice!r}")
        return by_name

    try:
        return parse_object(data, object_of=once)
    except ValueError as err:
        _damaged(where, f"a damaged header: {err}", err)


def _stored(name: str, entry: Any, base: int, where: str) -> TensorSpan:
    try:
        spelled, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        counts = all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, start, stop))
    except (TypeError, KeyError, ValueError) as err:
        _damaged(where, f"a malformed entry for {name!r}", err)
    if not counts or not isinstance(shape, list) or not isinstance(spelled, str) or not name or len(name) > 4096 or "\0" in name:
        _damaged(where, f"a malformed entry for {name[:80]!r}")
    kind = FROM_SAFETENSORS.get(spelled)
    if kind is None:
        known = ", ".join(sorted(FROM_SAFETENSORS))
        raise FormatError(f"tensor {name} has the unknown dtype {spelled!r}", where=where, hint=f"known dtypes: {known}")
    if spelled == "F4":
        # The header counts values of 4 bits, and elements here are bytes with two of them
        if not shape or shape[-1] % 2:
            raise FormatError(f"tensor {name} has an odd number of 4-bit values in a row", where=where, hint="store them as U8")
        shape = [*shape[:-1], shape[-1] // 2]
    span = TensorSpan(kind, tuple(shape), base + start)
    if span.length != stop - start:
        _damaged(where, f"{stop - start:,} bytes for tensor {name}, {spelled} {shape}, which takes {span.length:,}")
    return span


def _check_cover(tensors: Mapping[str, TensorSpan], base: int, size: int, where: str) -> None:
    """Every byte after the header belongs to one tensor."""
    end, last = base, "the header"
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].length)):
        if stored.offset != end:
            what = "overlaps" if stored.offset < end else f"leaves a hole of {stored.offset - end:,} bytes after"
            _damaged(where, f"a tensor {name} that {what} {last}")
        end, last = stored.offset + stored.length, name
    if end != size:
        _damaged(where, f"{size:,} bytes, and its header accounts for {end:,}")


def _damaged(where: str, what: str, cause: BaseException | None = None) -> NoReturn:
    hint = "the file is damaged or was cut off: get it again"
    raise CorruptError(f"the safetensors file has {what}", where=where, hint=hint) from cause


# safetensors files as catalogs: one file; a Hugging Face directory, whose index says which shard has which tensor; or all the shards of a
# directory without an index. Shards that ``torch.distributed.checkpoint`` wrote say in their metadata which box of a tensor each has.

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
FORMAT_NAME = "safetensors"
SHARDING = "DCP_SHARDING_INFO"
"""Member of ``__metadata__``: JSON, name → ``saved_offsets`` of the box in the file. (Source: HuggingFaceStorageWriter of PyTorch.)"""
_THREADS = 16


def recognises(backend: Backend, names: Sequence[str]) -> bool:
    """Whether there is an index, or a file that is called or begins like a safetensors file."""
    if any(name.endswith(INDEX_SUFFIX) for name in names):
        return True
    return any(_begins_right(backend, name) for name in candidates(backend, names, (SUFFIX,))[:1])


def _begins_right(backend: Backend, path: str) -> bool:
    size = backend.size(path)
    if path.endswith(SUFFIX):
        return True
    head = backend.read(path, 0, min(size, 9))
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") <= min(MAX_HEADER, size)


def open_safetensors(backend: Backend) -> ExternalCatalog:
    """Open what ``recognises`` found."""
    names = backend.list_dir()
    index_path = find_index(names, INDEX_SUFFIX, backend.url)
    index = None if index_path is None else read_index(backend, index_path)
    paths = sorted(set(index.values())) if index is not None else candidates(backend, names, (SUFFIX,))
    if index is None:
        check_all_there(backend, paths)
    files = [ExternalFile(path, size) for path, size in zip(paths, sizes_of(backend, paths), strict=True)]
    headers = map_tasks(lambda file: read_header(backend, file.path, file.size), files, _THREADS, "ckpt-open")
    if index is not None:
        check_index(index, _owners(headers, paths, backend.url), f"{backend.url.rstrip('/')}/{index_path}")
    tensors = _TensorSpans(backend.url, files, headers)
    contents = ExternalContents(tensors=tensors.entries, files=files)
    return ExternalCatalog(contents, backend=backend, format=FORMAT_NAME, locate=tensors.locate)


def _owners(headers: Sequence[FileHeader], paths: Sequence[str], url: str) -> dict[str, str]:
    """Name → file, of all files."""
    owners: dict[str, str] = {}
    for header, path in zip(headers, paths, strict=True):
        twice = [name for name in header.tensors if name in owners]
        if twice:
            raise CorruptError(
                f"both {owners[twice[0]]} and {path} have {shown(twice)}",
                where=url,
                hint="files of two models are mixed: remove those that do not belong here, or open one file by its own URL",
            )
        owners |= dict.fromkeys(header.tensors, path)
    return owners


class _Part(NamedTuple):
    file: int
    offset: tuple[int, ...]
    stored: TensorSpan


class _TensorSpans:
    """Entries of all tensors, and their places."""

    def __init__(self, url: str, files: Sequence[ExternalFile], headers: Sequence[FileHeader]) -> None:
        self._files = files
        self._places: dict[str, list[tuple[int, int]]] = {}
        boxes = [_saved_offsets(header, f"{url.rstrip('/')}/{file.path}") for header, file in zip(headers, files, strict=True)]
        if not any(boxes):
            _owners(headers, [f.path for f in files], url)
        parts: dict[str, list[_Part]] = {}
        for row, header in enumerate(headers):
            for name, stored in header.tensors.items():
                offset = boxes[row].get(name, (0,) * len(stored.shape))
                parts.setdefault(name, []).append(_Part(row, offset, stored))
        self.entries = [self._entry(name, own, url) for name, own in parts.items()]

    def _entry(self, name: str, parts: Sequence[_Part], url: str) -> TensorEntry:
        kind = parts[0].stored.dtype
        ndim = len(parts[0].stored.shape)
        if any(p.stored.dtype != kind or len(p.offset) != ndim or len(p.stored.shape) != ndim for p in parts):
            raise CorruptError(f"the files disagree about tensor {name}", where=url, hint="they are of different saves: copy them again")
        if len(parts) == 1 and not any(parts[0].offset):
            part = parts[0]
            self._places[name] = [(part.file, part.stored.offset)]
            return TensorEntry(name=name, dtype=kind, shape=part.stored.shape, grid=one_chunk_grid(part.stored.shape, part.file))
        shape = tuple(max(p.offset[d] + p.stored.shape[d] for p in parts) for d in range(ndim))
        filled = [p for p in parts if 0 not in p.stored.shape] or parts[:1]
        grid, order = grid_of(name, shape, [(p.offset, p.stored.shape) for p in filled], [p.file for p in filled], url)
        self._places[name] = [(filled[i].file, filled[i].stored.offset) for i in order]
        return TensorEntry(name=name, dtype=kind, shape=shape, grid=grid)

    def locate(self, wanted: ChunkRequests) -> list[Extent]:
        extents = []
        for entry, number in wanted:
            file, offset = self._places[entry.name][number]
            length = entry.nbytes if entry.grid.single else entry.grid.box(number).numel * entry.dtype.itemsize
            extents.append(Extent(self._files[file].path, offset, length, None))
        return extents


def _saved_offsets(header: FileHeader, where: str) -> Mapping[str, tuple[int, ...]]:
    """The boxes that a file of ``torch.distributed.checkpoint`` has; empty for all other files."""
    text = header.metadata.get(SHARDING)
    if text is None:
        return {}
    try:
        by_name = {name: tuple(fields["saved_offsets"]) for name, fields in parse_json(text).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as err:
        raise CorruptError(f"{SHARDING} in the header is damaged", where=where, hint="get the file again") from err
    if not all(type(n) is int and 0 <= n < 1 << 62 for offsets in by_name.values() for n in offsets):
        raise CorruptError(f"{SHARDING} in the header is damaged", where=where, hint="get the file again")
    return by_name


FORMAT = Format(name=FORMAT_NAME, recognises=recognises, open=open_safetensors)
"""This format, for ckpt.formats.registry."""
