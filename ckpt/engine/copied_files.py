"""Data files on their way from one storage to another: by the storage itself where it can, else read in jobs that may run at once, each
byte compared with its digest.

A file of up to ``settings.HASH_BUFFER`` bytes is one read. Of a larger one the header is read first, then runs of neighbouring chunks.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import xxhash

from ckpt import settings
from ckpt.catalog import DataFile, Extent, TensorEntry
from ckpt.errors import CorruptError, NotFoundError, StorageError
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.commit import REFERENCED, CommitRecord
from ckpt.formats.native.datafile import ChunkSpec, chunk_key, coded_key, plan_coded_file
from ckpt.formats.native.header import Header, parse_header
from ckpt.formats.native.index import FILE_COLUMNS
from ckpt.formats.native.paths import FILES, is_reference
from ckpt.formats.native.tables import rows_to_file
from ckpt.formats.native.writer import WriteJournal
from ckpt.io_backends.checks import READS
from ckpt.io_backends.protocol import Backend, CopySource, Writer
from ckpt.plan.reads import RangeGroup, group_ranges

from .digest_reader import ChunkDigest, ChunkName, DigestReader

# What a copy of a checkpoint with references has in their place: data files of its own, with the chunks that it refers to. No torch.
#
#     ../step-1/data/…-00000   a b c d e        the base's file; the checkpoint has b, c and e of it
#                                │ │   │
#     data/<id>-00000-1        b c e            at the target: a header of its own, the same stored bytes under the same digests
#
# Grids number the rows of files.arrow, and a row stays where it was: so of the index only files.arrow changes, and of the record what it
# says of that file, and the feature. Of a chunk that is stored as a difference, its anchor is gathered: the difference stays as it is.

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
        data = rows_to_file(files, FILE_COLUMNS)
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
    keys = [
        chunk_key(entry.name, box, entry.shape, entry.dtype)
        if extent.codec is None
        else coded_key(entry.name, box, entry.shape, extent.codec)
        for extent, entry, box in placed
    ]
    digests = [int(extent.digest or "", 16) for extent in extents]
    header = plan.encode_header(digests, {i: strong[key] for i, key in enumerate(keys) if key in strong})
    names = [ChunkName(key, None, extent) for key, extent in zip(keys, extents, strict=True)]
    return GatheredFile(file=plan.row(header), header=header, chunks=names, offsets=plan.offsets.tolist())


def _extent(catalog: NativeCatalog, entry: TensorEntry, chunk: int) -> Extent:
    extent = catalog.extents(entry, [chunk])[0]
    return extent if extent.anchor is None else extent.anchor.extent


# What of a copy the storage does by itself, so that nobody reads the bytes and writes them.
#
# one file system that shares extents      whole files; the bytes are read and compared all the same, and nothing is written
# one object store                         whole files, and the parts of gathered files that lie whole in one file of the source;
#                                          these bytes never come here, and nobody compares them: ``ckpt verify`` does

_WHOLE = 256 << 20
_BLOCKS = 16
"""A larger file is copied by so many blocks at a time, so that progress shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedRange:
    """``length`` bytes of a new file from ``offset`` on, which are those from ``at`` of a file of the source."""

    offset: int
    at: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class StorageCopies:
    """Lets the storage copy what it can, for all files of one copy. ``compare``: every byte is read and compared all the same.

    A storage that refuses once is not asked again. Thread-safe.
    """

    def __init__(self, source: Backend, target: Backend, *, compare: bool) -> None:
        self.compare = compare
        self._source = source
        self._target = target
        self._lock = threading.Lock()
        self._refused = False
        self._tried = False
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """That the storage copied, and nobody compared with a digest."""
        return 0 if self.compare else self._bytes

    def ranges(self, file: DataFile, gathered: GatheredFile | None, writer: Callable[[], Writer]) -> list[StorageCopy]:
        """What the storage copies of a new file, if it does. The first range is copied here, to know."""
        if self._refused or (file.size <= settings.HASH_BUFFER if not self.compare else gathered is not None):
            return []  # small files cost less to read than to doubt, and no file system shares what does not begin at a block
        if gathered is not None and file.size <= self._target.io_hints.single_put_size:
            return []
        path = file.path if gathered is None else gathered.chunks[0].extent.path
        source = self._source.copy_source(path)
        if source is None:
            self._refused = True
            return []
        ranges = list(_whole(file.size, writer) if gathered is None else _runs(gathered, writer().block_size))
        copies = [StorageCopy(self, source, r, writer) for r in ranges]
        with self._lock:
            if copies and not self._tried:
                self._tried = True
                self._refused = not copies[0].run()
        return [] if self._refused else copies

    def count(self, copied: int, *, refused: bool) -> None:
        """Note what became of a range."""
        self._refused = self._refused or refused
        self._bytes += copied


