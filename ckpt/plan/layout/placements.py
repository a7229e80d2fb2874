"""Placements: how rules and DTensors say that a tensor lies over the ranks. ``placement_base`` has what each of them answers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, ClassVar, cast

import numpy as np

from ckpt.errors import LayoutError, UsageError
from ckpt.needs import plugin, plugin_names

from .geometry import Box, Cuts, IntArray, ceil_cut, ceil_cuts, flat_to_boxes
from .mesh import Mesh
from .partition import Interval
from .placement_base import AxisSplit, BlockSplit, DTensorAxis, Piece, Placement, Shape, Split, dimension

# Placements that do not cut: what a rule of a :class:`~ckpt.plan.layout.layout.Layout` says of tensors besides how they are split.


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """No split: every rank of the mesh holds the whole tensor."""


@dataclass(frozen=True, slots=True)
class Padded(Placement):
    """Dimension ``dim`` has ``size`` real elements; what the ranks hold beyond them is padding (a vocabulary made divisible).

    Padding is stored, so that the same layout resumes exactly; another padding takes the real elements and fills its own padding
    with zeros.
    """

    dim: int
    size: int

    def real_shape(self, shape: Shape) -> Shape | None:
        dim = dimension(self.dim, len(shape), self)
        if self.size > shape[dim]:
            raise LayoutError(f"dimension {dim} has {shape[dim]} elements, fewer than the {self.size} real ones of {self}")
        return (*shape[:dim], self.size, *shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class Uneven(Placement):
    """Dimension ``dim`` has ``size`` elements in all. Needed where the parts of a :class:`Shard` differ: they cannot be derived from
    one rank's part."""

    dim: int
    size: int

    def global_shape(self, shape: Shape, mesh: Mesh) -> Shape:
        dim = dimension(self.dim, len(shape), self)
        return (*shape[:dim], self.size, *shape[dim + 1 :])


@dataclass(frozen=True, slots=True)
class GlobalShape(Placement):
    """The tensor's global shape. Needed for :class:`Flat` tensors, whose memory does not show it."""

    shape: tuple[int, ...]

    def stated_shape(self) -> Shape | None:
        return self.shape


@dataclass(frozen=True, slots=True)
class Stage(Placement):
    """The tensor lives on these coordinates of mesh dimension ``over`` (negative ones count from the end): an embedding tied to
    the head is on ``(0, -1)``."""

    over: str
    at: tuple[int, ...] | int

    def coordinates(self, mesh: Mesh) -> dict[str, tuple[int, ...]]:
        size = mesh.size(self.over)
        given = (self.at,) if isinstance(self.at, int) else self.at
        if not all(-size <= i < size for i in given):
            raise LayoutError(f"{self} does not fit: {self.over!r} has {size} coordinates")
        return {self.over: tuple(sorted({i % size for i in given}))}


@dataclass(frozen=True, slots=True)
class OnMesh(Placement):
    """The rule's mesh dimensions are those of this one of the layout's further meshes (experts folded over the same ranks)."""

    name: str

    def mesh_name(self) -> str | None:
        return self.name


# ``Boxes``: any boxes, listed.


@dataclass(frozen=True, slots=True)
class Boxes(BlockSplit):
    """Each coordinate of ``over`` holds the boxes that are listed for it, as pairs of offset and shape, each with memory of its own.

    The layout of a ``ShardedTensor`` that is cut along several dimensions. Must be the only split.
    """

    over: str
    boxes: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...]
    in_rules: ClassVar[bool] = False
    alone: ClassVar[bool] = True

    def pieces(self, block: list[Piece], parts: int, index: int) -> list[Piece]:
        return [Piece(Box(offset, shape), Box((0,) * len(shape), shape)) for offset, shape in self.boxes[index]]

    def local_shape(self, block: Shape, parts: int, index: int) -> Shape:
        return block


