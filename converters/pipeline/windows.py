"""How the tensors of a file are cut into windows: ranges of the file that are read, held in memory and written at once. Pure.

Invariants: the segments of all windows of a file are the items, each byte once and in the order of the file; no window is longer than asked
for, unless one element is.
"""

# A window is the image of a range of the output file. Items are cut into segments that are contiguous in the file, along the first axis
# that has more than one row, and best where stored chunks end (*seams*): then no chunk is read for two windows.
#
#     items       |---- a [6 rows] ----|-- b --|-------- c [8 rows] --------|
#     seams             ^     ^                      ^           ^
#     segments    |--a--|--a--|--a-----|---b---|--c--|-----c-----|----c-----|
#     windows     |--------- 1 --------|------- 2 ---|---------- 3 ---------|     each at most ``most`` bytes
#
# A segment is at most UNIT long, so that several threads can fill one window.

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ckpt.layout.geometry import Box
from ckpt.settings import limits


class FileItem(NamedTuple):
    """A box of a tensor in a file, row by row from byte ``offset`` on."""

    name: str
    box: Box
    offset: int
    itemsize: int

    @property
    def length(self) -> int:
        return self.box.numel * self.itemsize


class FileSegment(NamedTuple):
    """A contiguous part of item number ``item``: ``box`` in the coordinates of the tensor, ``start`` in bytes of the file."""

    item: int
    box: Box
    start: int
    length: int


class FileWindow(NamedTuple):
    """Segments in the order of the file, between the bytes ``start`` and ``stop``."""

    segments: tuple[FileSegment, ...]
    start: int
    stop: int


def windows(items: Sequence[FileItem], seams: Sequence[Sequence[int]], most: int, enough: int | None = None) -> Iterator[FileWindow]:
    """Windows of at most ``most`` bytes of a file with these items, in order of their offsets. One that has ``enough`` bytes ends with its
    item: no chunk is in two items, so none is read twice for that.

    ``seams`` has for each item the places along its first axis, increasing, where it is best cut, because stored chunks end there.
    """
    # Greedy and in one pass, since segments come in the order of the file: a window is closed as soon as the next
    # segment would make it too long.
    pending: list[FileSegment] = []
    enough = most if enough is None else enough
    for number, (item, places) in enumerate(zip(items, seams, strict=True)):
        at = item.offset
        if pending and at - pending[0].start >= enough:
            yield _closed(pending)
            pending = []
        for box in slabs(item.box, item.itemsize, places, min(most, limits.CHUNK)):
            segment = FileSegment(number, box, at, box.numel * item.itemsize)
            at += segment.length
            if pending and at - pending[0].start > most:
                yield _closed(pending)
                pending = []
            pending.append(segment)
    if pending:
        yield _closed(pending)


def _closed(segments: list[FileSegment]) -> FileWindow:
    return FileWindow(tuple(segments), segments[0].start, segments[-1].start + segments[-1].length)


def slabs(box: Box, itemsize: int, seams: Sequence[int], most: int) -> Iterator[Box]:
    """A box in parts of at most ``most`` bytes that are contiguous in it, row by row; nothing of an empty box."""
    if not box.numel:
        return
    axis = next((i for i, n in enumerate(box.shape) if n > 1), None)
    if axis is None or box.numel * itemsize <= most:
        yield box
        return
    row = box.numel // box.shape[axis] * itemsize
    cuts = cuts_at(box.offset[axis], box.end[axis], max(1, most // row), () if axis else seams)
    for start, stop in pairwise(cuts):
        yield from slabs(_along(box, axis, start, stop), itemsize, (), most)


def cuts_at(start: int, stop: int, count: int, seams: Sequence[int]) -> tuple[int, ...]:
    """Boundaries of parts of at most ``count``, from ``start`` to ``stop``: at the last of the increasing ``seams`` that a part reaches, if
    it reaches one."""
    cuts = [start]
    while cuts[-1] + count < stop:
        # The last seam that the part can reach. Without one in reach it is cut at its full length, in the middle of a
        # stored chunk, which is then read for two windows.
        best = bisect_right(seams, cuts[-1] + count) - 1
        cuts.append(seams[best] if best >= 0 and seams[best] > cuts[-1] else cuts[-1] + count)
    return (*cuts, stop)


def _along(box: Box, axis: int, start: int, stop: int) -> Box:
    offset, shape = list(box.offset), list(box.shape)
    offset[axis], shape[axis] = start, stop - start
    return Box(tuple(offset), tuple(shape))
