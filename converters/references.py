"""Where the chunks of a virtual checkpoint lie: views of stored tensors as ranges of files, with strides where they need some. No torch.

Invariant: the chunks of a tensor tile it, and every range lies inside a file that is there.
"""

# A view is made of pieces: boxes of stored tensors, whose axes may be in another order. A stored tensor lies in chunks. Where piece and
# chunk overlap is a *take*, and each take becomes one or more chunks of the virtual checkpoint:
#
#     stored q [8, 4], k [4, 4], one chunk each               view qkv [12, 4], interleaved in groups of 2 + 1 rows
#
#     file  |q0 q1 q2 q3 q4 q5 q6 q7|k0 k1 k2 k3|             q0 q1 k0 | q2 q3 k1 | q4 q5 k2 | q6 q7 k3
#            `---' take: rows 0-1 of q at offset 0            `---' chunk [0:2] = 2 rows at byte 0 of the file
#
#     the whole chunk, in its own order        the source's extent as it is, with its digest
#     a contiguous part                        a range of bytes; a digest of the whole says nothing of it
#     rows of a wider tensor, or transposed    the bytes from the first to the last element, and strides as a codec
#     filling that no piece has (padding)      one zero element somewhere in a file, with strides of 0
#
# Nothing is copied, so nothing can be decoded or cast: compressed chunks are refused, and chunks with strides can only be taken whole.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ckpt import settings
from ckpt.catalog import Catalog, Contents, Extent, Grid, SourceFile, TensorEntry
from ckpt.errors import CoverageError, UsageError
from ckpt.formats.external_elements import reach, strided, strides_of
from ckpt.formats.native.paths import RunBackend, is_reference
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import absolute_url
from ckpt.plan.layout.geometry import Box, row_major_strides
from ckpt.plan.reads import Copy, overlapping_chunks
from ckpt.plan.views import LogicalTensor, ViewPiece, in_order, within

from .selected_state import RenamedState, pruned_values
from .selection import stays

_LOOKED_AT = 1 << 16
"""Bytes at the beginning of a file among which zeros are looked for: its header has some."""


class _Take(NamedTuple):
    """What a piece of a view takes of a chunk of ``stored``."""

    piece: ViewPiece
    stored: TensorEntry
    copy: Copy