@dataclass(frozen=True, slots=True)
class StatedBoxes(Boxes):
    """The boxes of one coordinate, whose ranks know no others: together with the layouts of the other ranks they tile the tensor."""


# ``Flat``: contiguous ranges of the row-major flattening.


class Sizes(tuple[int, ...]):
    """Sizes of ranges, one for each rank of a job perhaps. Equal ones are one object, which is hashed and added up once: layouts of
    thousands of tensors have them, and are keys of caches."""

    @cached_property
    def cuts(self) -> Cuts:
        if min(self, default=0) < 0:
            raise LayoutError(f"sizes of flat ranges must not be negative, and one is {min(self)}")
        return Cuts.of(np.append(0, np.cumsum(np.fromiter(self, dtype=np.int64, count=len(self)))))

    @cached_property
    def filled(self) -> tuple[int, ...]:
        """The numbers of those that are not empty."""
        numbers: list[int] = np.flatnonzero(np.diff(self.cuts.array)).tolist()
        return tuple(numbers)

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)


@lru_cache(maxsize=4096)
def _interned(sizes: tuple[int, ...]) -> Sizes:
    return Sizes(sizes)


@lru_cache(maxsize=4096)
def window_sizes(each: int, start: int, numel: int, parts: int) -> Sizes:
    """The sizes of ``parts`` ranges of ``each`` elements as a window of ``numel`` elements from ``start`` on sees them."""
    cuts = np.clip(np.arange(parts + 1, dtype=np.int64) * each - start, 0, numel)
    return _interned(tuple(np.diff(cuts).tolist()))


@dataclass(frozen=True, slots=True)
class Flat(BlockSplit):
    """What earlier splits left is flattened (row-major) and cut into contiguous ranges of ``ceil(numel / n)`` elements; the last
    may be shorter or empty. Or into ranges of the given ``sizes``, any of which may be empty.

    The layout of ZeRO and of FSDP1. Must come last; a rank's memory is one-dimensional.
    """

    over: str
    sizes: tuple[int, ...] | None = None
    flattens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.sizes is not None and not isinstance(self.sizes, Sizes):
            object.__setattr__(self, "sizes", _interned(tuple(self.sizes)))

    @property
    def _given(self) -> Sizes:
        return cast(Sizes, self.sizes)

    def pieces(self, block: list[Piece], parts: int, index: int) -> list[Piece]:
        if not block:
            return []
        block_shape = tuple(np.max([p.local.end for p in block], axis=0).tolist()) if block[0].local.shape else ()
        start, stop = self._range(math.prod(block_shape), parts, index)
        pieces, at = [], 0
        for part in flat_to_boxes(block_shape, start, stop):
            for piece in block:
                common = part.intersect(piece.local)
                if common is None:
                    continue
                if common != part:
                    raise LayoutError("Flat over Interleaved is not supported", hint="shard each fused part under its own name")
                shift = tuple(g - o for g, o in zip(piece.box.offset, piece.local.offset, strict=True))
                pieces.append(Piece(common.shifted(shift), Box((at,), (part.numel,))))
            at += part.numel
        return pieces

    def local_shape(self, block: Shape, parts: int, index: int) -> Shape:
        start, stop = self._range(math.prod(block), parts, index)
        return (stop - start,)

    def _range(self, numel: int, parts: int, index: int) -> Interval:
        if self.sizes is None:
            return ceil_cut(numel, parts, index), ceil_cut(numel, parts, index + 1)
        cuts = self.range_cuts(numel, parts)
        return int(cuts[index]), int(cuts[index + 1])

    def has_even_ranges(self) -> bool:
        return self.sizes is None

    def range_cuts(self, numel: int, parts: int) -> IntArray:
        """Boundaries of the ranges of a block of ``numel`` elements.

        Raises:
            LayoutError: the given sizes are those of another block.
        """
        if self.sizes is None:
            return ceil_cuts(numel, parts).array
        cuts = self._given.cuts
        if len(self.sizes) != parts or cuts[-1] != numel:
            text = f"{self.sizes}" if len(self.sizes) <= 16 else f"of {len(self.sizes)} ranges, {cuts[-1]} elements in all,"
            raise LayoutError(f"sizes {text} must be {parts} numbers that add up to {numel}")
        return cuts.array

    def filled(self, parts: int) -> tuple[int, ...]:
        return tuple(range(parts)) if self.sizes is None else self._given.filled


