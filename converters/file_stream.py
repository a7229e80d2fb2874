"""Moves the bytes of a conversion into files: what is stored as it will be goes straight from file to file (``copy_through``), the rest in
windows (``buffered``). Torch is imported for these alone."""

from __future__ import annotations

import mmap
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import xxhash

from ckpt import settings
from ckpt.catalog import Extent, TensorEntry
from ckpt.concurrency import Pending, imap_unordered
from ckpt.engine.digest_reader import PROBE, ChunkDigest, ChunkName, DigestReader
from ckpt.errors import CkptError, CorruptError
from ckpt.io_backends.protocol import Backend, Writer
from ckpt.plan.layout.geometry import box_to_flat
from ckpt.plan.reads import Copy, RangeGroup, group_ranges, group_sizes, overlapping_chunks
from ckpt.plan.views import ViewPiece, in_order, within
from ckpt.telemetry.progress import ProgressCallback

from .selection import OutputSet
from .target import PAGE, FileItem, FileSegment, OutputFile, OutputPlan

if TYPE_CHECKING:
    from .buffered import WindowFiller


# What of a file is bytes of the source just as they are stored: read, compared with its digest and written piece by piece, while a piece
# is in the cache of the core that has read it. It needs no memory for windows. No torch.
#
# Invariant: the runs of an item are all of its bytes, each once and in the order of the file; a chunk with a digest is in a run as a whole.

# An item of the output passes through as *runs* if every part of it is a range of a source file, in the same order and dtype:
#
#     source file    ...|==== chunk 7 ====|...|== chunk 8 ==|...
#                            \                  /
#     output file    |header|== run =========|== run ======|header of the next|
#
# A chunk with a digest is only taken as a whole, because nothing could be compared with a part. A thread moves 2 MiB at a time: read,
# hashed, compared at the end of the chunk, written, all while the bytes are in its cache. If the digest does not match, the chunk is read
# once more past caches (``reread``), and the item's own digest goes back to where it was before the chunk (``mark``, ``back``). Small runs
# that lie near each other are read together.


JOB = 32 << 20
"""Bytes that one thread does before the next job is handed out."""
MANY = 2048
"""Runs that it does at most, unless one item has more."""
_AT_ONCE = 256


class ByteRun(NamedTuple):
    """Bytes of ``chunk`` that are a part of item number ``item``: from byte ``offset`` of a file of the source to byte ``start``."""

    item: int
    start: int
    length: int
    chunk: ChunkName
    offset: int


class _TakenPart(NamedTuple):
    """What ``copy`` takes of a chunk of ``entry``, and the bytes of the file, from ``start`` to ``stop``, that it is."""

    item: int
    start: int
    stop: int
    entry: TensorEntry
    copy: Copy
    skipped: int
    """Bytes of the chunk before the first one that is taken."""


def runs_of(chosen: OutputSet, items: Sequence[FileItem]) -> dict[int, list[ByteRun]]:
    """The runs of each item that is made of nothing else, by its number. Looks up where the source has its chunks."""
    placed = [(n, places) for n, item in enumerate(items) if (places := _places(chosen, n, item)) is not None]
    flat = [place for _, places in placed for place in places]
    extents: list[Extent] = []
    for at in range(0, len(flat), _AT_ONCE):  # each may have to read headers
        extents += chosen.catalog.extents_of([(p.entry, p.copy.chunk) for p in flat[at : at + _AT_ONCE]])
    by_item, rest = {}, iter(extents)
    for number, places in placed:
        runs = [_run(place, next(rest)) for place in places]
        if None not in runs:
            by_item[number] = [run for run in runs if run is not None]
    return by_item


