"""Takes pieces of a live state from the ranks that hold them, several at once. Another holder takes the place of one that is lost.

No torch. Each piece is compared with its digest before anything of it is placed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np
import xxhash

from ckpt.concurrency import Pending, run_tasks
from ckpt.errors import CancelledError, CkptError, CorruptError, CoverageError, FormatError, GroupError, NotFoundError, RankFailedError
from ckpt.net.endpoints import network
from ckpt.net.shared_memory import ANNOUNCEMENT_BYTES, Announcement, AttachedPool, machine
from ckpt.net.streams import ALIVE, IN_STREAM, RECORD, damaged
from ckpt.net.wire import Address, dial
from ckpt.plan.transfers import MOST_PIECE, RequestList, Share, TransferPlan
from ckpt.telemetry.spans import Spans
from ckpt.text import address_text

from .pieces import (
    CHANGES,
    DIGESTS,
    DIGESTS_KIND,
    FAILED,
    KNOWN,
    LENGTH,
    MACHINE,
    MOST_LIST,
    NOT_THE_BASE,
    OPENED,
    PULL,
    PULL_KIND,
    PURPOSE,
    REASONS,
    SLOTS,
    UNOPENED,
    PieceBase,
    Place,
    apply_changes,
    box_digests,
    receive_error,
)

log = logging.getLogger("ckpt")


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A rank that serves pieces. ``network`` is that of its machine (``ckpt.net.endpoints.network``).

    One that is no rank of the source but passes pieces on has the name of its sink (``relay``), calls the version by a name of its own
    (``version``), and a rank of the source, the ``witness``, tells the digests of what it gives."""

    rank: int
    addresses: tuple[Address, ...]
    network: str
    relay: str = ""
    version: str = ""
    witness: Holder | None = None

    def __str__(self) -> str:
        at = address_text(*self.addresses[0]) if self.addresses else "nowhere"
        return f"relay {self.relay} ({at})" if self.relay else f"rank {self.rank} ({at})"