# ``Shard``: a dimension in consecutive parts, one for each coordinate.


@dataclass(frozen=True, slots=True)
class Shard(AxisSplit):
    """Dimension ``dim`` is cut over mesh dimension ``over``: parts of ``ceil(size / n)`` as ``torch.chunk`` makes them, or of the
    given ``sizes``."""

    dim: int
    over: str
    sizes: tuple[int, ...] | None = None
    contiguous: ClassVar[bool] = True

    def part(self, size: int, parts: int, index: int) -> Sequence[Interval]:
        if self.sizes is None:
            return ((ceil_cut(size, parts, index), ceil_cut(size, parts, index + 1)),)
        cuts = given_cuts(self.sizes, size, parts)
        return ((cuts[index], cuts[index + 1]),)

    def all_parts(self, size: int, parts: int) -> tuple[IntArray, IntArray]:
        cuts = ceil_cuts(size, parts).array if self.sizes is None else np.asarray(given_cuts(self.sizes, size, parts), dtype=np.int64)
        return cuts[None, :-1], cuts[None, 1:]

    def size_before(self, size: int, parts: int) -> int:
        return size * parts if self.sizes is None else sum(self.sizes)

    @classmethod
    def from_dtensor(cls, placement: Any, axis: DTensorAxis) -> tuple[Split, int] | None:
        strided = strided_dim(placement, axis)
        if strided is None:
            return None
        dim, factor = strided
        position = strided_position(dim, factor, axis.later)
        return None if position is None else (cls(dim, axis.over), position)


def strided_dim(placement: Any, axis: DTensorAxis) -> tuple[int, int] | None:
    """Dimension and split factor of torch's ``Shard`` (1) and ``_StridedShard``; the latter is a subclass of the former in some versions
    only. Not of other libraries' subclasses, which may mean something else by the same fields."""
    if not type(placement).__module__.startswith("torch."):
        return None
    if not placement.is_shard() and not hasattr(placement, "split_factor"):
        return None
    return int(placement.dim) % max(len(axis.shape), 1), int(getattr(placement, "split_factor", 1))


def strided_position(dim: int, factor: int, later: Sequence[tuple[Split, int]]) -> int | None:
    """Where a torch ``Shard`` or ``_StridedShard`` goes among the splits of the mesh dimensions to its right.

    A plain one cuts before all of these. A strided one cuts after those whose parts multiply to its ``split_factor``
    (torch/distributed/tensor/placement_types.py). None if no such splits explain the factor.
    """
    position, product = 0, 1
    for number, (split, parts) in enumerate(later):
        if isinstance(split, Shard) and split.dim == dim and product < factor:
            position, product = number + 1, product * parts
    if product != factor:
        return None
    return position if factor > 1 else 0


def given_cuts(sizes: tuple[int, ...], size: int, parts: int) -> tuple[int, ...]:
    """Boundaries of parts of these sizes, which must be those of ``parts`` parts of ``size`` elements."""
    if len(sizes) != parts or sum(sizes) != size:
        raise LayoutError(f"sizes {sizes} must be {parts} numbers that add up to {size}")
    return tuple(itertools.accumulate(sizes, initial=0))


# ``Interleaved``: a dimension of several groups, each of which is cut for itself.


