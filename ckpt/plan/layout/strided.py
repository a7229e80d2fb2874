"""Which boxes of a row-major tensor a strided view of it is made of. Pure.

A program that takes a part of a tensor by ``narrow``, ``view``, ``transpose`` and the like ends with a shape, strides and an offset. Each
dimension of such a view walks along one dimension of the tensor, along a part of one, or along several::

    tensor (6, 4), strides (4, 1)

    view                    its strides   walks along
    t()                     (1, 4)        dimension 1, dimension 0
    [2:4]                   (4, 1)        dimension 0 from 2, dimension 1: the box [2:4, 0:4]
    view(2, 3, 4)[:, 0]     (12, 1)       every third row: the boxes [0:1, 0:4] and [3:4, 0:4]
    view(24)                (1,)          both: 6 × 4 by strides (4, 1)

So a dimension that runs over the end of the tensor's is divided there, and those that walk along one dimension of the tensor are joined
again. What cannot be joined, because elements lie between or because the other side of a copy lies otherwise, is listed step by step.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from .geometry import Box, row_major_strides

MOST_BOXES = 4096
"""A view of more boxes than this is none that anybody wants box by box."""


@dataclass(frozen=True, slots=True)
class StridedView:
    """Elements of a memory: sizes and strides per dimension, and the first one's offset, all in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def is_within(self, numel: int) -> bool:
        """Whether a memory of so many elements has all of it."""
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return math.prod(self.shape) == 0 or (self.offset >= 0 and self.offset + reach < numel)


@dataclass(frozen=True, slots=True)
class _Walk:
    """``count`` steps of ``stride`` in the tensor, and of ``beside`` in the memory on the other side."""

    count: int
    stride: int
    beside: int


def boxes_of_view(shape: tuple[int, ...], view: StridedView, beside: StridedView | None = None) -> list[tuple[Box, StridedView]] | None:
    """The boxes of a row-major tensor of ``shape`` whose elements ``view`` shows, each once.

    Args:
        beside: another memory, viewed with the same shape: what a copy between the two pairs with the view's elements. By default the
            tensor itself.

    Returns:
        Each box, and what of ``beside`` goes with it, in the box's shape. None if the view shows an element twice, walks across rows
        without covering them, reaches out of the tensor, or is made of more than ``MOST_BOXES`` boxes.
    """
    beside = beside or view
    if math.prod(view.shape) == 0:
        return []
    if not view.is_within(math.prod(shape)):
        return None
    strides = row_major_strides(shape)
    start = _start(shape, strides, view.offset)
    walks = _divided(shape, strides, start, view, beside)
    if walks is None:
        return None
    sides: list[_Walk] = []
    steps: list[tuple[int, _Walk]] = []
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        along = _joined(walks[dim])
        if along is None or start[dim] + sum((w.count - 1) * w.stride for w in along) // stride >= size:
            return None
        side = along.pop() if along and along[-1].stride == stride else _Walk(1, stride, 1)
        sides.append(side)
        steps += [(dim, walk) for walk in along]
    if math.prod(walk.count for _, walk in steps) > MOST_BOXES:
        return None
    boxes = []
    for numbers in itertools.product(*(range(walk.count) for _, walk in steps)):
        offset, there = list(start), beside.offset
        for (dim, walk), number in zip(steps, numbers, strict=True):
            offset[dim] += number * walk.stride // strides[dim]
            there += number * walk.beside
        sizes = tuple(side.count for side in sides)
        boxes.append((Box(tuple(offset), sizes), StridedView(sizes, tuple(side.beside for side in sides), there)))
    return boxes


def _start(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> list[int]:
    """The coordinates of the element at ``offset``."""
    return [offset // stride % size for size, stride in zip(shape, strides, strict=True)]


def _divided(
    shape: tuple[int, ...], strides: tuple[int, ...], start: list[int], view: StridedView, beside: StridedView
) -> list[list[_Walk]] | None:
    """The walks of a view by the dimension of the tensor that each goes along, divided where they run over its end."""
    walks: list[list[_Walk]] = [[] for _ in shape]
    left = [_Walk(*row) for row in zip(view.shape, view.strides, beside.strides, strict=True) if row[0] > 1]
    while left:
        walk = left.pop()
        dim = next((d for d, (n, s) in enumerate(zip(shape, strides, strict=True)) if n > 1 and s <= walk.stride < s * n), None)
        if dim is None or walk.stride % strides[dim]:
            return None
        step, size = walk.stride // strides[dim], shape[dim]
        if start[dim] + (walk.count - 1) * step < size:
            walks[dim].append(walk)
            continue
        inner = size // step
        if size % step or start[dim] >= step or walk.count % inner:
            return None
        if inner > 1:
            walks[dim].append(replace(walk, count=inner))
        left.append(_Walk(walk.count // inner, walk.stride * inner, walk.beside * inner))
    return walks


def _joined(walks: list[_Walk]) -> list[_Walk] | None:
    """Walks along one dimension, the widest steps first, those that make up one as one; None if they meet an element twice."""
    joined: list[_Walk] = []
    for walk in sorted(walks, key=lambda w: w.stride):
        if joined and walk.stride < joined[-1].stride * joined[-1].count:
            return None
        last = joined[-1] if joined else None
        if last and walk.stride == last.stride * last.count and walk.beside == last.beside * last.count:
            joined[-1] = replace(last, count=last.count * walk.count)
        else:
            joined.append(walk)
    return joined[::-1]
