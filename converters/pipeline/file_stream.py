"""Moves the bytes of a conversion into files: what is stored as it will be goes straight from file to file (``passthrough``), the rest in
windows (``buffered``). Torch is imported for these alone.
"""

# For each file of the plan, in turn:
#
#     begin    the caller is told, and the writer is made
#     copy_through     items that are ranges of the source, by several threads (``passthrough``), but where a storage makes a process wait;
#              digests are computed on the way
#     fill     all other items, window by window (``buffered``)
#     end      what needs the digests: headers, the directory of a zip archive; then the file becomes durable
#     compare  with ``verify``, the file is read again and compared with the digests of what was written
#
# An error leaves no file that is not durable: its writer is aborted, and the next attempt begins the file anew.

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import xxhash

from ckpt import settings
from ckpt.catalog import Extent
from ckpt.concurrency import Pending, imap_unordered
from ckpt.converters.select.selection import OutputSet
from ckpt.engine.digest_reader import PROBE, ChunkName, DigestReader
from ckpt.errors import CkptError, CorruptError
from ckpt.io_backends.protocol import Backend, Writer
from ckpt.telemetry.callbacks import ProgressCallback

from .passthrough import copy_through, jobs_of, runs_of
from .target import FileItem, FileSegment, OutputFile, OutputPlan

if TYPE_CHECKING:
    from .buffered import WindowFiller


class _Digest(Protocol):
    def update(self, data: memoryview, /) -> None: ...

    def intdigest(self) -> int: ...

    def copy(self) -> _Digest: ...


class _Crc:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def intdigest(self) -> int:
        return self._value

    def copy(self) -> _Crc:
        made = _Crc()
        made._value = self._value
        return made


_DIGESTS: dict[str, Callable[[], _Digest]] = {"xxh3": xxhash.xxh3_64, "crc32": _Crc}


