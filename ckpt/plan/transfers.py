"""Transfers: what one receiver takes from which rank of a live state. The receiver plans, holders only pack. Pure.

    a tensor of the source, 2 × 2 cells      the receiver's box        requests, each to one holder of its cell
    ┌────────┬────────┐                      ┌───────────┐             ┌────┬──────┐
    │ 0 or 4 │ 1 or 5 │           ∩          │           │      =      │ →0 │  →1  │  cut to at most a piece
    ├────────┼────────┤                      │           │             ├────┤──────┤
    │ 2 or 6 │ 3 or 7 │                      └───────────┘             │ →6 │  →3  │
    └────────┴────────┘                                                └────┴──────┘

1. Each wanted box is cut along the cells of the source (``ckpt.plan.reads``). What this rank has itself it copies.
2. The rest is cut along the outermost dimensions into requests of at most a piece. A request goes to the holder on this machine, or else
   elsewhere, from which this receiver takes least so far: so replicas share the work to within a piece. Which of equals is first follows
   from the receiver's number and the golden ratio, so that many receivers of few bytes spread over the holders too.
3. Receivers that already have, or are taking, the same boxes pass them on (*relays*): they are further holders of every cell, one for
   each holder of the source whose part they pass on, since that one tells the digests. Nearest first: this machine, this domain, the rest.
4. The requests to one holder are an ordered table. Neighbours are packed into pieces by ``ckpt.plan.reads.group_sizes``; both sides
   group alike, so a piece is known by its number.

Tensors of one kind (the same cells, the same boxes) are cut once. Invariant: own copies and requests tile every wanted box.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
import xxhash

from ckpt import settings
from ckpt.catalog import Grid
from ckpt.errors import CoverageError, FormatError
from ckpt.plan.layout.geometry import Box, IntArray

from .flat import caps
from .reads import group_sizes, overlapping_chunks
from .shared_reads import GOLDEN
from .tables import ranks_text

ALIGNMENT = 8
"""Each box of a piece begins at a multiple of so many bytes, so that its elements can be read where they are."""
MOST_PIECE = 4 * settings.MIB
"""A holder packs no longer pieces: it has few of them in memory."""
CANDIDATES = 8
"""Replicas among which a receiver divides what it takes, so that a rank talks to few others."""
_HEADER = struct.Struct("<4sIIIQ")
"""Magic, bytes of a piece, dimensions, bytes of a number, requests."""
_MAGIC = b"ckr1"
_MOST_DIMENSIONS = 64


class Want(NamedTuple):
    """What a receiver wants of one tensor of the source: ``boxes`` in global coordinates. ``number`` is that of the tensor in the source's
    catalog; ``holders`` are the ranks that have each cell of its ``grid``, ``[cells, replicas]``."""

    name: str
    number: int
    itemsize: int
    grid: Grid
    holders: IntArray
    boxes: tuple[Box, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestList:
    """The boxes that one holder is asked for, in order, as columns.

    ``numbers`` are those of the tensors, ``[n]``. ``offsets`` and ``shapes`` are ``[n, d]``: a tensor of fewer dimensions uses the last
    ones, those before are 0 and 1. ``nbytes`` is ``[n]``. A piece has at most ``piece`` bytes.
    """

    numbers: IntArray
    offsets: IntArray
    shapes: IntArray
    nbytes: IntArray
    piece: int

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def total(self) -> int:
        """Bytes of all boxes."""
        return int(self.nbytes.sum())

    @cached_property
    def packed(self) -> bytes:
        """What :meth:`to_bytes` gives, and a holder keeps."""
        return self.to_bytes()

    @cached_property
    def digest(self) -> bytes:
        """By which a holder knows a list that it has seen before."""
        return digest_of(self.packed)

    @cached_property
    def pieces(self) -> list[range]:
        """The requests of each piece."""
        return group_sizes(self._padded.tolist(), self.piece)

    @cached_property
    def _padded(self) -> IntArray:
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT

    @cached_property
    def _places(self) -> tuple[list[int], list[int], list[int]]:
        """Where in its piece each box begins; of each piece the length, and the bytes of its boxes."""
        if not self.pieces:
            return [], [], []
        firsts = [rows.start for rows in self.pieces]
        begins = np.cumsum(self._padded) - self._padded
        places = begins - np.repeat(begins[firsts], [len(rows) for rows in self.pieces])
        return places.tolist(), np.add.reduceat(self._padded, firsts).tolist(), np.add.reduceat(self.nbytes, firsts).tolist()

    def places(self, piece: int) -> tuple[list[int], int]:
        """Where in its bytes each box of a piece begins, and the length of the piece."""
        places, lengths, _ = self._places
        rows = self.pieces[piece]
        return places[rows.start : rows.stop], lengths[piece]

    def spans(self, piece: int) -> list[tuple[int, int, int]]:
        """The requests of a piece, each with where its box begins and ends in the piece's bytes."""
        rows = self.pieces[piece]
        sizes = self.nbytes[rows.start : rows.stop].tolist()
        return [(row, at, at + size) for row, at, size in zip(rows, self.places(piece)[0], sizes, strict=True)]

    def bytes_of(self, piece: int) -> int:
        """Bytes of the boxes of a piece, without what lies between them."""
        return self._places[2][piece]

    def box(self, request: int, dimensions: int) -> Box:
        """The box of a request for a tensor of so many dimensions."""
        first = self.offsets.shape[1] - dimensions
        return Box(tuple(self.offsets[request, first:].tolist()), tuple(self.shapes[request, first:].tolist()))

    def key(self, request: int) -> bytes:
        """By which boxes of one version are told apart: tensor, offset and shape."""
        columns = self.numbers, self.offsets, self.shapes
        return b"".join([np.ascontiguousarray(column[request]).tobytes() for column in columns])

    def to_bytes(self) -> bytes:
        """Equal for equal lists."""
        wide = any(column.size and int(column.max()) > 0x7FFFFFFF for column in (self.numbers, self.offsets, self.shapes))
        kind = np.dtype("<i8" if wide else "<i4")
        header = _HEADER.pack(_MAGIC, self.piece, self.offsets.shape[1], kind.itemsize, len(self))
        columns = (self.numbers, self.offsets, self.shapes, self.nbytes)
        return b"".join([header, *(np.ascontiguousarray(column, dtype=kind).tobytes() for column in columns)])

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> RequestList:
        """What somebody else asks for: nothing of it is believed."""
        if len(data) < _HEADER.size:
            raise _malformed("it is too short")
        magic, piece, dimensions, width, count = _HEADER.unpack_from(data)
        if magic != _MAGIC or width not in (4, 8):
            raise _malformed("it begins with something else")
        if not ALIGNMENT <= piece <= MOST_PIECE or piece % ALIGNMENT or dimensions > _MOST_DIMENSIONS:
            raise _malformed(f"pieces of {piece} bytes, {dimensions} dimensions")
        if len(data) != _HEADER.size + count * (2 + 2 * dimensions) * width:
            raise _malformed(f"{len(data)} bytes for {count} requests")
        values = np.frombuffer(data, dtype=f"<i{width}", offset=_HEADER.size).astype(np.int64)
        numbers, offsets, shapes, nbytes = np.split(values, np.cumsum([count, count * dimensions, count * dimensions]))
        if count and (numbers.min() < 0 or nbytes.min() < 1 or nbytes.max() > piece):
            raise _malformed("a number is out of range")
        if count and dimensions and (offsets.min() < 0 or shapes.min() < 1 or offsets.max() > 1 << 60 or shapes.max() > piece):
            raise _malformed("a box is out of range")
        return cls(
            numbers=numbers,
            offsets=offsets.reshape(count, dimensions),
            shapes=shapes.reshape(count, dimensions),
            nbytes=nbytes,
            piece=piece,
        )


