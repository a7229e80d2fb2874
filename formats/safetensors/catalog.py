"""safetensors files as catalogs: one file; a Hugging Face directory, whose index says which shard has which tensor; or all the shards of a
directory without an index. Shards that ``torch.distributed.checkpoint`` wrote say in their metadata which box of a tensor each has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckpt.catalog import Extent, TensorEntry
from ckpt.concurrency.workers import map_tasks
from ckpt.errors import CorruptError
from ckpt.formats.external.base import ChunkRequests, ExternalCatalog, ExternalContents, ExternalFile, grid_of, one_chunk_grid
from ckpt.formats.external.hf_index import check_all_there, check_index, find_index, read_index, shown, sizes_of
from ckpt.formats.external.virtual_backends import candidates
from ckpt.formats.protocol import Format
from ckpt.text.json_reader import parse_json

from .header import MAX_HEADER, FileHeader, TensorSpan, read_header

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

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
