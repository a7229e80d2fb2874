"""What of a copy the storage does by itself, so that nobody reads the bytes and writes them. No torch.

one file system that shares extents      whole files; the bytes are read and compared all the same, and nothing is written
one object store                         whole files, and the parts of gathered files that lie whole in one file of the source;
                                         these bytes never come here, and nobody compares them: ``ckpt verify`` does
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ckpt.catalog import DataFile
from ckpt.io_backends.protocol import Backend, CopySource, Writer
from ckpt.settings import limits

from .self_contained import GatheredFile

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
        if self._refused or (file.size <= limits.HASH_BUFFER if not self.compare else gathered is not None):
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