def digest_of(data: bytes | memoryview) -> bytes:
    """The XXH3-128 of a packed list."""
    return xxhash.xxh3_128_digest(data)


def _malformed(why: str) -> FormatError:
    return FormatError(f"the received message is not a list of requests: {why}", hint="both ends need the same release of ckpt")


class Share(NamedTuple):
    """What a receiver takes from one holder; ``wants`` has for each request the number of the want that it is a part of."""

    requests: RequestList
    wants: IntArray


def wanted_digest(wants: Sequence[Want]) -> str:
    """Equal for receivers that want the same boxes of a version, and so make the same requests."""
    digest = xxhash.xxh3_128()
    for want in wants:
        digest.update(repr((want.number, [(box.offset, box.shape) for box in want.boxes])).encode())
    return digest.hexdigest()


class OwnCopy(NamedTuple):
    """A box that the receiver has itself."""

    want: int
    box: Box


@dataclass(frozen=True, kw_only=True, eq=False)
class TransferPlan:
    """All that one receiver takes: ``own`` from its own memory, ``shares`` from other ranks."""

    wants: Sequence[Want]
    own: Sequence[OwnCopy]
    shares: Mapping[int, Share]
    near: Set[int]
    piece: int
    needed: int
    """Bytes of all wanted boxes, as the source has them."""
    relays: Sequence[int] = ()
    domain: Set[int] = frozenset()

    @cached_property
    def wanted(self) -> str:
        """The digest of ``wanted_digest``."""
        return wanted_digest(self.wants)

    def without(self, holder: int, share: Share, pieces: Collection[int], lost: Set[int]) -> dict[int, Share]:
        """Who else gives the ``pieces`` of a ``holder``'s share that have not come, when the ranks ``lost`` are gone."""
        book = _Book(self.wants, self.piece, holder)
        for number in sorted(pieces):
            for request in share.requests.pieces[number]:
                place = int(share.wants[request])
                want = self.wants[place]
                box = share.requests.box(request, len(want.boxes[0].shape))
                (copy,) = overlapping_chunks(want.grid, box)
                known = _with_relays(want.holders[copy.chunk].tolist(), self.relays)
                ranks = [rank for rank in known if rank not in lost]
                if not ranks:
                    raise CoverageError(
                        f"only {ranks_text(sorted(lost & set(want.holders[copy.chunk].tolist())))} had {box}",
                        where=f"tensor {want.name}",
                        hint="start the lost rank again, or load a checkpoint",
                    )
                book.add(place, _nearest(ranks, self.near, self.domain), box, int(share.requests.nbytes[request]))
        return book.shares()


