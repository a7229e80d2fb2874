"""One collective call: the phases in which the ranks of a job agree.

A phase has three moments. Every rank does its own part and posts a *row* (JSON); the leader gathers all rows and decides; every rank
hears the decision:

    rank 0 (leader)   work ── row ──┐ gather ── decide ──┬──► decision
    rank 1            work ── row ──┤                    ├──► decision
    rank 2            work ── row ──┘                    └──► decision
                      └ map ────────┘ └ reduce ──────────┘

``map_reduce(phase, local, on_leader)`` is that in one line. A call whose parts are longer spells it out, and reads from top to bottom:

    with call.phase("write"):                    # an error in here, on any rank, ends the call on all of them
        row = ...                                # this rank's part
        decision = call.agree(row, decide)
        ...                                      # what this rank makes of it

An error before the row is out takes the row's place: the leader reports it, and every other rank raises RankFailedError with the rank's
name. An error of ``decide`` is raised on every rank, as the same class. While the leader decides it may ask ranks for bytes of which it
has only the digests (``channel.py``). An error after the decision, on any rank while it is still within the phase, takes the place of that
rank's row in the next phase: the others are there already, or on their way. Every wait ends after ``timeout`` seconds without a sign of
life (``liveness.py``).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import xxhash

from ckpt.concurrency import Pending, patience
from ckpt.errors import DeadlineError, RankFailedError, error_to_json
from ckpt.telemetry.progress import RankSign, sign_interval
from ckpt.text import parse_json

from .broadcast_tree import PATIENCE
from .channel import ControlChannel, Row, check_posted, error_of, failed_on, longest_pause, looks
from .liveness import FailureDetector, Members, silent

R = TypeVar("R")

log = logging.getLogger("ckpt")

FIRST_SIGN = 1.0
"""Seconds of a call after which ranks say how far they are: most calls are over by then."""
_DRAIN, _DRAIN_WITHOUT_DEAD = 2.0, 0.75
"""Seconds that a leader waits at the end of a call for ranks that may be dead, and where some are known to be."""


# Bytes that the leader of a call may need, under their digests. They stay with the ranks, which tell their digests with their rows; the
# leader asks for those that it does not know, each of one rank, all at once. What no other rank has, and the leader always needs, is left
# in the store at once.
#
# Invariant: only the leader fetches what is offered, while it decides: all ranks then wait for its word, and give what it asks for.


class NotSentError(Exception):
    """Bytes are not there. ``positions``: the ranks that offered them."""

    def __init__(self, positions: set[int]) -> None:
        super().__init__()
        self.positions = positions


@dataclass(eq=False)
class Offers:
    """One rank's, in one call. ``channel`` is None for a single process."""

    channel: ControlChannel | None
    position: int
    timeout: float
    blobs: dict[str, bytes] = field(default_factory=dict)
    """What this rank shared, left, or fetched."""
    _shared: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    """Digests that the next row tells."""
    of_all: dict[int, Sequence[str]] = field(default_factory=dict)
    """On the leader: digests by position."""
    latest: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """The same of the last rows alone."""

    def share(self, data: bytes) -> str:
        """Have bytes ready for the leader, which asks for them if it needs them, and one rank only if several share equal ones. Gives
        their digest."""
        digest = xxhash.xxh3_128_hexdigest(data)
        if digest not in self.blobs:
            self.blobs[digest] = data
            self._shared.append(digest)
            self.new.append(digest)
        return digest

    def leave(self, data: bytes) -> str:
        digest = xxhash.xxh3_128_hexdigest(data)
        self.blobs[digest] = data
        if self.channel is not None:
            self.channel.give(digest, data)
        return digest

    def give(self, asks: Iterable[tuple[int, int, Sequence[int]]], channel: ControlChannel) -> None:
        """Leave in the store what the leader asks this rank for."""
        for digest in asked_of(asks, self.position, self._shared):
            channel.give(digest, self.blobs[digest])

    def fetch(self, digests: Iterable[str], alive: Callable[[], None] = lambda: None) -> None:
        """Have bytes here that are not. ``alive`` is called while they do not come."""
        lacking = {digest: None for digest in digests if digest not in self.blobs}
        if not lacking:
            return
        if self.channel is None:
            raise NotSentError(set())
        if self.channel.said:  # who asks a second time would ask for one after another
            lacking |= {digest: None for offered in self.latest.values() for digest in offered if digest not in self.blobs}
        wanted: dict[str, int] = {}
        for position, offered in self.of_all.items():
            for digest in offered:
                if digest in lacking:
                    wanted.setdefault(digest, position)
        if wanted:
            self.channel.say(json.dumps({"asks": whom_to_ask(wanted, self.of_all)}).encode())
        end = time.monotonic() + self.timeout
        for _ in looks(1):
            if self.channel.given(lacking):
                break
            alive()
            if not wanted or time.monotonic() >= end:
                raise NotSentError({wanted[d] for d in lacking if d in wanted and not self.channel.given([d])})
        self.blobs.update(zip(lacking, self.channel.blobs(lacking), strict=True))


