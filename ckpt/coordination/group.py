"""The ranks of one job, and how they agree. Control goes through the job's key-value store only: no collective that training could
interleave with.

Every wait has a deadline: ``timeout`` seconds without a sign of life. A rank that raised, died or hangs ends the call on all
others, with its name.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from ckpt.concurrency.workers import Pending
from ckpt.errors import ConsistencyError, DeadlineError, UsageError
from ckpt.tracing.progress import RankSign, sign_interval

from .calls import ControlChannel, WrittenKeys, longest_pause, looks
from .liveness import Watch, silent
from .offers import NotSentError, Offers
from .remote_errors import error_of, error_to_json, failed_on, failure
from .store import Store, part_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Row = dict[str, Any]
"""What a rank says in one phase: JSON."""

R = TypeVar("R")

log = logging.getLogger("ckpt")

FIRST_SIGN = 1.0
"""Seconds of a call after which ranks say how far they are: most calls are over by then."""
_SEE_OFF, _SEE_OFF_THE_DEAD = 2.0, 0.75
"""Seconds that a leader waits at the end of a call for ranks that may be dead, and where some are known to be."""


@dataclass(eq=False)
class Group:
    """The ranks that take part, as global ranks; the first is the leader. ``store`` is None for a single process."""

    rank: int
    ranks: tuple[int, ...]
    store: Store | None = None
    served: object = None
    """The job's own store. As long as it is referred to, its server runs, also after ``destroy_process_group``: a save may be going on."""
    calls: int = 0
    own_stores: int = 0
    """How many parts of the store were set aside, for the notices of a Checkpointer and the like."""
    keys: WrittenKeys = field(default_factory=WrittenKeys)

    @property
    def leader(self) -> int:
        return self.ranks[0]

    @property
    def size(self) -> int:
        return len(self.ranks)

    def call(self, kind: str, url: str, timeout: float, *, overlaps: bool = False) -> Call:
        """Begin a collective call; every rank makes the same calls in the same order. ``overlaps``: an earlier one may go on in the
        background, on any rank."""
        self.calls += 1
        return Call(self, f"{self.calls}", kind, url, timeout, overlaps)


_groups: WeakKeyDictionary[ProcessGroup, Group] = WeakKeyDictionary()


_alone = threading.local()
"""The group of a thread that saves and loads without torch.distributed: threads do so independently of each other."""


