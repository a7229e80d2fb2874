"""Who writes what. Every rank computes it from the layouts alone; ranks that see the same layouts always agree, without talking.

Replicas of a cell split it by rows, so bytes are balanced by construction; a cell under ``SMALL`` bytes goes whole to one replica,
the least loaded of those that hold the same tensors. Cells are cut further so that no chunk exceeds ``MAX_CHUNK`` bytes.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ckpt.dtypes import DType
from ckpt.geometry import Box, IntArray, cell_box, cells, even_cuts
from ckpt.layout import TensorLayout, Tiling

MAX_CHUNK = 64 << 20
"""Largest chunk, in bytes, unless one element is larger."""
SMALL = 64 << 10
"""A replicated cell of fewer bytes is written whole by one replica."""


@dataclass(frozen=True, slots=True)
class Global:
    """What all ranks that hold a tensor must agree about: name, dtype, global shape, the part of it that is not padding, and the
    layout."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    layout: TensorLayout
    logical: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class Owned:
    """The stored grid of one tensor, and the rank that writes each chunk.

    ``owners`` is ``[chunks]``. Chunk i is cut from cell ``cell[i]`` of the tensor's tiling, and the ranks
    ``cell_holders[cell[i]]`` have its bytes.
    """

    cuts: tuple[tuple[int, ...], ...] | None
    boxes: tuple[IntArray, IntArray] | None
    owners: IntArray
    cell: IntArray
    cell_holders: IntArray

    @property
    def replicas(self) -> int:
        """How many ranks have each byte."""
        return int(self.cell_holders.shape[1])

    @property
    def holders(self) -> IntArray:
        """The ranks that have each chunk's bytes, ``[chunks, replicas]``."""
        return self.cell_holders[self.cell]

    def box(self, chunk: int) -> Box:
        if self.cuts is None:
            assert self.boxes is not None
            return Box(tuple(self.boxes[0][chunk].tolist()), tuple(self.boxes[1][chunk].tolist()))
        return cell_box(self.cuts, chunk)

    def written_by(self, rank: int) -> list[int]:
        """Numbers of the chunks that ``rank`` writes."""
        found: list[int] = np.flatnonzero(self.owners == rank).tolist()
        return found

    def held_by(self, rank: int) -> list[int]:
        """Numbers of the chunks whose bytes ``rank`` has."""
        found: list[int] = np.flatnonzero((self.cell_holders == rank).any(axis=1)[self.cell]).tolist()
        return found


def assign(tensors: Iterable[Global]) -> dict[str, Owned]:
    """Decide the stored grid and the writers of every tensor.

    The result for one tensor depends only on the tensors that are replicated over the same mesh dimensions, so ranks that hold different
    pipeline stages need not know each other's tensors.
    """
    groups: dict[object, list[Global]] = defaultdict(list)
    for t in tensors:
        groups[_replica_group(t.layout)].append(t)
    owned: dict[str, Owned] = {}
    for members in groups.values():
        for t, turn in _turns(members):
            owned[t.name] = _owned(t.layout, t.shape, t.dtype.itemsize, turn)
    return owned


def _replica_group(layout: TensorLayout) -> object:
    return layout.mesh, layout.at, frozenset(s.over for s in layout.splits)