class FileStream:
    """Writes files of one plan. ``written`` and ``bytes_read`` count bytes; ``begin(number)`` is called before a file is made,
    ``done(number)`` when it is durable.

    ``verify``: read every file again, and compare.
    """

    def __init__(
        self,
        chosen: OutputSet,
        planned: OutputPlan,
        backend: Backend,
        *,
        memory: int,
        threads: int,
        verify: bool,
        begin: Callable[[int], None],
        done: Callable[[int], None],
    ) -> None:
        self.chosen = chosen if planned.tensors is None else replace(chosen, tensors=planned.tensors)
        self.planned = planned
        self.backend = backend
        self.verify = verify
        self.straight = not (chosen.catalog.backend.io_hints.concurrency or backend.io_hints.concurrency)
        self.written = 0
        self._kind = planned.digest or ("xxh3" if verify else None)
        self._begin = begin
        self._done = done
        self._memory = memory
        self._threads = threads
        self._fetch = DigestReader(chosen.catalog.backend)
        self._windowed: WindowFiller | None = None

    @property
    def bytes_read(self) -> int:
        """So far, of the source."""
        return self._fetch.read + (0 if self._windowed is None else self._windowed.bytes_read)

    def write(self, numbers: Sequence[int], progress: ProgressCallback | None) -> None:
        """Write the files of these numbers: a file is made durable while the next one is written."""
        total = sum(self.planned.files[n].size for n in numbers)

        def on_written() -> None:
            if progress is not None:
                progress(self.written, total)

        opened: list[_Open] = []
        last = Pending(lambda: None, "ckpt-convert")
        try:
            for number in numbers:
                file = self.planned.files[number]
                self._begin(number)
                # At most two files are open: the one being written and the one before it, which a thread makes
                # durable.
                opened = [*opened[-1:], _Open(file, self.backend.create(file.path, file.size), self._kind)]
                self._fill(opened[-1], on_written)
                last.result()
                last = Pending(partial(self._end, number, opened[-1]), "ckpt-convert")
            last.result()
        except BaseException:
            last.wait()
            for begun in opened:
                with suppress(CkptError):
                    begun.writer.abort()  # does nothing to one that is durable
            raise
        self.written = total
        on_written()

    def _fill(self, opened: _Open, on_written: Callable[[], None]) -> None:
        """Everything but the ends: first what goes straight from file to file, then the rest, in windows."""
        items = opened.file.items
        runs = runs_of(self.chosen, items) if self.straight else {}
        jobs = jobs_of(list(runs.values()), apart=opened.kind is None)
        for count in self._each(partial(copy_through, self._fetch, job, opened) for job in jobs):
            self.written += count
            on_written()
        rest = {number: item for number, item in enumerate(items) if number not in runs}
        if rest:
            self._fill_windows(opened, rest, on_written)

    def _each(self, jobs: Iterator[Callable[[], int]]) -> Iterator[int]:
        """The results of jobs. The first ones show whether the storage makes a thread wait; if not, a few cores do it as fast as many."""
        while self._fetch.read < PROBE and (job := next(jobs, None)) is not None:
            yield job()
        few = max(1, (os.cpu_count() or 1) // 2)
        yield from imap_unordered(jobs, self._threads if self._fetch.waits > 1 else min(self._threads, few), "ckpt-convert")

    def _fill_windows(self, opened: _Open, items: Mapping[int, FileItem], on_written: Callable[[], None]) -> None:
        if self._windowed is None:
            from .buffered import WindowFiller  # imports torch

            self._windowed = WindowFiller(self.chosen, self.backend, memory=self._memory, threads=self._threads)

        def put(segments: Sequence[FileSegment], data: memoryview) -> None:
            opened.put(segments, data)
            self.written += len(data)

        self._windowed.fill(items, opened.file.size, put, on_written)

    def _end(self, number: int, opened: _Open) -> None:
        opened.end()
        if self.verify:
            self._compare(opened)
            if opened.file.check is not None:
                opened.file.check(self.backend, opened.file)
        self._done(number)

    def _compare(self, opened: _Open) -> None:
        """Read a file again, and compare each item with the digest of what was written."""
        reader = DigestReader(self.backend, crc32=True)
        try:
            for item, digest in zip(opened.file.items, opened.digests, strict=True):
                extent = Extent(opened.file.path, item.offset, item.length, None)
                extent = extent._replace(crc32=digest) if opened.kind == "crc32" else extent._replace(digest=f"{digest:016x}")
                reader.reread(extent, partial(reader.verify_chunk, ChunkName(item.name, item.box, extent)))
        except CorruptError as err:
            self.backend.delete(opened.file.path)
            err.hint = "the storage or the memory of this machine is faulty: convert elsewhere"
            raise


class _Open:
    """A file while it is written."""

    def __init__(self, file: OutputFile, writer: Writer, kind: str | None) -> None:
        self.file = file
        self.writer = writer
        self.kind = kind
        self.digests: list[int] = []
        self._state: dict[int, _Digest] = {}

    def take(self, item: int, start: int, data: memoryview) -> None:
        """Write the next bytes of an item; those of different items from any threads."""
        self._update(item, data)
        self.writer.write(start, [data])

    def mark(self, item: int) -> _Digest | None:
        """The digest of an item so far: what ``back`` returns to before a part is written again."""
        digest = self._state.get(item)
        return None if digest is None else digest.copy()

    def back(self, item: int, mark: object) -> None:
        """Forget what was digested of an item since ``mark``."""
        if mark is None:
            self._state.pop(item, None)
        else:
            self._state[item] = cast(_Digest, mark).copy()

    def put(self, run: Sequence[FileSegment], data: memoryview) -> None:
        """Write segments that follow one another; ``data`` are their bytes."""
        first = run[0].start
        step = max(settings.CACHE_BLOCK, self.writer.block_size)
        at, end = 0, step - first % step  # blocks end where pages end, for direct I/O, or where parts of an upload do
        segments = iter(run)
        segment: FileSegment | None = next(segments)
        hashed = 0
        while at < len(data):
            end = min(end, len(data))
            while segment is not None and hashed < end:
                stop = min(end, segment.start - first + segment.length)
                self._update(segment.item, data[hashed:stop])
                hashed = stop
                if stop == segment.start - first + segment.length:
                    segment = next(segments, None)
            self.writer.write(first + at, [data[at:end]])
            at, end = end, end + step

    def _update(self, item: int, data: memoryview) -> None:
        if self.kind is not None:
            if item not in self._state:
                self._state[item] = _DIGESTS[self.kind]()
            self._state[item].update(data)

    def end(self) -> None:
        """Write what is not tensors, and make all durable."""
        if self.kind is not None:
            empty = _DIGESTS[self.kind]().intdigest()
            self.digests = [self._state[i].intdigest() if i in self._state else empty for i in range(len(self.file.items))]
        # Archives have very many, of a few bytes, and most follow one another. The last ones come first: each fills the gap behind the last
        # of the ranges that are written already, and no list of them is moved for it.
        start, parts, size = 0, list[bytes](), 0
        for offset, data in [*reversed(self.file.ends(self.digests)), (0, b"")]:
            if parts and (offset + len(data) != start or not data or size >= settings.CACHE_BLOCK):
                self.writer.write(start, [b"".join(reversed(parts))])
                parts, size = [], 0
            if data:
                parts.append(data)
                start, size = offset, size + len(data)
        self.writer.commit()
