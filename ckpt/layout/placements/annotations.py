"""Placements that do not cut: what a rule of a :class:`~ckpt.layout.layout.Layout` says of tensors besides how they are split."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.errors import LayoutError
from ckpt.layout.mesh import Mesh

from .base import Placement, Shape, dimension


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
    """Dimension ``dim`` has ``size`` elements in all. Needed where the parts of a :class:`Shard` differ: they cannot be told from
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
