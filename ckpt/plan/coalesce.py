"""Byte ranges of copies, and near ranges joined into reads. Each part is in exactly one read, and each read covers its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ckpt.catalog import Extent
from ckpt.errors import CorruptError
from ckpt.layout.geometry import Box, row_major_strides

from .join import Copy


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Contiguous file bytes that give a box of one copy; ``offset`` and ``length`` in bytes, ``offset`` from the start of the file.

    Where the wanted elements lie follows from the chunk. With ``blocks = strided_blocks(chunk_box.shape,
    box.relative_to(chunk_box.offset))``, run ``r`` starts at byte ``extent.offset + blocks.starts()[r] * itemsize`` of the file,
    ``part.offset`` less in the part.
    """

    path: str
    offset: int
    length: int
    copy: int
    """Number of the copy, as the caller counts them."""
    box: Box
    """Global coordinates; a sub-box of the copy's box. The parts of a copy tile it."""

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """Contiguous file bytes to read at once; ``offset`` and ``length`` in bytes, ``parts`` positions in what ``coalesce`` was given."""

    path: str
    offset: int
    length: int
    parts: tuple[int, ...]


def parts_of(copy_number: int, copy: Copy, extent: Extent, itemsize: int, *, whole_chunks: bool, max_gap: int) -> list[Part]:
    """The byte ranges to read for one copy, by increasing offset.

    ``extent`` holds the copy's chunk; ``itemsize`` and ``max_gap`` are in bytes. With ``whole_chunks`` the answer is the whole extent,
    which is needed to verify its digest. Without, it is the runs of the box: neighbours at most ``max_gap`` bytes apart share a part, and
    where they are further apart the box is cut along its outermost dimensions, so that each part is a box. Then no byte outside of the
    box's span is read, and at most ``max_gap`` bytes more than needed for each pair of neighbours that share a part.

    Raises:
        CorruptError: without ``whole_chunks``, the extent's length is not that of the chunk's elements.
    """
    if copy.box.numel == 0:
        return []
    if whole_chunks:
        return [Part(path=extent.path, offset=extent.offset, length=extent.length, copy=copy_number, box=copy.box)]
    _check_length(copy.chunk_box, extent, itemsize)
    box, origin = copy.box, copy.chunk_box.offset
    strides = row_major_strides(copy.chunk_box.shape)
    cut, span = _cut_dims(box.shape, strides, max_gap // itemsize)
    start = np.array([sum((o - b) * s for o, b, s in zip(box.offset, origin, strides, strict=True))], dtype=np.int64)
    for count, stride in zip(box.shape[:cut], strides[:cut], strict=True):
        start = (start[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    offsets = (extent.offset + start * itemsize).tolist()
    shape, tail = (1,) * cut + box.shape[cut:], box.offset[cut:]
    corners = product(*[range(o, o + n) for o, n in zip(box.offset[:cut], box.shape[:cut], strict=True)])
    return [
        Part(path=extent.path, offset=at, length=span * itemsize, copy=copy_number, box=Box(corner + tail, shape))
        for at, corner in zip(offsets, corners, strict=True)
    ]


def _cut_dims(shape: Sequence[int], strides: Sequence[int], max_gap: int) -> tuple[int, int]:
    """How many leading dimensions to cut into single rows, and the span in elements of what is left. ``max_gap`` is in elements.

    The gap between neighbours never shrinks from the inner dimensions to the outer ones, so the first one that is too wide ends the search.
    """
    span = 1
    for i in range(len(shape) - 1, -1, -1):
        if shape[i] > 1 and strides[i] - span > max_gap:
            return i + 1, span
        span += (shape[i] - 1) * strides[i]
    return 0, span


def _check_length(chunk_box: Box, extent: Extent, itemsize: int) -> None:
    if extent.length != chunk_box.numel * itemsize:
        raise CorruptError(
            f"chunk {chunk_box} takes {chunk_box.numel * itemsize} bytes, but bytes {extent.offset} to {extent.offset + extent.length}"
            f" are said to hold it ({extent.length} bytes)",
            where=extent.path,
            hint="check the checkpoint with `ckpt verify`",
        )


def coalesce(parts: Sequence[Part], *, max_gap: int, max_length: int) -> list[Read]:
    """Join parts that are near each other in a file into reads, ordered by path and offset; ``max_gap`` and ``max_length`` are in bytes.

    A part joins the read before it if at most ``max_gap`` unneeded bytes lie between them and the read stays within ``max_length``, and
    always if the read covers it already: a chunk that several copies want is read once. A part longer than ``max_length`` is a read of
    its own, shared only with parts that lie in it.

    Over-read: bytes read <= bytes needed + ``max_gap`` * (number of joins). Here joins are ``len(parts) - len(reads)``, and a byte that
    several parts need counts once. One exception: where two parts overlap, neither covers the other, and joining them would exceed
    ``max_length``, the bytes that they share are read more than once.
    """
    order = sorted(range(len(parts)), key=lambda i: (parts[i].path, parts[i].offset, -parts[i].length))
    reads: list[Read] = []
    members: list[int] = []
    path, start, end = "", 0, 0
    for i in order:
        part = parts[i]
        stop = part.end
        if members and part.path == path and (stop <= end or (part.offset - end <= max_gap and stop - start <= max_length)):
            members.append(i)
            end = max(end, stop)
            continue
        if members:
            reads.append(Read(path=path, offset=start, length=end - start, parts=tuple(members)))
        path, start, end, members = part.path, part.offset, stop, [i]
    if members:
        reads.append(Read(path=path, offset=start, length=end - start, parts=tuple(members)))
    return reads
