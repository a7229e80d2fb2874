"""Segments of other processes of this machine, as a reader maps them and copies from them. No torch.

Mapping costs a fault, or its share of a call, for each page, and unmapping as much again: together more than half of a copy. A source fills
the same few files again and again, so a sink keeps what it has mapped, and a take begins with a lease and a look at the token:

    take       lease the file (a shared lock) ──► is the token that of the version? ──► read ──► end of the take: no lease any more
    between    the source may renew the segment: what is mapped shows the new bytes, and nobody reads them before the next lease

A mapping keeps the memory of a file that its owner has let go of. So a thread looks every ``LOOK`` seconds whether the owner still has the
file open; else the mapping goes, whether or not there is another take.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import ReferenceType, ref

import numpy as np

from ckpt.concurrency import run_tasks, when_dropped
from ckpt.engine.load.whole_chunks import Stored, copy_box
from ckpt.errors import CorruptError, FormatError, NotFoundError
from ckpt.net.channel import Row
from ckpt.net.shared_memory import Announcement, AttachedPool, SlotPool, end_lease, is_ours, populate, try_lease
from ckpt.plan.layout.geometry import Box
from ckpt.telemetry.spans import Spans

from .filling import FillPlan
from .holdings import Manifest
from .segment import (
    BLOCK,
    DATA,
    MAGIC,
    NAME,
    TOKEN_BYTES,
    BlockCheck,
    Bytes,
    CheckedBlocks,
    Digests,
    SegmentAddress,
    SegmentBox,
    SegmentLayout,
    digest_of_digests,
    digests_at,
    file_size,
)

MOST_SEGMENT = 1 << 46
"""Bytes of a segment that a reader maps at most: what a peer says is not believed."""
LOOK = 2.0
"""Seconds for which the memory of a source that has closed or died may stay."""


class SegmentMapping:
    """The file of a segment, mapped, and leased when it is made: its owner does not fill it again before ``release``."""

    def __init__(self, at: SegmentAddress) -> None:
        self._path = path = f"/proc/{at.pid}/fd/{at.file}"
        try:
            if not is_ours(path, NAME):
                raise _gone(path)
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as err:
            raise _gone(path) from err
        when_dropped(self, os.close, self._file)  # what is mapped keeps a lease that is not released
        self.nbytes = at.nbytes
        self._inode = os.fstat(self._file).st_ino
        self.lease()
        if not 0 <= at.nbytes <= MOST_SEGMENT or os.fstat(self._file).st_size != file_size(at.nbytes):
            raise _gone(path)
        # A private mapping: it is never written, but numpy and torch are content.
        self._memory = mmap.mmap(self._file, file_size(at.nbytes), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.whole: Bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._populated = np.zeros(-(-len(self._memory) // BLOCK), dtype=bool)

    def lease(self) -> None:
        """Keep the owner from filling it again."""
        if not try_lease(self._file):
            raise _gone(self._path)

    def release(self) -> None:
        """Nobody reads it until the next lease."""
        end_lease(self._file)

    def shows(self, token: str) -> bool:
        """Whether this is what it begins with; under a lease it stays so."""
        return self._memory[: len(MAGIC) + TOKEN_BYTES] == MAGIC + bytes.fromhex(token)

    def is_owned(self) -> bool:
        """Whether its owner still has it open."""
        try:
            return os.stat(self._path).st_ino == self._inode and is_ours(self._path, NAME)
        except OSError:
            return False

    def populate(self, start: int, stop: int) -> None:
        """Map the pages of these bytes of the file now: a fault for each few of them takes as long as hashing them."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        if self._populated[first:last].all():
            return
        populate(self._memory, first * BLOCK, min(last * BLOCK, len(self._memory)) - first * BLOCK, write=False)
        self._populated[first:last] = True


class SegmentMappings:
    """What one sink has mapped of a source. Leases last from ``lease`` to ``end``: the time of one take."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, int], SegmentMapping] = {}
        self._leased: list[SegmentMapping] = []
        self._stop = threading.Event()
        self._watched = False
        self._process = os.getpid()

    def lease(self, at: SegmentAddress) -> SegmentMapping:
        """The mapping of a segment with this token; raises as :class:`SegmentMapping`."""
        with self._lock:
            if self._process != os.getpid():  # a forked child has its parent's mappings, and would end its parent's leases
                self._process, self._watched = os.getpid(), False
                self._kept, self._leased = {}, []
            key = at.pid, at.file
            mapping = self._kept.pop(key, None)
            if mapping is not None and mapping.nbytes == at.nbytes:
                mapping.lease()
                if mapping.shows(at.token):
                    self._kept[key] = mapping
                    self._leased.append(mapping)
                    return mapping
                mapping.release()
                if mapping.is_owned():  # the same file, filled with another version: it may be the next one that is taken
                    self._kept[key] = mapping
                    raise _gone(f"/proc/{at.pid}/fd/{at.file}")
            mapping = SegmentMapping(at)
            if not mapping.shows(at.token):
                raise _gone(f"/proc/{at.pid}/fd/{at.file}")
            self._kept[key] = mapping
            self._leased.append(mapping)
            return mapping

    def end(self) -> None:
        """The take is over: owners may fill their segments again. What is mapped of those that they have closed is let go of."""
        with self._lock:
            for mapping in self._leased:
                mapping.release()
            self._leased = []
            if self._drop_closed() and not self._watched:
                self._watched = True
                threading.Thread(target=_watch, args=(ref(self), self._stop), name="ckpt-mapped", daemon=True).start()

    def close(self) -> None:
        """Let go of all of them."""
        self._stop.set()
        with self._lock:
            self._kept, self._leased = {}, []
            self._stop, self._watched = threading.Event(), False

    def watch(self) -> bool:
        """One look of the thread that watches; whether there is anything to look at the next time."""
        with self._lock:
            self._watched = bool(self._leased) or self._drop_closed()
            return self._watched

    def _drop_closed(self) -> bool:
        self._kept = {key: mapping for key, mapping in self._kept.items() if mapping.is_owned()}
        return bool(self._kept)


def _watch(mappings: ReferenceType[SegmentMappings], stop: threading.Event) -> None:
    """Runs in a thread of its own, which keeps nothing alive: a sink that nobody closes takes its mappings along."""
    while not stop.wait(LOOK):
        watched = mappings()
        if watched is None or not watched.watch():
            return
        del watched


class MappedSegment:
    """One version of the segment of another process of this machine, which it cannot fill again before the end of the lease."""

    def __init__(self, at: SegmentAddress, digest: str, mappings: SegmentMappings | None = None) -> None:
        """``digest``: that of the digests of its blocks. ``mappings`` of the sink; without them the lease lasts as long as this."""
        self._mapping = SegmentMapping(at) if mappings is None else mappings.lease(at)
        path = f"/proc/{at.pid}/fd/{at.file}"
        if not self._mapping.shows(at.token):
            raise _gone(path)
        self.data: Bytes = self._mapping.whole[DATA : DATA + at.nbytes]
        where, count = digests_at(at.nbytes), -(-at.nbytes // BLOCK)
        self.digests: Digests = self._mapping.whole[where : where + 8 * count].view("<u8")
        if digest_of_digests(self.digests) != digest:
            raise CorruptError("the digests of a segment differ from those in its manifest", where=path, hint="publish again")

    def populate(self, start: int, stop: int) -> None:
        """Map the pages of these bytes of the boxes now, if they are not."""
        self._mapping.populate(DATA + start, DATA + stop)


def _gone(path: str) -> NotFoundError:
    return NotFoundError("a version was dropped before it was taken", where=path, hint="take it again: there is a newer one")


# Taking from ranks of the same machine: their segments are mapped, compared with their digests, and copied from. No sender works.

log = logging.getLogger("ckpt")

_STRETCH = 16 * BLOCK
"""Bytes that are compared between two signs of life."""


class SharedChecks:
    """Where the ranks of a sink note which blocks of the source's segments they have compared, so that those of one machine share the
    work. It is the leader's memory; ranks of other machines cannot open it, and compare all that they take."""

    def __init__(self) -> None:
        self._pool: SlotPool | None = None
        self._opened: tuple[str, AttachedPool] | None = None

    def begin(self, manifest: Manifest) -> list[str]:
        """Leader: what the other ranks need for ``open``. Empty if there is no memory for it."""
        size = 8 * sum(_blocks(manifest).values())
        if self._pool is None or self._pool.shape[1] != size:
            self.close()
            try:
                self._pool = SlotPool(1, size, 1, shared=True, timeout=0)
            except (AttributeError, OSError):
                return []
        return [self._pool.announcement().pack().hex(), secrets.token_hex(8)]

    def open(self, manifest: Manifest, shared: Sequence[str]) -> dict[int, CheckedBlocks]:
        """What is checked of the segment of each rank of the source; nothing where it cannot be shared."""
        if not shared:
            return {}
        where, key = shared
        if self._opened is None or self._opened[0] != where:
            self._opened = None
            try:
                self._opened = where, AttachedPool(Announcement.unpack(bytes.fromhex(where)))
            except OSError:
                return {}
        entries, checked, at = self._opened[1].data(0).view("<u8"), {}, 0
        for rank, count in _blocks(manifest).items():
            checked[rank] = CheckedBlocks(entries[at : at + count], int(key, 16))
            at += count
        if at != len(entries):
            raise FormatError(f"the ranks of the sink share checks of {len(entries)} blocks, where the source has {at}")
        return checked

    def close(self) -> None:
        self._opened = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _blocks(manifest: Manifest) -> dict[int, int]:
    """How many blocks the segment of each rank has."""
    return {rank: -(-manifest.segments[rank][0] // BLOCK) for rank in sorted(manifest.segments)}


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentShare:
    """What a receiver takes from one mapped segment.

    Requests are cut so that a piece fits a slot. Here nothing is sent, so those of one box are joined again. ``spans``: first byte, one
    past the last and the tensor of each; ``copies``: number of the want, the box of the segment, and what of it is copied.
    """

    spans: Sequence[tuple[int, int, str]]
    copies: Sequence[tuple[int, SegmentBox, Box]]

    @classmethod
    def of(cls, plan: FillPlan, rank: int, layout: SegmentLayout) -> SegmentShare:
        """For the share of ``rank``, which has a segment of this layout."""
        share, wants = plan.transfers.shares[rank], plan.transfers.wants
        joined: list[tuple[int, Box]] = []
        for number, want in enumerate(share.wants.tolist()):
            box = share.requests.box(number, len(plan.targets[want][1].shape))
            while joined and joined[-1][0] == want:
                both = joined[-1][1].joined(box)
                if both is None or not any(wanted.contains(both) for wanted in wants[want].boxes):  # memory of the receiver is one box
                    break
                joined.pop()
                box = both
            joined.append((want, box))
        spans: list[tuple[int, int, str]] = []
        copies: list[tuple[int, SegmentBox, Box]] = []
        for want, box in joined:
            entry = plan.targets[want][1]
            name = entry.alias or entry.name
            for placed in layout.boxes[name]:
                common = box if placed.box == box else placed.box.intersect(box)
                if common is not None:
                    spans.append((*placed.span(common), name))
                    copies.append((want, placed, common))
        return cls(spans=spans, copies=copies)


@dataclass(frozen=True, eq=False)
class LocalHolder:
    """The mapped segment of one rank, and what is taken from it."""

    rank: int
    segment: MappedSegment
    layout: SegmentLayout
    share: SegmentShare

    def stretches(self) -> list[tuple[int, int, str]]:
        """What is taken, in parts that are compared between two signs of life: as ``SegmentShare.spans``."""
        return [(at, min(at + _STRETCH, stop), name) for start, stop, name in self.share.spans for at in range(start, stop, _STRETCH)]

    def copy(self, plan: FillPlan, copied: Callable[[int], None]) -> None:
        """Copy what is taken to where it belongs; ``copied`` gets the bytes of each box."""
        for want, placed, common in self.share.copies:
            target, entry = plan.targets[want]
            data = self.segment.data[placed.start : placed.start + placed.nbytes]
            copy_box(Stored(data, 0, placed.box, entry.dtype), common, target)
            copied(common.numel * entry.dtype.itemsize)


def open_local(
    ranks: Sequence[int],
    holders: Mapping[int, Row],
    manifest: Manifest,
    layout_of: Callable[[int], SegmentLayout],
    share_of: Callable[[int], SegmentShare],
    mappings: SegmentMappings,
) -> dict[int, LocalHolder]:
    """Map the segments of these ranks. Those that cannot be mapped are left out: their pieces come in the other way."""
    mapped: dict[int, LocalHolder] = {}
    for rank in ranks:
        layout, (nbytes, digest) = layout_of(rank), manifest.segments[rank]
        if layout.nbytes != nbytes:
            raise FormatError(f"rank {rank} of the source has {nbytes} bytes, where its layout gives {layout.nbytes}")
        file, token = holders[rank]["at"]
        try:
            address = SegmentAddress(int(holders[rank]["pid"]), int(file), str(token), nbytes)
            mapped[rank] = LocalHolder(rank, MappedSegment(address, digest, mappings), layout, share_of(rank))
        except (OSError, NotFoundError) as err:  # another container, a protected process; or it is gone, which the other way finds out
            log.debug("live: the memory of rank %d cannot be mapped: %s", rank, err)
    return mapped


def check_local(
    mapped: Mapping[int, LocalHolder],
    checked: Mapping[int, CheckedBlocks],
    turn: float,
    threads: int,
    alive: Callable[[], None],
    spans: Spans,
) -> tuple[dict[int, LocalHolder], list[CorruptError]]:
    """Compare all that is taken from mapped segments with its digests, unless ``checked`` has it; those that are right, and what is wrong
    with the others. ``turn``, from 0 to 1, is where this rank begins: each of those that share the work begins elsewhere."""
    wrong: dict[int, CorruptError] = {}
    checks = {
        rank: BlockCheck(holder.segment.data, holder.segment.digests, holder.layout, f"rank {rank} of the source", checked.get(rank))
        for rank, holder in mapped.items()
    }

    def check(rank: int, start: int, stop: int, name: str) -> None:
        if rank in wrong:
            return
        alive()
        mapped[rank].segment.populate(start, stop)
        try:
            checks[rank].range(start, stop, name)
        except CorruptError as err:
            log.warning("live: %s", err)
            wrong[rank] = err

    tasks = [partial(check, rank, *stretch) for rank, holder in mapped.items() for stretch in holder.stretches()]
    first = int(turn * len(tasks))
    with spans.span("verify", sum(stop - start for holder in mapped.values() for start, stop, _ in holder.share.spans)):
        run_tasks(tasks[first:] + tasks[:first], threads, "ckpt-check")
    return {rank: holder for rank, holder in mapped.items() if rank not in wrong}, [*wrong.values()]


def copy_local(plan: FillPlan, mapped: Mapping[int, LocalHolder], threads: int, copied: Callable[[int], None]) -> None:
    """Copy all that is taken from mapped segments; ``copied`` gets the bytes of each box, from several threads."""
    run_tasks([partial(holder.copy, plan, copied) for holder in mapped.values()], threads, "ckpt-read-segments")
