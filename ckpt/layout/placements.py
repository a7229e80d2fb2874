"""What a rule of a :class:`~ckpt.layout.layout.Layout` says of tensors, besides how they are split."""

from __future__ import annotations

from dataclasses import dataclass

from .splits import Flat, Interleaved, Replicate, Shard, Split


@dataclass(frozen=True, slots=True)
class Padded:
    """Dimension ``dim`` has ``size`` real elements; what the ranks hold beyond them is padding (a vocabulary made divisible).

    Padding is stored, so that the same layout resumes exactly; another padding takes the real elements and fills its own padding
    with zeros.
    """

    dim: int
    size: int


@dataclass(frozen=True, slots=True)
class Uneven:
    """Dimension ``dim`` has ``size`` elements in all. Needed where the parts of a :class:`Shard` differ: they cannot be told from
    one rank's part."""

    dim: int
    size: int


@dataclass(frozen=True, slots=True)
class GlobalShape:
    """The tensor's global shape. Needed for :class:`Flat` tensors, whose memory does not show it."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """The tensor lives on these coordinates of mesh dimension ``over`` (negative ones count from the end): an embedding tied to
    the head is on ``(0, -1)``."""

    over: str
    at: tuple[int, ...] | int


@dataclass(frozen=True, slots=True)
class OnMesh:
    """The rule's mesh dimensions are those of this one of the layout's further meshes (experts folded over the same ranks)."""

    name: str


Placement = Split | Replicate | Padded | Uneven | GlobalShape | Stage | OnMesh
PLACEMENTS = (Shard, Interleaved, Flat, Replicate, Padded, Uneven, GlobalShape, Stage, OnMesh)
