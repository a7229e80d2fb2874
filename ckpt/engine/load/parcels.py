"""Parcels on their way: a rank reads and checks them piece by piece, and the others take what they want of each out of slots of its ring.

Ranks of one machine copy straight from the slot; to others, and to those that cannot open the ring, goes what they want, packed. A thread
that reads waits until a slot is free, so memory is bounded by the ring; it waits only while it has none itself, and a rank that takes waits
for nobody, so slots always get free.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ckpt.byte_source.chunk import ChunkName
from ckpt.byte_source.digest_reader import ChunkDigest, DigestReader
from ckpt.catalog import Catalog, Extent
from ckpt.concurrency.workers import Pending, run_tasks
from ckpt.coordination.call import Call
from ckpt.errors import CorruptError
from ckpt.layout.geometry import Box
from ckpt.plan.parcels import MOST
from ckpt.plan.reads import RangeGroup, group_ranges
from ckpt.transport.framing import Feed, Inlet
from ckpt.transport.peers import Peers, Turn
from ckpt.transport.shm_pool import PAUSE, Ring

from .exact import SLICE
from .sharing import Cut, Item, Parcel, Sharing
from .taking import ParcelReceiver, is_checked, pack, packed_copy, place, straight

_Digest = xxhash.xxh3_64
_Fill = Callable[[npt.NDArray[np.uint8], _Digest | None], None]
"""Fills memory with bytes of a parcel, and gives them to the digest that goes with them to other ranks, if one does."""


class Carrier:
    """Moves the parcels of one load. ``near``: the ranks of this machine; ``threads``: the most that read at once. ``received`` counts
    bytes of this rank's tensors; ``coded`` is the most scratch memory that one coded chunk takes."""

    def __init__(
        self, sharing: Sharing, fetch: DigestReader, near: frozenset[int], threads: int, peers: Callable[[], Peers], call: Call
    ) -> None:
        self._sharing = sharing
        self._fetch = fetch
        self._near = near
        self._threads = threads
        self._peers = peers
        self._call = call
        self._feeds = {rank: Feed(len(parcels)) for rank, parcels in sharing.gives.items()}
        self._takers = {rank: ParcelReceiver(rank, sharing.rank, parcels, fetch) for rank, parcels in sharing.takes.items()}
        self._numbers = {rank: {id(p): i for i, p in enumerate(parcels)} for rank, parcels in sharing.gives.items()}
        self._ring: Ring | None = None
        self.coded = 0
        self.again: list[tuple[str, int]] = []
        """Chunks, by stored tensor and number, of which this rank may have handed out wrong pieces."""
        self._left = len(sharing.reads)
        self._lock = threading.Lock()
        self._turn: Turn | None = None
        """Moves pieces, while this thread reads them too."""
        self._reading: Pending[None] | None = None
        self._ended = False
        self._waits = self._seen = 0
        self._nudged = time.monotonic()

    @property
    def received(self) -> int:
        return sum(taker.received for taker in self._takers.values())

    def tasks(self, catalog: Catalog) -> list[Callable[[], None]]:
        """What to run to read the parcels, in any order and on any threads."""
        reads = self._sharing.reads
        wanted = [(item.entry, item.chunk) for parcel in reads for item in parcel.items]
        extents: list[Extent] = []
        for at in range(0, len(wanted), SLICE):  # each may have to read headers
            extents += catalog.extents_of(wanted[at : at + SLICE])
            self._fetch.beat()
        ends = accumulate(len(parcel.items) for parcel in reads)
        found = [(parcel, extents[end - len(parcel.items) : end]) for parcel, end in zip(reads, ends, strict=True)]
        self.coded = max((p.items[0].nbytes + e[0].length for p, e in found if len(e) == 1 and e[0].codec is not None), default=0)
        return [partial(self._read, parcel, its) for parcel, its in found]

    # ---- both directions

    def carry(self, tasks: list[Callable[[], None]], threads: Callable[[], int]) -> None:
        """Run ``tasks``, those of :meth:`tasks` and others, and move pieces meanwhile. ``threads`` runs the first few and says how many
        threads are to run the rest: one is this one, more leave this one to the pieces.

        Raises:
            what tasks raise, and what ``Peers.relay`` does.
        """
        if not self._feeds and not self._takers:
            run_tasks(tasks, threads(), "ckpt-read")
            return

        def work(turn: Turn) -> None:
            self._turn = turn
            count = threads()
            if count > 1:
                self._turn = None
                self._reading = Pending(partial(self._run, tasks, count, inference=torch.is_inference_mode_enabled()), "ckpt-read")
            else:
                for task in tasks:
                    task()
                    turn(0)

        try:
            self._make_ring()
            self._peers().relay(self._feeds, {r: Inlet(r, len(t.parcels), t) for r, t in self._takers.items()}, work, alive=self._alive)
            if self._reading is not None:
                self._reading.result()
        finally:
            if self._ring is not None:
                self._ring.stop()
            if self._reading is not None:
                self._reading.wait()
            if self._ring is not None:
                self._ring.close()
            self._turn = self._reading = None  # no circles: the memory is to be free when the load returns
            for feed in self._feeds.values():
                feed.wake = lambda: None

    def _make_ring(self) -> None:
        """A slot for each thread to fill, and two that are on their way meanwhile."""
        if not self._feeds:
            return
        near = self._near.intersection(self._feeds)
        self._ring = Ring(self._threads + 2, self._sharing.piece, MOST, shared=bool(near), timeout=self._call.timeout)
        for rank in near:
            self._feeds[rank].announcement = self._ring.announcement().pack()

    def _run(self, tasks: list[Callable[[], None]], count: int, *, inference: bool) -> None:
        try:
            with torch.inference_mode(inference):
                run_tasks(tasks, count, "ckpt-read")
        finally:
            self._ended = True
            for feed in self._feeds.values():
                feed.wake()

    def _alive(self) -> None:
        if self._ended and self._reading is not None:
            self._reading.result()
        self._nudge()
        self._call.check_failures()

    def _nudge(self) -> None:
        """Tell those that wait for this rank that it goes on, if it does."""
        now = time.monotonic()
        moved = self._fetch.read + self._waits
        if moved != self._seen and now - self._nudged > self._call.timeout / 8:
            self._seen, self._nudged = moved, now
            for feed in self._feeds.values():
                feed.nudge()

    # ---- reading

    def _read(self, parcel: Parcel, extents: Sequence[Extent]) -> None:
        if len(parcel.items) > 1:
            self._read_small(parcel, extents)
        elif (codec := extents[0].codec) is not None:
            out = self._fetch.scratch(parcel.items[0].nbytes, "decoded")[: parcel.items[0].nbytes]
            self._fetch.reread(extents[0], partial(self._decode, parcel.items[0], extents[0], codec, out))
            for number, cut in enumerate(parcel.cuts()):
                self._hand_out(parcel, number, cut, partial(_copy, out[cut.start : cut.start + cut.nbytes]))
        else:
            self._read_large(parcel, extents[0])
        with self._lock:
            self._left -= 1
            over = not self._left
        if over:
            for feed in self._feeds.values():
                feed.close()

    def _read_large(self, parcel: Parcel, extent: Extent) -> None:
        """Pieces of a chunk are handed out before its digest is known. If it does not fit, and that of a second read does, the ranks read
        the chunk themselves at the end."""
        item, cuts = parcel.items[0], parcel.cuts()
        chunk = ChunkName(item.entry.name, item.box, extent)
        if len(cuts) == 1:

            def fill_whole(data: npt.NDArray[np.uint8], also: _Digest | None) -> None:
                self._fetch.reread(extent, partial(self._fetch.read_chunk, chunk, data.data))
                if also is not None:
                    also.update(data.data)

            self._hand_out(parcel, 0, cuts[0], fill_whole)
            return
        check = ChunkDigest(self._fetch, chunk)

        def fill(data: npt.NDArray[np.uint8], also: _Digest | None, cut: Cut) -> None:
            check.also = also
            self._fetch.fill(extent.path, extent.offset + cut.start, data.data, check)

        for number, cut in enumerate(cuts):
            self._hand_out(parcel, number, cut, partial(fill, cut=cut))
        try:
            check.end()
        except CorruptError as err:
            self._fetch.recheck(chunk, err)
            self.again.append((item.entry.alias or item.entry.name, item.chunk))

    def _read_small(self, parcel: Parcel, extents: Sequence[Extent]) -> None:
        """Chunks that lie together in a file are read together."""
        (cut,) = parcel.cuts()

        def fill(data: npt.NDArray[np.uint8], also: _Digest | None) -> None:
            for group in group_ranges(extents):
                together = Extent(group.path, group.offset, group.length, None)
                self._fetch.reread(together, partial(self._read_group, parcel, extents, group, data))
            if also is not None:
                also.update(data.data)

        self._hand_out(parcel, 0, cut, fill)

    def _read_group(self, parcel: Parcel, extents: Sequence[Extent], group: RangeGroup, data: npt.NDArray[np.uint8]) -> None:
        file_bytes = self._fetch.scratch(group.length)[: group.length]
        self._fetch.fill(group.path, group.offset, file_bytes.data)
        for i in group.members:
            item, extent = parcel.items[i], extents[i]
            stored, into = file_bytes[extent.offset - group.offset :][: extent.length], data[item.start : item.start + item.nbytes]
            chunk = ChunkName(item.entry.name, item.box, extent)
            self._fetch.compare(chunk, stored.data)
            if extent.codec is None:
                into[:] = stored
            else:
                self._fetch.decode(chunk, extent.codec, stored.data, into.data, item.itemsize)

    def _decode(self, item: Item, extent: Extent, codec: str, out: npt.NDArray[np.uint8]) -> None:
        chunk = ChunkName(item.entry.name, item.box, extent)
        blob = self._fetch.scratch(extent.length, "blob")[: extent.length].data
        self._fetch.read_chunk(chunk, blob)
        self._fetch.decode(chunk, codec, blob, out.data, item.itemsize)

    def _hand_out(self, parcel: Parcel, number: int, cut: Cut, fill: _Fill) -> None:
        """Fill a slot, or the target itself where nobody else wants this piece; send it, and take this rank's part.

        What has to be packed is read into this thread's memory: who waits for a slot to pack in must not hold another one.
        """
        me = self._sharing.rank
        others = {rank: wanted for rank in parcel.ranks if rank != me and (wanted := cut.wanted(rank))}
        everything = cut.spans if len(cut.spans) == 1 else None  # several chunks have gaps between them
        packed = {rank: wanted for rank, wanted in others.items() if rank not in self._near and wanted != everything}
        mine = cut.wanted(me)
        if others and not packed:
            self._send(parcel, number, cut, others, fill, mine)
        elif (memory := None if others else straight(mine, cut.nbytes)) is not None:
            fill(np.frombuffer(memory, dtype=np.uint8), None)
        else:
            data = self._fetch.scratch(cut.nbytes, "piece")[: cut.nbytes]
            fill(data, None)
            for rank, wanted in packed.items():
                self._send_packed(parcel, number, cut, rank, wanted, data)
            if rest := {rank: wanted for rank, wanted in others.items() if rank not in packed}:
                self._send(parcel, number, cut, rest, partial(_copy, data), mine)
            else:
                self._place(data, cut, mine)
        if self._turn is not None:
            self._turn(0)

    def _waiting(self) -> None:
        self._waits += 1
        self._fetch.beat()
        if self._turn is not None:
            self._turn(PAUSE)
        else:
            time.sleep(PAUSE)

    def _send(
        self,
        parcel: Parcel,
        number: int,
        cut: Cut,
        others: Mapping[int, Sequence[tuple[Item, Box]]],
        fill: _Fill,
        mine: Sequence[tuple[Item, Box]],
    ) -> None:
        """Fill a slot, from which ``others`` take what they want, or are sent all; and this rank takes what is ``mine``."""
        assert self._ring is not None
        slot = self._ring.take(self._waiting)
        try:
            data = self._ring.data(slot)[: cut.nbytes]
            places = {rank: parcel.ranks.index(rank) for rank in others if rank in self._near}
            also = xxhash.xxh3_64() if any(is_checked(cut, others[rank]) for rank in places) else None
            fill(data, also)
            turn = self._ring.lend(slot, parcel.ranks, places.values())
            digest = also.intdigest() if also is not None else 0
            for rank in others:
                which = self._numbers[rank][id(parcel)]
                if rank in places:
                    packed, sent = partial(packed_copy, data, cut, rank), partial(self._ring.returned, slot, places[rank])
                    self._feeds[rank].put_slot(which, number, slot=slot, turn=turn, digest=digest, packed=packed, sent=sent)
                else:
                    self._ring.hold(slot)
                    self._feeds[rank].put_bytes(which, number, [data.data], partial(self._ring.release, slot))
            self._place(data, cut, mine)
        finally:
            self._ring.release(slot)

    def _send_packed(
        self, parcel: Parcel, number: int, cut: Cut, rank: int, wanted: Sequence[tuple[Item, Box]], data: npt.NDArray[np.uint8]
    ) -> None:
        assert self._ring is not None
        slot = self._ring.take(self._waiting)
        packed = self._ring.data(slot)
        part = packed[: pack(data, cut, wanted, packed)]
        self._feeds[rank].put_bytes(self._numbers[rank][id(parcel)], number, [part.data], partial(self._ring.release, slot))

    def _place(self, data: npt.NDArray[np.uint8], cut: Cut, mine: Sequence[tuple[Item, Box]]) -> None:
        with self._fetch.span("copy", cut.nbytes):
            place(data, cut, mine)


def _copy(stored: npt.NDArray[np.uint8], data: npt.NDArray[np.uint8], also: _Digest | None) -> None:
    np.copyto(data, stored)
    if also is not None:
        also.update(data.data)
