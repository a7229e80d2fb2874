"""Which ranks want what of a stored chunk, and which of them reads it for all. Pure.

Everything follows from layouts, so each rank finds the same for the chunks that it wants, and needs to look at no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckpt.catalog import Grid
from ckpt.plan.layout.geometry import Box, IntArray
from ckpt.plan.layout.tensor_layout import TensorLayout, Tiling

from .machines import NearFiles, NearShares

MOST = 32
"""Ranks that share one read of a chunk; where more want it, several read it, so that a rank talks to few others."""
GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly over [0, 1), however few they are."""


class Sharing(NamedTuple):
    """Ranks that share reads, and those of these that may read for all."""

    ranks: tuple[int, ...]
    readers: tuple[int, ...]


class SharedChunk(NamedTuple):
    """A chunk that several ranks want parts of."""

    chunk: int
    box: Box
    sharing: Sharing
    weights: IntArray
    """How many elements each of the ranks wants."""
    wanted: int
    """Their sum."""


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
    # A chunk may be wanted by all ranks, and a rank may want all chunks. But the chunks that lie in the same cells of
    # the wanted tiling are wanted by the same ranks, and of these a rank needs only its block of MOST: so ranks are
    # looked at once for each set of cells, and elements are counted for a block, of all its chunks at once.
    tiling = layout.tiling(shape)
    mine = [grid.overlapping(box) for box in wants(layout, shape, stored, rank)]
    numbers = np.unique(np.concatenate(mine)) if mine else np.zeros(0, dtype=np.int64)
    offsets, shapes = grid.boxes_of(numbers)
    filled = (shapes > 0).all(axis=1)  # ranges of cuts have empty cells between others
    numbers, offsets, shapes = numbers[filled], offsets[filled], shapes[filled]
    low, high = np.maximum(offsets, stored.offset), np.minimum(offsets + shapes, stored.end)
    boxes = list(map(Box, map(tuple, offsets.tolist()), map(tuple, shapes.tolist())))
    shared: list[SharedChunk] = []
    for cells, members in _by_cells(tiling, low, high):
        holders = _Holders.of(tiling, cells, near)
        place = int(np.searchsorted(holders.ranks, rank))
        for places, readers, alike in _blocks(grid, numbers, members, holders, place, near_files):
            if len(places) == 1:
                continue
            ranks = tuple(holders.ranks[places].tolist())
            sharing = Sharing(ranks, ranks[:readers] or ranks)
            weights = holders.weights(tiling, places, low[alike], high[alike])
            rows = zip(numbers[alike].tolist(), alike.tolist(), weights, weights.sum(axis=1).tolist(), strict=True)
            shared += [SharedChunk(chunk, boxes[i], sharing, row, total) for chunk, i, row, total in rows]
    shared.sort(key=lambda c: c.chunk)
    return shared, len(numbers)


