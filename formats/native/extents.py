"""sources.arrow and extents.arrow: what a virtual checkpoint has in the place of data files (docs/format.md §11)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import pyarrow as pa

from ckpt.catalog import Contents, Extent, SourceFile, TensorEntry
from ckpt.errors import ConsistencyError, CorruptError
from ckpt.formats.external.strided import reach, strided, strides_of

from .paths import EXTENTS, SOURCES, is_digest, path_problem
from .tables import from_file, to_file

_SOURCES = pa.schema(
    [
        pa.field("root", pa.utf8(), nullable=False),
        pa.field("path", pa.utf8(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("stamp", pa.utf8()),
    ]
)
_EXTENTS = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("digest", pa.utf8()),
        pa.field("strides", pa.list_(pa.int64())),
    ]
)
_DIGITS = 16


def encode_extents(contents: Contents) -> dict[str, bytes]:
    """The two index files by name."""
    rows: list[Extent] = []
    for entry in _stored(contents.tensors):
        extents = contents.extents.get(entry.name, ())
        problem = _problem(entry, extents, contents.sources)
        if problem is not None:
            raise ConsistencyError(f"these contents cannot be an index: {problem}")
        rows += extents
    # One row per chunk, in the order of the tensors' names and of each grid's chunks: so a row needs neither the name
    # of its tensor nor the number of its chunk. Data files need no such table, since their headers say where chunks
    # lie.
    columns = {
        "offset": pa.array([e.offset for e in rows], pa.int64()),
        "length": pa.array([e.length for e in rows], pa.int64()),
        "digest": pa.array([e.digest for e in rows], pa.utf8()),
        "strides": pa.array([strides_of(e.codec) for e in rows], pa.list_(pa.int64())),
    }
    sources = {f.name: pa.array([getattr(s, f.name) for s in contents.sources], f.type) for f in _SOURCES}
    return {SOURCES: to_file(sources, _SOURCES), EXTENTS: to_file(columns, _EXTENTS)}


def decode_sources(data: bytes, where: str) -> tuple[SourceFile, ...]:
    """The rows of sources.arrow."""
    columns = from_file(data, _SOURCES, f"{where}/{SOURCES}")
    rows = zip(*(columns[n].to_pylist() for n in _SOURCES.names), strict=True)
    sources = tuple(SourceFile(root=r, path=p, size=s, stamp=t) for r, p, s, t in rows)
    for source in sources:
        problem = path_problem(source.path) or _root_problem(source.root) or (None if source.size >= 0 else f"{source} cannot be")
        if problem is not None:
            _contradicts(problem, f"{where}/{SOURCES}")
    return sources


def decode_extents(data: bytes, tensors: Sequence[TensorEntry], sources: Sequence[SourceFile], where: str) -> dict[str, list[Extent]]:
    """The extents of each tensor's chunks. The paths are those of :func:`source_path`."""
    columns = from_file(data, _EXTENTS, f"{where}/{EXTENTS}")
    offsets, lengths, digests, strides = (columns[n].to_pylist() for n in _EXTENTS.names)
    if sum(t.grid.count for t in _stored(tensors)) != len(offsets):
        _contradicts(f"{len(offsets)} extents are not those of the tensors' chunks", f"{where}/{EXTENTS}")
    paths = [source_path(i, s) for i, s in enumerate(sources)]
    by_name, at = {}, 0
    for entry in _stored(tensors):
        extents = []
        for chunk, shape in enumerate(_shapes(entry)):
            # A chunk that lies with strides in a foreign file takes the bytes from its first to its last element. The
            # stored length must be exactly that, or the strides would lead out of the range that was checked against
            # the file's size.
            steps = strides[at]
            if steps is not None and reach(shape, steps, entry.dtype.itemsize) != lengths[at]:
                _contradicts(f"chunk {entry.name}{entry.grid.box(chunk)} has strides that do not fit it", f"{where}/{EXTENTS}")
            codec = None if steps is None else strided(shape, steps, entry.dtype.itemsize)
            extents.append(Extent(paths[entry.grid.file(chunk)], offsets[at], lengths[at], digests[at], codec))
            at += 1
        problem = _problem(entry, extents, sources)
        if problem is not None:
            _contradicts(problem, f"{where}/{EXTENTS}")
        by_name[entry.name] = extents
    return by_name


def source_path(number: int, source: SourceFile) -> str:
    """What the source of this number is called as a path of a virtual checkpoint: with its own name at the end, for messages."""
    return f"sources/{number}/{source.path.rpartition('/')[2]}"


def _stored(tensors: Sequence[TensorEntry]) -> list[TensorEntry]:
    return sorted((t for t in tensors if t.alias is None), key=lambda t: t.name)


def _shapes(entry: TensorEntry) -> Sequence[Sequence[int]]:
    """Those of its chunks."""
    if entry.grid.single and entry.grid.cuts is not None:
        return [entry.shape]
    shapes: list[list[int]] = entry.grid.all_boxes()[1].tolist()
    return shapes


def _problem(entry: TensorEntry, extents: Sequence[Extent], sources: Sequence[SourceFile]) -> str | None:
    if len(extents) != entry.grid.count:
        return f"tensor {entry.name!r} has {entry.grid.count} chunks and {len(extents)} extents"
    for i, (extent, shape) in enumerate(zip(extents, _shapes(entry), strict=True)):
        source = sources[entry.grid.file(i)]
        steps = strides_of(extent.codec)
        size = entry.dtype.itemsize
        needed = math.prod(shape) * size if steps is None else reach(shape, steps, size)
        bad = extent.length != needed or extent.offset < 0 or extent.offset + extent.length > source.size
        if bad or (extent.codec is not None and steps is None) or not (extent.digest is None or is_digest(extent.digest, _DIGITS)):
            return f"chunk {entry.name}{entry.grid.box(i)} cannot be {extent.length} bytes from {extent.offset} of {source.path}"
    return None


def _root_problem(root: str) -> str | None:
    """Why a root cannot be followed: relative ones lead wherever the reader happens to be, chained URLs to more than they show."""
    if "\0" in root or "::" in root or not (root.startswith("/") or "://" in root):
        return f"the root {root!r} of a source is neither an absolute path nor a plain URL"
    if any(part == ".." for part in root.split("/")):
        return f"the root {root!r} of a source leads upwards"
    return None


def _contradicts(what: str, where: str) -> NoReturn:
    raise CorruptError(f"the index contradicts itself: {what}", where=where, hint="import the checkpoint again")
