"""Parcels on their way: a rank reads and checks them piece by piece, in the slots of its ring, and the others take what they want of each.

Ranks of one machine copy straight from the slot; to others goes what they want, packed. A rank that reads waits until a slot is free, so
memory is bounded by the ring; a rank that takes waits for nobody, so the ring always gets free.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from ckpt.catalog import Catalog, Extent
from ckpt.geometry import Box
from ckpt.group import Call
from ckpt.peers import Peers, Turn
from ckpt.plan.parcels import MOST
from ckpt.relay import Feed, Inlet
from ckpt.ring import PAUSE, Ring
from ckpt.workers import Pending, run_tasks

from .exact import SLICE
from .fetch import PIECE, Check, Chunk, Fetch
from .sharing import Cut, Item, Parcel, Sharing
from .taking import Taker, pack, place, straight


class Carrier:
    """Moves the parcels of one load. ``near``: the ranks of this machine. ``received`` counts bytes of this rank's tensors; ``coded`` is
    the most scratch memory that one coded chunk takes."""

    def __init__(self, sharing: Sharing, fetch: Fetch, near: frozenset[int], threads: int, peers: Callable[[], Peers], call: Call) -> None:
        self._sharing = sharing
        self._fetch = fetch
        self._near = near
        self._peers = peers
        self._call = call
        self._feeds = {rank: Feed(len(parcels)) for rank, parcels in sharing.gives.items()}
        self._takers = {rank: Taker(rank, sharing.rank, parcels, fetch) for rank, parcels in sharing.takes.items()}
        self._numbers = {rank: {id(p): i for i, p in enumerate(parcels)} for rank, parcels in sharing.gives.items()}
        self._ring: Ring | None = None
        self.coded = 0
        self._left = len(sharing.reads)
        self._lock = threading.Lock()
        self._turn: Turn | None = None
        """Moves pieces, while this thread reads them too."""
        self._reading: Pending[None] | None = None
        self._ended = False
        self._waits = self._seen = 0
        self._nudged = time.monotonic()
        if sharing.reads:
            # Each thread fills one slot, and may wait for a second one to pack in: with more than one to spare, some always come back.
            self._ring = Ring(threads + 2, PIECE, MOST, shared=not near.isdisjoint(self._feeds), timeout=call.timeout)
        for rank in near.intersection(self._feeds):
            assert self._ring is not None
            self._feeds[rank].put_ring(os.getpid(), self._ring.file, self._ring.shape)

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
        self._call.look()

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
        elif extents[0].codec is not None:
            out = self._fetch.scratch(parcel.items[0].nbytes, "decoded")[: parcel.items[0].nbytes]
            self._decode(parcel.items[0], extents[0], out)
            for number, cut in enumerate(parcel.cuts()):
                self._hand_out(parcel, number, cut, partial(np.copyto, src=out[cut.start : cut.start + cut.nbytes]))
        else:
            self._read_large(parcel, extents[0])
        with self._lock:
            self._left -= 1
            over = not self._left
        if over:
            for feed in self._feeds.values():
                feed.close()

    def _read_large(self, parcel: Parcel, extent: Extent) -> None:
        item = parcel.items[0]
        check = Check(self._fetch, Chunk(item.entry.name, item.box, extent))

        def fill(data: npt.NDArray[np.uint8], cut: Cut) -> None:
            self._fetch.fill(extent.path, extent.offset + cut.start, data.data)
            check.update(data.data)

        for number, cut in enumerate(parcel.cuts()):
            self._hand_out(parcel, number, cut, partial(fill, cut=cut))
        check.end()

    def _read_small(self, parcel: Parcel, extents: Sequence[Extent]) -> None:
        """Chunks that lie together in a file are read together."""
        order = sorted(range(len(extents)), key=lambda i: extents[i][:2])
        (cut,) = parcel.cuts()

        def fill(data: npt.NDArray[np.uint8]) -> None:
            for run in _runs(order, extents):
                start, end = extents[run[0]].offset, max(extents[i].offset + extents[i].length for i in run)
                found = self._fetch.scratch(end - start)[: end - start]
                self._fetch.fill(extents[run[0]].path, start, found.data)
                for i in run:
                    item, extent = parcel.items[i], extents[i]
                    stored, into = found[extent.offset - start :][: extent.length], data[item.start : item.start + item.nbytes]
                    chunk = Chunk(item.entry.name, item.box, extent)
                    self._fetch.check(chunk, stored.data)
                    if extent.codec is None:
                        into[:] = stored
                    else:
                        self._fetch.decode(chunk, stored.data, into.data, item.itemsize)

        self._hand_out(parcel, 0, cut, fill)

    def _decode(self, item: Item, extent: Extent, out: npt.NDArray[np.uint8]) -> None:
        chunk = Chunk(item.entry.name, item.box, extent)
        blob = self._fetch.scratch(extent.length, "blob")[: extent.length].data
        self._fetch.chunk(chunk, blob)
        self._fetch.decode(chunk, blob, out.data, item.itemsize)

    def _hand_out(self, parcel: Parcel, number: int, cut: Cut, fill: Callable[[npt.NDArray[np.uint8]], None]) -> None:
        """Fill a slot, or the target itself where nobody else wants this piece; send it, and take this rank's part."""
        assert self._ring is not None
        me = self._sharing.rank
        others = {rank: wanted for rank in parcel.ranks if rank != me and (wanted := cut.wanted(rank))}
        mine = cut.wanted(me)
        memory = None if others else straight(mine, cut.nbytes)
        if memory is not None:
            fill(np.frombuffer(memory, dtype=np.uint8))
            return
        slot = self._ring.take(self._waiting)
        try:
            data = self._ring.data(slot)[: cut.nbytes]
            fill(data)
            self._send(parcel, number, cut, slot, others)
            with self._fetch.span("copy", cut.nbytes):
                place(data, cut, mine)
        finally:
            self._ring.release(slot)
        if self._turn is not None:
            self._turn(0)

    def _waiting(self) -> None:
        self._waits += 1
        self._fetch.beat()
        if self._turn is not None:
            self._turn(PAUSE)
        else:
            time.sleep(PAUSE)

    def _send(self, parcel: Parcel, number: int, cut: Cut, slot: int, others: Mapping[int, Sequence[tuple[Item, Box]]]) -> None:
        assert self._ring is not None
        near = [rank for rank in others if rank in self._near]
        self._ring.lend(slot, parcel.ranks, [parcel.ranks.index(rank) for rank in near])
        for rank in near:
            self._feeds[rank].put_slot(self._numbers[rank][id(parcel)], number, slot)
        for rank, wanted in others.items():
            if rank in self._near:
                continue
            data, from_slot = self._ring.data(slot)[: cut.nbytes], slot
            if len(cut.spans) == len(wanted) == 1 and wanted[0] == cut.spans[0]:  # all of it
                self._ring.hold(slot)
            else:
                from_slot = self._ring.take(self._waiting)
                packed = self._ring.data(from_slot)
                data = packed[: pack(data, cut, wanted, packed)]
            sent = partial(self._ring.release, from_slot)
            self._feeds[rank].put_bytes(self._numbers[rank][id(parcel)], number, [data.data], sent)


def _runs(order: Sequence[int], extents: Sequence[Extent]) -> list[list[int]]:
    """Those that follow one another without a gap in a file."""
    runs: list[list[int]] = []
    for i in order:
        last = extents[runs[-1][-1]] if runs else None
        if last is not None and last.path == extents[i].path and last.offset + last.length >= extents[i].offset:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs
