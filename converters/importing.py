"""Import without copying: a virtual checkpoint whose chunks are ranges of somebody else's files. No torch; no tensor is read.

Invariant: what is committed tiles every tensor exactly, and every range lies inside a file that is there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ckpt.catalog import Catalog, Contents, Extent, Grid, Source, TensorEntry
from ckpt.errors import ConflictError, CorruptError, CoverageError, UsageError
from ckpt.formats.native.commit import VIRTUAL
from ckpt.formats.native.virtual import VirtualCatalog
from ckpt.formats.native.writer import new_id, previous_files, read_record, write_index
from ckpt.formats.registry import open_catalog
from ckpt.formats.strided import reach, strided, strides_of
from ckpt.geometry import Box, row_major_strides
from ckpt.io_backends.protocol import Backend, stamp_of
from ckpt.io_backends.registry import absolute_url, open_backend
from ckpt.plan.join import Copy, join
from ckpt.plan.views import Piece, View, in_order, within

from .choosing import Views, wanted_views
from .unchanged import Watch

MAX_CHUNK = 64 << 20
"""Bytes of a chunk of the virtual checkpoint: longer ranges are cut along the first axis, so that they can be read in parallel."""
_BUFFER = 16 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportReport:
    """What an import made: ``tensors`` and ``tensor_bytes`` that it points at in ``sources`` files. ``seconds`` is wall time."""

    url: str
    id: str
    format: str
    """Of what was imported."""
    tensors: int
    tensor_bytes: int
    chunks: int
    sources: int
    digested: bool
    values: bool
    """Whether what is not a tensor is there too: not if tensors were left out or have other names."""
    seconds: float


def import_checkpoint(
    source: str,
    url: str,
    *,
    views: Views | None = None,
    only: Sequence[str] = (),
    digest: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Write a virtual checkpoint at ``url`` of the checkpoint at ``source``, which is left as it is and has to stay where it is.

    Args:
        views: from the shapes of the stored tensors to what the virtual checkpoint shall have; by default the same tensors.
        only: globs of names; others are left out.
        digest: read all bytes once, so that loads can verify them. Without it a changed file is noticed by its size and time alone.
        overwrite: replace a checkpoint that is at ``url``.
        progress: called with the bytes that were read so far and all bytes, with ``digest``.

    Raises:
        NotFoundError, NotCommittedError, FormatError, CorruptError: there is no whole checkpoint of a known format at ``source``.
        ConflictError: there is a checkpoint at ``url``.
        CoverageError: a tensor would have elements that no file has.
        UsageError: ``views`` do not fit, or take a part of a chunk that is coded.
    """
    began = time.monotonic()
    backend = open_backend(url)
    previous = read_record(backend)
    if previous is not None and not overwrite:
        raise ConflictError("there is a checkpoint already", where=url, hint="import to another URL, or replace it: --overwrite")
    watch = Watch(source)
    catalog = open_catalog(source)
    if isinstance(catalog, VirtualCatalog):
        raise UsageError("this is a virtual checkpoint already", where=source, hint="import what it was made of")
    if absolute_url(url).rstrip("/") == absolute_url(catalog.backend.url).rstrip("/"):
        raise UsageError("a checkpoint cannot point into itself", where=url, hint="import to another URL")
    contents = pointed = _point(catalog, views, only)
    if digest:
        contents = replace(contents, extents=_digested(catalog.backend, contents, progress))
    if not watch.are_as_they_were(pointed.sources):
        again = _point(open_catalog(source), views, only)
        if (again.sources, again.extents) != (pointed.sources, pointed.extents):
            raise CorruptError("the files changed while they were imported", where=source, hint="import again when nobody writes there")
    backend.prepare()
    id = new_id(previous)
    replaced = previous_files(backend, previous) if previous is not None else ()
    write_index(backend, contents, id=id, world_size=catalog.world_size, previous=previous, features=(VIRTUAL,))
    for path in replaced:
        backend.delete(path)
    return ImportReport(
        url=url,
        id=id,
        format=catalog.format,
        tensors=len(contents.tensors),
        tensor_bytes=sum(t.nbytes for t in contents.tensors if t.alias is None),
        chunks=sum(map(len, contents.extents.values())),
        sources=len(contents.sources),
        digested=digest,
        values=views is None and not only,
        seconds=time.monotonic() - began,
    )


