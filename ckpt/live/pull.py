"""Takes pieces of a live state from the ranks that hold them, several at once. Another holder takes the place of one that is lost.

No torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from ckpt.concurrency import Pending, run_tasks
from ckpt.errors import CancelledError, CkptError, CorruptError, CoverageError, GroupError, NotFoundError
from ckpt.plan.transfers import RequestList, Share, TransferPlan
from ckpt.telemetry.spans import Spans

from .client import Holder, PieceClient
from .delta import PieceBase
from .piece_messages import box_digests

log = logging.getLogger("ckpt")

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
            client = self._client(giver, shared=pull.shared, room=pull.room, spans=pull.spans)
            try:
                base = None if pull.base is None or giver.relay else pull.base.of(share)
                client.pull(giver.version or pull.version, share.requests, placed, base)
            finally:
                with self._lock:
                    self.pulled.transferred += client.transferred
                    self.pulled.dense += client.dense
                if pull.spans is not None:
                    pull.spans.add("pull", began, time.perf_counter(), client.transferred)
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
    places, _ = share.requests.places(piece)
    rows = share.requests.pieces[piece]
    nbytes = share.requests.nbytes[rows.start : rows.stop].tolist()
    wants = share.wants[rows.start : rows.stop].tolist()
    return [(want, request, at, at + size) for want, request, at, size in zip(wants, rows, places, nbytes, strict=True)]
