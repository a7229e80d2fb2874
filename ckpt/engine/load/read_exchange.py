"""The exchange of shared reads: a rank reads and checks them slice by slice, and the others copy what they want out of its pool's slots.

     reader (any thread)                         receiver (one thread)
     ───────────────────                         ─────────────────────
     take a free slot, or wait ◄──────────┐
     read storage → slot, hash            │
     announce (shared read, slice, slot) ─┼────► copy its boxes slot → tensors, compare the digest
     copy its own boxes slot → tensors    │            │
     release its hold                     └─ returned ─┘   the last one to return a slot makes it free

Ranks of one machine copy straight from the slot, which lies in shared memory. To ranks of other machines, and to those that cannot open
the pool, the reader sends what they want, packed, over a connection.

Why nobody waits for ever. Two rules make a cycle of waits impossible, whoever reads for whom:

1. A thread waits for a free slot only while it holds none. What has to be packed is therefore read into memory of the thread first.
2. A receiver never waits for a slot, a reader or another receiver: it takes what arrives, copies it and returns the slot.

So each slot that was taken is returned after a copy that depends on nothing else, and some slot always becomes free. With one thread, a
rank does both in turns: it serves arriving slices between two reads, and while it waits for a slot. A rank that dies or stops is no part
of this argument: waits have deadlines, and the group's failure detection ends them.

Memory is bounded by the pool: ``threads + 2`` slots of one slice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt.catalog import Catalog, Extent
from ckpt.concurrency import Pending, run_tasks
from ckpt.engine.digest_reader import ChunkDigest, ChunkName, DigestReader
from ckpt.errors import CorruptError
from ckpt.net.call import Call
from ckpt.net.peers import MoveSlices, Peers
from ckpt.net.shared_memory import PAUSE, SlotPool
from ckpt.net.streams import Feed, Inlet
from ckpt.plan.layout.geometry import Box
from ckpt.plan.reads import RangeGroup, group_ranges
from ckpt.plan.shared_reads import MOST
from ckpt.state import lazy

from .receiver import SharedReadReceiver, direct_view, is_checked, pack, packed_copy, place
from .shared_reads import ReadSlice, SharedRead, SharedReadItem, SharedReads
from .whole_chunks import SLICE

_ON_THEIR_WAY = 2
_Digest = xxhash.xxh3_64
_Fill = Callable[[npt.NDArray[np.uint8], _Digest | None], None]
"""Fills memory with bytes of a shared read, and gives them to the digest that goes with them to other ranks, if one does."""


class ReadExchange:
    """Moves the shared reads of one load. ``near``: the ranks of this machine; ``threads``: the most that read at once. ``received`` counts
    bytes of this rank's tensors; ``coded`` is the most scratch memory that one coded chunk takes."""

    def __init__(
        self, sharing: SharedReads, fetch: DigestReader, near: frozenset[int], threads: int, peers: Callable[[], Peers], call: Call
    ) -> None:
        self.sharing = sharing
        self._fetch = fetch
        self._near = near
        self._threads = threads
        self._peers = peers
        self._call = call
        self._feeds = {rank: Feed(len(shared_reads)) for rank, shared_reads in sharing.gives.items()}
        self._takers = {rank: SharedReadReceiver(rank, sharing.rank, shared_reads, fetch) for rank, shared_reads in sharing.takes.items()}
        self._numbers = {rank: {id(p): i for i, p in enumerate(shared_reads)} for rank, shared_reads in sharing.gives.items()}
        self._made_pool: SlotPool | None = None
        self.coded = 0
        self.again: list[tuple[str, int]] = []
        """Chunks, by stored tensor and number, of which this rank may have handed out wrong pieces."""
        self._left = len(sharing.reads)
        self._lock = threading.Lock()
        self._move: MoveSlices | None = None
        """Moves pieces, while this thread reads them too."""
        self._reading: Pending[None] | None = None
        self._ended = False
        self._waits = self._seen = 0
        self._nudged = time.monotonic()

    @property
    def received(self) -> int:
        return sum(taker.received for taker in self._takers.values())

    def tasks(self, catalog: Catalog) -> list[Callable[[], None]]:
        """What to run to read the shared reads, in any order and on any threads."""
        return [partial(self._read, shared_read, extents) for shared_read, extents in self.own_reads(catalog)]

    def own_reads(self, catalog: Catalog) -> list[tuple[SharedRead, list[Extent]]]:
        """The shared reads of this rank, with where their chunks are stored."""
        # Extents may need headers of data files. They are fetched before the first byte is moved, in slices, so that
        # a damaged header is an error while the state is still as it was, and other ranks hear of progress meanwhile.
        reads = self.sharing.reads
        wanted = [(item.entry, item.chunk) for shared_read in reads for item in shared_read.items]
        extents: list[Extent] = []
        for at in range(0, len(wanted), SLICE):  # each may have to read headers
            extents += catalog.extents_of(wanted[at : at + SLICE])
            self._fetch.beat()
        ends = accumulate(len(shared_read.items) for shared_read in reads)
        own_reads = [(shared_read, extents[end - len(shared_read.items) : end]) for shared_read, end in zip(reads, ends, strict=True)]
        self.coded = max(
            (e[0].decoding_bytes(p.items[0].nbytes) for p, e in own_reads if len(e) == 1 and e[0].codec is not None), default=0
        )
        return own_reads

    @property
    def pool_bytes(self) -> int:
        """Memory of the slots that shared reads are handed out in: one for each thread to fill, and two that are on their way meanwhile."""
        return (self._threads + _ON_THEIR_WAY) * self.sharing.piece if self._feeds else 0

    # ---- both directions

    def carry(self, tasks: list[Callable[[], None]], threads: Callable[[], int]) -> None:
        """Run ``tasks``, those of :meth:`tasks` and others, and move pieces meanwhile. ``threads`` runs the first few and says how many
        threads are to run the rest: one is this one, more leave this one to the pieces."""
        if not self._feeds and not self._takers:
            run_tasks(tasks, threads(), "ckpt-read")
            return

        # With two threads or more, this one only moves slices and the others read. With one thread it must do both:
        # it calls ``move(0)`` between two tasks, which moves what can be moved without waiting.
        def work(move: MoveSlices) -> None:
            self._move = move
            count = threads()
            if count > 1:
                self._move = None
                self._reading = Pending(partial(self._run, tasks, count, inference=lazy.torch.is_inference_mode_enabled()), "ckpt-read")
            else:
                for task in tasks:
                    task()
                    move(0)

        try:
            self._make_pool()
            self._peers().relay(
                self._feeds, {r: Inlet(r, len(t.shared_reads), t) for r, t in self._takers.items()}, work, alive=self._alive
            )
            if self._reading is not None:
                self._reading.result()
        finally:
            if self._made_pool is not None:
                self._made_pool.stop()
            if self._reading is not None:
                self._reading.wait()
            if self._made_pool is not None:
                self._made_pool.close()
            self._move = self._reading = None  # no rank_sets: the memory is to be free when the load returns
            for feed in self._feeds.values():
                feed.wake = lambda: None

    def _make_pool(self) -> None:
        # Slots are needed only for what is handed out; what is received lies in other ranks' slots or goes straight into the tensors.
        if not self._feeds:
            return
        near = self._near.intersection(self._feeds)
        self._made_pool = SlotPool(self._threads + _ON_THEIR_WAY, self.sharing.piece, MOST, shared=bool(near), timeout=self._call.timeout)
        for rank in near:
            self._feeds[rank].announcement = self._pool.announcement().pack()

    def _run(self, tasks: list[Callable[[], None]], count: int, *, inference: bool) -> None:
        try:
            with lazy.torch.inference_mode(inference):
                run_tasks(tasks, count, "ckpt-read")
        finally:
            self._ended = True
            for feed in self._feeds.values():
                feed.wake()

    def _alive(self) -> None:
        if self._ended and self._reading is not None:
            self._reading.result()
        # Tell those that wait for this rank that it goes on, if it does
        # A storage that is slow for minutes is no dead rank. As long as bytes were read since the last look, the
        # connected ranks get an empty message, which restarts their deadlines. At most one per eighth of the timeout:
        # often enough for a deadline, and rare enough to cost nothing.
        now = time.monotonic()
        moved = self._fetch.read + self._waits
        if moved != self._seen and now - self._nudged > self._call.timeout / 8:
            self._seen, self._nudged = moved, now
            for feed in self._feeds.values():
                feed.nudge()
        self._call.check_failures()

    # ---- reading

    def _read(self, shared_read: SharedRead, extents: Sequence[Extent]) -> None:
        if len(shared_read.items) > 1:
            self._read_small(shared_read, extents)
        elif extents[0].codec is not None:
            out = self._fetch.scratch(shared_read.items[0].nbytes, "decoded")[: shared_read.items[0].nbytes]
            self._fetch.reread(extents[0], partial(self._decode, shared_read.items[0], extents[0], out))
            for number, cut in enumerate(shared_read.slices()):
                self._hand_out(shared_read, number, cut, partial(_copy, out[cut.start : cut.start + cut.nbytes]))
        else:
            self._read_large(shared_read, extents[0])
        with self._lock:
            self._left -= 1
            over = not self._left
        if over:
            for feed in self._feeds.values():
                feed.close()

    def _read_large(self, shared_read: SharedRead, extent: Extent) -> None:
        """Pieces of a chunk are handed out before its digest is known."""
        # If it does not fit, and that of a second read does, the ranks read the chunk themselves at the end.
        item, slices = shared_read.items[0], shared_read.slices()
        chunk = ChunkName(item.entry.name, item.box, extent)
        if len(slices) == 1:

            def fill_whole(data: npt.NDArray[np.uint8], also: _Digest | None) -> None:
                self._fetch.reread(extent, partial(self._fetch.read_chunk, chunk, data.data))
                if also is not None:
                    also.update(data.data)

            self._hand_out(shared_read, 0, slices[0], fill_whole)
            return
        check = ChunkDigest(self._fetch, chunk)

        def fill(data: npt.NDArray[np.uint8], also: _Digest | None, cut: ReadSlice) -> None:
            check.also = also
            self._fetch.fill(extent.path, extent.offset + cut.start, data.data, check)

        for number, cut in enumerate(slices):
            self._hand_out(shared_read, number, cut, partial(fill, cut=cut))
        try:
            check.end()
        except CorruptError as err:
            self._fetch.recheck(chunk, err)
            self.again.append((item.entry.alias or item.entry.name, item.chunk))

    def _read_small(self, shared_read: SharedRead, extents: Sequence[Extent]) -> None:
        """Chunks that lie together in a file are read together."""
        (cut,) = shared_read.slices()

        def fill(data: npt.NDArray[np.uint8], also: _Digest | None) -> None:
            for group in group_ranges(extents):
                together = Extent(group.path, group.offset, group.length, None)
                self._fetch.reread(together, partial(self._read_group, shared_read, extents, group, data))
            if also is not None:
                also.update(data.data)

        self._hand_out(shared_read, 0, cut, fill)

    def _read_group(self, shared_read: SharedRead, extents: Sequence[Extent], group: RangeGroup, data: npt.NDArray[np.uint8]) -> None:
        file_bytes = self._fetch.scratch(group.length)[: group.length]
        self._fetch.fill(group.path, group.offset, file_bytes.data)
        for i in group.members:
            item, extent = shared_read.items[i], extents[i]
            stored, into = file_bytes[extent.offset - group.offset :][: extent.length], data[item.start : item.start + item.nbytes]
            chunk = ChunkName(item.entry.name, item.box, extent)
            self._fetch.compare(chunk, stored.data)
            if extent.codec is None:
                into[:] = stored
            else:
                self._fetch.decode(chunk, stored.data, into.data, item.itemsize)

    def _decode(self, item: SharedReadItem, extent: Extent, out: npt.NDArray[np.uint8]) -> None:
        chunk = ChunkName(item.entry.name, item.box, extent)
        blob = self._fetch.scratch(extent.length, "blob")[: extent.length].data
        self._fetch.read_chunk(chunk, blob)
        self._fetch.decode(chunk, blob, out.data, item.itemsize)

    def _hand_out(self, shared_read: SharedRead, number: int, cut: ReadSlice, fill: _Fill) -> None:
        """Fill a slot, or the target itself where nobody else wants this piece; send it, and take this rank's part."""
        # What has to be packed is read into this thread's memory: who waits for a slot to pack in must not hold another one.
        me = self.sharing.rank
        # Four ways to hand a slice out, the cheapest first:
        #
        # nobody else wants it, one box here      read straight into the tensor
        # others want it, all can use the slot    read into a slot; they copy from it, or get all of it over TCP
        # some want a part, over TCP              read into this thread's memory; pack each one's part into a slot of its own
        # nobody else wants it, several boxes     read into this thread's memory, and copy
        others = {rank: wanted for rank in shared_read.ranks if rank != me and (wanted := cut.wanted(rank))}
        everything = cut.spans if len(cut.spans) == 1 else None  # several chunks have gaps between them
        packed = {rank: wanted for rank, wanted in others.items() if rank not in self._near and wanted != everything}
        mine = cut.wanted(me)
        if others and not packed:
            self._send(shared_read, number, cut, others, fill, mine)
        elif (memory := None if others else direct_view(mine, cut.nbytes)) is not None:
            fill(np.frombuffer(memory, dtype=np.uint8), None)
        else:
            data = self._fetch.scratch(cut.nbytes, "piece")[: cut.nbytes]
            fill(data, None)
            for rank, wanted in packed.items():
                self._send_packed(shared_read, number, cut, rank, wanted, data)
            if rest := {rank: wanted for rank, wanted in others.items() if rank not in packed}:
                self._send(shared_read, number, cut, rest, partial(_copy, data), mine)
            else:
                self._place(data, cut, mine)
        if self._move is not None:
            self._move(0)

    @property
    def _pool(self) -> SlotPool:
        if self._made_pool is None:
            raise ValueError("slots are made when the exchange runs")
        return self._made_pool

    def _waiting(self) -> None:
        self._waits += 1
        self._fetch.beat()
        if self._move is not None:
            self._move(PAUSE)
        else:
            time.sleep(PAUSE)

    def _send(
        self,
        shared_read: SharedRead,
        number: int,
        cut: ReadSlice,
        others: Mapping[int, Sequence[tuple[SharedReadItem, Box]]],
        fill: _Fill,
        mine: Sequence[tuple[SharedReadItem, Box]],
    ) -> None:
        """Fill a slot, from which ``others`` take what they want, or are sent all; and this rank takes what is ``mine``."""
        slot = self._pool.take(self._waiting)
        try:
            data = self._pool.data(slot)[: cut.nbytes]
            # Ranks of this machine need the digest of the whole slice only if one of them takes at least half of it
            # (``is_checked``): hashing costs about as much as copying.
            places = {rank: shared_read.ranks.index(rank) for rank in others if rank in self._near}
            also = xxhash.xxh3_64() if any(is_checked(cut, others[rank]) for rank in places) else None
            fill(data, also)
            generation = self._pool.lend(slot, shared_read.ranks, places.values())
            digest = also.intdigest() if also is not None else 0
            for rank in others:
                which = self._numbers[rank][id(shared_read)]
                if rank in places:
                    packed, sent = partial(packed_copy, data, cut, rank), partial(self._pool.returned, slot, places[rank])
                    self._feeds[rank].put_slot(which, number, slot=slot, generation=generation, digest=digest, packed=packed, sent=sent)
                else:
                    self._pool.hold(slot)
                    self._feeds[rank].put_bytes(which, number, [data.data], partial(self._pool.release, slot))
            self._place(data, cut, mine)
        finally:
            self._pool.release(slot)

    def _send_packed(
        self,
        shared_read: SharedRead,
        number: int,
        cut: ReadSlice,
        rank: int,
        wanted: Sequence[tuple[SharedReadItem, Box]],
        data: npt.NDArray[np.uint8],
    ) -> None:
        slot = self._pool.take(self._waiting)
        packed = self._pool.data(slot)
        part = packed[: pack(data, cut, wanted, packed)]
        self._feeds[rank].put_bytes(self._numbers[rank][id(shared_read)], number, [part.data], partial(self._pool.release, slot))

    def _place(self, data: npt.NDArray[np.uint8], cut: ReadSlice, mine: Sequence[tuple[SharedReadItem, Box]]) -> None:
        with self._fetch.span("copy", cut.nbytes):
            place(data, cut, mine)


def _copy(stored: npt.NDArray[np.uint8], data: npt.NDArray[np.uint8], also: _Digest | None) -> None:
    np.copyto(data, stored)
    if also is not None:
        also.update(data.data)
