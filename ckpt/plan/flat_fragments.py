"""What ranks send each other so that merged chunks are whole: the edges of their flat ranges, less than a row each. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .flat import FlatGrid
from .ownership import ChunkAssignment, TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """Contiguous elements ``[start, stop)`` of the row-major flattening of one tensor, that move from the rank that holds them to the
    one that writes them as a part of ``chunk``."""

    name: str
    chunk: int
    start: int
    stop: int
    source: int
    target: int


def fragments(
    tensors: Iterable[TensorSpec], assignments: Mapping[str, ChunkAssignment], rank: int
) -> tuple[list[Fragment], list[Fragment]]:
    """What ``rank`` sends and what it receives, by name and start: so two ranks list what moves between them in the same order.

    Among replicas, the owner of a chunk gets what it lacks from the ranks that have its own place on the other mesh dimensions.
    Tensors that are not merged have no fragments.
    """
    sends: list[Fragment] = []
    receives: list[Fragment] = []
    for name in sorted(t.name for t in tensors):
        grid = assignments[name].flat
        if grid is not None:
            out, into = _moves(grid, assignments[name].rotation, rank)
            sends += [Fragment(name=name, chunk=c, start=a, stop=b, source=rank, target=other) for c, a, b, other in out]
            receives += [Fragment(name=name, chunk=c, start=a, stop=b, source=other, target=rank) for c, a, b, other in into]
    return sends, receives


Moves = list[tuple[int, int, int, int]]
"""Chunk, start, stop, and the other rank."""


@lru_cache(maxsize=16384)
def _moves(grid: FlatGrid, rotation: int, rank: int) -> tuple[Moves, Moves]:
    """What a rank sends and receives of one tensor."""
    mine = _place(grid, rank)
    if mine is None:
        return [], []
    cell, replica = mine
    # ``foreign`` lists, for the whole grid, which elements of a chunk lie in another cell than the one whose holders
    # write it. Both sides of a transfer derive it from the same grid, so sender and receiver agree about chunk, start
    # and stop without a message, and in the same order.
    #
    # Of the source's replicas the one in the writer's own place (``column``) sends. So every transfer happens once,
    # whatever the number of replicas, and a rank exchanges only with ranks that share its other mesh coordinates.
    chunk, source, start, stop = grid.foreign
    column = (grid.part[chunk] + rotation) % grid.holders.shape[1]
    out = np.flatnonzero((source == cell) & (column == replica))
    into = np.flatnonzero((grid.cell[chunk] == cell) & (column == replica))
    to, of = grid.holders[grid.cell[chunk[out]], replica], grid.holders[source[into], replica]
    sends, receives = (np.column_stack([chunk[at], start[at], stop[at], other]).tolist() for at, other in ((out, to), (into, of)))
    return sends, receives


@lru_cache(maxsize=16384)
def _place(grid: FlatGrid, rank: int) -> tuple[int, int] | None:
    """The cell that a rank holds, and which of its replicas it is."""
    box = np.argwhere(grid.holders == rank)
    return (int(box[0, 0]), int(box[0, 1])) if len(box) else None
