"""Files of ``torch.save`` as catalogs: a single file, or a Hugging Face directory of ``.bin`` files with an index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt.catalog import Extent, Format, Grid, Replica, TensorEntry
from ckpt.dtypes import dtype
from ckpt.errors import CorruptError, FormatError
from ckpt.plan.layout.geometry import Box, row_major_strides

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
    sizes_of,
)
from .pickle_nodes import NodeMaker
from .stand_ins import StoredPart, StoredStorage, StoredView
from .torch_archive import MAGIC, Archive, is_legacy, open_archive

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


# Tensors of ``torch.save`` archives as entries of a catalog, and where their bytes are.
#
# A tensor is a view of a storage: contiguous ones are one chunk; of others, such as a slice of columns, each contiguous row is a chunk. A
# transposed tensor has rows of one element: beyond a small size that is not read, and said when its bytes are asked for.

# The contiguous rows of a view. Trailing axes whose strides are those of a dense tensor are one run of bytes:
#
#     t = base[:, 1:3] of base [4, 5]     shape (4, 2), strides (5, 1)
#     storage    . x x . .  . x x . .  . x x . .  . x x . .
#                  `-' 4 chunks of shape [1, 2], 5 elements apart
#
# A dense view has one chunk, however many axes. A transposed one would have as many chunks as elements, hence the limits.


MAX_ROWS = 1 << 16
"""Rows that a tensor may consist of: as many chunks, and reads."""


MAX_ROWS_OF_ALL = 1 << 20
"""Rows of all tensors that are not contiguous: they take memory before any is read."""
MAX_SPREAD = 1 << 20
"""Bytes that an expanded tensor, which has the same stored elements many times, may have beyond its storage."""


class StorageBlock(NamedTuple):
    """Contiguous bytes of a storage: ``offset`` and ``length`` in bytes, ``file`` the number of its archive."""

    file: int
    storage: StoredStorage
    offset: int
    length: int


class Row(NamedTuple):
    """A box of a tensor and where its elements begin, in elements of the storage."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int


def rows_of(view: StoredView) -> list[Row] | None:
    """The fewest boxes that are contiguous in the storage, in row-major order; None if they are too many, or unfold to very much."""
    shape, strides = view.shape, view.strides
    if not math.prod(shape):
        return [Row((0,) * len(shape), shape, view.offset)]
    dense = row_major_strides(shape)
    inner = len(shape)
    while inner and (shape[inner - 1] == 1 or strides[inner - 1] == dense[inner - 1]):
        inner -= 1
    if math.prod(shape[:inner]) > MAX_ROWS or math.prod(shape) * view.itemsize > max(view.storage.nbytes, MAX_SPREAD):
        return None
    tail = shape[inner:]
    corners = product(*map(range, shape[:inner]))
    return [
        Row(c + (0,) * len(tail), (1,) * inner + tail, view.offset + sum(i * s for i, s in zip(c, strides, strict=False))) for c in corners
    ]