class StorageCopy:
    """One range that the storage copies."""

    def __init__(self, copies: StorageCopies, source: CopySource, copied: CopiedRange, writer: Callable[[], Writer]) -> None:
        self.range = copied
        self._copies = copies
        self._source = source
        self._writer = writer
        self._done = False

    def run(self) -> bool:
        """Copy it, unless that was done. False if the storage refuses."""
        if not self._done:
            self._done = self._writer().copy_range(self.range.offset, self._source, self.range.at, self.range.length)
            self._copies.count(self.range.length if self._done else 0, refused=not self._done)
        return self._done


def _whole(size: int, writer: Callable[[], Writer]) -> Iterator[CopiedRange]:
    step = size if size <= _WHOLE else writer().block_size * _BLOCKS
    for at in range(0, size, step):
        yield CopiedRange(offset=at, at=at, length=min(step, size - at))


def _runs(gathered: GatheredFile, block: int) -> Iterator[CopiedRange]:
    """Whole blocks of the new file in each run of chunks that follow one another in both files."""
    size = gathered.file.size
    for begin, at, length in _joined(gathered):
        end = begin + length
        first, last = -(-begin // block) * block, end if end == size else end // block * block
        if first < last:
            yield CopiedRange(offset=first, at=at + first - begin, length=last - first)


def _joined(gathered: GatheredFile) -> Iterator[Sequence[int]]:
    """Offset in the new file, offset in the source, and length of each run."""
    begin = at = length = 0
    for chunk, offset in zip(gathered.chunks, gathered.offsets, strict=True):
        if length and (offset, chunk.extent.offset) == (begin + length, at + length):
            length += chunk.extent.length
            continue
        if length:
            yield begin, at, length
        begin, at, length = offset, chunk.extent.offset, chunk.extent.length
    if length:
        yield begin, at, length


CopyTask = Callable[[], int]
"""Gives the bytes that it has done."""

Take = Callable[[int, memoryview], None]
"""Gets bytes and their offset in the file. Those of a long chunk come before its digest was compared, and again if it did not fit."""


class FileCopy:
    """One data file that is copied. It is committed at the target by the last of its jobs."""

    def __init__(
        self,
        reader: DigestReader,
        journal: WriteJournal,
        file: DataFile,
        gathered: GatheredFile | None = None,
        copies: StorageCopies | None = None,
    ) -> None:
        """``gathered``: the file is made of chunks of one that the source refers to. ``copies``: what lets the storage copy."""
        self._reader = reader
        self._copies = copies
        self._ranges: list[CopiedRange] = []
        """What the storage copies."""
        self._journal = journal
        self._gathered = gathered
        self._file = file
        self._lock = threading.Lock()
        self._writer: Writer | None = None
        self._left = 0
        self._uncounted = file.size
        self._taken: set[int] = set()
        """Offsets of what was written."""
        self._spoiled = False
        """Something of it was read wrong, and cannot be written anew by itself."""

    def jobs(self) -> Iterator[CopyTask]:
        """Raises CorruptError, here or in a job, if the file is not as the index says."""
        copies = [] if self._copies is None else self._copies.ranges(self._file, self._gathered, self._shared_writer)
        self._ranges = [copy.range for copy in copies]
        jobs: list[CopyTask] = [partial(self._copy, copy) for copy in copies]
        jobs += self._checked()
        self._left = len(jobs)
        for job in jobs:
            yield partial(self._run, job)

    def _checked(self) -> list[CopyTask]:
        if self._gathered is None:
            return _checked(self._reader, self._file, self._take, self._is_read)
        # The same for a file that is made of chunks of another one; offsets are those in the new file
        gathered = self._gathered

        def head() -> int:
            self._take(0, memoryview(gathered.header))
            return len(gathered.header)

        def move(offset: int, data: memoryview) -> None:
            for at, part in gathered.places(offset, data):
                self._take(at, part)

        placed = zip(gathered.chunks, gathered.offsets, strict=True)
        chunks = [chunk for chunk, offset in placed if self._is_read(offset, chunk.extent.length)]
        return [head, *(partial(self._reader.reread, together, work) for together, work in _long_jobs(self._reader, chunks, move))]

    def _is_read(self, offset: int, length: int) -> bool:
        """Whether bytes of the new file are read: not if the storage copies them, and nobody asked to compare."""
        return self._compares or next(self._written(offset, length), None) is not None

    @property
    def _compares(self) -> bool:
        return self._copies is None or self._copies.compare

    def _written(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """Begin and end of what of these bytes is written, and not copied by the storage."""
        end = offset + length
        for copied in self._ranges:  # in the order of their offsets
            if copied.end <= offset or copied.offset >= end:
                continue
            if offset < copied.offset:
                yield offset, copied.offset
            offset = copied.end
        if offset < end:
            yield offset, end

    def _copy(self, copy: StorageCopy) -> int:
        if not copy.run():
            self._spoiled = True  # it copied something else before, and refuses this: the last job reads all of the file
        return 0 if self._compares else copy.range.length

    def _run(self, job: CopyTask) -> int:
        count = job()
        with self._lock:
            count = min(count, self._uncounted)  # chunks that lie across what the storage copies are read whole
            self._uncounted -= count
            self._left -= 1
            last = self._left == 0
        if last:
            self._finish()
        return count

    def _take(self, offset: int, data: memoryview) -> None:
        for begin, end in self._written(offset, len(data)):
            self._write(begin, data[begin - offset : end - offset])

    def _write(self, offset: int, data: memoryview) -> None:
        with self._lock:
            writer = self._opened()
            again = offset in self._taken
            self._taken.add(offset)
        try:
            writer.write(offset, [data])
        except StorageError:
            if not again:
                raise
            self._spoiled = True  # an object store may have it in a part that was sent: the whole file is sent again

    def _finish(self) -> None:
        for _ in range(READS):
            if not self._spoiled:
                break
            self.abort()
            self._writer, self._spoiled, self._ranges = None, False, []
            self._taken.clear()
            for job in self._checked():
                job()
        if self._spoiled:
            where = f"{self._reader.backend.url.rstrip('/')}/{self._file.path}"
            hint = "the network, a cache or the memory of a machine flips bits: copy on another machine"
            raise StorageError(f"something of it was read wrong each of {READS} times", where=where, hint=hint)
        with self._journal.making(self._file.path):
            self._opened().commit()

    def _shared_writer(self) -> Writer:
        with self._lock:
            return self._opened()

    def _opened(self) -> Writer:
        if self._writer is None:
            self._writer = self._journal.backend.create(self._file.path, self._file.size)
        return self._writer

    def abort(self) -> None:
        """Leave nothing of the file at the target, unless it is committed. No job may run any more."""
        if self._writer is not None:
            self._writer.abort()


class FileCheck:
    """One data file that is at the target already, which ``reader`` reads. After its jobs ``damaged`` says whether it has to be copied."""

    def __init__(self, reader: DigestReader, file: DataFile) -> None:
        self._reader = reader
        self.file = file
        self.damaged = False

    def jobs(self) -> Iterator[CopyTask]:
        try:
            jobs = _checked(self._reader, self.file, lambda offset, data: None, lambda offset, length: True)
        except (CorruptError, NotFoundError):
            self.damaged = True
            return
        for job in jobs:
            yield partial(self._run, job)

    def _run(self, job: CopyTask) -> int:
        if not self.damaged:  # else nobody needs to know more
            try:
                return job()
            except (CorruptError, NotFoundError):
                self.damaged = True
        return 0


def _checked(reader: DigestReader, file: DataFile, take: Take, is_read: Callable[[int, int], bool]) -> list[CopyTask]:
    """Jobs that read ``file``, raise CorruptError for bytes that are not as they should be, and give them to ``take``. Its header is
    read in any case; of its chunks those are for whose offset and length ``is_read``."""
    where = f"{reader.backend.url.rstrip('/')}/{file.path}"
    if file.size <= settings.HASH_BUFFER:
        return [partial(reader.reread, Extent(file.path, 0, file.size, None), partial(_copy_small, reader, file, where, take))]

    def read_header() -> tuple[bytes, Header]:
        memory = bytearray(file.header)
        reader.fill(file.path, 0, memoryview(memory))
        data = bytes(memory)
        return data, parse_header(data, file, where)

    data, header = reader.reread(Extent(file.path, 0, file.header, None), read_header)

    def head() -> int:
        take(0, memoryview(data))
        return len(data)

    chunks = [chunk for chunk in _chunks(file, header) if is_read(chunk.extent.offset, chunk.extent.length)]
    return [head, *(partial(reader.reread, together, work) for together, work in _long_jobs(reader, chunks, take))]


def _chunks(file: DataFile, header: Header) -> list[ChunkName]:
    """The chunks of a file, named by their keys."""
    return [ChunkName(key, None, Extent(file.path, c.offset, c.length, c.digest)) for key, c in header.chunks.items()]


def _copy_small(reader: DigestReader, file: DataFile, where: str, take: Take) -> int:
    data = reader.scratch(file.size).data[: file.size]
    reader.fill(file.path, 0, data)
    for chunk in _chunks(file, parse_header(bytes(data[: file.header]), file, where)):
        reader.compare(chunk, data[chunk.extent.offset : chunk.extent.offset + chunk.extent.length])
    take(0, data)
    return file.size


def _long_jobs(reader: DigestReader, chunks: Sequence[ChunkName], take: Take) -> Iterator[tuple[Extent, CopyTask]]:
    """Chunks that follow one another, up to ``HASH_BUFFER`` bytes, and longer ones alone: the bytes of each job, and what it does."""
    for group in group_ranges([chunk.extent for chunk in chunks], max_bytes=settings.HASH_BUFFER):
        members = [chunks[i] for i in group.members]
        if group.length <= settings.HASH_BUFFER:
            yield Extent(group.path, group.offset, group.length, None), partial(_copy_group, reader, group, members, take)
        else:
            yield from ((chunk.extent, partial(_copy_long, reader, chunk, take)) for chunk in members)


def _copy_group(reader: DigestReader, group: RangeGroup, chunks: Sequence[ChunkName], take: Take) -> int:
    data = reader.scratch(group.length).data[: group.length]
    reader.fill(group.path, group.offset, data)
    for chunk in chunks:
        at = chunk.extent.offset - group.offset
        reader.compare(chunk, data[at : at + chunk.extent.length])
    take(group.offset, data)
    return group.length


def _copy_long(reader: DigestReader, chunk: ChunkName, take: Take) -> int:
    digest, extent = ChunkDigest(reader, chunk), chunk.extent
    for at in range(0, extent.length, settings.HASH_BUFFER):
        data = reader.scratch(settings.HASH_BUFFER).data[: min(settings.HASH_BUFFER, extent.length - at)]
        reader.fill(extent.path, extent.offset + at, data, digest)
        take(extent.offset + at, data)
    digest.end()
    return extent.length
