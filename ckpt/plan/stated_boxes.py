"""Layouts that list the boxes of some ranks alone (``StatedBoxes``), joined: to the layout of one tensor, and how it is stored. Pure.

The chunks of a rank are numbered otherwise in the joined assignment than in its own, but they come in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckpt.errors import CoverageError
from ckpt.layout.mesh import Mesh
from ckpt.layout.placements import Boxes, StatedBoxes
from ckpt.layout.tensor_layout import TensorLayout

from .ownership import ChunkAssignment


def states_boxes(layout: TensorLayout) -> bool:
    """Whether a layout lists the boxes of its own ranks alone, and other ranks have other layouts for the same tensor."""
    return isinstance(layout.block_split, StatedBoxes)


def joined_layout(name: str, layouts: Sequence[TensorLayout]) -> TensorLayout:
    """The layout of a tensor whose ranks state their boxes.

    Raises:
        CoverageError: a rank is in two of the layouts, or they have different numbers of replicas.
    """
    holding = [layout for layout in layouts if _boxes(layout)] or list(layouts[:1])
    ranks = [tuple(layout.mesh.array().ravel().tolist()) for layout in holding]
    copies = {len(each) for each in ranks}
    if len(copies) > 1 or len({rank for each in ranks for rank in each}) < sum(map(len, ranks)):
        raise CoverageError(
            f"tensor {name}: the ranks that hold the boxes that it states are not the same number for each box",
            hint="put it on one mesh, as a DTensor that is replicated over the same dimensions on all ranks",
        )
    mesh = Mesh(("stated", "copies"), (len(holding), copies.pop()), tuple(rank for each in ranks for rank in each))
    return TensorLayout(mesh, (Boxes("stated", tuple(_boxes(layout) for layout in holding)),))


def joined_assignment(assignments: Sequence[ChunkAssignment]) -> ChunkAssignment:
    """How a tensor is stored of which ranks have assigned their own boxes; all have the same number of replicas."""
    parts = [a for a in assignments if len(a)] or list(assignments[:1])
    offsets, shapes = (np.concatenate(column) for column in zip(*(a.all_boxes() for a in parts), strict=True))
    first = np.cumsum([0, *(len(a.cell_holders) for a in parts)])
    return ChunkAssignment(
        boxes=(offsets, shapes),
        owners=np.concatenate([a.owners for a in parts]),
        cell=np.concatenate([a.cell + at for a, at in zip(parts, first.tolist(), strict=False)]),
        cell_holders=np.concatenate([a.cell_holders for a in parts]),
    )


def _boxes(layout: TensorLayout) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    split = layout.block_split
    assert isinstance(split, StatedBoxes)
    return split.boxes[0]
