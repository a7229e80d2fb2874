"""The shared reads of one rank: chunks that several ranks want parts of are read and checked by one of them, which hands each of the
others what it wants (ByteCheckpoint, arXiv 2407.20143, section 4.3, shares replicas in this way).

    chunk 7 of w, wanted by ranks 0 1 2 3        rank 2 reads it, by its number: ranks take turns in proportion to what they want
    ┌────┬────┬────┬────┐                        rank 2:  reads  = [… SharedRead(chunk 7) …]   gives[0], gives[1], gives[3]
    │ 0  │ 1  │ 2  │ 3  │                        rank 0:  takes[2] = [… SharedRead(chunk 7) …]
    └────┴────┴────┴────┘                        a slice of at most ``piece`` bytes goes through a slot of the pool at once

No messages are needed to agree: each rank computes from the layouts alone who reads what, and only for chunks that it wants itself. Two
ranks list the shared reads between them in one order, so that a number names one. This is right only if the ranks of a *rank set*, those
that a layout names, load the same tensors: each rank gives the leader a digest of what it loads for each set, and the leader refuses the
sets whose ranks differ. They read for themselves.

Small chunks share one read of up to ``piece`` bytes, if the same ranks want them.

Where files lie on the machines of the job (node-local disks, the memory tier), each rank tells the leader which are near, and gets from it
who has which near (``ckpt.plan.machines``). Then what a rank has near it reads or gets on its own machine, and other bytes cross the
network once: as what a rank wants.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import xxhash

from ckpt import settings
from ckpt.catalog import Catalog, TensorEntry
from ckpt.engine.digest_reader import Verify
from ckpt.net.call import Call
from ckpt.net.channel import Row
from ckpt.net.shared_memory import machine
from ckpt.plan import machines
from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.partition import runs_of
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.plan.machines import NearFiles
from ckpt.plan.reads import CacheBlock, common_box, pieces
from ckpt.plan.shared_reads import Readers, SharedChunk, Sharing, shared_chunks, wants
from ckpt.text import parse_json

from .whole_chunks import TensorLoad

INLINE = 512
"""Bytes of what the verdict contains itself; of what is longer it has the digest, and ranks hand it on to each other."""
ALIGN = 16
"""Chunks begin at multiples of it in a shared read: of every item size."""


@dataclass(slots=True, eq=False)  # not frozen, as that takes three times as long, and a rank may have a million
class SharedReadItem:
    """A chunk in a shared read, ``start`` bytes into it, and the targets of this rank that want parts of it. ``stored``: what of the tensor
    there is to load; ``piece``: bytes of the chunk that go through the pool at once."""

    jobs: Sequence[TensorLoad]
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
        """The same for each piece of a shared read of this chunk alone."""
        info = self.jobs[0].target.info
        return _boxes_by_piece(info.layout, info.shape, self.stored, self.box, rank, self.piece // self.itemsize)


class ReadSlice(NamedTuple):
    """What of a shared read goes through the pool at once: ``nbytes`` from ``start`` on. ``spans``: the boxes of items that these are;
    ``place``: its number, from 0."""

    start: int
    nbytes: int
    spans: Sequence[tuple[SharedReadItem, Box]]
    place: int

    def wanted(self, rank: int) -> list[tuple[SharedReadItem, Box]]:
        """What ``rank`` wants of it."""
        if len(self.spans) > 1:
            return [(item, box) for item, _ in self.spans for box in item.boxes(rank)]
        item = self.spans[0][0]
        return [(item, box) for box in item.by_piece(rank)[self.place]]


@dataclass(slots=True, eq=False)  # as above
class SharedRead:
    """One chunk, or small ones, that ``reader`` reads for all of ``ranks``."""

    items: Sequence[SharedReadItem]
    ranks: tuple[int, ...]
    reader: int

    def slices(self) -> list[ReadSlice]:
        """In order; all ranks cut alike."""
        last = self.items[-1]
        if len(self.items) > 1:
            return [ReadSlice(0, last.start + last.nbytes, [(item, item.box) for item in self.items], 0)]
        size = last.itemsize
        return [ReadSlice(p.start * size, p.length * size, [(last, p.box)], i) for i, p in enumerate(_pieces(last.box, last.piece // size))]


class _Kind(NamedTuple):
    """Jobs of equal kind want the same of the same chunks."""

    name: str
    shape: tuple[int, ...]
    layout: TensorLayout
    stored: Box


@dataclass(eq=False)
class SharedReads:
    """What one rank shares with others in one load. Shared reads between two ranks are numbered by their places in the lists, on both."""

    rank: int
    piece: int
    """Bytes that go through a slot of a pool at once."""
    rank_sets: dict[str, tuple[int, dict[_Kind, list[TensorLoad]]]] = field(default_factory=dict)
    """For each rank set how many ranks it has, and what this rank loads of its tensors."""
    reads: list[SharedRead] = field(default_factory=list)
    gives: dict[int, list[SharedRead]] = field(default_factory=dict)
    takes: dict[int, list[SharedRead]] = field(default_factory=dict)
    left_out: dict[int, Collection[int]] = field(default_factory=dict)
    """By ``id`` of a target the chunks that come in shared reads."""
    complete: set[int] = field(default_factory=set)
    """Targets that get all that they want in shared reads."""
    needed: int = 0
    """Bytes that this rank wants of shared reads."""

    @classmethod
    def of(cls, jobs: Iterable[TensorLoad], rank: int, *, parts: bool, piece: int) -> SharedReads:
        """What there may be to share. Changes nothing. ``parts``: replicas and small tensors are left out, which :func:`worth_parts` would
        refuse; ``piece``: bytes that one call of the storage has best."""
        shared = cls(rank, max(settings.PIECE, piece // ALIGN * ALIGN))
        for job in jobs:
            target, entry = job
            info = target.info
            ranks = _members(info.layout)
            if entry.rank is not None or rank not in ranks or len(ranks) == 1:
                continue
            if parts and (not info.layout.splits or (len(ranks) - 1) * entry.nbytes < settings.SMALL_SHARED_READ):
                continue
            # What the others compute of this rank's wants, they compute from the layout. Where the memory is
            # something else than the layout says, nobody could know, so the rank reads such tensors for itself.
            if [p.box for p in target.parts] != [p.box for p in info.layout.pieces(info.shape, rank)]:
                continue  # one of several tensors that are stacked: others cannot tell who has which
            kind = _Kind(entry.alias or entry.name, info.shape, info.layout, common_box(info, entry))
            rank_set = shared.rank_sets.setdefault(_rank_set(info.layout), (len(ranks), {}))
            rank_set[1].setdefault(kind, []).append(job)
        return shared

    def entries(self) -> Iterator[TensorEntry]:
        """Stored tensors that may be shared."""
        return (jobs[0].entry for _, kinds in self.rank_sets.values() for jobs in kinds.values())

    def divide(
        self,
        refused: Collection[str],
        near: Set[int] | None,
        worth: Callable[[SharedChunk, int], bool],
        near_files: NearFiles | None = None,
    ) -> None:
        """Find the shared reads. ``refused``: rank sets that do not share; ``near``: the ranks of this machine, if only those share;
        ``worth``: whether to share a chunk of elements of this size; ``near_files``: who has which file near, if reads differ by that."""
        # What is cut alike is looked at once: a model has very many tensors, and few ways to cut them.
        known: dict[tuple[int, object], tuple[list[SharedChunk], int]] = {}
        alike: dict[tuple[int, object, int], _Alike] = {}
        for key in sorted(self.rank_sets.keys() - set(refused)):
            # ``number`` counts the chunks of all tensors of the rank set, in an order that all its ranks have in
            # common (largest tensor first, then by name). It is the seed of :func:`reader_of`: that ranks agree about
            # it is what makes them agree about who reads.
            few: dict[Sharing, list[_Small]] = {}
            number = 0
            for kind, jobs in sorted(self.rank_sets[key][1].items(), key=_order):
                entry = jobs[0].entry
                place = (id(entry.grid), kind[1:])
                sized = (*place, entry.dtype.itemsize)
                if place not in known:
                    known[place] = shared_chunks(entry.grid, kind.layout, kind.shape, kind.stored, self.rank, near, near_files)
                if sized not in alike:
                    alike[sized] = _Alike.of(*known[place], entry.dtype.itemsize, self.rank, worth)
                cut = alike[sized]
                if cut.chunks:
                    complete = len(cut.chunks) == cut.wanted and kind.stored == Box.whole(kind.shape)
                    for job in jobs:
                        self.left_out[id(job.target)] = cut.chunks
                        if complete:
                            self.complete.add(id(job.target))
                    self.needed += len(jobs) * cut.needed
                readers = cut.readers.of(number)
                for at, shared in cut.large:
                    item = SharedReadItem(jobs, kind.stored, shared.chunk, shared.box, 0, self.piece)
                    self._add([item], shared.sharing.ranks, readers[at])
                for sharing, members in cut.small.items():
                    few.setdefault(sharing, []).extend([(jobs, kind.stored, s, n, readers[at]) for at, s, n in members])
                number += len(entry.grid)
            for sharing, smalls in few.items():
                self._add_small(sharing.ranks, smalls)

    def _add_small(self, ranks: tuple[int, ...], members: Sequence[_Small]) -> None:
        """Shared reads that fit into one slot of a pool."""
        items: list[SharedReadItem] = []
        reader, at = members[0][4], 0
        for jobs, stored, shared, nbytes, its_reader in members:
            if at + nbytes > self.piece:
                self._add(items, ranks, reader)
                items, reader, at = [], its_reader, 0
            items.append(SharedReadItem(jobs, stored, shared.chunk, shared.box, at, self.piece))
            at += -(-nbytes // ALIGN) * ALIGN
        self._add(items, ranks, reader)

    def _add(self, items: Sequence[SharedReadItem], ranks: tuple[int, ...], reader: int) -> None:
        shared_read = SharedRead(items, ranks, reader)
        if reader == self.rank:
            self.reads.append(shared_read)
            for rank in ranks:
                if rank != reader:
                    self.gives.setdefault(rank, []).append(shared_read)
        else:
            self.takes.setdefault(reader, []).append(shared_read)


@dataclass(frozen=True, slots=True, eq=False)
class _Alike:
    """The shared chunks of tensors that are cut alike and have elements of one size."""

    chunks: frozenset[int]
    large: Sequence[tuple[int, SharedChunk]]
    """With their places among ``readers``."""
    small: Mapping[Sharing, Sequence[tuple[int, SharedChunk, int]]]
    """With their places among ``readers``, and their bytes."""
    readers: Readers
    wanted: int
    """How many chunks the rank wants parts of, shared or not."""
    needed: int
    """Bytes that it wants of the shared ones."""

    @classmethod
    def of(cls, chunks: Sequence[SharedChunk], wanted: int, itemsize: int, rank: int, worth: Callable[[SharedChunk, int], bool]) -> _Alike:
        taken = [c for c in chunks if worth(c, itemsize)]
        large: list[tuple[int, SharedChunk]] = []
        small: dict[Sharing, list[tuple[int, SharedChunk, int]]] = {}
        for at, c in enumerate(taken):
            if (size := c.box.numel * itemsize) > settings.SMALL_SHARED_READ:
                large.append((at, c))
            else:
                small.setdefault(c.sharing, []).append((at, c, size))
        return cls(
            chunks=frozenset(c.chunk for c in taken),
            large=large,
            small=small,
            readers=Readers(taken),
            wanted=wanted,
            needed=itemsize * sum(int(c.weights[c.sharing.ranks.index(rank)]) for c in taken),
        )


_Small = tuple[Sequence[TensorLoad], Box, SharedChunk, int, int]
"""What a :class:`SharedReadItem` is made of, its bytes, and the rank that reads it if it comes first."""


def worth_all(chunk: SharedChunk, itemsize: int) -> bool:
    """Where reading costs more than sending."""
    return True


def worth_replicas(chunk: SharedChunk, itemsize: int) -> bool:
    """Where ranks read only what they want, and some want the same."""
    return chunk.wanted > chunk.box.numel


def worth_parts(chunk: SharedChunk, itemsize: int) -> bool:
    """Where reading costs less than sending: ranks would read at least twice what they want to check it, and it is not little."""
    count, numel = len(chunk.sharing.ranks), chunk.box.numel
    return count * numel >= 2 * chunk.wanted and (count - 1) * numel * itemsize >= settings.SMALL_SHARED_READ


def what_is_worth(*, parts: bool, verify: Verify) -> Callable[[SharedChunk, int], bool]:
    """Which chunks are shared: only ``parts`` that would be read twice to check them, or all that it saves to share."""
    return worth_parts if parts else worth_all if verify == "full" else worth_replicas


def row_of_sharing(call: Call, catalog: Catalog, sharing: SharedReads) -> Row:
    """For the leader: each rank set, how many ranks it has and a digest of what this rank loads, empty if there is none; its machine; and
    the files near it."""
    digests = {key: (size, _digest(kinds, sharing.piece)) for key, (size, kinds) in sharing.rank_sets.items()}
    row: Row = {"shares": call.share(json.dumps(digests).encode()) if digests else "", "machine": machine()}
    near = catalog.backend.nearby([file.path for file in catalog.files])
    if near is not None:
        row["near"] = runs_of(number for number, file in enumerate(catalog.files) if file.path in near)
    return row


def what_is_shared(call: Call, rows: Mapping[int, Row]) -> Row:
    """Leader: the rank sets in which not every rank loads the same, which are ``refused``; which ranks are on one machine, and which have
    which files near (``ckpt.plan.machines``), if a file does not cost all ranks the same."""
    different = {row["shares"] for row in rows.values()} - {""}
    call.fetch_all(different)
    digests = {"": {}, **{digest: parse_json(call.fetch(digest)) for digest in different}}
    sizes: dict[str, int] = {}
    counts: dict[tuple[str, str], int] = {}
    for row in rows.values():
        for key, (size, digest) in digests[row["shares"]].items():
            sizes[key] = size
            counts[key, digest] = counts.get((key, digest), 0) + 1
    ordered = [rows[rank] for rank in call.group.ranks]
    shared: Row = {
        "refused": sorted(sizes.keys() - {key for (key, _), count in counts.items() if count == sizes[key]}),
        "machines": machines.spell([row["machine"] for row in ordered]),
    }
    if all("near" in row for row in ordered):
        spelled = machines.spelled([tuple(map(tuple, row["near"])) for row in ordered])
        text = json.dumps(spelled).encode()
        # Where machines changed places there is a row for each of them, which is too much for a verdict that every rank
        # reads from the store.
        shared["near_files"] = spelled if len(text) <= INLINE else call.leave(text)
    return shared


def _order(group: tuple[_Kind, list[TensorLoad]]) -> tuple[int, str, str]:
    kind, jobs = group
    return -jobs[0].entry.nbytes, kind.name, _spelled(kind.layout)


def _digest(kinds: Mapping[_Kind, Sequence[TensorLoad]], piece: int) -> str:
    rows = sorted((k.name, k.shape, _spelled(k.layout), k.stored.shape) for k in kinds)
    return xxhash.xxh3_128_hexdigest(repr((piece, rows)).encode())


@lru_cache(maxsize=4096)
def _members(layout: TensorLayout) -> frozenset[int]:
    return layout.ranks()


@lru_cache(maxsize=4096)
def _rank_set(layout: TensorLayout) -> str:
    return xxhash.xxh3_64_hexdigest(repr(sorted(_members(layout))).encode())


@lru_cache(maxsize=4096)
def _spelled(layout: TensorLayout) -> str:
    return xxhash.xxh3_64_hexdigest(repr(layout.to_json()).encode())


@lru_cache(maxsize=1 << 16)
def _boxes(layout: TensorLayout, shape: tuple[int, ...], stored: Box, chunk: Box, rank: int) -> tuple[Box, ...]:
    return tuple(box for b in wants(layout, shape, stored, rank) if (box := b.intersect(chunk)) is not None)


@lru_cache(maxsize=4096)
def _pieces(chunk: Box, limit: int) -> tuple[CacheBlock, ...]:
    return tuple(pieces(chunk, chunk, limit))


@lru_cache(maxsize=1 << 14)
def _boxes_by_piece(
    layout: TensorLayout, shape: tuple[int, ...], stored: Box, chunk: Box, rank: int, limit: int
) -> tuple[tuple[Box, ...], ...]:
    boxes = _boxes(layout, shape, stored, chunk, rank)
    return tuple(tuple(box for b in boxes if (box := b.intersect(piece.box)) is not None) for piece in _pieces(chunk, limit))