class PieceClient:
    """A connection to one holder."""

    def __init__(
        self,
        holder: Holder,
        secret: bytes,
        timeout: float,
        *,
        alive: Callable[[], None] = lambda: None,
        shared: bool = True,
        room: Callable[[int], memoryview] | None = None,
        spans: Spans | None = None,
    ) -> None:
        """``shared``: whether the holder's shared memory is used where it can be. ``room`` gives memory for so many bytes of a piece, which
        is then the caller's; without it, pieces come into memory of this connection."""
        self.holder = holder
        with _naming(holder):
            self._channel = dial(
                holder.addresses, secret, timeout, peer=str(holder), purpose=PURPOSE, alive=alive, same_network=holder.network == network()
            )
            try:
                name = machine().encode() if shared else b""
                self._channel.send(MACHINE.pack(len(name)), name)
                self._slots = _opened(self._channel.receive(ANNOUNCEMENT_BYTES))
                self._channel.send(UNOPENED if self._slots is None else OPENED)
            except BaseException:
                self._channel.close()
                raise
        self._room = room
        self._spans = Spans(on=False) if spans is None else spans
        self._buffer = bytearray()
        self._changes = bytearray()
        self.transferred = 0
        """Bytes of pieces, or of changes of them, that came in the stream or in shared memory."""
        self.dense: Counter[str] = Counter()
        """Bytes of boxes that came whole although there was a base, by why (``pieces.dense``)."""

    def close(self) -> None:
        self._channel.close()

    def is_open(self) -> bool:
        """Whether the holder is there, as far as can be seen."""
        return self._channel.is_open()

    def begin(self, holder: Holder, timeout: float, alive: Callable[[], None], spans: Spans | None) -> None:
        """A connection that was kept serves another transfer."""
        self.holder, self._channel.timeout, self._channel.alive = holder, timeout, alive
        self._spans = Spans(on=False) if spans is None else spans
        self.transferred, self.dense = 0, Counter()

    def rest(self) -> None:
        """Keep nothing of the transfer that is over."""
        self.begin(self.holder, self._channel.timeout, lambda: None, None)

    def pull(self, version: str, requests: RequestList, place: Place, base: PieceBase | None = None) -> None:
        """Take all pieces of a list: ``place`` gets the number and the bytes of each, which it must not keep if they are not in a ``room``.
        With a ``base`` the holder may send what changed since. Where the base turns out not to be that version any more, the piece itself
        is taken afterwards."""
        with _naming(self.holder):
            stale = self._pull(version, requests, place, base)
            if stale:
                message = "live: %d pieces of %s are no longer those of version %s; they come whole"
                log.warning(message, len(stale), self.holder, base.version if base is not None else "")
                self.dense[NOT_THE_BASE] += sum(map(requests.bytes_of, stale))
                self._pull(version, requests, lambda piece, view: place(piece, view) if piece in stale else None, None)

    def digests(self, version: str, requests: RequestList) -> list[list[int]]:
        """The XXH3-64 of each box of each piece of a list, which others give; raises as ``pull``."""
        with _naming(self.holder):
            self._ask(DIGESTS_KIND, version, requests, None)
            digests = []
            for piece, rows in enumerate(requests.pieces):
                parcel, number, _, count, digest = RECORD.unpack(self._channel.receive(RECORD.size))
                if parcel == FAILED:
                    raise receive_error(self._channel, count)
                if (parcel, number, count) != (DIGESTS, piece, 8 * len(rows)):
                    raise FormatError(f"{count} bytes came in the place of the digests of piece {piece}", where=str(self.holder))
                data = self._channel.receive(count)
                self._check(memoryview(data), digest)
                digests.append(np.frombuffer(data, "<u8").tolist())
            return digests

    def _pull(self, version: str, requests: RequestList, place: Place, base: PieceBase | None) -> set[int]:
        """One pull; the pieces whose base was another one, which are not placed."""
        stale: set[int] = set()
        self._ask(PULL_KIND, version, requests, base)
        for piece in range(len(requests.pieces)):
            if not self._take(piece, requests, partial(place, piece), base):
                stale.add(piece)
        return stale

    def _ask(self, kind: int, version: str, requests: RequestList, base: PieceBase | None) -> None:
        channel, name, base_name = self._channel, version.encode(), b"" if base is None else base.version.encode()
        if len(requests.packed) > MOST_LIST:
            raise FormatError(f"a list of requests of {len(requests.packed)} bytes is too long", hint="take fewer tensors at once (only=)")
        channel.send(PULL.pack(kind, len(name), len(base_name), requests.digest), name, base_name)
        if channel.receive(1) != KNOWN:
            channel.send(LENGTH.pack(len(requests.packed)), requests.packed)

    def _take(self, piece: int, requests: RequestList, place: Callable[[memoryview], None], base: PieceBase | None) -> bool:
        """One piece; False if its base is another one than the holder's, and it was not placed."""
        length = requests.places(piece)[1]
        while True:
            parcel, number, slot, count, digest = RECORD.unpack(self._channel.receive(RECORD.size))
            if parcel != ALIVE:
                break
        if parcel == FAILED:
            raise receive_error(self._channel, count)
        as_changes = parcel == CHANGES and base is not None and slot == IN_STREAM and count < length
        if number != piece or (slot == IN_STREAM and count != length and not as_changes):
            raise FormatError(f"piece {number} of {count} bytes came in the place of piece {piece} of {length}", where=str(self.holder))
        if base is not None and not as_changes:
            self.dense[SLOTS if slot != IN_STREAM else REASONS.get(parcel, "")] += requests.bytes_of(piece)
        if slot != IN_STREAM:
            self._take_from_slot(slot, count, length, digest, place)
            return True
        piece_bytes = self._memory(length)
        if not as_changes or base is None:
            self._receive(piece_bytes, digest)
        else:
            if len(self._changes) < count:
                self._changes = bytearray(length)
            changes = memoryview(self._changes)[:count]
            self._receive(changes, digest)
            base.fill(piece, piece_bytes)
            if not apply_changes(changes, piece_bytes, requests, piece, str(self.holder)):
                return False
        place(piece_bytes)
        return True

    def _receive(self, view: memoryview, digest: int) -> None:
        self._channel.receive_into(view)
        self.transferred += len(view)
        self._check(view, digest)

    def _take_from_slot(self, slot: int, generation: int, length: int, digest: int, place: Callable[[memoryview], None]) -> None:
        """A piece that lies in the holder's shared memory. What was copied counts only if the slot was not lent again meanwhile."""
        slots = self._slots
        if slots is None or not slots.has(slot):
            raise FormatError(f"slot {slot} of memory that is not open", where=str(self.holder))
        view = slots.data(slot).data[:length]
        self.transferred += length
        if self._room is not None:
            room = self._room(length)
            room[:] = view
            view = room
        self._check(view, digest)
        place(view)
        if slots.generation(slot) != generation:
            raise ConnectionAbortedError("this rank was taken for dead while it copied")
        slots.done(slot, 0)

    def _memory(self, length: int) -> memoryview:
        """For the bytes of a piece."""
        if self._room is not None:
            return self._room(length)
        if len(self._buffer) < length:
            self._buffer = bytearray(length)
        return memoryview(self._buffer)[:length]

    def _check(self, view: memoryview, digest: int) -> None:
        with self._spans.span("verify", len(view)):
            right = xxhash.xxh3_64_intdigest(view) == digest
        if not right:
            raise damaged(str(self.holder))


