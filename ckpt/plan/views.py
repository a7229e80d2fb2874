"""Logical tensors made of boxes of stored ones: renamed, cut, concatenated, stacked, interleaved, transposed. Pure.

A view moves no element: it says for each box of the logical tensor which box of which stored tensor it is.

Invariants: the pieces of a view do not overlap. Axes are counted from 0. Everything is in elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from ckpt.errors import UsageError
from ckpt.plan.layout.geometry import Box, TilingFault, even_cuts, find_fault

_T = TypeVar("_T")


class ViewPiece(NamedTuple):
    """``box`` of the logical tensor is ``part`` of the stored tensor ``source``.

    ``axes`` has an entry for each axis of the box: the axis of the part that runs along it, or None for an axis of size 1 that the part
    does not have. Axes of the part that are not named have size 1.
    """

    box: Box
    source: str
    part: Box
    axes: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LogicalTensor:
    """A logical tensor of ``shape``. Elements that no piece has are filling: a load gives zeros there."""

    shape: tuple[int, ...]
    pieces: tuple[ViewPiece, ...]

    def is_all_of(self, shape: Sequence[int]) -> bool:
        """Whether it is one stored tensor, which has this shape, as it is, under whatever name."""
        if len(self.pieces) != 1 or self.shape != tuple(shape):
            return False
        box, _, part, axes = self.pieces[0]
        return box == part == Box.whole(self.shape) and axes == tuple(range(len(self.shape)))

    def fault(self) -> TilingFault | None:
        """A box that no piece fills, or that several do; None if the pieces tile the view."""
        boxes = [p.box for p in self.pieces]
        rank = len(self.shape)
        offsets = np.array([b.offset for b in boxes], dtype=np.int64).reshape(len(boxes), rank)
        return find_fault(self.shape, offsets, np.array([b.shape for b in boxes], dtype=np.int64).reshape(len(boxes), rank))

    @property
    def unpadded(self) -> tuple[int, ...] | None:
        """The shape without filling at the ends of axes (a padded vocabulary); None if there is no filling, or it lies elsewhere."""
        if not self.pieces:
            return None
        shape = tuple(max(ends) for ends in zip(*(p.box.end for p in self.pieces), strict=True))
        return shape if shape != self.shape and LogicalTensor(shape=shape, pieces=self.pieces).fault() is None else None

    def overlapping(self, box: Box) -> Iterator[ViewPiece]:
        """What the pieces have of ``box``, in the coordinates of the view: what has to be read to get this box."""
        for piece in self.pieces:
            common = piece.box.intersect(box)
            if common is not None:
                yield _cut(piece, common)


def whole(source: str, shape: Sequence[int]) -> LogicalTensor:
    """The stored tensor itself."""
    box = Box.whole(shape)
    return LogicalTensor(shape=box.shape, pieces=(ViewPiece(box, source, box, tuple(range(len(box.shape)))),))


def part(view: LogicalTensor, box: Box) -> LogicalTensor:
    """A box of a view."""
    if len(box.shape) != len(view.shape) or not Box.whole(view.shape).contains(box):
        raise UsageError(f"{box} does not lie in a tensor of shape {list(view.shape)}")
    back = tuple(-o for o in box.offset)
    return LogicalTensor(shape=box.shape, pieces=tuple(_shifted(piece, back) for piece in view.overlapping(box)))


def split(view: LogicalTensor, axis: int, sizes: Sequence[int]) -> list[LogicalTensor]:
    """A view cut along an axis in parts of these sizes."""
    _check_axis(view, axis)
    if sum(sizes) != view.shape[axis]:
        raise UsageError(f"parts of {list(sizes)} do not make up axis {axis} of shape {list(view.shape)}")
    cuts = np.cumsum([0, *sizes]).tolist()
    rank, (before, after) = len(view.shape), (view.shape[:axis], view.shape[axis + 1 :])
    return [part(view, Box(_unit(rank, axis, a), (*before, b - a, *after))) for a, b in pairwise(cuts)]


def concat(views: Sequence[LogicalTensor], axis: int) -> LogicalTensor:
    """Views one after another along an axis."""
    _check_alike(views, axis)
    pieces: list[ViewPiece] = []
    at = 0
    for view in views:
        pieces += [_shifted(p, _unit(len(view.shape), axis, at)) for p in view.pieces]
        at += view.shape[axis]
    shape = views[0].shape
    return LogicalTensor(shape=(*shape[:axis], at, *shape[axis + 1 :]), pieces=tuple(pieces))


def stack(views: Sequence[LogicalTensor], axis: int) -> LogicalTensor:
    """Views one after another along a new axis."""
    return concat([_with_axis(view, axis) for view in views], axis)


def unstack(view: LogicalTensor, axis: int) -> list[LogicalTensor]:
    """What :func:`stack` put together."""
    _check_axis(view, axis)
    return [_without_axis(v, axis) for v in split(view, axis, [1] * view.shape[axis])]


def interleave(views: Sequence[LogicalTensor], axis: int, groups: int) -> LogicalTensor:
    """Each view cut in ``groups`` equal parts along an axis: the first part of each, then the second of each, and so on.

    With the rows of queries, keys and values, and a group for each key-value head, this is Megatron's fused QKV
    (core/transformer/attention.py).
    """
    _check_alike(views, axis)
    parts = [split(view, axis, _equal(view.shape[axis], groups)) for view in views]
    return concat([v for group in zip(*parts, strict=True) for v in group], axis)


def deinterleave(view: LogicalTensor, axis: int, groups: int, sizes: Sequence[int]) -> list[LogicalTensor]:
    """What :func:`interleave` put together; ``sizes`` are those of its views along the axis."""
    per_group = [_equal(size, groups)[0] for size in sizes]
    parts = split(view, axis, per_group * groups)
    return [concat(parts[i :: len(sizes)], axis) for i in range(len(sizes))]


def transpose(view: LogicalTensor, axes: Sequence[int]) -> LogicalTensor:
    """A view with its axes in another order, as ``numpy.transpose``."""
    if sorted(axes) != list(range(len(view.shape))):
        raise UsageError(f"{list(axes)} is not an order of the {len(view.shape)} axes of shape {list(view.shape)}")
    pieces = [ViewPiece(_ordered(p.box, axes), p.source, p.part, tuple(p.axes[a] for a in axes)) for p in view.pieces]
    return LogicalTensor(shape=tuple(view.shape[a] for a in axes), pieces=tuple(pieces))


def padded(view: LogicalTensor, axis: int, size: int) -> LogicalTensor:
    """A view with filling at the end of an axis."""
    _check_axis(view, axis)
    if size < view.shape[axis]:
        raise UsageError(f"axis {axis} of shape {list(view.shape)} has more than {size} elements")
    return LogicalTensor(shape=(*view.shape[:axis], size, *view.shape[axis + 1 :]), pieces=view.pieces)


def within(piece: ViewPiece, part: Box) -> ViewPiece:
    """What of a piece takes ``part`` of its stored tensor, a box inside of ``piece.part``."""
    return _turned(_cut(_turned(piece, ""), part), piece.source)


def in_order(piece: ViewPiece) -> bool:
    """Whether the elements of box and part have one row-major order."""
    axes = [a for a, n in zip(piece.axes, piece.box.shape, strict=True) if a is not None and n > 1]
    return axes == sorted(axes)


def filled(view: LogicalTensor) -> int:
    """How many elements come from stored tensors; the others are filling."""
    return sum(math.prod(p.box.shape) for p in view.pieces)


# ------------------------------------------------------------------------------------------------------------- pieces


def _cut(piece: ViewPiece, box: Box) -> ViewPiece:
    """The piece of ``box``, which lies in ``piece.box``."""
    offset, shape = list(piece.part.offset), list(piece.part.shape)
    for i, axis in enumerate(piece.axes):
        if axis is not None:
            offset[axis] += box.offset[i] - piece.box.offset[i]
            shape[axis] = box.shape[i]
    return ViewPiece(box, piece.source, Box(tuple(offset), tuple(shape)), piece.axes)


def _shifted(piece: ViewPiece, by: Sequence[int]) -> ViewPiece:
    return piece._replace(box=piece.box.shifted(by))


def _turned(piece: ViewPiece, name: str) -> ViewPiece:
    """The same piece with stored and logical tensor in each other's place."""
    axes: list[int | None] = [None] * len(piece.part.shape)
    for i, axis in enumerate(piece.axes):
        if axis is not None:
            axes[axis] = i
    return ViewPiece(piece.part, name, piece.box, tuple(axes))