@dataclass(frozen=True, slots=True)
class Interleaved(AxisSplit):
    """Dimension ``dim`` is made of groups, each of which is cut over ``over``; a rank holds its part of every group, one after another.

    ``groups`` are the groups' sizes (fused QKV with the three parts one below the other), or their number if they are equal (2 for
    gate/up). Group sizes refer to what earlier splits left of the dimension.
    """

    dim: int
    over: str
    groups: tuple[int, ...] | int

    def part(self, size: int, parts: int, index: int) -> Sequence[Interval]:
        cuts = itertools.pairwise(self._group_cuts(size))
        return [(a + ceil_cut(b - a, parts, index), a + ceil_cut(b - a, parts, index + 1)) for a, b in cuts]

    def all_parts(self, size: int, parts: int) -> tuple[IntArray, IntArray]:
        edges = np.stack([a + ceil_cuts(b - a, parts).array for a, b in itertools.pairwise(self._group_cuts(size))])
        return edges[:, :-1], edges[:, 1:]

    def _group_cuts(self, size: int) -> Sequence[int]:
        if isinstance(self.groups, tuple):
            return given_cuts(self.groups, size, len(self.groups))
        return ceil_cuts(size, self.groups)

    def size_before(self, size: int, parts: int) -> int:
        if isinstance(self.groups, tuple):
            return sum(self.groups)
        if size * parts % self.groups:
            raise LayoutError(
                f"dimension {self.dim} has {size * parts} elements, which are not {self.groups} equal groups",
                hint="give Interleaved their sizes",
            )
        return size * parts

    @classmethod
    def from_dtensor(cls, placement: Any, axis: DTensorAxis) -> tuple[Split, int] | None:
        """A ``_StridedShard`` whose split factor no splits to its right explain interleaves that many groups."""
        strided = strided_dim(placement, axis)
        if strided is None:
            return None
        dim, factor = strided
        if strided_position(dim, factor, axis.later) is not None:
            return None
        return cls(dim, axis.over, tuple(b - a for a, b in itertools.pairwise(ceil_cuts(axis.shape[dim], factor)))), 0


# The splits there are, by name. Layouts travel between ranks as JSON that names them, and DTensors' placements are read as these.

SPLITS: dict[str, type[Split]] = {cls.__name__: cls for cls in (Shard, Interleaved, Flat, Boxes, StatedBoxes)}
"""A new split is one more entry; one of another distribution is entered when its name is met."""
_GROUP = "ckpt.placements"


def split_from_json(data: Any) -> Split:
    """The split that :meth:`~.base.Split.to_json` wrote."""
    kind, *values = data
    if kind not in SPLITS and not _is_known(kind):
        raise LayoutError(
            f"a layout names the split {kind!r}, which this process does not know",
            hint=f"it knows {', '.join(SPLITS)}; give all ranks the same",
        )
    return SPLITS[kind](*map(_tuples, values))


def split_from_dtensor(placement: Any, axis: DTensorAxis) -> tuple[Split, int] | None:
    """The split that a DTensor's placement stands for, and its position among ``axis.later``; None if no split knows it. The last of the
    registry is asked first: it may be a special case of one before."""
    if not (kind := type(placement)).__module__.startswith("torch."):
        _enter_plugins(f"{kind.__module__}.{kind.__qualname__}")
    answers = (cls.from_dtensor(placement, axis) for cls in reversed(SPLITS.values()))
    return next((answer for answer in answers if answer is not None), None)


@cache
def _enter_plugins(_: str) -> None:
    """Once for each class of another library, before anybody is asked: it may derive from torch's ``Shard`` and mean something else."""
    for name in plugin_names(_GROUP):
        _is_known(name)


def _is_known(kind: str) -> bool:
    if kind not in SPLITS and (given := plugin(_GROUP, kind, type)) is not None:
        if given.__name__ != kind or not issubclass(given, Split):
            raise UsageError(f"the placement {kind!r} is the class {given.__qualname__}", hint=f"it has to be a Split of the name {kind}")
        SPLITS[kind] = given
    return kind in SPLITS


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