def _point(catalog: Catalog, views: Views | None, only: Sequence[str]) -> Contents:
    pointed = _Pointed(catalog)
    wanted = wanted_views(catalog, catalog.tensors, views, only)
    taken = {name: _taken(catalog, name, view) for name, view in wanted.items()}
    extents = iter(catalog.extents_of([(t.stored, t.copy.chunk) for takes in taken.values() for t in takes]))  # of all at once
    for name, view in wanted.items():
        pointed.add(name, view, [(take, next(extents)) for take in taken[name]])
    return pointed.contents(_state(catalog, wanted, same=views is None and not only))


class _Take(NamedTuple):
    """What a piece of a view takes of a chunk of ``stored``."""

    piece: Piece
    stored: TensorEntry
    copy: Copy


def _taken(catalog: Catalog, name: str, view: View) -> list[_Take]:
    """All chunks that a view is made of; none for an alias, which stays one.

    Raises:
        CoverageError: there are none, or the view has elements that no piece has, or several.
        UsageError: they are of several dtypes.
    """
    entry = catalog.tensors[view.pieces[0].source] if view.pieces else None
    if entry is None:
        raise CoverageError(f"{name!r} would have no stored elements at all", where=catalog.url)
    if _is_alias(entry, name, view):
        return []
    fault = None if view.is_whole else view.fault()
    if fault is not None:
        told = f"{name}{fault.box} would be in {fault.times} stored tensors"
        raise CoverageError(told, where=catalog.url, hint="convert instead, which can fill")
    found = []
    for piece in view.pieces:
        stored = catalog.tensors[piece.source]
        if stored.dtype != entry.dtype:
            told = f"{name!r} would be made of {entry.name!r} ({entry.dtype.name}) and {stored.name!r} ({stored.dtype.name})"
            raise UsageError(told, where=catalog.url, hint="convert with one dtype instead")
        found += [_Take(piece, stored, copy) for copy in join(stored.grid, piece.part)]
    return found


def _is_alias(entry: TensorEntry, name: str, view: View) -> bool:
    return entry.alias is not None and name == entry.name and view.is_whole


def _state(catalog: Catalog, wanted: Mapping[str, View], *, same: bool) -> Any:
    """The state's node: as it was, or the tensors by name if these are others now."""
    return catalog.state if same else {name: {"$tensor": name} for name in wanted}


