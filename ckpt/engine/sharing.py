"""Ranks that want parts of the same chunks: one of them reads and checks each chunk, and gives the others what they want of it
(ByteCheckpoint, arXiv 2407.20143, section 4.3, shares replicas in this way).

Each rank computes from the layouts alone who reads what. The leader compares what the ranks of a *circle*, those that a layout names, say
that they load; only where it is the same they share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import xxhash

from ckpt.catalog import TensorEntry
from ckpt.geometry import Box
from ckpt.layout import TensorLayout
from ckpt.plan.match import common_box
from ckpt.plan.parcels import Shared, reader_of, shared_chunks, wants
from ckpt.plan.pieces import Piece, pieces

from .exact import Job
from .fetch import PIECE

SMALL = 256 << 10
"""Bytes of a chunk that shares a parcel with others."""
ALIGN = 16
"""Chunks begin at multiples of it in a parcel: of every item size."""


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A chunk in a parcel, ``start`` bytes into it, and the targets of this rank that want parts of it. ``stored``: what of the tensor
    there is to load; ``piece``: bytes of the chunk that go through the ring at once."""

    jobs: Sequence[Job]
    stored: Box
    chunk: int
    box: Box
    start: int
    piece: int

    @property
    def entry(self) -> TensorEntry:
        return self.jobs[0].entry

    @property
    def itemsize(self) -> int:
        return self.entry.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.itemsize

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """What ``rank`` wants of the chunk."""
        info = self.jobs[0].target.info
        return _boxes(info.layout, info.shape, self.stored, self.box, rank)

    def by_piece(self, rank: int) -> tuple[tuple[Box, ...], ...]:
        """The same for each piece of a parcel of this chunk alone."""
        info = self.jobs[0].target.info
        return _boxes_by_piece(info.layout, info.shape, self.stored, self.box, rank, self.piece // self.itemsize)


class Cut(NamedTuple):
    """What of a parcel goes through the ring at once: ``nbytes`` from ``start`` on. ``spans``: the boxes of items that these are;
    ``place``: its number, from 0."""

    start: int
    nbytes: int
    spans: Sequence[tuple[Item, Box]]
    place: int

    def wanted(self, rank: int) -> list[tuple[Item, Box]]:
        """What ``rank`` wants of it."""
        if len(self.spans) > 1:
            return [(item, box) for item, _ in self.spans for box in item.boxes(rank)]
        item = self.spans[0][0]
        return [(item, box) for box in item.by_piece(rank)[self.place]]


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """One chunk, or small ones, that ``reader`` reads for all of ``ranks``."""

    items: Sequence[Item]
    ranks: tuple[int, ...]
    reader: int

    def cuts(self) -> list[Cut]:
        """In order; every rank cuts alike."""
        last = self.items[-1]
        if len(self.items) > 1:
            return [Cut(0, last.start + last.nbytes, [(item, item.box) for item in self.items], 0)]
        size = last.itemsize
        return [Cut(p.start * size, p.length * size, [(last, p.box)], i) for i, p in enumerate(_pieces(last.box, last.piece // size))]


class _Kind(NamedTuple):
    """Jobs of equal kind want the same of the same chunks."""

    name: str
    shape: tuple[int, ...]
    layout: TensorLayout
    stored: Box


@dataclass(eq=False)
class Sharing:
    """What one rank shares with others in one load. Parcels between two ranks are numbered by their places in the lists, on both."""

    rank: int
    piece: int
    """Bytes that go through a slot of a ring at once."""
    circles: dict[str, tuple[int, dict[_Kind, list[Job]]]] = field(default_factory=dict)
    """For each circle how many ranks it has, and what this rank loads of its tensors."""
    reads: list[Parcel] = field(default_factory=list)
    gives: dict[int, list[Parcel]] = field(default_factory=dict)
    takes: dict[int, list[Parcel]] = field(default_factory=dict)
    left_out: dict[int, set[int]] = field(default_factory=dict)
    """By ``id`` of a target the chunks that come in parcels."""
    complete: set[int] = field(default_factory=set)
    """Targets that get all that they want in parcels."""
    needed: int = 0
    """Bytes that this rank wants of parcels."""

    @classmethod
    def of(cls, jobs: Iterable[Job], rank: int, *, parts: bool, piece: int) -> Sharing:
        """What there may be to share. Changes nothing. ``parts``: replicas and small tensors are left out, which :func:`worth_parts` would
        refuse; ``piece``: bytes that one call of the storage has best."""
        found = cls(rank, max(PIECE, piece // ALIGN * ALIGN))
        for job in jobs:
            target, entry = job
            info = target.info
            ranks = _members(info.layout)
            if entry.rank is not None or rank not in ranks or len(ranks) == 1:
                continue
            if parts and (not info.layout.splits or (len(ranks) - 1) * entry.nbytes < SMALL):
                continue
            if [p.box for p in target.parts] != [p.box for p in info.layout.pieces(info.shape, rank)]:
                continue  # one of several tensors that are stacked: others cannot tell who has which
            kind = _Kind(entry.alias or entry.name, info.shape, info.layout, common_box(info, entry))
            circle = found.circles.setdefault(_circle(info.layout), (len(ranks), {}))
            circle[1].setdefault(kind, []).append(job)
        return found

    def said(self) -> dict[str, tuple[int, str]]:
        """For the leader: each circle, how many ranks it has, and a digest of what this rank loads."""
        return {key: (size, _digest(kinds, self.piece)) for key, (size, kinds) in self.circles.items()}

    def entries(self) -> Iterator[TensorEntry]:
        """Stored tensors that may be shared."""
        return (jobs[0].entry for _, kinds in self.circles.values() for jobs in kinds.values())

    def divide(self, refused: Collection[str], near: Mapping[int, int] | None, worth: Callable[[Shared, int], bool]) -> None:
        """Find the parcels. ``refused``: circles that do not share; ``near``: machines of ranks, if only those of one do; ``worth``:
        whether to share a chunk of elements of this size."""
        known: dict[tuple[int, object], tuple[list[Shared], int]] = {}
        for key in sorted(self.circles.keys() - set(refused)):
            few: dict[tuple[int, ...], list[tuple[Item, Shared, int]]] = {}
            number = 0
            for kind, jobs in sorted(self.circles[key][1].items(), key=_order):
                grid = jobs[0].entry.grid
                place = (id(grid), kind[1:])
                if place not in known:
                    known[place] = shared_chunks(grid, kind.layout, kind.shape, kind.stored, self.rank, near)
                chunks, count = known[place]
                chunks = [c for c in chunks if worth(c, jobs[0].entry.dtype.itemsize)]
                if chunks:
                    self._leave_out(kind, jobs, {c.chunk for c in chunks}, count)
                for shared in chunks:
                    item = Item(jobs, kind.stored, shared.chunk, shared.box, 0, self.piece)
                    if item.nbytes > SMALL:
                        self._add([item], shared.ranks, reader_of(shared.ranks, shared.weights, number + shared.chunk))
                    else:
                        few.setdefault(shared.ranks, []).append((item, shared, number + shared.chunk))
                number += len(grid)
            for ranks, members in few.items():
                self._add_small(ranks, members)

    def _leave_out(self, kind: _Kind, jobs: Sequence[Job], chunks: set[int], count: int) -> None:
        """These of ``count`` chunks come in parcels."""
        for job in jobs:
            self.left_out[id(job.target)] = chunks
            if len(chunks) == count and kind.stored == Box.whole(kind.shape):
                self.complete.add(id(job.target))

    def _add_small(self, ranks: tuple[int, ...], members: Sequence[tuple[Item, Shared, int]]) -> None:
        """Parcels that fit into one slot of a ring."""
        items: list[Item] = []
        first, at = members[0], 0
        for member in members:
            item = member[0]
            if at + item.nbytes > self.piece:
                self._add(items, ranks, reader_of(ranks, first[1].weights, first[2]))
                items, first, at = [], member, 0
            items.append(replace(item, start=at))
            at += -(-item.nbytes // ALIGN) * ALIGN
        self._add(items, ranks, reader_of(ranks, first[1].weights, first[2]))

    def _add(self, items: Sequence[Item], ranks: tuple[int, ...], reader: int) -> None:
        parcel = Parcel(items, ranks, reader)
        self.needed += sum(len(i.jobs) * i.itemsize * sum(b.numel for b in i.boxes(self.rank)) for i in items)
        if reader == self.rank:
            self.reads.append(parcel)
            for rank in ranks:
                if rank != reader:
                    self.gives.setdefault(rank, []).append(parcel)
        else:
            self.takes.setdefault(reader, []).append(parcel)


def worth_all(chunk: Shared, itemsize: int) -> bool:
    """Where reading costs more than sending."""
    return True


def worth_replicas(chunk: Shared, itemsize: int) -> bool:
    """Where ranks read only what they want, and some want the same."""
    return sum(chunk.weights) > chunk.box.numel


def worth_parts(chunk: Shared, itemsize: int) -> bool:
    """Where reading costs less than sending: ranks would read at least twice what they want to check it, and it is not little."""
    count, numel = len(chunk.ranks), chunk.box.numel
    return count * numel >= 2 * sum(chunk.weights) and (count - 1) * numel * itemsize >= SMALL


def refused(said: Iterable[Mapping[str, tuple[int, str]]]) -> list[str]:
    """Leader: the circles in which not every rank loads the same. ``said``: what each rank of the load said."""
    sizes: dict[str, int] = {}
    counts: dict[tuple[str, str], int] = {}
    for row in said:
        for key, (size, digest) in row.items():
            sizes[key] = size
            counts[key, digest] = counts.get((key, digest), 0) + 1
    return sorted(sizes.keys() - {key for (key, _), count in counts.items() if count == sizes[key]})


def _order(found: tuple[_Kind, list[Job]]) -> tuple[int, str, str]:
    kind, jobs = found
    return -jobs[0].entry.nbytes, kind.name, _spelled(kind.layout)


def _digest(kinds: Mapping[_Kind, Sequence[Job]], piece: int) -> str:
    rows = sorted((k.name, k.shape, _spelled(k.layout), k.stored.shape) for k in kinds)
    return xxhash.xxh3_128_hexdigest(repr((piece, rows)).encode())


@lru_cache(maxsize=4096)
def _members(layout: TensorLayout) -> frozenset[int]:
    return layout.ranks()


@lru_cache(maxsize=4096)
def _circle(layout: TensorLayout) -> str:
    return xxhash.xxh3_64_hexdigest(repr(sorted(_members(layout))).encode())


@lru_cache(maxsize=4096)
def _spelled(layout: TensorLayout) -> str:
    return xxhash.xxh3_64_hexdigest(repr(layout.to_json()).encode())


@lru_cache(maxsize=1 << 16)
def _boxes(layout: TensorLayout, shape: tuple[int, ...], stored: Box, chunk: Box, rank: int) -> tuple[Box, ...]:
    return tuple(box for b in wants(layout, shape, stored, rank) if (box := b.intersect(chunk)) is not None)


@lru_cache(maxsize=4096)
def _pieces(chunk: Box, limit: int) -> tuple[Piece, ...]:
    return tuple(pieces(chunk, chunk, limit))


@lru_cache(maxsize=1 << 14)
def _boxes_by_piece(
    layout: TensorLayout, shape: tuple[int, ...], stored: Box, chunk: Box, rank: int, limit: int
) -> tuple[tuple[Box, ...], ...]:
    boxes = _boxes(layout, shape, stored, chunk, rank)
    return tuple(tuple(box for b in boxes if (box := b.intersect(piece.box)) is not None) for piece in _pieces(chunk, limit))
