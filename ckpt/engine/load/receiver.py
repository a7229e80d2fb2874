"""What a rank does with slices of shared reads, its own and those that others read: out of slots and streams into its tensors.

A rank that takes pieces waits for nobody, so whoever reads for it always gets its memory back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt.engine.digest_reader import DigestReader
from ckpt.errors import ConsistencyError
from ckpt.net.shared_memory import Announcement, AttachedPool
from ckpt.net.streams import damaged
from ckpt.plan.layout.geometry import Box
from ckpt.state.tensors import writable_bytes

from .shared_reads import ReadSlice, SharedRead, SharedReadItem
from .whole_chunks import Stored, copy_box

log = logging.getLogger("ckpt")
_noticed: set[str] = set()


class SharedReadReceiver:
    """Takes what this rank wants of the shared reads that another one reads."""

    def __init__(self, reader: int, rank: int, shared_reads: Sequence[SharedRead], fetch: DigestReader) -> None:
        self.shared_reads = shared_reads
        self._fetch = fetch
        self.received = 0
        self._reader = reader
        self._rank = rank
        self._left = len(shared_reads)
        self._cuts: dict[int, dict[int, tuple[ReadSlice, list[tuple[SharedReadItem, Box]]]]] = {}
        """By shared read and piece, what is still to come of the shared reads that have begun."""
        self._pool: AttachedPool | None = None
        self._scratch = np.empty(0, dtype=np.uint8)
        self._direct = False

    def open(self, announcement: bytes) -> bool:
        """See ``relay.Taker``."""
        try:
            self._pool = AttachedPool(Announcement.unpack(announcement))
        except (OSError, ValueError) as err:  # another machine or container than it looked like, or the kernel forbids it
            # Once in a process: it is the same in every load
            text = f"the shared memory of rank {self._reader} cannot be used ({err}): what it reads for this rank comes over the connection"
            if text not in _noticed:
                _noticed.add(text)
                log.warning(text)
            return False
        return True

    def slot(self, shared_read: int, piece: int, slot: int, generation: int, digest: int) -> bool:
        """See ``relay.Taker``."""
        cut, wanted = self._expected(shared_read, piece)
        if self._pool is None:
            raise self._strange("a slot of memory that it has not opened")
        # Copy first, check afterwards: the slot's generation and the digest of the bytes are compared after the copy,
        # so that a slot which was filled again *during* the copy is noticed.
        data = self._pool.data(slot)[: cut.nbytes]
        with self._fetch.span("copy", cut.nbytes):
            place(data, cut, wanted)
        wrong = self._pool.generation(slot) != generation or (is_checked(cut, wanted) and xxhash.xxh3_64_intdigest(data.data) != digest)
        if wrong:  # looked at after the copy, so that what changed meanwhile is found too
            raise damaged(f"rank {self._reader}")
        self._pool.done(slot, self.shared_reads[shared_read].ranks.index(self._rank))
        return self._over(shared_read, piece)

    def room(self, shared_read: int, piece: int, length: int) -> Sequence[memoryview]:
        """See ``relay.Taker``."""
        _, wanted = self._expected(shared_read, piece)
        expected = sum(box.numel * item.itemsize for item, box in wanted)
        if expected != length:
            raise self._strange(f"{length} bytes where {expected} are wanted")
        # If the slice is exactly one contiguous box of one tensor, the socket writes into the tensor itself, and
        # there is no copy at all. Otherwise the bytes come into scratch memory first.
        memory = direct_view(wanted, length)
        self._direct = memory is not None
        if memory is not None:
            return [memory]
        if len(self._scratch) < length:
            self._scratch = np.empty(max(length, self._fetch.piece), dtype=np.uint8)
        return [self._scratch[:length].data]

    def filled(self, shared_read: int, piece: int) -> bool:
        """See ``relay.Taker``."""
        _, wanted = self._expected(shared_read, piece)
        at = 0
        for item, box in () if self._direct else wanted:
            stop = at + box.numel * item.itemsize
            for target, entry in item.jobs:
                copy_box(Stored(self._scratch[at:stop], 0, box, entry.dtype), box, target)
            at = stop
        return self._over(shared_read, piece)

    def _expected(self, shared_read: int, piece: int) -> tuple[ReadSlice, list[tuple[SharedReadItem, Box]]]:
        if shared_read not in self._cuts and shared_read < len(self.shared_reads):
            # Slices are worked out when the first one of a shared read arrives, and forgotten when the last one has:
            # a load of thousands of shared reads keeps the few that are on their way.
            slices = enumerate(self.shared_reads[shared_read].slices())
            self._cuts[shared_read] = {i: (cut, wanted) for i, cut in slices if (wanted := cut.wanted(self._rank))}
        expected = self._cuts.get(shared_read, {}).get(piece)
        if expected is None:
            raise self._strange(f"piece {piece} of shared_read {shared_read}, which is not wanted")
        return expected

    def _strange(self, what: str) -> ConsistencyError:
        return ConsistencyError(
            f"rank {self._reader} sent rank {self._rank} {what}",
            hint="please report this; read=ckpt.ReadOptions(exchange=False) reads without it",
        )

    def _over(self, shared_read: int, piece: int) -> bool:
        """Count a piece that has come; whether it was the last of all."""
        _, wanted = self._cuts[shared_read].pop(piece)
        self.received += sum(len(item.jobs) * item.itemsize * box.numel for item, box in wanted)
        if not self._cuts[shared_read]:
            self._cuts[shared_read] = {}
            self._left -= 1
        return not self._left


def is_checked(cut: ReadSlice, wanted: Sequence[tuple[SharedReadItem, Box]]) -> bool:
    """Whether who takes this out of a slot compares the digest, which is of the whole piece: not for a small part of it. Many ranks that
    want a part each would hash more than they copy."""
    return 2 * sum(box.numel * item.itemsize for item, box in wanted) >= cut.nbytes


def place(data: npt.NDArray[np.uint8], cut: ReadSlice, wanted: Sequence[tuple[SharedReadItem, Box]]) -> None:
    """Copy boxes of a piece to where this rank has them."""
    for item, box in wanted:
        stored = Stored(*_within(data, cut, item), item.box, item.entry.dtype)
        for job in item.jobs:
            copy_box(stored, box, job.target)


def pack(data: npt.NDArray[np.uint8], cut: ReadSlice, wanted: Sequence[tuple[SharedReadItem, Box]], out: npt.NDArray[np.uint8]) -> int:
    """Put boxes of a piece one after another; how many bytes they are."""
    spans = {id(item): span for item, span in cut.spans}
    at = 0
    for item, box in wanted:
        span, size = spans[id(item)], item.itemsize
        inside, _ = _within(data, cut, item)
        shaped = inside[: span.numel * size].reshape(*span.shape, size)
        stop = at + box.numel * size
        part = shaped[box.relative_to(span.offset).slices]
        np.copyto(_typed(out[at:stop].reshape(*box.shape, size), size), _typed(part, size))
        at = stop
    return at


def packed_copy(data: npt.NDArray[np.uint8], cut: ReadSlice, rank: int) -> list[memoryview]:
    """What ``rank`` wants of a piece, in memory of its own."""
    wanted = cut.wanted(rank)
    out = np.empty(sum(box.numel * item.itemsize for item, box in wanted), dtype=np.uint8)
    pack(data, cut, wanted, out)
    return [out.data]


def direct_view(wanted: Sequence[tuple[SharedReadItem, Box]], nbytes: int) -> memoryview | None:
    """The target's own memory, where a piece of ``nbytes`` is just one box of it, and can be put into it as it is."""
    if len(wanted) != 1:
        return None
    item, box = wanted[0]
    target, entry = item.jobs[0]
    if len(item.jobs) > 1 or entry.dtype != target.info.dtype or box.numel * item.itemsize != nbytes:
        return None
    return writable_bytes(target.view(box))


def _within(data: npt.NDArray[np.uint8], cut: ReadSlice, item: SharedReadItem) -> tuple[npt.NDArray[np.uint8], int]:
    """The bytes of one chunk in a piece, and where in the chunk they begin."""
    if len(cut.spans) == 1:
        return data, cut.start
    return data[item.start : item.start + item.nbytes], 0


def _typed(array: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.generic]:
    """Elements in place of their bytes, which are the last dimension: numpy copies these much faster."""
    return array.view(f"V{size}") if size > 8 else array.view(f"u{size}")