class _Pointed:
    """Gathers tensors and where their chunks lie."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.tensors: list[TensorEntry] = []
        self.extents: dict[str, list[Extent]] = {}
        self._sources: dict[str, int] = {}

    def add(self, name: str, view: View, takes: Sequence[tuple[_Take, Extent]]) -> None:
        """A tensor, as it is stored or as a view of stored ones: the chunks that it takes something of, and where these are."""
        entry = self.catalog.tensors[view.pieces[0].source]
        if _is_alias(entry, name, view):
            self.tensors.append(entry)
            return
        rows = [row for take, extent in takes for row in self._rows(name, take, extent)] or [self._empty(entry)]
        boxes = [box for box, _ in rows]
        files = np.array([self._source(e.path) for _, e in rows], dtype=np.int32)
        self.extents[name] = [extent for _, extent in rows]
        same = view.is_whole and name == entry.name
        logical, rank = (entry.logical, entry.rank) if same else (None, None)
        grid = _grid(view.shape, boxes, files)
        self.tensors.append(TensorEntry(name=name, dtype=entry.dtype, shape=view.shape, grid=grid, logical=logical, rank=rank))

    def _rows(self, name: str, take: _Take, extent: Extent) -> list[tuple[Box, Extent]]:
        """Boxes of the logical tensor and where their bytes are."""
        (piece, stored, copy), size = take, take.stored.dtype.itemsize
        taken = within(piece, copy.box)
        as_it_is = copy.box == copy.chunk_box and in_order(taken) and taken.box.numel * size <= MAX_CHUNK
        if extent.codec is not None and not (as_it_is and strides_of(extent.codec)):
            told = f"{name!r} would have a chunk of {stored.name!r} that is coded ({extent.codec})"
            raise UsageError(told, where=self.catalog.url, hint="convert instead")
        return [(taken.box, extent)] if as_it_is else _parts(taken, copy.chunk_box, extent, size)

    def _empty(self, entry: TensorEntry) -> tuple[Box, Extent]:
        """No bytes, of an empty tensor."""
        return Box.whole(entry.shape), self.catalog.extents(entry, [0])[0]

    def _source(self, path: str) -> int:
        return self._sources.setdefault(path, len(self._sources))

    def contents(self, state: Any) -> Contents:
        backend = self.catalog.backend
        sources = tuple(
            Source(root=absolute_url(backend.url), path=p, size=backend.size(p), stamp=stamp_of(backend, p)) for p in self._sources
        )
        return Contents(tensors=tuple(self.tensors), files=(), state=state, ranks=self.catalog.ranks, sources=sources, extents=self.extents)


def _parts(piece: Piece, chunk: Box, extent: Extent, itemsize: int) -> list[tuple[Box, Extent]]:
    """A part of a chunk, in pieces along the first axis that are not too long: as ranges, or with strides."""
    steps = row_major_strides(chunk.shape)
    strides = [itemsize * (0 if axis is None else steps[axis]) for axis in piece.axes]
    found = []
    for box in _cut(piece.box, itemsize, strides):
        offset = [p - c for p, c in zip(piece.part.offset, chunk.offset, strict=True)]
        for i, axis in enumerate(piece.axes):
            if axis is not None:
                offset[axis] += box.offset[i] - piece.box.offset[i]
        start = extent.offset + itemsize * sum(o * s for o, s in zip(offset, steps, strict=True))
        codec = strided(box.shape, strides, itemsize)
        length = box.numel * itemsize if codec is None else reach(box.shape, strides, itemsize)
        found.append((box, Extent(extent.path, start, length, None, codec)))
    return found


def _cut(box: Box, itemsize: int, strides: Sequence[int]) -> list[Box]:
    """A box in parts that take at most ``MAX_CHUNK`` bytes where they lie, along the axis whose elements are farthest apart there."""
    axes = [i for i, n in enumerate(box.shape) if n > 1]
    if not axes or reach(box.shape, strides, itemsize) <= MAX_CHUNK:
        return [box]
    axis = max(axes, key=strides.__getitem__)
    count = max(1, MAX_CHUNK // max(strides[axis], 1))
    found = []
    for at in range(0, box.shape[axis], count):
        offset, shape = list(box.offset), list(box.shape)
        offset[axis] += at
        shape[axis] = min(count, box.shape[axis] - at)
        found.append(Box(tuple(offset), tuple(shape)))
    return found


def _grid(shape: tuple[int, ...], boxes: Sequence[Box], files: np.ndarray[Any, np.dtype[np.int32]]) -> Grid:
    """The boxes as a grid: cut along one axis, if they are, else one by one."""
    if len(boxes) <= 1 or not shape:
        return Grid(cuts=tuple((0, n) for n in shape), files=files if len(files) else np.zeros(1, dtype=np.int32))
    axes = [i for i in range(len(shape)) if any(b.shape[i] != shape[i] for b in boxes)]
    if len(axes) == 1:
        starts = [b.offset[axes[0]] for b in boxes]
        if starts == sorted(starts):
            cuts = [(0, n) for n in shape]
            return Grid(cuts=tuple((*starts, n) if i == axes[0] else cuts[i] for i, n in enumerate(shape)), files=files)
    offsets = np.array([b.offset for b in boxes], dtype=np.int64)
    return Grid(boxes=(offsets, np.array([b.shape for b in boxes], dtype=np.int64)), files=files)


def _digested(backend: Backend, contents: Contents, progress: Progress | None) -> dict[str, list[Extent]]:
    """The extents with the digest of their bytes, read in parallel."""
    paths = [s.path for s in contents.sources]
    rows = [
        (t.name, i, paths[t.grid.file(i)], extent)
        for t in contents.tensors
        if t.alias is None
        for i, extent in enumerate(contents.extents[t.name])
    ]
    total, done = sum(e.length for *_, e in rows), 0
    found = {name: list(extents) for name, extents in contents.extents.items()}

    def digest(row: tuple[str, int, str, Extent]) -> str:
        _, _, path, extent = row
        state = xxhash.xxh3_64()
        buffer = np.empty(min(_BUFFER, extent.length), dtype=np.uint8).data
        for at in range(0, extent.length, _BUFFER):
            view = buffer[: min(_BUFFER, extent.length - at)]
            backend.read_into(path, extent.offset + at, view)
            state.update(view)
        return state.hexdigest()

    with ThreadPoolExecutor(min(16, 2 * (os.cpu_count() or 1)), thread_name_prefix="ckpt-import") as pool:
        for (name, i, _, extent), hexdigest in zip(rows, pool.map(digest, rows), strict=True):
            found[name][i] = extent._replace(digest=hexdigest)
            done += extent.length
            if progress is not None:
                progress(done, total)
    return found