def _with_axis(view: LogicalTensor, axis: int) -> LogicalTensor:
    if not 0 <= axis <= len(view.shape):
        raise UsageError(f"shape {list(view.shape)} cannot get a new axis {axis}")
    return LogicalTensor(
        shape=_inserted(view.shape, axis, 1),
        pieces=tuple(
            ViewPiece(
                Box(_inserted(p.box.offset, axis, 0), _inserted(p.box.shape, axis, 1)), p.source, p.part, _inserted(p.axes, axis, None)
            )
            for p in view.pieces
        ),
    )


def _without_axis(view: LogicalTensor, axis: int) -> LogicalTensor:
    """A view without an axis of size 1."""
    kept = [i for i in range(len(view.shape)) if i != axis]
    pieces = [ViewPiece(_ordered(p.box, kept), p.source, p.part, tuple(p.axes[i] for i in kept)) for p in view.pieces]
    return LogicalTensor(shape=tuple(view.shape[i] for i in kept), pieces=tuple(pieces))


def _ordered(box: Box, axes: Sequence[int]) -> Box:
    return Box(tuple(box.offset[a] for a in axes), tuple(box.shape[a] for a in axes))


def _inserted(values: tuple[_T, ...], at: int, value: _T) -> tuple[_T, ...]:
    return (*values[:at], value, *values[at:])


def _unit(rank: int, axis: int, value: int) -> tuple[int, ...]:
    return tuple(value if i == axis else 0 for i in range(rank))


def _equal(size: int, groups: int) -> list[int]:
    if groups < 1 or size % groups:
        raise UsageError(f"{size} elements cannot be cut in {groups} equal groups")
    return [b - a for a, b in pairwise(even_cuts(size, groups))]


def _check_axis(view: LogicalTensor, axis: int) -> None:
    if not 0 <= axis < len(view.shape):
        raise UsageError(f"shape {list(view.shape)} has no axis {axis}")


def _check_alike(views: Sequence[LogicalTensor], axis: int) -> None:
    if not views:
        raise UsageError("there is nothing to put together")
    _check_axis(views[0], axis)
    others = {(len(v.shape), v.shape[:axis], v.shape[axis + 1 :]) for v in views}
    if len(others) > 1:
        raise UsageError(f"shapes {', '.join(str(list(v.shape)) for v in views)} cannot be put together along axis {axis}")
