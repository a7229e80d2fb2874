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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import xxhash

from .errors import ConsistencyError, DeadlineError, UsageError
from .store import Store, part_of
from .told import error_of, error_to_json, failed_on, failure
from .watch import Watch
from .workers import Pending

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Row = dict[str, Any]
"""What a rank says in one phase: JSON."""

R = TypeVar("R")

log = logging.getLogger("ckpt")

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
    _written: dict[int, list[str]] = field(default_factory=dict)
    """Keys by number of the call. All calls before number ``_past`` are over on all ranks."""
    _past: int = 0

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

    def settled(self, number: str) -> None:
        """Every rank has come to this call, so all have left those before it: what they wrote there is not read any more. It may still be
        going on in the background when the next one begins, and fails."""
        self._past = max(self._past, int(number))

    def forget(self, store: Store) -> None:
        """Delete what this rank wrote in calls that all ranks have left."""
        with suppress(DeadlineError):  # the call that begins now will say so
            for number in [n for n in list(self._written) if n < self._past]:
                for key in self._written.pop(number, ()):  # a save in the background forgets, too
                    store.delete_key(key)

    def remember(self, key: str) -> None:
        """A key that this rank wrote: the number of its call, a slash, and a name."""
        self._written.setdefault(int(key.partition("/")[0]), []).append(key)


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
    _phase: str = "start"
    _turn: int = 0
    """Number of the phase. Keys have it, not the name: ranks that make different calls must meet to find out."""
    _beaten: float = 0.0
    _looked: float = 0.0
    _blobs: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._store = self.group.store.within(self.timeout) if self.group.store is not None else None

    @property
    def is_leader(self) -> bool:
        return self.group.rank == self.group.leader

    def agree(self, phase: str, work: Callable[[], Row], decide: Callable[[dict[int, Row]], R]) -> R:
        """Run ``work`` on every rank, then ``decide`` on the leader with all rows (JSON); every rank returns what it decided (JSON).

        Raises:
            the error of ``work`` on the rank that it happened on, and RankFailedError on the others; the error of ``decide`` on all;
            DeadlineError if a rank gave no sign of life for ``timeout`` seconds.
        """
        self._phase = phase
        self._turn += 1
        if self._turn == 1 and self._store is not None:
            self.group.forget(self._store)  # here, not when the call began: a save in the background has a thread of its own for it
        try:
            row = work()
        except BaseException as err:
            self._tell(err, decided=False)
            raise
        if self.group.store is None:
            return decide({self.group.rank: json.loads(json.dumps(row))})
        message = {"kind": self.kind, "url": self.url, "row": row}
        return self._lead(message, decide) if self.is_leader else self._follow(message)

    def beat(self) -> None:
        """Give a sign of life. Cheap: at most a few messages per deadline."""
        now = time.monotonic()
        if self.group.store is None or now - self._beaten < self.timeout / 8:
            return
        self._beaten = now
        self._add(f"beat/{self.group.rank}")  # which the store answers: a rank that is cut off from it finds that out while it works

    def look(self) -> None:
        """Within the work of a phase that waits for other ranks, often: give a sign of life, and see whether the call has failed elsewhere.

        Raises:
            CorruptError: another rank found damage.
            RankFailedError: another rank raised anything else.
        """
        self.beat()
        now = time.monotonic()
        if self.group.store is None or now - self._looked < max(0.5, self.group.size / 1024):
            return
        self._looked = now
        if not self._has(f"{self._turn}/all"):  # this rank's row is not there yet, so not all are: some rank has failed
            return
        for rank in self.group.ranks:
            row = self._read(f"{self._turn}/row/{rank}") if self._has(f"{self._turn}/row/{rank}") else {}
            if "error" in row:
                raise failed_on(rank, row["error"])

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

    def share(self, data: bytes) -> str:
        """Leave bytes for the leader under their digest; equal bytes of several ranks are sent once."""
        digest = xxhash.xxh3_128_hexdigest(data)
        if self.group.store is None:
            self._blobs[digest] = data
        elif self._add(f"claim/{digest}") == 1:
            self._set(f"blob/{digest}", data)
        return digest

    def fetch(self, digest: str) -> bytes:
        """What some rank shared under this digest. Ranks share before they send their row, so it is there."""
        if self.group.store is None:
            return self._blobs[digest]
        if not self._has(f"blob/{digest}"):
            raise DeadlineError(f"{self.kind}: the job's store has lost what a rank left in it", where=self.url, hint="try again")
        return self._get(f"blob/{digest}")

    def _settle(self) -> None:
        if not self.overlaps:
            self.group.settled(self.number)

    # ---- the protocol

    def _key(self, name: str) -> str:
        return f"{self.number}/{name}"

    @contextmanager
    def _reached(self) -> Iterator[Store]:
        """The job's store; it raises only when it cannot be reached."""
        assert self._store is not None
        try:
            yield self._store
        except DeadlineError as err:
            raise DeadlineError(f"{self.kind}: {err.message}", where=self.url, hint=err.hint) from err

    def see_off(self, seconds: float = _SEE_OFF) -> None:
        """On the leader: wait for a moment until all ranks have heard what it decided last. Its process may serve the job's store, and end
        as soon as the call does.

        Raises:
            DeadlineError: the store does not answer, so the others may not have heard. That it is gone is no error: nobody is served.
        """
        if self._store is None or not self.is_leader:
            return
        seconds = max(seconds, self.group.size / 512)  # longer than any rank waits between two looks
        end, pause = time.monotonic() + seconds, 0.0005
        try:
            while self._add(f"{self._turn}/heard", 0) < self.group.size - 1 and time.monotonic() < end:
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
        except DeadlineError:
            if self._store.silent:
                raise

    def _set(self, name: str, data: bytes) -> None:
        with self._reached() as store:
            store.set(self._key(name), data)
        self.group.remember(self._key(name))

    def _add(self, name: str, amount: int = 1) -> int:
        with self._reached() as store:
            count = store.add(self._key(name), amount)
        if count == amount == 1:
            self.group.remember(self._key(name))
        return count

    def _get(self, name: str) -> bytes:
        with self._reached() as store:
            return bytes(store.get(self._key(name)))

    def _has(self, name: str) -> bool:
        with self._reached() as store:
            return store.check([self._key(name)])

    def _read(self, name: str) -> Row:
        found: Row = json.loads(self._get(name))
        return found

    def _post(self, message: Row) -> None:
        self._set(f"{self._turn}/row/{self.group.rank}", json.dumps(message).encode())
        if self._add(f"{self._turn}/count") == self.group.size or "error" in message:
            self._set(f"{self._turn}/all", b"1")

    def _tell(self, err: BaseException, *, decided: bool) -> None:
        """Tell the other ranks of an error that ends the call here: of this rank's own work, or ``decided`` for all by the leader."""
        if self.group.store is None or type(err).__name__ == "SimulatedCrash":  # a process that has crashed tells nobody
            return
        told = {"error": error_to_json(err), "rank": self.group.rank, "decided": decided}
        try:
            if not decided:
                self._post(told)
            if self.is_leader:
                self._publish(told)
                self.see_off(_SEE_OFF_THE_DEAD if isinstance(err, DeadlineError) else _SEE_OFF)
        except DeadlineError as lost:
            log.warning("%s of %s failed, and the other ranks could not be told: %s", self.kind, self.url, lost)

    def _publish(self, verdict: Row) -> None:
        self._set(f"{self._turn}/verdict", json.dumps(verdict).encode())

    def _lead(self, message: Row, decide: Callable[[dict[int, Row]], R]) -> R:
        self._post(message)
        try:
            rows = self._gather()
            found = self.alive_while(lambda: decide(rows), self.timeout)
        except BaseException as err:
            self._tell(err, decided=True)
            raise
        self._publish({"found": found})
        self._settle()
        return found

    def _gather(self) -> dict[int, Row]:
        watch, missing = self._watch(), list(self.group.ranks)
        while not self._arrived(f"{self._turn}/all"):
            self.beat()
            missing = [r for r in missing if not self._has(f"{self._turn}/row/{r}")]
            watch.check(missing, self._phase)
        rows = {r: self._read(f"{self._turn}/row/{r}") for r in self.group.ranks if self._has(f"{self._turn}/row/{r}")}
        failed = {r: row["error"] for r, row in rows.items() if "error" in row}
        if failed:
            raise failure(self.kind, self._phase, failed)
        for r, row in rows.items():
            if (row["kind"], row["url"]) != (self.kind, self.url):
                raise ConsistencyError(
                    f"rank {r} calls {row['kind']}({row['url']!r}) while rank {self.group.rank} calls {self.kind}({self.url!r})",
                    hint="make the same calls in the same order on every rank",
                )
        return {r: row["row"] for r, row in rows.items()}

    def _follow(self, message: Row) -> Any:
        self.undecided = True  # before the row is out: the leader may have it although sending it failed
        self._post(message)
        watch = self._watch()
        while not self._arrived(f"{self._turn}/verdict"):
            watch.check([self.group.leader], self._phase)
        verdict = self._read(f"{self._turn}/verdict")
        self.undecided = False
        self._add(f"{self._turn}/heard")
        if "error" in verdict:
            raise error_of(self.kind, self._phase, verdict)
        self._settle()
        return verdict["found"]

    def _watch(self) -> Watch:
        return Watch(self.kind, self.url, self.timeout, self.heard)

    def _arrived(self, name: str) -> bool:
        """Look for a key for a slice of the deadline.

        Looking again and again, not the store's own wait: that blocks every other user of the store's connection, and writes
        warnings to stderr. The pause grows with the job, so that the store answers at most a few thousand questions a second.
        """
        pause, longest = 0.0005, max(0.05, self.group.size / 4096)
        end = time.monotonic() + min(self.timeout / 8, max(0.25, self.group.size / 1024))
        while not self._has(name):
            if time.monotonic() >= end:
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True

    def heard(self, rank: int) -> bytes | None:
        """The last sign of life of a rank."""
        key = f"beat/{rank}"
        return self._get(key) if self._has(key) else None
