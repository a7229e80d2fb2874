"""Layouts that list the boxes of some ranks alone (``StatedBoxes``), joined to the layout of one tensor. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.errors import CoverageError

from .mesh import Mesh
from .placements import Boxes, StatedBoxes
from .tensor_layout import TensorLayout


def states_boxes(layout: TensorLayout) -> bool:
    """Whether a layout lists the boxes of its own ranks alone, and other ranks have other layouts for the same tensor."""
    return isinstance(layout.block_split, StatedBoxes)


def joined_layout(name: str, layouts: Sequence[TensorLayout]) -> TensorLayout:
    """The layout of a tensor whose ranks state their boxes."""
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


def _boxes(layout: TensorLayout) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    split = layout.block_split
    assert isinstance(split, StatedBoxes)
    return split.boxes[0]
