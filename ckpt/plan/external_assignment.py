"""Stored grids for boxes that somebody else assigned to ranks, such as the planner of another library. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckpt import settings
from ckpt.dtypes import DType
from ckpt.errors import ConsistencyError, CoverageError
from ckpt.plan.layout.geometry import Box, IntArray, TilingFault, cells
from ckpt.plan.layout.tensor_layout import TensorLayout

from .flat import caps, refine
from .ownership import ChunkAssignment, TensorSpec

_NOWHERE = TensorLayout.replicated((0,))
"""Where the boxes came from does not matter any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignedBox:
    """A box of the tensor ``name``, whose global ``shape`` counts elements of ``dtype``; ``owner`` writes it."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    box: Box
    owner: int


@dataclass(frozen=True, kw_only=True)
class ExternalAssignment:
    """Tensors by name, and how each is stored."""

    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)
    assignments: Mapping[str, ChunkAssignment] = field(default_factory=dict)

    def check(self) -> None:
        """Raise unless the boxes tile every tensor."""
        tiled: set[tuple[int, tuple[int, ...]]] = set()
        for name, t in self.tensors.items():
            assignment = self.assignments.get(name)
            key = (id(assignment), t.shape)
            if key in tiled:
                continue
            nothing = TilingFault(Box.whole(t.shape), 0) if t.nbytes else None
            fault = nothing if assignment is None else assignment.fault(t.shape)
            if fault is not None:
                raise CoverageError(f"{fault.box} would be stored {fault.times} times", where=f"tensor {name}")
            tiled.add(key)


def assign_boxes(assigned: Iterable[AssignedBox]) -> ExternalAssignment:
    """How the boxes are stored: cut to the size of chunks, and numbered by their offsets.

    The chunks of one owner come in the same order whether the boxes of the others are given too or not: so a rank can lay out its files
    from its own boxes. Empty boxes are left out; an empty tensor is one chunk, of whoever has the box at its start.
    """
    tensors: dict[str, TensorSpec] = {}
    boxes: dict[str, list[tuple[Box, int]]] = {}
    for g in assigned:
        t = TensorSpec(g.name, g.dtype, g.shape, _NOWHERE)
        if tensors.setdefault(g.name, t) != t:
            shapes = " and ".join(f"{x.dtype.name} {list(x.shape)}" for x in (tensors[g.name], t))
            raise ConsistencyError(f"ranks give it different dtypes or shapes: {shapes}", where=f"tensor {g.name}")
        if g.box.numel or (t.nbytes == 0 and not any(g.box.offset) and g.name not in boxes):
            boxes.setdefault(g.name, []).append((g.box, g.owner))
    alike: dict[object, ChunkAssignment] = {}
    assignments = {}
    for name, owned_boxes in boxes.items():
        t = tensors[name]
        key = (t.shape, t.dtype.itemsize, tuple(owned_boxes))
        if key not in alike:
            alike[key] = _assignment(t.shape, t.dtype.itemsize, owned_boxes)
        assignments[name] = alike[key]
    return ExternalAssignment(tensors=tensors, assignments=assignments)


def joined_assignment(assignments: Sequence[ChunkAssignment]) -> ChunkAssignment:
    """How a tensor is stored of which ranks have assigned their own boxes; all have the same number of replicas. The chunks of a rank have
    other numbers here than in its own assignment, and come in the same order."""
    parts = [a for a in assignments if len(a)] or list(assignments[:1])
    offsets, shapes = (np.concatenate(column) for column in zip(*(a.all_boxes() for a in parts), strict=True))
    first = np.cumsum([0, *(len(a.cell_holders) for a in parts)])
    return ChunkAssignment(
        boxes=(offsets, shapes),
        owners=np.concatenate([a.owners for a in parts]),
        cell=np.concatenate([a.cell + at for a, at in zip(parts, first.tolist(), strict=False)]),
        cell_holders=np.concatenate([a.cell_holders for a in parts]),
    )


def _assignment(shape: tuple[int, ...], itemsize: int, owned_boxes: Sequence[tuple[Box, int]]) -> ChunkAssignment:
    cut = [_cut(box, itemsize) for box, _ in owned_boxes]
    at, sizes = (np.concatenate(column) for column in zip(*cut, strict=True))
    cell = np.repeat(np.arange(len(cut), dtype=np.int64), [len(a) for a, _ in cut])
    order = np.lexsort(at.T[::-1]) if shape else np.arange(len(at))
    at, sizes, cell = at[order], sizes[order], cell[order]
    holders = np.array([[owner] for _, owner in owned_boxes], dtype=np.int64)
    cuts = _cuts(shape, at, sizes)
    return ChunkAssignment(
        cuts=cuts, boxes=None if cuts is not None else (at, sizes), owners=holders[cell, 0], cell=cell, cell_holders=holders
    )


def _cut(box: Box, itemsize: int) -> tuple[IntArray, IntArray]:
    if not box.numel:
        return np.array([box.offset], dtype=np.int64), np.array([box.shape], dtype=np.int64)
    most = caps(box.shape, itemsize, settings.CHUNK)
    at, sizes = cells([refine((0, n), 1, cap)[0] for n, cap in zip(box.shape, most, strict=True)])
    return at + np.array(box.offset, dtype=np.int64), sizes


def _cuts(shape: tuple[int, ...], at: IntArray, sizes: IntArray) -> tuple[tuple[int, ...], ...] | None:
    """The boundaries along each dimension, if the boxes are the cells of a regular grid: that is stored in far less space."""
    if math.prod(shape) == 0:
        return tuple((0, n) for n in shape)
    cuts = tuple((*np.unique(at[:, dim]).tolist(), size) for dim, size in enumerate(shape))
    if math.prod(len(c) - 1 for c in cuts) != len(at):
        return None
    offsets, shapes = cells(cuts)
    return cuts if np.array_equal(offsets, at) and np.array_equal(shapes, sizes) else None