def _opened(announcement: bytes) -> AttachedPool | None:
    if announcement == bytes(ANNOUNCEMENT_BYTES):
        return None
    at = Announcement.unpack(announcement)
    if at.shape[0] > 1024 or at.shape[1] > MOST_PIECE or at.shape[2] != 1:
        raise FormatError(f"shared memory of an unlikely shape {at.shape}")
    try:
        return AttachedPool(at)
    except OSError:
        return None  # another container, or not allowed: then the bytes come in the stream


@contextmanager
def _naming(holder: Holder) -> Iterator[None]:
    """Errors say which holder is lost."""
    try:
        yield
    except CkptError as err:
        if isinstance(err, GroupError) and not err.ranks and not holder.relay:
            err.ranks = (holder.rank,)
        raise
    except OSError as err:
        lost = RankFailedError(f"{holder} is gone: {err}", hint="look why that process ended")
        lost.ranks = () if holder.relay else (holder.rank,)
        raise lost from err


# From several holders at once.


REPLACED = (GroupError, NotFoundError, CorruptError)
"""Errors of one holder, after which another one may have the bytes."""

PlaceBoxes = Callable[[Share, int, memoryview], None]
"""Gets share, number and bytes of each piece, from several threads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PullBase:
    """What a receiver has of an earlier version: ``fill`` packs the boxes of a piece of a share."""

    version: str
    fill: Callable[[Share, int, memoryview], None]

    def of(self, share: Share) -> PieceBase:
        return PieceBase(version=self.version, fill=partial(self.fill, share))


@dataclass(eq=False)
class Pulled:
    """What came, in bytes of boxes by rank; ``lost`` are holders that others stood in for, and what happened to them."""

    received: dict[int, int] = field(default_factory=dict)
    lost: dict[int, CkptError] = field(default_factory=dict)
    transferred: int = 0
    """Bytes that came for it: fewer, where holders sent what changed."""
    dense: Counter[str] = field(default_factory=Counter)
    """Bytes of boxes that came whole although there was a base, by why."""


@dataclass(frozen=True, eq=False)
class _Unfinished:
    """What a lost holder has not given."""

    holder: int
    share: Share
    pieces: set[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class PiecePull:
    """How one receiver takes pieces of a version."""

    version: str
    rank: int
    """Of the receiver."""
    secret: bytes
    timeout: float
    threads: int = 4
    """Holders that are asked at once."""
    alive: Callable[[], None] = lambda: None
    """Called often, from the thread that waits; what it raises ends the transfer."""
    shared: bool = True
    """Whether the holders' shared memory is used where it can be."""
    base: PullBase | None = None
    """What the receiver has of an earlier version."""
    room: Callable[[int], memoryview] | None = None
    """Gives memory for so many bytes of a piece, which whoever places it may keep."""
    spans: Spans | None = None
    """Get a ``pull`` for each connection to a holder, and within it a ``verify`` for each piece."""
    kept: dict[int, PieceClient] | None = None
    """Connections by holder that outlive a transfer which ended well."""

    def run(self, plan: TransferPlan, holders: Mapping[int, Holder], place: PlaceBoxes) -> Pulled:
        """Take every share of a plan."""
        transfer = _Transfer(self, holders, place)
        shares = list(plan.shares.items())
        while shares:
            shares.sort(key=lambda item: (item[0] <= self.rank, item[0]))  # each receiver begins with another holder
            _run_alive([partial(transfer.take, holder, share) for holder, share in shares], self.threads, self.alive, transfer.stop)
            unfinished, transfer.unfinished = transfer.unfinished, []
            shares = list(chain.from_iterable(_others(plan, lost, transfer.pulled) for lost in unfinished))
        return transfer.pulled