def plan_transfers(
    wants: Sequence[Want],
    *,
    rank: int,
    near: Set[int] = frozenset(),
    domain: Set[int] = frozenset(),
    relays: Sequence[int] = (),
    piece: int | None = None,
) -> TransferPlan:
    """What the receiver ``rank`` takes from whom. ``near`` are the holders on its machine, ``domain`` those nearby.

    ``relays``: receivers of the same boxes that pass them on. The relay ``relays[k]`` is the holder ``relays[k] + r`` of what rank ``r``
    of the source has; no two of these numbers are equal. Where a rank of the source itself is near, its memory is, and no relay is asked.

    Every rank makes its own plan from the catalog of the source; nothing is agreed.
    """
    piece = settings.PIECE if piece is None else piece
    own: list[OwnCopy] = []
    book = _Book(wants, piece, rank)
    kinds: dict[tuple[int, int, tuple[Box, ...]], list[_Cut]] = {}
    needed = 0
    for place, want in enumerate(wants):
        key = id(want.grid), want.itemsize, want.boxes
        cuts = kinds.get(key)
        if cuts is None:
            cuts = kinds[key] = _cut(want, rank, near, domain, relays, piece)
        for cut in cuts:
            needed += cut.nbytes
            if cut.candidates is None:
                own.append(OwnCopy(place, cut.box))
            else:
                for box, nbytes in cut.requests:
                    book.add(place, cut.candidates, box, nbytes)
    return TransferPlan(
        wants=wants, own=own, shares=book.shares(), near=near, piece=piece, needed=needed, relays=tuple(relays), domain=domain
    )


class _Cut(NamedTuple):
    """What one cell has of a wanted box: who may give it, None if the receiver has it, and the requests for it."""

    candidates: tuple[int, ...] | None
    box: Box
    nbytes: int
    requests: Sequence[tuple[Box, int]]