def _places(chosen: OutputSet, number: int, item: FileItem) -> list[_TakenPart] | None:
    """Where the bytes of an item are, in the order of the file; None if some are computed, filling, of another dtype or in another
    order."""
    if not item.length:
        return []
    wanted = chosen.tensors[item.name]
    if wanted.computed is not None:
        return None
    if item.box.shape == wanted.shape and wanted.view.pieces:
        entry = chosen.catalog.tensors[wanted.view.pieces[0].source]
        if (
            wanted.view.is_all_of(entry.shape) and entry.grid.single and entry.grid.cuts is not None and entry.dtype == wanted.dtype
        ):  # by far the most common case
            copy = Copy(chunk=0, chunk_box=item.box, box=item.box)
            return [_TakenPart(number, item.offset, item.offset + item.length, entry, copy, 0)]
    parts: list[_TakenPart] = []
    for piece in wanted.view.overlapping(item.box):
        entry = chosen.catalog.tensors[piece.source]
        places = [_place(number, item, piece, entry, copy) for copy in overlapping_chunks(entry.grid, piece.part)]
        if entry.dtype != wanted.dtype or not in_order(piece) or None in places:
            return None
        parts += [place for place in places if place is not None]
    parts.sort(key=lambda p: p.start)
    ends = [item.offset, *(p.stop for p in parts)]
    tiled = [p.start for p in parts] == ends[:-1] and ends[-1] == item.offset + item.length
    return parts if tiled else None


def _place(number: int, item: FileItem, piece: ViewPiece, entry: TensorEntry, copy: Copy) -> _TakenPart | None:
    there = box_to_flat(copy.chunk_box.shape, copy.box.relative_to(copy.chunk_box.offset))
    here = box_to_flat(item.box.shape, within(piece, copy.box).box.relative_to(item.box.offset))
    if there is None or here is None:
        return None
    start, stop = (item.offset + n * item.itemsize for n in here)
    return _TakenPart(number, start, stop, entry, copy, there[0] * item.itemsize)


def _run(place: _TakenPart, extent: Extent) -> ByteRun | None:
    """None if the chunk is coded, or compared with a digest although only a part of it is wanted."""
    length, box = place.stop - place.start, place.copy.chunk_box
    if extent.codec is not None or (length != extent.length if extent.digest is not None else place.skipped + length > extent.length):
        return None
    return ByteRun(place.item, place.start, length, ChunkName(place.entry.name, box, extent), extent.offset + place.skipped)