class References:
    """Gathers tensors and where their chunks lie."""

    def __init__(self, catalog: Catalog, state: RenamedState) -> None:
        self.catalog = catalog
        self.state = state
        self.tensors: list[TensorEntry] = []
        self.extents: dict[str, list[Extent]] = {}
        self.parted = False
        """Whether parts of chunks that have a digest or a checksum are pointed at: what it says of them, nobody can tell."""
        self._sources: dict[str, int] = {}
        self._taken: set[str] = set()
        self._zeros: dict[tuple[str, int], int | None] = {}

    @property
    def left_out(self) -> tuple[str, ...]:
        """Stored tensors of which nothing is taken, and values that are not."""
        return tuple(sorted({*self.catalog.tensors} - self._taken - self.state.united | {*self.state.left_out}))

    def add(self, wanted: Mapping[str, LogicalTensor]) -> None:
        """Tensors, as they are stored or as views of stored ones."""
        taken = {name: [] if self._stays_alias(name, wanted) else self._takes(name, view) for name, view in wanted.items()}
        extents = iter(self.catalog.extents_of([(t.stored, t.copy.chunk) for takes in taken.values() for t in takes]))  # of all at once
        for name, view in wanted.items():
            self._taken.update(piece.source for piece in view.pieces)
            if self._stays_alias(name, wanted):
                self.tensors.append(self.catalog.tensors[view.pieces[0].source])
            else:
                self._add(name, view, [(take, next(extents)) for take in taken[name]])

    def _stays_alias(self, name: str, wanted: Mapping[str, LogicalTensor]) -> bool:
        view = wanted[name]
        entry = self.catalog.tensors[view.pieces[0].source] if view.pieces else None
        target = wanted.get(entry.alias) if entry is not None and entry.alias is not None else None
        return (
            target is not None and entry is not None and stays(view, name, self.catalog) and stays(target, entry.alias or "", self.catalog)
        )

    def _takes(self, name: str, view: LogicalTensor) -> list[_Take]:
        """All chunks that a view is made of."""
        if not view.pieces:
            raise CoverageError(f"{name!r} would have no stored elements at all", where=self.catalog.url)
        like = self.catalog.tensors[view.pieces[0].source]
        takes = []
        for piece in view.pieces:
            stored = self.catalog.tensors[piece.source]
            if stored.dtype != like.dtype:
                message = f"{name!r} would be made of {like.name!r} ({like.dtype.name}) and {stored.name!r} ({stored.dtype.name})"
                raise UsageError(message, where=self.catalog.url, hint="convert with one dtype instead")
            takes += [_Take(piece, stored, copy) for copy in overlapping_chunks(stored.grid, piece.part)]
        return takes

    def _add(self, name: str, view: LogicalTensor, takes: Sequence[tuple[_Take, Extent]]) -> None:
        entry = self.catalog.tensors[view.pieces[0].source]
        rows = [row for take, extent in takes for row in self._rows(name, take, extent)]
        if not rows:  # an empty tensor has an extent without bytes
            rows = [(Box.whole(entry.shape), self.catalog.extents(entry, [0])[0])]
        rows += [row for box in self._filling(name, view) for row in self._filled(name, box, rows[0][1].path, entry.dtype.itemsize)]
        boxes = [box for box, _ in rows]
        files = np.array([self._sources.setdefault(e.path, len(self._sources)) for _, e in rows], dtype=np.int32)
        self.extents[name] = [extent for _, extent in rows]
        logical = entry.logical if view.is_all_of(entry.shape) else view.unpadded
        rank = entry.rank if name == entry.name else None
        grid = _grid(view.shape, boxes, files)
        self.tensors.append(TensorEntry(name=name, dtype=entry.dtype, shape=view.shape, grid=grid, logical=logical, rank=rank))

    def _filling(self, name: str, view: LogicalTensor) -> list[Box]:
        """Boxes that no piece has."""
        boxes: list[Box] = []
        if len(view.pieces) == 1 and view.pieces[0].box == Box.whole(view.shape):
            return boxes
        while (fault := view.fault()) is not None:
            if fault.times:
                raise CoverageError(f"{name}{fault.box} would be in {fault.times} stored tensors", where=self.catalog.url)
            boxes.append(fault.box)
            view = replace(view, pieces=(*view.pieces, ViewPiece(fault.box, "", fault.box, ())))
        return boxes

    def _filled(self, name: str, box: Box, path: str, itemsize: int) -> list[tuple[Box, Extent]]:
        """Zeros, which have to lie in a file as all else: one element of zero bytes, wherever there is one, with strides of 0."""
        if (path, itemsize) not in self._zeros:
            backend = self.catalog.backend
            zeros_at = backend.read(path, 0, min(_LOOKED_AT, backend.size(path))).find(bytes(itemsize))
            self._zeros[path, itemsize] = None if zeros_at < 0 else zeros_at
        offset = self._zeros[path, itemsize]
        if offset is None:
            message = f"{name}{box} would be filling, and {path} has no zeros to point at"
            raise CoverageError(message, where=self.catalog.url, hint="`ckpt convert` instead, which writes them")
        none = (0,) * len(box.shape)
        parts = _cut(box, itemsize, [itemsize * step for step in row_major_strides(box.shape)])
        return [(part, Extent(path, offset, itemsize, None, strided(part.shape, none, itemsize))) for part in parts]

    def _rows(self, name: str, take: _Take, extent: Extent) -> list[tuple[Box, Extent]]:
        """Boxes of the logical tensor and where their bytes are."""
        (piece, stored, copy), size = take, take.stored.dtype.itemsize
        taken = within(piece, copy.box)
        as_it_is = copy.box == copy.chunk_box and in_order(taken) and taken.box.numel * size <= settings.CHUNK
        if extent.codec is not None and not (as_it_is and strides_of(extent.codec)):
            message = f"{name!r} would have a chunk of {stored.name!r} that is coded ({extent.codec})"
            raise UsageError(message, where=self.catalog.url, hint="convert instead")
        if as_it_is:
            return [(taken.box, extent)]
        self.parted |= (extent.digest, extent.crc32) != (None, None)
        return _parts(taken, copy.chunk_box, extent, size)

    @property
    def paths(self) -> list[str]:
        """Where the sources of ``contents`` lie for the backend that is pointed at."""
        return list(self._sources)

    def contents(self) -> Contents:
        backend = self.catalog.backend
        sources = tuple(_source(backend, path) for path in self._sources)
        kept, gone = sorted(t.name for t in self.tensors), {*self.state.left_out}
        ranks = {rank: pruned_values(values, kept) for rank, values in self.catalog.ranks.items()}
        return Contents(
            tensors=tuple(self.tensors),
            files=(),
            state=self.state.state,
            ranks={rank: {path: node for path, node in values.items() if path not in gone} for rank, values in ranks.items()},
            sources=sources,
            extents=self.extents,
        )


def _source(backend: Backend, path: str) -> SourceFile:
    root, inner = backend.url, path
    if isinstance(backend, RunBackend) and is_reference(path):  # a neighbour has it: a source's path leads to nothing above its root
        root, inner = backend.owner_url(path), path.split("/", 2)[2]
    return SourceFile(root=absolute_url(root), path=inner, size=backend.size(path), stamp=backend.version_token(path))


def _parts(piece: ViewPiece, chunk: Box, extent: Extent, itemsize: int) -> list[tuple[Box, Extent]]:
    """A part of a chunk, in pieces along the first axis that are not too long: as ranges, or with strides."""
    steps = row_major_strides(chunk.shape)
    strides = [itemsize * (0 if axis is None else steps[axis]) for axis in piece.axes]
    parts = []
    for box in _cut(piece.box, itemsize, strides):
        offset = [p - c for p, c in zip(piece.part.offset, chunk.offset, strict=True)]
        for i, axis in enumerate(piece.axes):
            if axis is not None:
                offset[axis] += box.offset[i] - piece.box.offset[i]
        start = extent.offset + itemsize * sum(o * s for o, s in zip(offset, steps, strict=True))
        codec = strided(box.shape, strides, itemsize)
        length = box.numel * itemsize if codec is None else reach(box.shape, strides, itemsize)
        parts.append((box, Extent(extent.path, start, length, None, codec)))
    return parts


def _cut(box: Box, itemsize: int, strides: Sequence[int]) -> list[Box]:
    """A box in parts that take at most ``settings.CHUNK`` bytes where they lie, along the axis whose elements are farthest apart there."""
    axes = [i for i, n in enumerate(box.shape) if n > 1]
    if not axes or reach(box.shape, strides, itemsize) <= settings.CHUNK:
        return [box]
    # Cut along the axis with the largest stride: each part is then a shorter stretch of the file. A cut along another
    # axis would leave each part as long as before.
    axis = max(axes, key=strides.__getitem__)
    count = max(1, settings.CHUNK // max(strides[axis], 1))
    first, end = box.offset[axis], box.end[axis]
    return [box.narrowed(axis, at, min(at + count, end)) for at in range(first, end, count)]


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