def _cut(want: Want, rank: int, near: Set[int], domain: Set[int], relays: Sequence[int], piece: int) -> list[_Cut]:
    cuts = []
    for wanted in want.boxes:
        given = 0
        for copy in overlapping_chunks(want.grid, wanted):
            given += copy.box.numel
            holders = want.holders[copy.chunk].tolist()
            nbytes = copy.box.numel * want.itemsize
            if rank in holders:
                cuts.append(_Cut(None, copy.box, nbytes, ()))
            else:
                known = holders if any(h in near for h in holders) else _with_relays(holders, relays)
                cuts.append(_Cut(_nearest(known, near, domain), copy.box, nbytes, list(_requests(copy.box, want.itemsize, piece))))
        if given != wanted.numel:
            raise CoverageError(
                f"the source has {given} of the {wanted.numel} elements of {wanted}",
                where=f"tensor {want.name}",
                hint="correct the layout of the source",
            )
    return cuts


def _with_relays(holders: Sequence[int], relays: Sequence[int]) -> list[int]:
    """All that may give a cell: replicas take turns to tell the digests of what relays give."""
    return [*holders, *(relay + holders[turn % len(holders)] for turn, relay in enumerate(relays))]


def _nearest(holders: Sequence[int], near: Set[int], domain: Set[int]) -> tuple[int, ...]:
    return tuple(h for h in holders if h in near) or tuple(h for h in holders if h in domain) or tuple(holders)


def _requests(box: Box, itemsize: int, piece: int) -> Iterable[tuple[Box, int]]:
    """A box in parts of at most a piece, by its outermost dimensions."""
    if box.numel * itemsize <= piece:
        yield box, box.numel * itemsize
        return
    steps = caps(box.shape, itemsize, piece)
    ranges = [[(at, min(step, end - at)) for at in range(o, end, step)] for o, end, step in zip(box.offset, box.end, steps, strict=True)]
    for combination in product(*ranges):
        offset, shape = zip(*combination, strict=True)
        part = Box(offset, shape)
        yield part, part.numel * itemsize


@dataclass(eq=False)
class _Rows:
    """The growing columns of the requests to one holder."""

    wants: list[int] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)


class _Book:
    """Gives each request to the candidate that has least to send to this receiver."""

    def __init__(self, wants: Sequence[Want], piece: int, receiver: int) -> None:
        self._wants = wants
        self._piece = piece
        self._turn = receiver * GOLDEN % 1.0
        self._rows: dict[int, _Rows] = defaultdict(_Rows)
        self._load: dict[int, int] = defaultdict(int)
        self._turned: dict[tuple[int, ...], tuple[int, ...]] = {}

    def add(self, want: int, candidates: tuple[int, ...], box: Box, nbytes: int) -> None:
        ranks = self._turned.get(candidates)
        if ranks is None:
            first = int(self._turn * len(candidates))
            ranks = self._turned[candidates] = (candidates[first:] + candidates[:first])[:CANDIDATES]
        holder = ranks[0] if len(ranks) == 1 else min(ranks, key=self._load.__getitem__)
        self._load[holder] += nbytes
        rows = self._rows[holder]
        rows.wants.append(want)
        rows.boxes.append(box)
        rows.nbytes.append(nbytes)

    def shares(self) -> dict[int, Share]:
        dimensions = max((len(want.boxes[0].shape) for want in self._wants if want.boxes), default=0)
        return {holder: self._share(self._rows[holder], dimensions) for holder in sorted(self._rows)}

    def _share(self, rows: _Rows, dimensions: int) -> Share:
        numbers = np.array([self._wants[want].number for want in rows.wants], dtype=np.int64)
        lead = [(0,) * (dimensions - n) for n in range(dimensions + 1)]
        ones = [(1,) * (dimensions - n) for n in range(dimensions + 1)]
        offsets = np.array([lead[len(b.shape)] + b.offset for b in rows.boxes], dtype=np.int64).reshape(len(numbers), dimensions)
        shapes = np.array([ones[len(b.shape)] + b.shape for b in rows.boxes], dtype=np.int64).reshape(len(numbers), dimensions)
        requests = RequestList(
            numbers=numbers, offsets=offsets, shapes=shapes, nbytes=np.array(rows.nbytes, dtype=np.int64), piece=self._piece
        )
        return Share(requests, np.array(rows.wants, dtype=np.int64))