def jobs_of(runs: Sequence[Sequence[ByteRun]], *, apart: bool) -> Iterator[list[ByteRun]]:
    """The runs of items in jobs of about ``JOB`` bytes. ``apart``: those of one item may be in several jobs, also long ones in parts."""
    units = runs
    if apart:
        units = []
        for run in (run for runs_of_item in runs for run in runs_of_item):
            step = run.length if run.chunk.extent.digest is not None else JOB  # a digest asks for one part after another
            starts = range(0, run.length, step)
            units += [[run._replace(start=run.start + n, length=min(step, run.length - n), offset=run.offset + n)] for n in starts]
    sizes = [max(sum(run.length for run in unit), len(unit) * (JOB // MANY)) for unit in units]  # small runs take time, too
    for group in group_sizes(sizes, JOB):
        yield [run for unit in units[group.start : group.stop] for run in unit]


def copy_through(fetch: DigestReader, runs: Sequence[ByteRun], file: OpenFile) -> int:
    """Read the runs and give their bytes to ``file``, those of an item one after another; how many these are."""
    memory = memoryview(mmap.mmap(-1, settings.PIECE + PAGE))
    times = Counter(run.item for run in runs)
    small, large = list[ByteRun](), list[ByteRun]()
    for run in runs:
        (small if run.length <= min(settings.WORTH_A_CALL, settings.PIECE) and times[run.item] == 1 else large).append(run)
    for group in group_ranges(
        [Extent(r.chunk.extent.path, r.offset, r.length, None) for r in small], max_bytes=settings.PIECE, max_gap=settings.GAP
    ):
        _copy_together(fetch, [small[i] for i in group.members], group, file, memory)
    for run in large:
        _copy_one(fetch, run, file, memory)
    return sum(run.length for run in runs)


def _copy_one(fetch: DigestReader, run: ByteRun, file: OpenFile, memory: memoryview) -> None:
    mark = file.mark(run.item)

    def read() -> None:
        file.back(run.item, mark)
        check = ChunkDigest(fetch, run.chunk)
        at, stop = run.start, run.start + run.length
        while at < stop:
            end = min(stop, (at + settings.PIECE) // PAGE * PAGE)  # where pages do: a piece keeps its place in a page, for direct I/O
            piece = memory[at % PAGE : at % PAGE + end - at]
            fetch.fill(run.chunk.extent.path, run.offset + at - run.start, piece)
            check.update(piece)
            file.take(run.item, at, piece)
            at = end
        check.end()

    fetch.reread(run.chunk.extent, read)


def _copy_together(fetch: DigestReader, runs: Sequence[ByteRun], group: RangeGroup, file: OpenFile, memory: memoryview) -> None:
    pieces = [memory[run.offset - group.offset : run.offset - group.offset + run.length] for run in runs]

    def read() -> None:
        fetch.fill(group.path, group.offset, memory[: group.length])
        for run, piece in zip(runs, pieces, strict=True):
            fetch.compare(run.chunk, piece)

    fetch.reread(Extent(group.path, group.offset, group.length, None), read)
    for run, piece in zip(runs, pieces, strict=True):
        file.take(run.item, run.start, piece)


# For each file of the plan, in turn:
#
#     begin    the caller is told, and the writer is made
#     copy_through     items that are ranges of the source, by several threads, but where a storage makes a process wait;
#              digests are computed on the way
#     fill     all other items, window by window (``buffered``)
#     end      what needs the digests: headers, the directory of a zip archive; then the file becomes durable
#     compare  with ``verify``, the file is read again and compared with the digests of what was written
#
# An error leaves no file that is not durable: its writer is aborted, and the next attempt begins the file anew.


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
        begin: Callable[[int], None] | None,
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

        opened: list[OpenFile] = []
        last = Pending(lambda: None, "ckpt-convert")
        try:
            for number in numbers:
                file = self.planned.files[number]
                if self._begin is not None:
                    self._begin(number)
                # At most two files are open: the one being written and the one before it, which a thread makes durable.
                opened = [*opened[-1:], OpenFile(file, self.backend.create(file.path, file.size), self._kind)]
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

    def _fill(self, opened: OpenFile, on_written: Callable[[], None]) -> None:
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

    def _fill_windows(self, opened: OpenFile, items: Mapping[int, FileItem], on_written: Callable[[], None]) -> None:
        if self._windowed is None:
            from .buffered import WindowFiller  # imports torch

            self._windowed = WindowFiller(self.chosen, self.backend, memory=self._memory, threads=self._threads)

        def put(segments: Sequence[FileSegment], data: memoryview) -> None:
            opened.put(segments, data)
            self.written += len(data)

        self._windowed.fill(items, opened.file.size, put, on_written)

    def _end(self, number: int, opened: OpenFile) -> None:
        opened.end()
        if self.verify:
            # Read a file again, and compare each item with the digest of what was written
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
            if opened.file.check is not None:
                opened.file.check(self.backend, opened.file)
        self._done(number)


class OpenFile:
    """A file while it is written."""

    def __init__(self, file: OutputFile, writer: Writer, kind: str | None) -> None:
        self.file = file
        self.writer = writer
        self.kind = kind
        self.digests: list[int] = []
        self._state: dict[int, _Digest] = {}

    def take(self, item: int, start: int, data: memoryview) -> None:
        """Write the next bytes of an item; those of different items from any threads."""
        if self.kind is not None:
            self._update(item, self.kind, data)
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
                if self.kind is not None:
                    self._update(segment.item, self.kind, data[hashed:stop])
                hashed = stop
                if stop == segment.start - first + segment.length:
                    segment = next(segments, None)
            self.writer.write(first + at, [data[at:end]])
            at, end = end, end + step

    def _update(self, item: int, kind: str, data: memoryview) -> None:
        if item not in self._state:
            self._state[item] = _DIGESTS[kind]()
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