def _turns(members: Sequence[Global]) -> list[tuple[Global, int]]:
    """For each tensor the replica that starts: the one that has least so far. Large tensors first, so that small ones even out the
    rest."""
    tilings = {t.name: t.layout.tiling(t.shape) for t in members}
    replicas = tilings[members[0].name].holders.shape[1]
    if replicas == 1:
        return [(t, 0) for t in members]
    load = np.zeros(replicas)
    bytes_of: dict[object, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    found = []
    for t in sorted(members, key=lambda t: (-t.nbytes, t.name)):
        alike = t.layout, t.shape, t.dtype
        if alike not in bytes_of:
            tiling = tilings[t.name]
            shares = _shares(tiling, t.shape, t.dtype.itemsize, replicas) * (t.nbytes / max(len(tiling.holders), 1))
            bytes_of[alike] = np.concatenate([shares, shares])  # a slice of it is the shares, turned
        turn = int(load.argmin())
        load += bytes_of[alike][replicas - turn : 2 * replicas - turn]
        found.append((t, turn))
    return found


def _shares(tiling: Tiling, shape: tuple[int, ...], itemsize: int, replicas: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Fraction of a typical cell that each replica writes, before it is turned."""
    widest = _widest(tiling, shape)
    shares = np.zeros(replicas)
    if math.prod(widest) * itemsize < SMALL:
        shares[0] = 1
        return shares
    rows = widest[_row_dim(widest, replicas)]
    sizes = np.diff(even_cuts(rows, min(replicas, rows)))
    shares[: len(sizes)] = sizes / rows
    return shares


def _widest(tiling: Tiling, shape: tuple[int, ...]) -> tuple[int, ...]:
    if tiling.cuts is not None:
        return tuple(int(np.diff(c).max()) for c in tiling.cuts)
    assert tiling.boxes is not None
    return tuple(tiling.boxes[1].max(axis=0).tolist()) if len(tiling.boxes[1]) else shape


def _row_dim(widest: tuple[int, ...], replicas: int) -> int:
    """The dimension along which replicas split a cell: the first that is long enough, or the longest."""
    for dim, size in enumerate(widest):
        if size >= replicas:
            return dim
    return max(range(len(widest)), key=lambda d: widest[d])


@lru_cache(maxsize=2048)
def _owned(layout: TensorLayout, shape: tuple[int, ...], itemsize: int, turn: int) -> Owned:
    tiling = layout.tiling(shape)
    if tiling.cuts is None:
        return _owned_boxes(tiling, itemsize, turn)
    widest = _widest(tiling, shape)
    replicas = tiling.holders.shape[1]
    small = replicas == 1 or not shape or math.prod(widest) * itemsize < SMALL
    row = None if small else _row_dim(widest, replicas)
    caps = _caps(widest, itemsize)
    refined = [_refine(cuts, replicas if dim == row else 1, caps[dim]) for dim, cuts in enumerate(tiling.cuts)]
    counts = [len(parent) for _, parent, _ in refined]
    index = np.indices(counts).reshape(len(counts), -1) if counts else np.zeros((0, 1), dtype=np.int64)
    parents = np.zeros(index.shape[1], dtype=np.int64)
    for dim, (_, parent, _) in enumerate(refined):
        parents = parents * (len(tiling.cuts[dim]) - 1) + parent[index[dim]]
    part = 0 if row is None else refined[row][2][index[row]]
    owners = tiling.holders[parents, (part + turn) % replicas]
    return Owned(cuts=tuple(new for new, _, _ in refined), boxes=None, owners=owners, cell=parents, cell_holders=tiling.holders)


def _caps(widest: Sequence[int], itemsize: int) -> list[int]:
    """Most elements that a chunk may have along each dimension: rows are cut first, and within a row only if one row is too large."""
    caps = [max(n, 1) for n in widest]
    for dim in range(len(caps)):
        if math.prod(caps) * itemsize <= MAX_CHUNK:
            break
        caps[dim] = max(1, MAX_CHUNK // (math.prod(caps[dim + 1 :]) * itemsize))
    return caps


def _refine(cuts: Sequence[int], parts: int, cap: int) -> tuple[tuple[int, ...], IntArray, IntArray]:
    """Cut each interval into ``parts``, and these into pieces of at most ``cap``.

    Returns:
        The new cuts; for each new interval the number of the old one, and the number of its part.
    """
    new, parent, part = [cuts[0]], [], []
    for i, (a, b) in enumerate(itertools.pairwise(cuts)):
        outer = even_cuts(b - a, max(min(parts, b - a), 1))
        for p, (lo, hi) in enumerate(itertools.pairwise(outer)):
            inner = even_cuts(hi - lo, max(-(-(hi - lo) // cap), 1))
            new += [a + lo + c for c in inner[1:]]
            parent += [i] * (len(inner) - 1)
            part += [p] * (len(inner) - 1)
    return tuple(new), np.array(parent, dtype=np.int64), np.array(part, dtype=np.int64)


def _owned_boxes(tiling: Tiling, itemsize: int, turn: int) -> Owned:
    """Explicit boxes (flat ranges): each is cut by rows among its replicas and to the size of a chunk."""
    assert tiling.boxes is not None
    offsets, shapes, owners, parents = [], [], [], []
    for cell, (offset, shape, held) in enumerate(zip(tiling.boxes[0].tolist(), tiling.boxes[1].tolist(), tiling.holders, strict=True)):
        small = math.prod(shape) * itemsize < SMALL
        row = _row_dim(shape, len(held)) if shape else None
        caps = _caps(shape, itemsize)
        refined = [_refine((0, n), len(held) if d == row and not small else 1, caps[d]) for d, n in enumerate(shape)]
        at, sizes = cells([r[0] for r in refined])
        part = np.indices([len(r[1]) for r in refined])[row].ravel() if refined else np.zeros(1, dtype=np.int64)
        part = refined[row][2][part] if row is not None else part
        offsets.append(at + np.asarray(offset, dtype=np.int64))
        shapes.append(sizes)
        owners.append(held[(part + turn) % len(held)])
        parents.append(np.full(len(at), cell, dtype=np.int64))
    boxes = (np.concatenate(offsets), np.concatenate(shapes)) if offsets else tiling.boxes
    none = np.zeros(0, dtype=np.int64)
    return Owned(
        cuts=None,
        boxes=boxes,
        owners=np.concatenate(owners) if owners else none,
        cell=np.concatenate(parents) if parents else none,
        cell_holders=tiling.holders,
    )