class _Transfer:
    """A pull that goes on; shares come in threads of their own."""

    def __init__(self, pull: PiecePull, holders: Mapping[int, Holder], place: PlaceBoxes) -> None:
        self._pull = pull
        self._holders = holders
        self._place = place
        self._lock = threading.Lock()
        self.stop = threading.Event()
        self.pulled = Pulled()
        self.unfinished: list[_Unfinished] = []

    def take(self, holder: int, share: Share) -> None:
        """Take a share from one holder. If that is lost, what it has not given is ``unfinished``."""
        pull, giver = self._pull, self._holders[holder]
        left = set(range(len(share.requests.pieces)))
        digests: list[list[int]] = []

        def placed(piece: int, view: memoryview) -> None:
            self._check_going()
            if digests and box_digests(share.requests, piece, view) != digests[piece]:
                raise CorruptError("it gives other bytes than the source has published", where=str(giver), hint="look at its memory")
            self._place(share, piece, view)
            with self._lock:
                left.discard(piece)
                self.pulled.received[holder] = self.pulled.received.get(holder, 0) + share.requests.bytes_of(piece)

        try:
            if giver.witness is not None:
                digests += self._digests_by(giver.witness, share.requests)
            began = time.perf_counter()
            client = pull.kept.pop(holder, None) if pull.kept is not None else None
            if client is not None and client.holder.addresses == giver.addresses and client.is_open():
                client.begin(giver, pull.timeout, self._check_going, pull.spans)
            else:
                if client is not None:
                    client.close()
                client = self._client(giver, shared=pull.shared, room=pull.room, spans=pull.spans)
            whole = False
            try:
                base = None if pull.base is None or giver.relay else pull.base.of(share)
                client.pull(giver.version or pull.version, share.requests, placed, base)
                whole = True
            finally:
                with self._lock:
                    self.pulled.transferred += client.transferred
                    self.pulled.dense += client.dense
                if pull.spans is not None:
                    pull.spans.add("pull", began, time.perf_counter(), client.transferred)
                client.rest()
                if not whole or pull.kept is None or pull.kept.setdefault(holder, client) is not client:
                    client.close()
        except REPLACED as err:
            with self._lock:
                self.pulled.lost[holder] = err
                self.unfinished.append(_Unfinished(holder, share, left))

    def _digests_by(self, witness: Holder, requests: RequestList) -> list[list[int]]:
        """What the source says of boxes that a relay gives. Where that rank is lost, the digests that the relay has kept must do."""
        try:
            client = self._client(witness, shared=False)
            try:
                return client.digests(self._pull.version, requests)
            finally:
                client.close()
        except GroupError as err:
            with self._lock:
                self.pulled.lost.setdefault(witness.rank, err)
        except NotFoundError as err:
            log.debug("live: %s tells no digests any more: %s", witness, err)
        return []

    def _client(
        self, holder: Holder, *, shared: bool, room: Callable[[int], memoryview] | None = None, spans: Spans | None = None
    ) -> PieceClient:
        return PieceClient(holder, self._pull.secret, self._pull.timeout, alive=self._check_going, shared=shared, room=room, spans=spans)

    def _check_going(self) -> None:
        if self.stop.is_set():
            raise CancelledError("another part of the transfer failed")


def _others(plan: TransferPlan, lost: _Unfinished, pulled: Pulled) -> list[tuple[int, Share]]:
    """Who stands in for a lost holder; its error if nobody can."""
    try:
        return list(plan.without(lost.holder, lost.share, lost.pieces, pulled.lost.keys()).items())
    except CoverageError as err:
        error = pulled.lost[lost.holder]
        error.message += f"; {err.message} of {err.where}" if err.where else f"; {err.message}"
        raise error from err


def _run_alive(tasks: Sequence[Callable[[], None]], threads: int, alive: Callable[[], None], stop: threading.Event) -> None:
    pending = Pending(lambda: run_tasks(tasks, threads, "ckpt-pull"), "ckpt-pull")
    try:
        while not pending.wait(0.05):
            alive()
    except BaseException:
        stop.set()
        pending.wait()
        raise
    pending.result()


def piece_boxes(share: Share, piece: int) -> list[tuple[int, int, int, int]]:
    """For each box of a piece: the number of its want and of its request, and where in the piece it begins and ends."""
    return [(int(share.wants[request]), request, start, stop) for request, start, stop in share.requests.spans(piece)]
