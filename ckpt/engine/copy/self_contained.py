"""What a copy of a checkpoint with references has in their place: data files of its own, with the chunks that it refers to. No torch.

    ../step-1/data/…-00000   a b c d e        the base's file; the checkpoint has b, c and e of it
                               │ │   │
    data/<id>-00000-1        b c e            at the target: a header of its own, the same stored bytes under the same digests

Grids number the rows of files.arrow, and a row stays where it was: so of the index only files.arrow changes, and of the record what it
says of that file, and the feature. Of a chunk that is stored as a difference, its anchor is gathered: the difference stays as it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from ckpt.catalog import DataFile, Extent, TensorEntry
from ckpt.engine.digest_reader import ChunkName
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.commit import REFERENCED, CommitRecord
from ckpt.formats.native.datafile import ChunkSpec, chunk_key, coded_key, plan_coded_file
from ckpt.formats.native.index import encode_files
from ckpt.formats.native.paths import FILES, is_reference
from ckpt.plan.layout.geometry import Box

RANK = 0
"""Whose files they are at the target: the rank that wrote them belongs to another save."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GatheredFile:
    """A data file of the target that is made of chunks of a file that the source refers to. ``chunks`` are where these are, by offset;
    ``offsets`` where each goes."""

    file: DataFile
    header: bytes
    chunks: Sequence[ChunkName]
    offsets: Sequence[int]

    def places(self, offset: int, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Where bytes from ``offset`` of the source on go: an offset in the target for each part."""
        starts = [chunk.extent.offset for chunk in self.chunks]
        while len(data):
            at = bisect_right(starts, offset) - 1
            count = min(len(data), starts[at] + self.chunks[at].extent.length - offset)
            yield self.offsets[at] + offset - starts[at], data[:count]
            offset, data = offset + count, data[count:]


@dataclass(frozen=True, kw_only=True, eq=False)
class SelfContained:
    """A checkpoint without references: its record, the rows and the bytes of its files.arrow, and what has to be gathered, by path."""

    record: CommitRecord
    files: tuple[DataFile, ...]
    rows: bytes
    gathered: Mapping[str, GatheredFile]

    @classmethod
    def of(cls, catalog: NativeCatalog) -> SelfContained | None:
        """None if the checkpoint has no references."""
        if REFERENCED not in catalog.record.features:
            return None
        chunks: defaultdict[int, list[tuple[TensorEntry, int]]] = defaultdict(list)
        for entry in catalog.tensors.values():
            numbers = np.broadcast_to(entry.grid.files, entry.grid.count) if entry.alias is None else ()
            anchors = entry.grid.anchors if entry.alias is None and entry.grid.anchors is not None else ()
            # A chunk that has an anchor is the checkpoint's own, so no row has both: the chunk and its anchor.
            for chunk, row in (*enumerate(numbers), *enumerate(anchors)):
                if row >= 0 and is_reference(catalog.files[int(row)].path):
                    chunks[int(row)].append((entry, chunk))
        number = sum(file.rank == RANK and not is_reference(file.path) for file in catalog.files)
        files, gathered = [], {}
        for row, file in enumerate(catalog.files):
            if is_reference(file.path):
                made = _gathered(catalog, row, chunks[row], number)
                gathered[made.file.path] = made
                number += 1
                files.append(made.file)
            else:
                files.append(file)
        data = encode_files(files)
        index = replace(catalog.record.index[FILES], size=len(data), digest=xxhash.xxh3_128_hexdigest(data))
        record = replace(
            catalog.record,
            features=tuple(f for f in catalog.record.features if f != REFERENCED),
            index={**catalog.record.index, FILES: index},
            inline={name: text for name, text in catalog.record.inline.items() if name != FILES},
        )
        return cls(record=record, files=tuple(files), rows=data, gathered=gathered)


def _gathered(catalog: NativeCatalog, row: int, chunks: Sequence[tuple[TensorEntry, int]], number: int) -> GatheredFile:
    strong = catalog.header(row).strong_digests
    placed = [(_extent(catalog, entry, chunk), entry, entry.grid.box(chunk)) for entry, chunk in chunks]
    placed.sort(key=lambda item: item[0].offset)
    extents = [extent for extent, _, _ in placed]
    plan = plan_coded_file(
        [ChunkSpec(name=entry.name, box=box, shape=entry.shape, dtype=entry.dtype) for _, entry, box in placed],
        [extent.codec for extent in extents],
        [extent.length for extent in extents],
        id=catalog.record.id,
        rank=RANK,
        number=number,
        has_128=bool(strong),
    )
    keys = [_key(extent, entry, box) for extent, entry, box in placed]
    digests = [int(extent.digest or "", 16) for extent in extents]
    header = plan.encode_header(digests, {i: strong[key] for i, key in enumerate(keys) if key in strong})
    names = [ChunkName(key, None, extent) for key, extent in zip(keys, extents, strict=True)]
    return GatheredFile(file=plan.row(header), header=header, chunks=names, offsets=plan.offsets.tolist())


def _extent(catalog: NativeCatalog, entry: TensorEntry, chunk: int) -> Extent:
    extent = catalog.extents(entry, [chunk])[0]
    return extent if extent.anchor is None else extent.anchor.extent


def _key(extent: Extent, entry: TensorEntry, box: Box) -> str:
    if extent.codec is None:
        return chunk_key(entry.name, box, entry.shape, entry.dtype)
    return coded_key(entry.name, box, entry.shape, extent.codec)
