"""Which ranks want what of a stored chunk, and which of them reads it for all. Pure.

Everything follows from layouts, so each rank finds the same for the chunks that it wants, and needs to look at no others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence, Set
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ckpt.catalog import Grid
from ckpt.layout.geometry import Box
from ckpt.layout.tensor_layout import TensorLayout

from .near_files import NearFiles
from .overlap import overlapping_chunks

MOST = 32
"""Ranks that share one read of a chunk; where more want it, several read it, so that a rank talks to few others."""
GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly over [0, 1), however few they are."""


class SharedChunk(NamedTuple):
    """A chunk that several ranks want parts of, and how many elements each does; and those of these ranks that may read it for
    all."""

    chunk: int
    box: Box
    ranks: tuple[int, ...]
    weights: tuple[int, ...]
    readers: tuple[int, ...]

    def reader(self, number: int) -> int:
        """The rank that reads it, as the chunk of this number of all that are shared."""
        wanted = dict(zip(self.ranks, self.weights, strict=True))
        return reader_of(self.readers, [wanted[rank] for rank in self.readers], number)


def wants(layout: TensorLayout, shape: tuple[int, ...], stored: Box, rank: int) -> list[Box]:
    """The boxes of a tensor of global ``shape`` that ``rank`` has to get from the ``stored`` part of it, in the order of its memory."""
    return [box for p in layout.pieces(shape, rank) if (box := p.box.intersect(stored)) is not None]


def shared_chunks(
    grid: Grid,
    layout: TensorLayout,
    shape: tuple[int, ...],
    stored: Box,
    rank: int,
    near: Set[int] | None,
    near_files: NearFiles | None = None,
) -> tuple[list[SharedChunk], int]:
    """The chunks that ``rank`` wants parts of and others too, by number, and how many chunks it wants parts of at all. ``near`` are the
    ranks that it shares with, of its own machine and itself among them; None if all do. With ``near_files``, a rank that has a chunk's file
    near reads it, if one of those that want it has, and shares it with its machine and with ranks that have not."""
    mine = {copy.chunk: copy.chunk_box for box in wants(layout, shape, stored, rank) for copy in overlapping_chunks(grid, box)}
    shared = []
    for chunk in sorted(mine):
        common = mine[chunk].intersect(stored)
        if common is None:
            continue
        of_rank = _wanters(layout, shape, common)
        ranks = tuple(r for r in of_rank if near is None or r in near)
        readers = ranks
        if near_files is not None:
            readers, ranks = next(g for g in near_files.groups(grid.file(chunk), ranks, chunk) if rank in g.ranks)
        # More than MOST ranks want it: they are divided into groups of MOST, in order, each of which reads the chunk
        # once. Every rank finds its group by its own place in the list, so this needs no message either.
        first = ranks.index(rank) // MOST * MOST
        block = ranks[first : first + MOST]
        if len(block) > 1:
            nearest = tuple(r for r in block if r in readers) or block
            shared.append(SharedChunk(chunk, mine[chunk], block, tuple(of_rank[r] for r in block), nearest))
    return shared, len(mine)


def _wanters(layout: TensorLayout, shape: tuple[int, ...], box: Box) -> dict[int, int]:
    """The ranks that hold parts of a box, increasing, and how many elements of it each holds."""
    tiling = layout.tiling(shape)
    cells = overlapping_chunks(tiling, box)
    sizes = np.array([cell.box.numel for cell in cells], dtype=np.int64)
    holders = tiling.holders[[cell.chunk for cell in cells]]
    ranks, places = np.unique(holders, return_inverse=True)
    weights = np.zeros(len(ranks), dtype=np.int64)
    np.add.at(weights, places.reshape(-1), np.repeat(sizes, holders.shape[1]))
    return dict(zip(ranks.tolist(), weights.tolist(), strict=True))


def reader_of(ranks: Sequence[int], weights: Sequence[int], number: int) -> int:
    """The rank that reads what ``ranks`` want so much of each: over many numbers each reads in proportion to what it wants.

    Then ranks read about what they would if nothing had to be checked, and most bytes stay where they are read.
    """
    # Lay the ranks side by side on a line, each as long as what it wants, and throw chunk ``number`` onto it:
    #
    # 0         rank 0          ends[0]     rank 1     ends[1]  rank 2  ends[-1]
    # ├──────────────────────────┼──────────────────────┼─────────────────┤
    #                       ▲ number · golden ratio mod 1, as a part of the line
    #
    # A low-discrepancy sequence instead of random numbers: all ranks get the same answer, and also for a dozen chunks
    # the shares are close to the weights.
    ends = list(accumulate(weights))
    return ranks[min(bisect_right(ends, number * GOLDEN % 1.0 * ends[-1]), len(ranks) - 1)]