def _by_cells(tiling: Tiling, low: IntArray, high: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
    """Sets of cells, and the numbers of the boxes from ``low`` to ``high`` that have elements of all of these, and of no others."""
    if tiling.cuts is None:
        by_cells: dict[bytes, tuple[IntArray, list[int]]] = {}
        for i, (lo, hi) in enumerate(zip(low, high, strict=True)):
            cells = tiling.overlapping(Box(tuple(lo.tolist()), tuple((hi - lo).tolist())))
            by_cells.setdefault(cells.tobytes(), (cells, []))[1].append(i)
        yield from ((cells, np.array(members)) for cells, members in by_cells.values())
        return
    # In a grid of cells these are a range in each dimension.
    sides = [("right", low, 1), ("left", high, 0)]
    ranges = [np.searchsorted(c, x[:, d], side) - one for d, c in enumerate(tiling.cuts) for side, x, one in sides]  # type: ignore[call-overload]  # of literals
    if not ranges or not len(low):
        yield from [(np.zeros(1, dtype=np.int64), np.arange(len(low)))] if len(low) else []
        return
    _, first, kind = np.unique(np.stack(ranges, axis=1), axis=0, return_index=True, return_inverse=True)
    order = np.argsort(kind.reshape(-1), kind="stable")
    for i, members in zip(first.tolist(), np.split(order, np.cumsum(np.bincount(kind.reshape(-1)))[:-1]), strict=True):
        yield tiling.overlapping(Box(tuple(low[i].tolist()), tuple((high[i] - low[i]).tolist()))), members


@dataclass(frozen=True, eq=False)
class _Holders:
    """The ranks that hold parts of some cells, increasing; rank number i holds ``cells[starts[i] : starts[i + 1]]``."""

    ranks: IntArray
    cells: IntArray
    starts: IntArray

    @classmethod
    def of(cls, tiling: Tiling, cells: IntArray, near: Set[int] | None) -> _Holders:
        """Of the ranks ``near``, if these are given."""
        holders = tiling.holders[cells]
        which, cell_of = holders.reshape(-1), np.repeat(cells, holders.shape[1])
        if near is not None:
            here = np.isin(which, np.fromiter(near, dtype=np.int64))
            which, cell_of = which[here], cell_of[here]
        order = np.argsort(which, kind="stable")
        ranks, starts = np.unique(which[order], return_index=True)
        return cls(ranks, cell_of[order], np.append(starts, len(order)))

    def weights(self, tiling: Tiling, places: IntArray, low: IntArray, high: IntArray) -> IntArray:
        """``[boxes, places]``: how many elements of the boxes from ``low`` to ``high`` each of the ranks at ``places`` holds."""
        cells = [self.cells[self.starts[p] : self.starts[p + 1]] for p in places.tolist()]
        at, sizes = tiling.boxes_of(np.concatenate(cells))
        common = np.minimum(high[:, None], at + sizes) - np.maximum(low[:, None], at)
        counts = np.maximum(common, 0).prod(axis=2)
        return np.add.reduceat(counts, np.cumsum([0, *map(len, cells[:-1])]), axis=1)


def _blocks(
    grid: Grid, numbers: IntArray, members: IntArray, holders: _Holders, place: int, near_files: NearFiles | None
) -> Iterator[tuple[IntArray, int, IntArray]]:
    """The blocks of at most :data:`MOST` of ``holders`` in which the one at ``place`` is for the chunks ``numbers[members]``, by place; how
    many of these, the first, alone may read, 0 if all may; and which of the members these are."""
    # More than MOST ranks want a chunk: they are divided into groups of MOST, in order, each of which reads the chunk
    # once. Every rank finds its group by its own place in the list, so this needs no message either.
    if near_files is None:
        first = place // MOST * MOST
        yield np.arange(first, min(first + MOST, len(holders.ranks))), 0, members
        return
    shares_of = near_files.among(holders.ranks)
    alike: dict[tuple[NearShares, int], list[int]] = {}
    for i, chunk in zip(members.tolist(), numbers[members].tolist(), strict=True):
        shares = shares_of(grid.file(chunk))
        alike.setdefault((shares, chunk % shares.turns()), []).append(i)
    for (shares, turn), those in alike.items():
        yield *shares.block(place, turn, MOST), np.array(those)


class Readers:
    """Who reads each of some shared chunks."""

    def __init__(self, chunks: Sequence[SharedChunk]) -> None:
        self._count = len(chunks)
        by_sharing: dict[Sharing, list[int]] = {}
        for i, chunk in enumerate(chunks):
            by_sharing.setdefault(chunk.sharing, []).append(i)
        self._lines = [_Line.of(sharing, np.array(members), chunks) for sharing, members in by_sharing.items()]

    def of(self, first: int) -> list[int]:
        """The rank that reads each, where the tensor's first chunk has this number among all that are shared. Over many numbers each rank
        reads in proportion to what it wants.

        Then ranks read about what they would if nothing had to be checked, and most bytes stay where they are read.
        """
        readers = np.zeros(self._count, dtype=np.int64)
        for line in self._lines:
            readers[line.members] = line.readers(first)
        ranks: list[int] = readers.tolist()
        return ranks


@dataclass(frozen=True, eq=False)
class _Line:
    """Chunks that the same ``ranks`` may read; the ranks lie side by side on a line for each."""

    # Each rank is as long as what it wants, and chunk ``number`` is thrown onto the line:
    #
    # 0         rank 0          ends[0]     rank 1     ends[1]  rank 2  ends[-1]
    # ├──────────────────────────┼──────────────────────┼─────────────────┤
    #                       ▲ number · golden ratio mod 1, as a part of the line
    #
    # A low-discrepancy sequence instead of random numbers: all ranks get the same answer, and also for a dozen chunks
    # the shares are close to the weights.
    members: IntArray
    """Places of the chunks among all."""
    ranks: IntArray
    numbers: IntArray
    """Of the chunks in their grid."""
    ends: IntArray
    """``[chunks, ranks]``"""

    @classmethod
    def of(cls, sharing: Sharing, members: IntArray, chunks: Sequence[SharedChunk]) -> _Line:
        columns = [sharing.ranks.index(rank) for rank in sharing.readers]
        weights = np.stack([chunks[i].weights for i in members.tolist()])[:, columns]
        numbers = np.array([chunks[i].chunk for i in members.tolist()])
        return cls(members, np.array(sharing.readers), numbers, np.cumsum(weights, axis=1))

    def readers(self, first: int) -> IntArray:
        at = (first + self.numbers) * GOLDEN % 1.0 * self.ends[:, -1]
        ranks: IntArray = self.ranks[np.minimum((self.ends <= at[:, None]).sum(axis=1), len(self.ranks) - 1)]
        return ranks
