"""What every placement answers: the questions that layouts, planners and readers of states ask, with the answers of one that has nothing to
say.

A tensor's splits are applied one after another, each to what the ones before it left::

    global tensor ──AxisSplit──► ──AxisSplit──► block of this rank ──BlockSplit──► pieces of this rank
                    cuts one dimension, over one mesh dimension        at most one, and last

* An :class:`AxisSplit` says which ranges of its dimension each coordinate holds (``part``). The boxes of a rank are the product of the
  ranges of all dimensions; all else follows from ``part``: tilings, owners, chunks, resharding.
* A :class:`BlockSplit` cuts the whole block that axis splits leave, and says which pieces of it each coordinate holds.
* Any other placement says something else about the tensor: its global shape, its mesh, the coordinates that have it.

A new placement is one such class (a frozen dataclass) and, if it is a split, one entry in ``placements.SPLITS``. Its name and fields are
its JSON, which ranks send each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from ckpt.errors import LayoutError

from .geometry import Box, IntArray
from .mesh import Mesh
from .partition import Interval

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the global tensor, and where it is in this rank's memory: a box of the local tensor (a range of it for ``Flat``)."""

    box: Box
    local: Box


@dataclass(frozen=True, kw_only=True, slots=True)
class DTensorAxis:
    """One mesh dimension of a DTensor whose placement is read. Placements are read from the last mesh dimension to the first."""

    over: str
    """Name of the mesh dimension."""
    shape: Shape
    """Of the global tensor."""
    later: tuple[tuple[Split, int], ...]
    """The splits of the mesh dimensions to its right, in the order in which they cut, and into how many parts."""


class Placement:
    """A part of a rule of a :class:`~ckpt.plan.layout.layout.Layout`: what it says of the tensors that the rule is for."""

    __slots__ = ()
    in_rules: ClassVar[bool] = True
    """False for what only readers of live tensors make, of tensors that know their place."""

    def as_split(self) -> Split | None:
        """Itself, if it cuts the tensor."""
        return None

    def mesh_name(self) -> str | None:
        """Which of the layout's further meshes the rule's mesh dimensions belong to."""
        return None

    def coordinates(self, mesh: Mesh) -> dict[str, tuple[int, ...]]:
        """The coordinates of mesh dimensions that alone have the tensor, increasing."""
        return {}

    def stated_shape(self) -> Shape | None:
        """The global shape, if the placement states all of it."""
        return None

    def global_shape(self, shape: Shape, mesh: Mesh) -> Shape:
        """The shape before this placement cut the tensor, where ``shape`` is what a rank holds after it."""
        return shape

    def real_shape(self, shape: Shape) -> Shape | None:
        """The shape of what is not padding of a tensor of global ``shape``, if the placement tells."""
        return None


class Split(Placement, ABC):
    """Cuts a tensor over mesh dimension ``over``."""

    __slots__ = ()
    over: str

    def as_split(self) -> Split | None:
        return self

    @abstractmethod
    def stacked(self, dim: int, ndim: int) -> Split:
        """The same split of a tensor that has got a new dimension ``dim``, now one of ``ndim``."""

    def to_json(self) -> list[Any]:
        """Name and fields; ``registry.split_from_json`` reads it."""
        return [type(self).__name__, *(getattr(self, f.name) for f in fields(self))]  # type: ignore[arg-type]  # splits are dataclasses

    @classmethod
    def from_dtensor(cls, placement: Any, axis: DTensorAxis) -> tuple[Split, int] | None:
        """The split that a placement of a DTensor stands for, and its position among ``axis.later``; None if it is of another kind."""
        return None


class AxisSplit(Split):
    """Cuts dimension ``dim``, which may count from the end."""

    __slots__ = ()
    dim: int
    contiguous: ClassVar[bool] = False
    """Whether each part is one range, whatever the size."""

    @abstractmethod
    def part(self, size: int, parts: int, index: int) -> Sequence[Interval]:
        """The ranges of ``[0, size)`` that part ``index`` of ``parts`` holds, in the order of its memory. The parts together are all of
        it, and no two have a common element.

        Raises:
            LayoutError: a dimension of this size cannot be cut so.
        """

    def all_parts(self, size: int, parts: int) -> tuple[IntArray, IntArray]:
        """:meth:`part` of all parts at once, as starts and stops ``[ranges, parts]``; parts with fewer ranges than others have empty ones.
        A split of very many parts does it in numpy."""
        ranges = [list(self.part(size, parts, index)) for index in range(parts)]
        table = np.zeros((2, max(1, *map(len, ranges)), parts), dtype=np.int64)
        for index, own in enumerate(ranges):
            if own:
                table[:, : len(own), index] = np.asarray(own, dtype=np.int64).T
        return table[0], table[1]

    @abstractmethod
    def size_before(self, size: int, parts: int) -> int:
        """The size of what is cut, where a rank's part has ``size`` elements."""

    def dimension(self, ndim: int) -> int:
        """The dimension that it cuts of a tensor of ``ndim``, counted from 0."""
        return dimension(self.dim, ndim, self)

    def global_shape(self, shape: Shape, mesh: Mesh) -> Shape:
        dim = self.dimension(len(shape))
        return (*shape[:dim], self.size_before(shape[dim], mesh.size(self.over)), *shape[dim + 1 :])

    def stacked(self, dim: int, ndim: int) -> Split:
        old = self.dim % (ndim - 1)
        moved: Split = replace(self, dim=old + 1 if old >= dim else old)  # type: ignore[type-var]  # splits are dataclasses
        return moved


class BlockSplit(Split):
    """Cuts the block that the splits before it leave, whatever its dimensions. Comes last."""

    __slots__ = ()
    alone: ClassVar[bool] = False
    """Whether it has to be the only split."""
    flattens: ClassVar[bool] = False
    """Whether a rank's memory is one-dimensional."""

    @abstractmethod
    def pieces(self, block: list[Piece], parts: int, index: int) -> list[Piece]:
        """The pieces that part ``index`` of ``parts`` holds of a block, which consists of the pieces that the splits before leave."""

    @abstractmethod
    def local_shape(self, block: Shape, parts: int, index: int) -> Shape:
        """The shape of the memory of part ``index`` of a block of this shape."""

    def has_even_ranges(self) -> bool:
        """Whether the parts are ranges of ``ceil(numel / parts)`` elements of the block's row-major flattening."""
        return False

    def filled(self, parts: int) -> tuple[int, ...]:
        """The parts that are not known to hold nothing of any tensor, increasing."""
        return tuple(range(parts))

    def stacked(self, dim: int, ndim: int) -> Split:
        raise LayoutError(f"a stacked tensor cannot be {type(self).__name__}")

    def global_shape(self, shape: Shape, mesh: Mesh) -> Shape:
        raise LayoutError(
            f"the global shape of a {type(self).__name__} tensor cannot be derived from its memory",
            hint="add GlobalShape(shape) to the rule",
        )


def dimension(dim: int, ndim: int, placement: object) -> int:
    """A dimension that a placement names of a tensor that has ``ndim``, counted from 0."""
    if not -ndim <= dim < ndim:
        raise LayoutError(f"{placement} does not fit a tensor of {ndim} dimensions")
    return dim % ndim
