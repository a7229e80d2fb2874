"""Tensors that are put together of contiguous elements of stored ones: the entries of a catalog, and where their bytes are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckpt.catalog import Extent, Replica, TensorEntry
from ckpt.dtypes import dtype
from ckpt.errors import CorruptError, FormatError
from ckpt.formats.dcp_container import DcpBox, Places
from ckpt.formats.external import ChunkRequests, ExternalFile, Range, grid_of, one_chunk_grid, read_ranges
from ckpt.formats.external_elements import reach, read_extent, strided
from ckpt.formats.stand_ins import StoredStorage, StoredView
from ckpt.formats.torch_archive import Archive
from ckpt.formats.torchzip import rows_of
from ckpt.plan.layout.geometry import Box

if TYPE_CHECKING:
    import numpy.typing as npt

    from ckpt.io_backends.protocol import Backend


class InItem(NamedTuple):
    """Elements of a box that is an item of a DCP data file; ``name`` is the tensor's there."""

    name: str
    dtype: str
    box: DcpBox

    @property
    def numel(self) -> int:
        return math.prod(self.box.shape)


class InArchive(NamedTuple):
    """Elements of a tensor in an archive, which has the number ``archive``."""

    archive: int
    view: StoredView

    @property
    def dtype(self) -> str:
        return self.view.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.view.shape)


class InFile(NamedTuple):
    """``numel`` elements that follow one another in a file, from byte ``offset`` on, with nothing around them."""

    path: str
    dtype: str
    offset: int
    numel: int


Source = InItem | InArchive | InFile


