"""What of a file is bytes of the source just as they are stored: read, compared with its digest and written piece by piece, while a piece
is in the cache of the core that has read it. It needs no memory for windows. No torch.

Invariant: the runs of an item are all of its bytes, each once and in the order of the file; a chunk with a digest is in a run as a whole.
"""

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

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from ckpt import settings
from ckpt.catalog import Extent, TensorEntry
from ckpt.converters.select.selection import OutputSet
from ckpt.engine.digest_reader import ChunkDigest, ChunkName, DigestReader
from ckpt.plan.layout.geometry import box_to_flat
from ckpt.plan.reads import Copy, RangeGroup, group_ranges, group_sizes, overlapping_chunks
from ckpt.plan.views import ViewPiece, in_order, within

from .target import FileItem

JOB = 32 << 20
"""Bytes that one thread does before the next job is handed out."""
MANY = 2048
"""Runs that it does at most, unless one item has more."""
PAGE = 4096
_AT_ONCE = 256


class ByteSink(Protocol):
    """Where the bytes of a file go."""

    def take(self, item: int, start: int, data: memoryview) -> None:
        """The next bytes of item number ``item``, and where in the file they go."""

    def mark(self, item: int) -> object:
        """How far the item is, for ``back``."""

    def back(self, item: int, mark: object) -> None:
        """Forget what came of the item after the mark: it comes again."""


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
    units = [[run] for runs_of_item in runs for run in _parts(runs_of_item)] if apart else runs
    sizes = [max(sum(run.length for run in unit), len(unit) * (JOB // MANY)) for unit in units]  # small runs take time, too
    for group in group_sizes(sizes, JOB):
        yield [run for unit in units[group.start : group.stop] for run in unit]


def _parts(runs: Sequence[ByteRun]) -> Iterator[ByteRun]:
    """Runs in parts of at most ``JOB`` bytes, where no digest asks for one after another."""
    for run in runs:
        step = run.length if run.chunk.extent.digest is not None else JOB
        for at in range(0, run.length, step):
            yield run._replace(start=run.start + at, length=min(step, run.length - at), offset=run.offset + at)


def copy_through(fetch: DigestReader, runs: Sequence[ByteRun], put: ByteSink) -> int:
    """Read the runs and give their bytes to ``put``, those of an item one after another; how many these are."""
    memory = memoryview(mmap.mmap(-1, settings.PIECE + PAGE))
    times = Counter(run.item for run in runs)
    small, large = list[ByteRun](), list[ByteRun]()
    for run in runs:
        (small if run.length <= min(settings.WORTH_A_CALL, settings.PIECE) and times[run.item] == 1 else large).append(run)
    for group in group_ranges(
        [Extent(r.chunk.extent.path, r.offset, r.length, None) for r in small], max_bytes=settings.PIECE, max_gap=settings.GAP
    ):
        _copy_together(fetch, [small[i] for i in group.members], group, put, memory)
    for run in large:
        _copy_one(fetch, run, put, memory)
    return sum(run.length for run in runs)


def _copy_one(fetch: DigestReader, run: ByteRun, put: ByteSink, memory: memoryview) -> None:
    mark = put.mark(run.item)

    def read() -> None:
        put.back(run.item, mark)
        _copy_once(fetch, run, put, memory)

    fetch.reread(run.chunk.extent, read)


def _copy_once(fetch: DigestReader, run: ByteRun, put: ByteSink, memory: memoryview) -> None:
    check = ChunkDigest(fetch, run.chunk)
    at, stop = run.start, run.start + run.length
    while at < stop:
        end = min(stop, (at + settings.PIECE) // PAGE * PAGE)  # pieces end where pages do, and keep their place in a page, for direct I/O
        piece = memory[at % PAGE : at % PAGE + end - at]
        fetch.fill(run.chunk.extent.path, run.offset + at - run.start, piece)
        check.update(piece)
        put.take(run.item, at, piece)
        at = end
    check.end()


def _copy_together(fetch: DigestReader, runs: Sequence[ByteRun], group: RangeGroup, put: ByteSink, memory: memoryview) -> None:
    pieces = [memory[run.offset - group.offset : run.offset - group.offset + run.length] for run in runs]

    def read() -> None:
        fetch.fill(group.path, group.offset, memory[: group.length])
        for run, piece in zip(runs, pieces, strict=True):
            fetch.compare(run.chunk, piece)

    fetch.reread(Extent(group.path, group.offset, group.length, None), read)
    for run, piece in zip(runs, pieces, strict=True):
        put.take(run.item, run.start, piece)
