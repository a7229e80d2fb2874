"""Hypothesis strategies for shapes, boxes, cuts and tilings. Shapes stay small enough for numpy to enumerate every element."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import strategies as st

from ckpt.catalog import Grid
from ckpt.plan.layout.geometry import Box, cells, flat_to_boxes


def shapes(min_side: int = 0, max_side: int = 5, max_dims: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with zero to ``max_dims`` dimensions."""
    return st.lists(st.integers(min_side, max_side), max_size=max_dims).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...], min_side: int = 0) -> Box:
    """A box inside of a tensor of ``shape``; sides of at least ``min_side``."""
    offset = tuple(draw(st.integers(0, size - min_side)) for size in shape)
    return Box(offset, tuple(draw(st.integers(min_side, size - o)) for size, o in zip(shape, offset, strict=True)))


@st.composite
def cuts_of(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Increasing boundaries for each dimension, as the format has them."""
    return tuple(
        tuple(sorted({0, size, *draw(st.sets(st.integers(1, size - 1), max_size=4))})) if size > 1 else (0, size) for size in shape
    )


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile a tensor of ``shape``, in any order: halved again and again, flat ranges, or cells."""
    how = draw(st.sampled_from(["halves", "flat", "cells"]))
    if how == "cells":
        rows = zip(*(a.tolist() for a in cells(draw(cuts_of(shape)))), strict=True)
        found = [Box(tuple(o), tuple(s)) for o, s in rows]
    elif how == "flat":
        numel = math.prod(shape)
        at = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=4))})
        found = [b for lo, hi in itertools.pairwise(at) for b in flat_to_boxes(shape, lo, hi)]
    else:
        found = draw(_halves(Box.whole(shape), 3))
    return draw(st.permutations(found))


@st.composite
def _halves(draw: st.DrawFn, box: Box, depth: int) -> list[Box]:
    wide = [i for i, size in enumerate(box.shape) if size > 1]
    if not wide or depth == 0 or draw(st.integers(0, 3)) == 0:
        return [box]
    axis = draw(st.sampled_from(wide))
    first = draw(st.integers(1, box.shape[axis] - 1))
    parts = []
    for offset, size in ((box.offset[axis], first), (box.offset[axis] + first, box.shape[axis] - first)):
        half = Box(
            (*box.offset[:axis], offset, *box.offset[axis + 1 :]),
            (*box.shape[:axis], size, *box.shape[axis + 1 :]),
        )
        parts += draw(_halves(half, depth - 1))
    return parts


def as_arrays(boxes: list[Box], dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and shapes ``[n, dims]`` of boxes."""
    offsets = np.array([b.offset for b in boxes], dtype=np.int64).reshape(len(boxes), dims)
    return offsets, np.array([b.shape for b in boxes], dtype=np.int64).reshape(len(boxes), dims)


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> Grid:
    """A grid of a tensor of ``shape``, regular or of explicit boxes."""
    files = np.zeros(1, dtype=np.int32)
    if draw(st.booleans()):
        return Grid(cuts=draw(cuts_of(shape)), files=files)
    return Grid(boxes=as_arrays(draw(tilings(shape)), len(shape)), files=files)