@dataclass(eq=False)
class TensorTable:
    """Collects tensors; then ``entries`` are what a catalog has, and ``locate`` finds their bytes.

    ``file`` in its methods is the number of an archive. ``rows`` says which of ``files`` each archive lies in.
    """

    archives: Sequence[Archive]
    files: Sequence[ExternalFile]
    rows: Sequence[int] = ()
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    _blocks: dict[str, list[StorageBlock]] = field(default_factory=dict)
    _problems: dict[str, str] = field(default_factory=dict)
    _known: dict[tuple[int, StoredView], str] = field(default_factory=dict)
    _rows_used: int = 0
    _copies: list[tuple[str, Box, StorageBlock]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = self.rows or range(len(self.archives))

    def add(self, name: str, file: int, view: StoredView, rank: int | None = None) -> None:
        """A whole tensor. The same view again, as of tied weights, is an alias."""
        self._check_new(name, file)
        if math.prod(view.shape):
            self.archives[file].check(view.storage)
        first = self._known.setdefault((file, view), name)
        if first != name and self.entries[first].rank == rank:
            there = self.entries[first]
            self.entries[name] = TensorEntry(name=name, dtype=there.dtype, shape=there.shape, grid=there.grid, alias=first, rank=rank)
            return
        rows = self._rows(view)
        if rows is None or view.lazy:
            what = f"its elements have still to be changed ({view.lazy})" if view.lazy else f"its strides are {list(view.strides)}"
            self._problems[name] = f"tensor {name} of shape {list(view.shape)} is not stored row by row: {what}"
            rows = [Row((0,) * len(view.shape), view.shape, view.offset)]
        self._put(name, dtype(view.dtype).name, view.shape, [(row, file, view.storage, view.itemsize) for row in rows], rank)

    def add_parts(self, name: str, kind: str, shape: tuple[int, ...], parts: Sequence[tuple[int, tuple[int, ...], StoredView]]) -> None:
        """A tensor of which several files have parts: file, offset of the box, and view. Of equal boxes the first counts; the others
        are its replicas."""
        rows: list[tuple[Row, int, StoredStorage, int]] = []
        seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for file, offset, view in parts:
            self._check_new(name, file)
            inside = len(offset) == len(shape) and all(o + n <= size for o, n, size in zip(offset, view.shape, shape, strict=True))
            if not inside or view.dtype != kind:
                what = f"a part {view.dtype} {list(view.shape)} at {list(offset)} of the tensor {name}, {kind} {list(shape)}"
                raise CorruptError(f"there is {what}", where=self.archives[file].where, hint="the files are of different saves")
            if not math.prod(view.shape):
                continue
            if (offset, view.shape) in seen:
                self.add_copy(name, file, offset, view)
                continue
            seen.add((offset, view.shape))
            self.archives[file].check(view.storage)
            own = self._rows(view)
            if own is None or view.lazy:
                self._problems[name] = f"a part of tensor {name} is not stored row by row: its strides are {list(view.strides)}"
                own = [Row((0,) * len(shape), view.shape, view.offset)]
            rows += [
                (Row(tuple(a + b for a, b in zip(offset, r.offset, strict=True)), r.shape, r.start), file, view.storage, view.itemsize)
                for r in own
            ]
        if not rows and not math.prod(shape):
            file, _, view = parts[0]
            rows = [(Row((0,) * len(shape), shape, 0), file, view.storage, view.itemsize)]
        self._put(name, kind, shape, rows, None)

    def _rows(self, view: StoredView) -> list[Row] | None:
        rows = rows_of(view)
        if rows is None or len(rows) == 1:
            return rows
        self._rows_used += len(rows)
        return rows if self._rows_used <= MAX_ROWS_OF_ALL else None

    def add_placed(self, name: str, kind: str, shape: tuple[int, ...], grid: Grid, blocks: Sequence[StorageBlock]) -> None:
        """A tensor of which it is known where each chunk of ``grid`` lies."""
        self._check_new(name, blocks[0].file if blocks else 0)
        self.entries[name] = TensorEntry(name=name, dtype=dtype(kind), shape=shape, grid=grid)
        self._blocks[name] = list(blocks)

    def add_alias(self, name: str, of: str) -> None:
        """A further name of a tensor that is there."""
        first = self.entries[self.entries[of].alias or of]
        self.entries[name] = TensorEntry(name=name, dtype=first.dtype, shape=first.shape, grid=first.grid, alias=first.name)

    def add_copy(self, name: str, file: int, offset: tuple[int, ...], view: StoredView) -> None:
        """A further copy of a box of the tensor ``name``; see :meth:`replicas`."""
        for row in () if view.lazy else self._rows(view) or ():
            box = Box(tuple(a + b for a, b in zip(offset, row.offset, strict=True)), row.shape)
            self._copies.append(
                (name, box, StorageBlock(file, view.storage, row.start * view.itemsize, math.prod(row.shape) * view.itemsize))
            )

    def replicas(self) -> list[Replica]:
        """All copies of boxes that are stored more than once, besides those that are read; without those that are not stored row by row,
        or whose elements have more than 8 bytes."""
        known = [c for c in self._copies if c[0] not in self._problems and self.entries[c[0]].dtype.itemsize <= 8]
        extents = self._extents([block for _, _, block in known])
        return [Replica(name, box, extent) for (name, box, _), extent in zip(known, extents, strict=True)]

    def storages(self) -> list[Extent]:
        """Storages with a checksum that tensors are only parts of."""
        blocks = [b for stored in self._blocks.values() for b in stored if b.length]
        parts = {(b.file, b.storage.key): b for b in blocks if self.archives[b.file].crc32(b.storage, b.offset, b.length) is None}
        whole_storages = [StorageBlock(b.file, b.storage, 0, self.archives[b.file].record_size(b.storage)) for b in parts.values()]
        return [extent for extent in self._extents(whole_storages) if extent.crc32 is not None]

    def _put(
        self, name: str, kind: str, shape: tuple[int, ...], rows: Sequence[tuple[Row, int, StoredStorage, int]], rank: int | None
    ) -> None:
        blocks = [StorageBlock(file, s, row.start * size, math.prod(row.shape) * size) for row, file, s, size in rows]
        if len(rows) == 1 and rows[0][0].shape == shape:
            grid = one_chunk_grid(shape, self.rows[rows[0][1]])
        else:
            where = self.archives[rows[0][1]].where if rows else name
            grid, order = grid_of(name, shape, [r[0][:2] for r in rows], [self.rows[r[1]] for r in rows], where)
            blocks = [blocks[i] for i in order]
        self.entries[name] = TensorEntry(name=name, dtype=dtype(kind), shape=shape, grid=grid, rank=rank)
        self._blocks[name] = blocks

    def _check_new(self, name: str, file: int) -> None:
        if name in self.entries:
            raise CorruptError(
                f"two tensors have the name {name!r}", where=self.archives[file].where, hint="keys such as 1 and '1' make the same name"
            )

    def locate(self, wanted: ChunkRequests) -> list[Extent]:
        """The extents of chunks. Reads local headers of records, many at once."""
        return self._extents([self._block(entry, number) for entry, number in wanted])

    def _extents(self, blocks: Sequence[StorageBlock]) -> list[Extent]:
        by_file: dict[int, list[StoredStorage]] = {}
        for block in blocks:
            if block.length:
                by_file.setdefault(block.file, []).append(block.storage)
        starts: dict[tuple[int, str], int] = {}
        for file, storages in by_file.items():
            starts |= {(file, s.key): at for s, at in zip(storages, self.archives[file].starts(storages), strict=True)}
        return [self._extent(b, starts[b.file, b.storage.key] if b.length else 0) for b in blocks]

    def _extent(self, block: StorageBlock, start: int) -> Extent:
        path = self.files[self.rows[block.file]].path
        if not block.length:
            return Extent(path, 0, 0, None)
        crc = self.archives[block.file].crc32(block.storage, block.offset, block.length)
        return Extent(path, start + block.offset, block.length, None, crc32=crc)

    def _block(self, entry: TensorEntry, number: int) -> StorageBlock:
        name = entry.alias or entry.name
        if name in self._problems:
            hint = "load it with torch, and save tensor.contiguous() (tensor.resolve_conj(), tensor.resolve_neg())"
            raise FormatError(self._problems[name], where=self.archives[self._blocks[name][0].file].where, hint=hint)
        return self._blocks[name][number]


SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""How files of ``torch.save`` are usually called: in a directory only such files are looked at."""
INDEX_SUFFIX = ".bin.index.json"
FORMAT_NAME = "torch.save archive"


def recognises(backend: Backend, names: Sequence[str]) -> bool:
    """Whether there is an index of ``.bin`` files, or exactly one file of ``torch.save``."""
    if any(name.endswith(INDEX_SUFFIX) for name in names):
        return True
    files = candidates(backend, names, SUFFIXES)
    return len(files) == 1 and is_torch_file(backend, files[0])


def is_torch_file(backend: Backend, path: str) -> bool:
    """Whether a file begins like one of ``torch.save``, old ones included."""
    head = backend.read(path, 0, min(backend.size(path), 512))
    return head.startswith(MAGIC) or is_legacy(head)


def open_torch(backend: Backend) -> ExternalCatalog:
    """Open what ``recognises`` found."""
    names = backend.list_dir()
    index = find_index(names, INDEX_SUFFIX, backend.url)
    if index is not None:
        return _open_shards(backend, index)
    (path,) = candidates(backend, names, SUFFIXES)
    check_all_there(backend, [path])
    archive = open_archive(backend, path)
    files = [ExternalFile(path, backend.size(path))]
    table = TensorTable([archive], files)
    maker = node_maker(table, 0)
    state = maker.root(archive.load())
    contents = ExternalContents(tensors=table.entries.values(), files=files, state=state, opaque=maker.opaque)
    return ExternalCatalog(contents, backend=backend, format=FORMAT_NAME, locate=table.locate, storages=table.storages)


def node_maker(table: TensorTable, file: int) -> NodeMaker:
    """Makes the nodes of an archive's object graph; puts its tensors into the table."""
    archive = table.archives[file]

    def place(value: StoredView | StoredPart, path: str) -> Any:
        if isinstance(value, StoredPart):
            raise FormatError(
                f"tensor {path} is sharded, and this file has the part of one rank",
                where=archive.where,
                hint="open the directory that has the files of all ranks",
            )
        table.add(path, file, value)
        return {"$tensor": path}

    return NodeMaker(archive.values, place, pickle_bytes=archive.pickle_bytes)


def _open_shards(backend: Backend, index: str) -> ExternalCatalog:
    weights = read_index(backend, index)
    paths = sorted(set(weights.values()))
    files = [ExternalFile(path, size) for path, size in zip(paths, sizes_of(backend, paths), strict=True)]
    table = TensorTable([open_archive(backend, path) for path in paths], files)
    owners: dict[str, str] = {}
    for number, path in enumerate(paths):
        node_maker(table, number).root(table.archives[number].load())
        owners |= {name: path for name in table.entries if name not in owners}
    check_index(weights, owners, f"{backend.url.rstrip('/')}/{index}")
    contents = ExternalContents(tensors=table.entries.values(), files=files)
    return ExternalCatalog(contents, backend=backend, format=FORMAT_NAME, locate=table.locate, storages=table.storages)


FORMAT = Format(name=FORMAT_NAME, recognises=recognises, open=open_torch)
"""This format, for ckpt.formats.registry."""
