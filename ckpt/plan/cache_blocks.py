"""A chunk in pieces that are small enough to stay in the cache while they are hashed and copied. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ckpt.layout.geometry import Box, row_major_strides


@dataclass(frozen=True, slots=True)
class CacheBlock:
    """A box, in global coordinates, and the contiguous elements of its chunk that hold it: ``start`` counts from the chunk's first one."""

    box: Box
    start: int
    length: int


def pieces(chunk: Box, cover: Box, limit: int) -> Iterator[CacheBlock]:
    """Cut ``cover``, a part of the row-major ``chunk``, into boxes that lie within at most ``limit`` elements of the chunk each.

    By increasing start. They tile ``cover``; those of the whole chunk follow one another without a gap. A limit below 1 counts as 1.
    """
    if cover.numel == 0:
        return
    strides = row_major_strides(chunk.shape)
    lead, row = _lead(cover.shape, strides, limit)
    if not cover.shape:
        yield CacheBlock(cover, 0, 1)
        return
    # Dimensions before ``lead`` are walked one row at a time, ``lead`` itself ``rows`` at a time, and those after it
    # are taken whole:
    #
    # chunk [4, 3, 5], limit 10 elements     lead = 1, since one row of dimension 0 spans 15
    # block 0: [0, 0:2, :]   block 1: [0, 2:3, :]   block 2: [1, 0:2, :]   …
    size, stride, inner = cover.shape[lead], strides[lead], cover.shape[lead + 1 :]
    rows = max((limit - row) // stride, 0) + 1
    tail = cover.offset[lead + 1 :]
    base = sum((o - b) * s for o, b, s in zip(tail, chunk.offset[lead + 1 :], strides[lead + 1 :], strict=True))
    for corner in product(*(range(o, o + n) for o, n in zip(cover.offset[:lead], cover.shape[:lead], strict=True))):
        first = base + sum((o - b) * s for o, b, s in zip(corner, chunk.offset, strides, strict=False))
        for at in range(0, size, rows):
            count, offset = min(rows, size - at), cover.offset[lead] + at
            box = Box((*corner, offset, *tail), (*(1,) * lead, count, *inner))
            yield CacheBlock(box, first + (offset - chunk.offset[lead]) * stride, (count - 1) * stride + row)


def _lead(shape: tuple[int, ...], strides: tuple[int, ...], limit: int) -> tuple[int, int]:
    """The first dimension whose single rows span at most ``limit`` elements, and what one of them spans."""
    row = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    for dim in range(len(shape)):
        row -= (shape[dim] - 1) * strides[dim]
        if row <= limit or dim == len(shape) - 1:
            return dim, row
    return 0, row