class SourcePiece(NamedTuple):
    """A box of a tensor and the elements of a source that it is: from ``start`` on, row by row or with ``strides`` between neighbours."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    source: Source
    start: int = 0
    strides: tuple[int, ...] | None = None


class PieceTable:
    """Collects tensors; then ``entries`` are what a catalog has, and ``locate`` finds their bytes.

    ``rows`` says which of ``files`` each archive lies in.
    """

    def __init__(self, backend: Backend, files: Sequence[ExternalFile], archives: Sequence[Archive], rows: Sequence[int]) -> None:
        self.entries: dict[str, TensorEntry] = {}
        self.backend = backend
        self.files = files
        self.archives = archives
        self._rows = rows
        self._row_of = {file.path: row for row, file in enumerate(files)}
        self._places = Places(backend, {file.path: file.size for file in files})
        self._pieces: dict[str, list[SourcePiece]] = {}
        self._copies: dict[str, list[SourcePiece]] = {}

    def add(
        self, name: str, kind: str, shape: tuple[int, ...], pieces: Iterable[SourcePiece], logical: tuple[int, ...] | None = None
    ) -> None:
        """A tensor. Of pieces with the same box, which are replicas, the first counts."""
        if name in self.entries:
            raise CorruptError(f"two tensors have the name {name!r}", where=self.backend.url, hint="files of several saves are mixed")
        first: dict[tuple[tuple[int, ...], tuple[int, ...]], SourcePiece] = {}
        copies = []
        for piece in pieces:
            self._check(name, kind, shape, piece)
            if first.setdefault((piece.offset, piece.shape), piece) is not piece:
                copies.append(piece)
        own = [p for p in first.values() if math.prod(p.shape)] or list(first.values())[:1]
        if len(own) == 1 and own[0].shape == shape:
            grid, order = one_chunk_grid(shape, self._row(own[0].source)), [0]
        else:
            grid, order = grid_of(name, shape, [p[:2] for p in own], [self._row(p.source) for p in own], self.backend.url)
        fault = grid.fault(shape)
        if fault is not None:
            what = f"{name}{fault.box} is stored {fault.times} times by parts that are no replicas"
            raise CorruptError(what, where=self.backend.url, hint="files are missing, or are of different saves")
        self.entries[name] = TensorEntry(name=name, dtype=dtype(kind), shape=shape, grid=grid, logical=logical)
        self._pieces[name] = [own[i] for i in order]
        if copies:
            self._copies[name] = copies

    def _check(self, name: str, kind: str, shape: tuple[int, ...], piece: SourcePiece) -> None:
        inside = len(piece.offset) == len(shape) and all(o + n <= s for o, n, s in zip(piece.offset, piece.shape, shape, strict=True))
        span = reach(piece.shape, piece.strides, 1) if piece.strides is not None else math.prod(piece.shape)
        if not inside or piece.source.dtype != kind or not 0 <= piece.start <= piece.source.numel - span:
            what = f"a part {piece.source.dtype} {list(piece.shape)} at {list(piece.offset)} of {name}, {kind} {list(shape)}"
            raise CorruptError(f"there is {what}", where=self.backend.url, hint="the files are of different saves, or one is damaged")
        if isinstance(piece.source, InArchive) and span:
            self.archives[piece.source.archive].check(piece.source.view.storage)

    def _row(self, source: Source) -> int:
        if isinstance(source, InArchive):
            return self._rows[source.archive]
        return self._row_of[source.path if isinstance(source, InFile) else source.box.item.path]

    def parts(self, name: str, axis: int) -> int:
        """In how many parts of an axis a tensor was stored; 1 of a tensor that is not there."""
        entry = self.entries.get(name)
        return 1 if entry is None else len({int(o) for o in entry.grid.all_boxes()[0][:, axis]})

    def pieces(self, name: str) -> Sequence[SourcePiece]:
        """What a tensor of the table is made of, in the order of its chunks."""
        return self._pieces[name]

    def with_pieces(self, backend: Backend, files: Sequence[ExternalFile], pieces: Mapping[str, Sequence[SourcePiece]]) -> PieceTable:
        """The same tensors, some of them made of other ``pieces``, which may lie in further ``files`` of the ``backend``."""
        made = PieceTable(backend, [*self.files, *files], self.archives, self._rows)
        for name, entry in self.entries.items():
            own = pieces[name] if name in pieces else [*self._pieces[name], *self._copies.get(name, ())]
            made.add(name, entry.dtype.name, entry.shape, own, entry.logical)
        return made

    # ---- places of bytes

    def locate(self, wanted: ChunkRequests) -> list[Extent]:
        """The extents of chunks. Reads headers of records and items that were not read before, many at once."""
        return self._extents([(entry.name, self._pieces[entry.name][number]) for entry, number in wanted])

    def replicas(self) -> list[Replica]:
        """All copies of boxes that are stored more than once, besides the one that is read."""
        named = [(name, piece) for name, pieces in self._copies.items() for piece in pieces]
        return [Replica(name, Box(p.offset, p.shape), e) for (name, p), e in zip(named, self._extents(named), strict=True)]

    def extents_of(self, wanted: ChunkRequests) -> list[Extent]:
        """The same, as catalogs call it."""
        return self.locate(wanted)

    def read_piece(self, name: str, piece: SourcePiece) -> npt.NDArray[Any]:
        """The elements of a piece of the tensor ``name``, which need not be in the table, as ``read_box`` gives them."""
        (extent,) = self._extents([(name, piece)])
        return read_extent(self.backend, piece.source.dtype, extent, piece.shape)

    def read_scalars(self, sources: Sequence[InArchive]) -> list[float]:
        """The numbers that these tensors without axes are, as ``float`` has them; many small reads at a time."""
        extents = self._extents([("of one number", whole_piece(source, ())) for source in sources])
        data = read_ranges(self.backend, [Range(e.path, e.offset, e.length) for e in extents])
        return [float(np.frombuffer(raw, self._number(source))[0]) for raw, source in zip(data, sources, strict=True)]

    def _number(self, source: InArchive) -> str:
        name = dtype(source.dtype).numpy
        if name is None or name.startswith("complex"):
            raise FormatError(f"a step of dtype {source.dtype}", where=self.archives[source.archive].where, hint="save it as float32")
        return name

    def _extents(self, named: Sequence[tuple[str, SourcePiece]]) -> list[Extent]:
        sources = [piece.source for _, piece in named if math.prod(piece.shape)]
        self._places.look((s.name, s.dtype, s.box) for s in sources if isinstance(s, InItem))
        by_archive: dict[int, list[StoredStorage]] = {}
        for source in sources:
            if isinstance(source, InArchive):
                by_archive.setdefault(source.archive, []).append(source.view.storage)
        for number, storages in by_archive.items():
            self.archives[number].starts(storages)
        return [self._extent(name, piece) for name, piece in named]

    def _extent(self, name: str, piece: SourcePiece) -> Extent:
        size = dtype(piece.source.dtype).itemsize
        path = self.files[self._row(piece.source)].path
        if not math.prod(piece.shape):
            return Extent(path, 0, 0, None)
        start = self._start(name, piece.source) + piece.start * size
        if piece.strides is None:
            return Extent(path, start, math.prod(piece.shape) * size, None, crc32=self._crc32(piece, size))
        strides = [s * size for s in piece.strides]
        return Extent(path, start, reach(piece.shape, strides, size), None, strided(piece.shape, strides, size))

    def _crc32(self, piece: SourcePiece, size: int) -> int | None:
        """What the archive says of the bytes of a piece, if these are a whole storage."""
        source, length = piece.source, math.prod(piece.shape) * size
        if isinstance(source, InItem):
            is_whole = piece.start == 0 and length == math.prod(source.box.shape) * size
            return self._places.of(source.box.item)[1] if is_whole else None
        if isinstance(source, InFile):
            return None
        return self.archives[source.archive].crc32(source.view.storage, (source.view.offset + piece.start) * size, length)

    def _start(self, name: str, source: Source) -> int:
        if isinstance(source, InItem):
            return self._places.of(source.box.item)[0]
        if isinstance(source, InFile):
            return source.offset
        archive, view = self.archives[source.archive], source.view
        rows = rows_of(view)
        if rows is None or len(rows) != 1 or view.lazy:
            hint = "load it with torch, and save tensor.contiguous()"
            raise FormatError(
                f"a part of tensor {name} is not stored row by row: its strides are {list(view.strides)}", where=archive.where, hint=hint
            )
        return archive.starts([view.storage])[0] + rows[0].start * view.itemsize


def whole_piece(source: Source, shape: tuple[int, ...]) -> SourcePiece:
    """All of a source, as all of a tensor."""
    return SourcePiece((0,) * len(shape), shape, source)