def current_group(process_group: ProcessGroup | None = None) -> Group:
    """The group of ``process_group``, of torch.distributed's world, or of this process alone if torch.distributed is not in use."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        if not hasattr(_alone, "group"):
            _alone.group = Group(0, (0,))
        alone: Group = _alone.group
        return alone
    pg = process_group if process_group is not None else dist.group.WORLD
    assert pg is not None
    ranks = tuple(dist.get_process_group_ranks(pg))
    rank = dist.get_rank()
    if rank not in ranks:
        raise UsageError(f"rank {rank} is not in the process group {list(ranks)[:8]}")
    known = _groups.get(pg)
    if known is None and len(ranks) == 1:  # nobody to talk to
        known = _groups[pg] = Group(rank, ranks)
    if known is None:
        base = dist.distributed_c10d._get_default_store()
        known = _groups[pg] = Group(rank, ranks, part_of(base, pg.group_name, rank), base)
    return known


# ------------------------------------------------------------------------------------------------------------- one call


@dataclass(eq=False)
class Call:
    """One collective call: a few phases, in each of which every rank says something and the leader decides."""

    group: Group
    number: str
    kind: str
    url: str
    timeout: float
    overlaps: bool = False
    undecided: bool = False
    """This rank has done its part and does not know what the leader decided, which may still do anything."""
    signer: Callable[[int], RankSign] | None = None
    """Says how far this rank is, in its n-th sign; None where nobody asks. Any thread calls it."""
    signed: bytes = b""
    """The leader's own last sign."""
    _phase: str = "start"
    _signs: int = 0
    _sign_at: float = field(default_factory=lambda: time.monotonic() + FIRST_SIGN)
    _signing: threading.Lock = field(default_factory=threading.Lock)
    _beaten: float = field(default_factory=time.monotonic)
    _look_at: float = field(default_factory=lambda: time.monotonic() + 0.5)

    def __post_init__(self) -> None:
        group, position = self.group, self.group.ranks.index(self.group.rank)
        self._store = group.store.within(self.timeout) if group.store is not None else None
        channel = ControlChannel(self._store, self.number, position, group.size, group.keys.remember) if self._store is not None else None
        self._own_channel: Any = channel  # which is None only where nobody asks for it
        self._offers = Offers(channel, position, self.timeout)

    @property
    def phase(self) -> str:
        """The name of the phase that is going on."""
        return self._phase

    @property
    def is_leader(self) -> bool:
        return self.group.rank == self.group.leader

    def agree(self, phase: str, work: Callable[[], Row], decide: Callable[[dict[int, Row]], R]) -> R:
        """Run ``work`` on every rank, then ``decide`` on the leader with all rows (JSON); every rank returns what it decided (JSON).
        ``decide`` leaves the rows as they are: equal ones are one object.

        Raises:
            the error of ``work`` on the rank that it happened on, and RankFailedError on the others; the error of ``decide`` on all;
            DeadlineError if a rank gave no sign of life for ``timeout`` seconds.
        """
        self._phase = phase
        if self._store is not None:
            self._own_channel.next_turn()
            if self._own_channel.turn == 1:  # not when the call began: a save in the background has a thread of its own for it
                self.group.keys.forget(self._store)
        try:
            row = work()
        except BaseException as err:
            self._tell(err, decided=False)
            raise
        if self.group.store is None:
            return decide({self.group.rank: json.loads(json.dumps(row))})
        message = json.dumps({"kind": self.kind, "url": self.url, "row": row, "offers": self._offers.told()}).encode()
        return self._lead(message, decide) if self.is_leader else self._follow(message)

    def beat(self) -> None:
        """Give a sign of life. Cheap: at most a few messages per deadline; in a long call that has a signer, one each second."""
        now = time.monotonic()
        if now >= self._sign_at and self.signer is not None and self._signing.acquire(blocking=False):
            try:
                self._sign(now, self.signer)
            finally:
                self._signing.release()
        if self.group.store is None or now - self._beaten < self.timeout / 8:
            return
        self._beaten = now
        with self._channel() as channel:
            channel.beat()

    def _sign(self, now: float, signer: Callable[[int], RankSign]) -> None:
        self._sign_at = now + sign_interval(self.group.size)
        self._signs += 1
        data = signer(self._signs).to_bytes()
        if self.is_leader:
            self.signed = data
            return
        with self._channel() as channel:
            channel.sign(data, first=self._signs == 1)

    def awaited(self) -> dict[int, bytes | None]:
        """Leader, in any thread: the ranks, by position, that have not done their part of this phase, and their last signs.

        Raises:
            DeadlineError: the store does not answer.
        """
        if self._store is None:
            return {0: self.signed or None}
        with self._channel() as channel:
            awaited = channel.awaited()
            signs: dict[int, bytes | None] = {**dict.fromkeys(sorted(awaited)), **channel.signs(awaited - {0})}
        return signs | ({0: self.signed or None} if 0 in awaited else {})

    def look(self) -> None:
        """Within the work of a phase that waits for other ranks, often: give a sign of life, and see whether the call has failed elsewhere.

        Raises:
            CorruptError: another rank found damage.
            RankFailedError: another rank raised anything else.
        """
        self.beat()
        now = time.monotonic()
        if self.group.store is None or now < self._look_at:
            return
        with self._channel() as channel:
            failed = channel.failure()
        took = time.monotonic() - now  # far away: whoever looks is held up
        self._look_at = now + max(0.5, self.group.size / 1024, 10 * took)
        if failed is not None:
            row = json.loads(failed)
            raise failed_on(row["rank"], row["error"])

    def alive_while(self, work: Callable[[], R], seconds: float) -> R:
        """Run something that cannot give signs of life itself (a flush to disk), and give them for it, for at most ``seconds``."""
        if self.group.store is None:
            return work()
        end = time.monotonic() + seconds
        pending = Pending(work, "ckpt-wait")
        try:
            while not pending.wait(min(self.timeout / 8, 1.0)):
                if time.monotonic() < end:
                    self.beat()
        finally:
            pending.wait()  # whatever happened
        return pending.result()

    # ---- bytes under their digests

    def share(self, data: bytes) -> str:
        """Have bytes ready for the leader, which asks for them if it needs them, and one rank only if several share equal ones. Gives
        their digest."""
        return self._offers.share(data)

    def leave(self, data: bytes) -> str:
        """Leave bytes in the store: some that the leader always needs and no other rank has; or, as the leader, some for all ranks. Gives
        their digest."""
        with self._channel():
            return self._offers.leave(data)

    def fetch(self, digest: str) -> bytes:
        """What is shared under this digest, on the leader while it decides; or what is left in the store, on any rank.

        Raises:
            DeadlineError: a rank that is asked for its bytes does not send them; or the store has lost what was left in it.
        """
        with self._channel():
            return self._offers.get(digest)

    def fetch_all(self, digests: Iterable[str]) -> None:
        """Fetch much at once, which takes hardly longer than one: ``fetch`` then has it."""
        with self._channel():
            self._offers.fetch(digests)

    # ---- the protocol

    @contextmanager
    def _channel(self) -> Iterator[ControlChannel]:
        """This rank's end, in a call with a store; an error of the store says in which call."""
        try:
            yield self._own_channel
        except NotSentError as err:
            if ranks := [self.group.ranks[p] for p in sorted(err.positions)]:
                raise silent(self.kind, self.url, self._phase, self.timeout, ranks) from None
            text = f"{self.kind}: the job's store has lost what a rank left in it"
            raise DeadlineError(text, where=self.url, hint="try again") from None
        except DeadlineError as err:
            if err.where is not None:
                raise
            raise DeadlineError(f"{self.kind}: {err.message}", where=self.url, hint=err.hint) from err

    def see_off(self, seconds: float = _SEE_OFF) -> None:
        """On the leader: wait for a moment until all ranks have heard what it decided last. Its process may serve the job's store, and end
        as soon as the call does.

        Raises:
            DeadlineError: the store does not answer, so the others may not have heard. That it is gone is no error: nobody is served.
        """
        if self._store is None or not self.is_leader:
            return
        end = time.monotonic() + max(seconds, 4 * longest_pause(self.group.size))  # any rank looks within that, and the store may be busy
        heard = False
        try:
            with self._channel() as channel:
                for _ in looks(self.group.size // 16):
                    if (heard := channel.confirmed()) or time.monotonic() >= end:
                        break
        except DeadlineError:
            if self._store.silent:
                raise
        if heard:
            self.group.keys.over(self._store, int(self.number))

    def _settle(self) -> None:
        if not self.overlaps:
            self.group.keys.settled(self.number)

    def _tell(self, err: BaseException, *, decided: bool) -> None:
        """Tell the other ranks of an error that ends the call here: of this rank's own work, or ``decided`` for all by the leader."""
        if self.group.store is None or type(err).__name__ == "SimulatedCrash":  # a process that has crashed tells nobody
            return
        told = {"error": error_to_json(err), "rank": self.group.rank, "decided": decided}
        try:
            with self._channel() as channel:
                if not decided:
                    channel.post(json.dumps(told).encode(), failed=True)
                if not self.is_leader:
                    channel.confirm()
                    return
                channel.say(told)
            self.see_off(_SEE_OFF_THE_DEAD if isinstance(err, DeadlineError) else _SEE_OFF)
        except DeadlineError as lost:
            log.warning("%s of %s failed, and the other ranks could not be told: %s", self.kind, self.url, lost)

    def _lead(self, message: bytes, decide: Callable[[dict[int, Row]], R]) -> R:
        try:
            with self._channel() as channel:
                channel.post(message)
                rows = self._gather(channel)
            found = self.alive_while(lambda: decide(rows), self.timeout)
        except BaseException as err:
            self._tell(err, decided=True)
            raise
        with self._channel() as channel:
            channel.say({"found": found})
        self._settle()
        return found

    def _gather(self, channel: ControlChannel) -> dict[int, Row]:
        """The rows of all ranks, in their order."""
        ranks, end = self.group.ranks, time.monotonic() + self._slice()
        watch = Watch(self.kind, self.url, self.timeout, ranks, channel.beats)
        here: list[int] = []
        for _ in looks(self.group.size // 16):
            here, failed = channel.here()
            if failed or len(here) == len(ranks):
                break
            if time.monotonic() >= end:
                self.beat()
                watch.check(set(range(len(ranks))).difference(here), self._phase)
                end = time.monotonic() + self._slice()
        texts = channel.rows(here)
        different = set(texts.values())  # rows of many ranks are alike
        parsed = dict(zip(different, json.loads(b"[" + b",".join(different) + b"]"), strict=True))
        rows: dict[int, Row] = {ranks[position]: parsed[text] for position, text in texts.items()}
        errors = {rank: row["error"] for rank, row in rows.items() if "error" in row}
        if errors:
            raise failure(self.kind, self._phase, errors)
        for rank, row in rows.items():
            if (row["kind"], row["url"]) != (self.kind, self.url):
                raise ConsistencyError(
                    f"rank {rank} calls {row['kind']}({row['url']!r}) while rank {self.group.rank} calls {self.kind}({self.url!r})",
                    hint="make the same calls in the same order on every rank",
                )
        self._offers.hear({position: parsed[text]["offers"] for position, text in texts.items()})
        return {rank: row["row"] for rank, row in rows.items()}

    def _follow(self, message: bytes) -> Any:
        self.undecided = True  # before the row is out: the leader may have it although sending it failed
        with self._channel() as channel:
            channel.post(message)
            while "asks" in (word := self._await_word(channel)):
                self._offers.give(word["asks"])
            self.undecided = False
            channel.confirm()
        if "error" in word:
            raise error_of(self.kind, self._phase, word)
        self._settle()
        return word["found"]

    def _await_word(self, channel: ControlChannel) -> Row:
        watch, end = Watch(self.kind, self.url, self.timeout, self.group.ranks, channel.beats), time.monotonic() + self._slice()
        for _ in looks(self.group.size):
            if (word := channel.word()) is not None:
                break
            if time.monotonic() >= end:
                watch.check([0], self._phase)
                end = time.monotonic() + self._slice()
        assert word is not None
        return word

    def _slice(self) -> float:
        """Seconds after which a rank that waits looks for signs of life."""
        return min(self.timeout / 8, max(1.0, self.group.size / 1024))