def whom_to_ask(wanted: Mapping[str, int], offers: Mapping[int, Sequence[str]]) -> list[list[Any]]:
    """The leader's word that asks for bytes: ``wanted`` has a position for each digest, ``offers`` the digests of each position.

    All ranks read it, so it names no digests but their places among the offers of a rank, once for neighbours that are asked for the same
    places: rows of the first position, how many there are, and the places."""
    places: dict[int, list[int]] = {}
    for digest, position in wanted.items():
        places.setdefault(position, []).append(offers[position].index(digest))
    rows: list[list[Any]] = []
    for position in sorted(places):
        asked = sorted(places[position])
        if rows and (rows[-1][0] + rows[-1][1], rows[-1][2]) == (position, asked):
            rows[-1][1] += 1
        else:
            rows.append([position, 1, asked])
    return rows


def asked_of(word: Iterable[tuple[int, int, Sequence[int]]], position: int, offers: Sequence[str]) -> list[str]:
    """What the rank at ``position`` is asked for."""
    return [offers[place] for first, count, places in word if first <= position < first + count for place in places]


@dataclass(eq=False)
class Call:
    """One collective call: a few phases, in each of which every rank says something and the leader decides."""

    group: Members
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
    is_leader: bool = field(init=False)
    share: Callable[[bytes], str] = field(init=False)
    """See ``Offers.share``."""
    _phase: str = "start"
    _posted: bool = False
    """This rank's row of the phase is out, or about to be: its errors from now on are reported elsewhere."""
    _decided: bool = False
    """The phase is decided for all, and this rank knows how: its errors from now on belong to the next phase."""
    _signs: int = 0
    _sign_at: float = field(default_factory=lambda: time.monotonic() + FIRST_SIGN)
    _signing: threading.Lock = field(default_factory=threading.Lock)
    _beaten: float = field(default_factory=time.monotonic)
    _look_at: float = field(default_factory=lambda: time.monotonic() + 0.5)

    def __post_init__(self) -> None:
        group, position = self.group, self.group.position
        self.is_leader = group.rank == group.leader
        self._store = group.store.within(self.timeout) if group.store is not None else None
        channel = ControlChannel(self._store, self.number, position, group.size, group.keys.remember) if self._store is not None else None
        self._own_channel: Any = channel  # which is None only where nobody asks for it
        self._offers = Offers(channel, position, self.timeout)
        self.share = self._offers.share
        self._slice = min(self.timeout / 8, max(1.0, group.size / 1024))  # seconds after which a rank that waits looks for signs of life

    @property
    def phase_name(self) -> str:
        """The phase that is going on."""
        return self._phase

    # ---- phases

    def map_reduce(self, phase: str, local: Callable[[], Row], on_leader: Callable[[dict[int, Row]], R]) -> R:
        """Run ``local`` on every rank, then ``on_leader`` on the leader with all rows (JSON); every rank returns what that decided (JSON).
        ``on_leader`` leaves the rows as they are: equal ones are one object."""
        with self.phase(phase):
            return self.agree(local(), on_leader)

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """One phase: this rank's part, then ``lead`` or ``follow``, and what the rank makes of the decision. An error ends the call on
        every rank; after the decision, as soon as the others come to the next phase."""
        self._phase, self._posted, self._decided = phase, False, False
        if self._store is not None:
            self._own_channel.next_turn()
            if self._own_channel.turn == 1:  # not when the call began: a save in the background has a thread of its own for it
                self.group.keys.forget(self._store)
        before = patience.set(self.timeout)
        try:
            yield
        except BaseException as err:  # Ctrl-C and SystemExit as well: the other ranks would wait for this one until the deadline
            if self._decided and self._store is not None:
                self._own_channel.next_turn()
            if self._decided or not self._posted:
                self._report_error(err, decided=False)
            raise
        finally:
            patience.reset(before)
            # Every rank has come to this call. Where it overlaps none, all have left those before it, whose keys nobody reads any more.
            # This one may still be going on in the background when the next one begins, and fails.
            if self._decided and not self.overlaps:
                self.group.keys.past = max(self.group.keys.past, int(self.number))

    def fail(self, phase: str, error: BaseException) -> None:
        """End the call on all ranks with an error of this one, which the caller then raises."""
        with suppress(type(error)), self.phase(phase):
            raise error

    def agree(self, row: Row, decide: Callable[[dict[int, Row]], R]) -> R:
        """The end of a phase: the leader decides with the rows of all ranks, and every rank returns that."""
        if self.is_leader:
            return self.lead(row, decide)
        decision: R = self.follow(row)
        return decision

    def lead(self, row: Row, decide: Callable[[dict[int, Row]], R], public: Callable[[R], Any] | None = None) -> R:
        """On the leader: gather the rows of all ranks, decide, and tell every rank: what was decided if that is JSON, else what ``public``
        makes of it. Returns what was decided."""
        # From here on an error is the leader's decision (``decided``), not a rank's row: followers wait for a word,
        # and the word is the error.
        self._posted = True
        if self.group.store is None:
            return decide({self.group.rank: parse_json(json.dumps(row))})
        try:
            with self._channel() as channel:
                channel.post(self._message(row))
                rows = self._gather(channel)
            decision = self.alive_while(lambda: decide(rows), self.timeout)
            word = json.dumps({"found": decision if public is None else public(decision)}).encode()
        except BaseException as err:  # as above: every rank waits for the leader's word
            self._report_error(err, decided=True)
            raise
        with self._channel() as channel:
            channel.say(word)
        self._decided = True
        return decision

    def follow(self, row: Row) -> Any:
        """On every other rank: leave the row for the leader, give it the bytes that it asks for, and wait for what it decides."""
        message = self._message(row)
        # ``undecided`` until a word has come: the leader may commit with this row although this rank fails later, so
        # this rank must not remove the files that it wrote.
        self._posted = self.undecided = True  # before the row is out: the leader may have it although sending it failed
        with self._channel() as channel:
            channel.post(message)
            while "asks" in (word := self._await_word(channel)):
                self._offers.give(word["asks"], channel)
            self.undecided = False
            channel.confirm()
        if "error" in word:
            raise error_of(self.kind, self._phase, word)
        self._decided = True
        return word["found"]

    def _message(self, row: Row) -> bytes:
        new, self._offers.new = self._offers.new, []
        return json.dumps({"kind": self.kind, "url": self.url, "row": row, "offers": new}).encode()

    # ---- signs of life

    def heartbeat(self) -> None:
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
            channel.heartbeat()

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
        """Leader, in any thread: the ranks, by position, that have not done their part of this phase, and their last signs."""
        if self._store is None:
            return {0: self.signed or None}
        with self._channel() as channel:
            awaited = channel.awaited()
            signs: dict[int, bytes | None] = {**dict.fromkeys(sorted(awaited)), **channel.signs(awaited - {0})}
        return signs | ({0: self.signed or None} if 0 in awaited else {})

    def check_failures(self, *, at_once: bool = False) -> None:
        """Within the work of a phase that waits for other ranks, often: give a sign of life, and see whether the call failed elsewhere.
        ``at_once``: look also if the last look was a moment ago."""
        self.heartbeat()
        now = time.monotonic()
        if self.group.store is None or (not at_once and now < self._look_at and not self._departed(())):
            return
        with self._channel() as channel:
            failed = channel.failure()
        took = time.monotonic() - now  # far away: whoever looks is held up
        self._look_at = now + max(0.5, self.group.size / 1024, 10 * took)
        if failed is not None:
            row = parse_json(failed)
            raise error_of(self.kind, self._phase, row) if row["decided"] else failed_on(row["rank"], row["error"])
        self.check_departed()  # after the look: a rank that failed and ended is named with its error

    def check_departed(self, here: Collection[int] = ()) -> None:
        """``here``: the leader does not wait for these ranks any more. The others wait for the leader alone."""
        gone = self._departed(here)
        if gone and self.group.links is not None:
            raise self.group.links.departure(gone, self.kind, self.url, self._phase)

    def _departed(self, here: Collection[int]) -> list[int]:
        links = self.group.links
        if links is None or not links.departed:
            return []
        return [p for p in list(links.departed) if p not in here and (self.is_leader or p == 0)]

    def alive_while(self, work: Callable[[], R], seconds: float) -> R:
        """Run something that cannot give signs of life itself (a flush to disk), and give them for it, for at most ``seconds``."""
        if self.group.store is None:
            return work()
        end = time.monotonic() + seconds
        pending = Pending(work, "ckpt-wait")
        try:
            while not pending.wait(min(self.timeout / 8, 1.0)):
                if time.monotonic() < end:
                    self.heartbeat()
        finally:
            pending.wait()  # whatever happened
        return pending.result()

    # ---- bytes for all ranks

    def broadcast(self, name: str, load: Callable[[], bytes]) -> bytes:
        """What ``load`` gives on the leader, on all ranks: the leader loads it, and the ranks hand it on to each other
        (``broadcast_tree.py``). For bytes that every rank would else read from the same place, where a read costs something.

            index = call.broadcast("index", lambda: backend.read("index.json"))

        Within a phase, before the rank's row in it or in a later one: then all have it before the call ends. Every rank of the call does
        it, with a name that is used once in the call. A rank that has the same bytes from an earlier broadcast does not get them again.
        Where nobody hands it on, a rank loads it itself: if the leader's ``load`` raises, all load, and each raises its own error.
        """
        tree, name = self.group.tree, f"{self.number}/{name}"
        if tree is None:
            return load()
        data = None if self.is_leader else tree.get([name], self.check_failures, patience=self._patience).get(name)
        if data is None:
            try:
                data = load()
            finally:  # also that there is nothing, whatever the error: the ranks below wait for it
                tree.put(name, data)
        return data

    @property
    def _patience(self) -> float:
        return min(self.timeout / 2, PATIENCE)

    # ---- bytes under their digests

    def leave(self, data: bytes) -> str:
        """Leave bytes in the store: some that the leader always needs and no other rank has; or, as the leader, some for all ranks, which
        then hand them on to each other. Gives their digest."""
        with self._channel():
            digest = self._offers.leave(data)
        if self.group.tree is not None and self.is_leader:
            self.group.tree.put(digest, data)
        return digest

    def fetch(self, digest: str) -> bytes:
        """What is shared under this digest, on the leader while it decides; or what is left in the store, on any rank."""
        self.fetch_all([digest])
        return self._offers.blobs[digest]

    def fetch_all(self, digests: Iterable[str]) -> None:
        """Fetch much at once, which takes hardly longer than one: ``fetch`` then has it. Where no rank hands it on, from the store."""
        lacking = [digest for digest in dict.fromkeys(digests) if digest not in self._offers.blobs]
        if not lacking:
            return
        if self.group.tree is not None and not self.is_leader:
            self._offers.blobs.update(self.group.tree.get(lacking, self.check_failures, patience=self._patience, digests=True))
        with self._channel():
            self._offers.fetch(lacking, self.check_departed)

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

    def drain(self, seconds: float = _DRAIN) -> None:
        """On the leader: wait for a moment until all ranks have heard what it decided last. Its process may serve the job's store, and end
        as soon as the call does."""
        if self._store is None or not self.is_leader:
            return
        end = time.monotonic() + max(seconds, 4 * longest_pause(self.group.size))  # any rank looks within that, and the store may be busy
        heard = False
        try:
            with self._channel() as channel:
                for _ in looks(self.group.size // 16):
                    if (heard := channel.confirmed(len(self._departed(())))) or time.monotonic() >= end:
                        break
        except DeadlineError:
            if self._store.silent:
                raise
        if heard:
            self.group.keys.over(self._store, int(self.number))

    def _report_error(self, err: BaseException, *, decided: bool) -> None:
        """Tell the other ranks of an error that ends the call here: of this rank's own work, or ``decided`` for all by the leader."""
        if self.group.store is None or type(err).__name__ == "SimulatedCrash":  # a process that has crashed tells nobody
            return
        departed = isinstance(err, RankFailedError) and err.departed and self.is_leader
        report = json.dumps({"error": error_to_json(err), "rank": self.group.rank, "decided": decided or departed}).encode()
        try:
            with self._channel() as channel:
                if not decided or departed:
                    channel.post(report, failed=True)
                if not self.is_leader:
                    channel.confirm()
                    return
                channel.say(report)
            self.drain(_DRAIN_WITHOUT_DEAD if departed or isinstance(err, DeadlineError) else _DRAIN)
        except DeadlineError as lost:
            log.warning("%s of %s failed, and the other ranks could not be told: %s", self.kind, self.url, lost)

    def _gather(self, channel: ControlChannel) -> dict[int, Row]:
        """The rows of all ranks, in their order."""
        ranks, end = self.group.ranks, time.monotonic() + self._slice
        detector = FailureDetector(self.kind, self.url, self.timeout, ranks, channel.beats)
        here: list[int] = []
        for _ in looks(self.group.size // 16):
            here, failed = channel.here()
            if failed or len(here) == len(ranks):
                break
            self.check_departed(here)
            if time.monotonic() >= end:
                self.heartbeat()
                detector.check(set(range(len(ranks))).difference(here), self._phase)
                end = time.monotonic() + self._slice
        texts = channel.rows(here)
        different = set(texts.values())  # rows of many ranks are equal: each different text is parsed once, and all at once
        parsed: dict[bytes, Row] = dict(zip(different, parse_json(b"[" + b",".join(different) + b"]"), strict=True))
        posted = {position: parsed[text] for position, text in texts.items()}
        check_posted({ranks[position]: row for position, row in posted.items()}, self.kind, self.url, self._phase)
        offers = self._offers
        offers.latest = {position: row["offers"] for position, row in posted.items()}
        offers.of_all = {position: [*offers.of_all.get(position, ()), *digests] for position, digests in offers.latest.items()}
        return {ranks[position]: row["row"] for position, row in posted.items()}

    def _await_word(self, channel: ControlChannel) -> Row:
        detector, end = (
            FailureDetector(self.kind, self.url, self.timeout, self.group.ranks, channel.beats),
            time.monotonic() + self._slice,
        )
        moments = looks(self.group.size)
        next(moments)
        while (word := channel.word()) is None:
            self.check_departed()
            if time.monotonic() >= end:
                detector.check([0], self._phase)
                end = time.monotonic() + self._slice
            next(moments)
        return word


# The rows of all ranks, of which many are equal.


def grouped(rows: Mapping[int, Row], key: str) -> list[tuple[str, list[int]]]:
    """Digest and ranks, for each different digest."""
    ranks_of: dict[str, list[int]] = {}
    for rank, row in rows.items():
        ranks_of.setdefault(row[key], []).append(rank)
    return list(ranks_of.items())


def grouped_parts(rows: Mapping[int, Row]) -> dict[str, list[int]]:
    """The ranks by digest, for each different part of the ranks' tables."""
    ranks_of: dict[str, list[int]] = {}
    for digests, ranks in grouped(rows, "table"):
        for digest in digests.split():
            ranks_of.setdefault(digest, []).extend(ranks)
    return ranks_of
