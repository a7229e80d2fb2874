"""The chunks of a checkpoint that verify reads, where they lie, and what is said of one that is wrong. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt.byte_source.chunk import ChunkName
from ckpt.catalog import Catalog, Extent, TensorEntry
from ckpt.errors import FormatError
from ckpt.formats.external.base import ExternalCatalog

from .structure import FAILURES, UNREAD, Problem, file_of


@dataclass(frozen=True, slots=True)
class ChunkToVerify:
    """``others`` are chunks that lie in the same bytes, whose checksum is one."""

    entry: TensorEntry
    number: int
    extent: Extent
    others: int = 0

    @property
    def end(self) -> int:
        return self.extent.offset + self.extent.length

    @property
    def name(self) -> ChunkName:
        return ChunkName(self.entry.name, self.entry.grid.box(self.number), self.extent)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements: more than those that are stored if it is coded."""
        return self.entry.grid.box(self.number).numel * self.entry.dtype.itemsize

    @property
    def read_bytes(self) -> int:
        """Bytes that are read to check it: those that are stored, and those of its anchor."""
        anchored = self.extent.anchor
        return self.extent.length + (0 if anchored is None else anchored.extent.length)

    def problem(self, kind: str, message: str) -> Problem:
        if self.others:
            message += f"; in this chunk or one of {self.others:,} others, which lie in the same storage"
        return Problem(kind=kind, file=self.extent.path, tensor=self.entry.name, box=self.entry.grid.box(self.number), message=message)


def stored_chunks(catalog: Catalog, broken: frozenset[int], problems: list[Problem]) -> Iterator[ChunkToVerify]:
    """Every chunk whose bytes can be found, those in ``broken`` files left out; what cannot be found goes to ``problems``."""
    for entry in catalog.tensors.values():
        if entry.alias is not None:
            continue
        numbers = [n for n in range(len(entry.grid)) if entry.grid.file(n) not in broken] if broken else range(len(entry.grid))
        try:
            extents = catalog.extents(entry, numbers)
        except FAILURES:
            yield from _chunks_one_by_one(catalog, entry, numbers, problems)
        else:
            yield from map(ChunkToVerify, [entry] * len(extents), numbers, extents)


def by_storage(catalog: Catalog, chunks: list[ChunkToVerify]) -> list[ChunkToVerify]:
    """The chunks, but in place of those that lie in a storage with a checksum, that storage."""
    if not isinstance(catalog, ExternalCatalog):
        return chunks
    try:
        storages = sorted(catalog.storages(), key=lambda s: s[:2])
    except FAILURES:
        return chunks  # what cannot be found is among the problems already
    starts = [(s.path, s.offset) for s in storages]
    inside: dict[int, list[ChunkToVerify]] = {}
    left = []
    for chunk in chunks:
        # Archives of torch.save keep one CRC-32 per storage, and a storage holds many tensors. The storage is read
        # once in place of the chunks inside it; if it is wrong, the message says that it may be any of them.
        at = bisect_right(starts, (chunk.extent.path, chunk.extent.offset)) - 1
        storage = storages[at] if at >= 0 and chunk.extent.crc32 is None and chunk.extent.length else None
        if storage is not None and storage.path == chunk.extent.path and chunk.end <= storage.offset + storage.length:
            inside.setdefault(at, []).append(chunk)
        else:
            left.append(chunk)
    return left + [ChunkToVerify(members[0].entry, members[0].number, storages[at], len(members) - 1) for at, members in inside.items()]


def _chunks_one_by_one(catalog: Catalog, entry: TensorEntry, numbers: Sequence[int], problems: list[Problem]) -> Iterator[ChunkToVerify]:
    for number in numbers:
        try:
            yield ChunkToVerify(entry, number, catalog.extents(entry, [number])[0])
        except FAILURES as err:
            file, box = file_of(err, catalog.url), entry.grid.box(number)
            kind = UNREAD if isinstance(err, FormatError) else "header"
            problems.append(Problem(kind=kind, file=file, tensor=entry.name, box=box, message=err.message))
