"""Moves bytes between the ranks of one group, over TCP connections that nothing else uses: no process group, no collective.

Each rank listens on ports of its own and leaves its addresses and a secret in the job's store. A rank that has something for another
connects to it, so a job has as many connections as its plan has pairs of ranks, and only while bytes move. One thread serves them all.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

from ckpt import settings
from ckpt.concurrency import when_dropped
from ckpt.errors import CkptError, DeadlineError, GroupError, UsageError
from ckpt.plan.tables import ranks_text
from ckpt.text import parse_json

from .channel import FEW
from .connections import Listener
from .endpoints import listen, network
from .exchange import Exchange, Port
from .liveness import Members
from .store import Store
from .streams import HELLO, PURPOSE, Feed, Incoming, Inlet, Outgoing, Views, damaged, hash_of

log = logging.getLogger("ckpt")

Pieces = Mapping[int, Sequence[memoryview]]
"""Memory by the rank that gets it, or that it comes from."""
MoveSlices = Callable[[float], None]
"""Moves what can be moved, after waiting at most so many seconds until something can."""


class Peers:
    """The connections of one rank to the others of its group, for the exchanges of one collective call.

    All ranks make the same exchanges in the same order. Once an exchange has failed on a rank there are no further ones.
    """

    def __init__(self, group: Members, timeout: float, name: str = "peers") -> None:
        """``name`` tells these connections from others of the same call."""
        self._name = name
        self.call = group.calls
        self.ranks = group.ranks
        self._group = ref(group)  # a group that is not used any more is forgotten, and its connections with it
        self._store = group.store.within(timeout) if group.store is not None else None
        self._known: dict[str, Any] = {}
        """Where ranks are reached that have said so under one key."""
        self._number = 0
        self._broken: str | None = None
        self._closing = False
        self._busy = threading.Lock()
        secret = secrets.token_bytes(32)
        self._port = Port(group.rank, group.size, timeout, secret, self._look, network())
        if self._store is not None:
            self._port.listener = listener = Listener(listen(self._store.host), secret, timeout, PURPOSE, HELLO.size)
            when_dropped(self, listener.close)
            self._publish({"addresses": listener.addresses, "network": self._port.network, "secret": secret.hex()})

    def exchange(self, outgoing: Pieces, incoming: Pieces, *, alive: Callable[[], None] | None = None) -> None:
        """Send ``outgoing`` (rank → memory) and fill ``incoming``, contiguous memory in both; the views of one rank are one stream of
        bytes. Returns when all of it has arrived, here and at the other ranks.

        ``alive`` is called about five times a second; an error of it ends the exchange. May run in any thread.
        """
        sent = {rank: Views([*views, memoryview(hash_of(views).digest())]) for rank, views in outgoing.items()}
        digests = {rank: memoryview(bytearray(DIGEST_BYTES)) for rank in incoming}
        taken = {rank: Views([*views, digests[rank]]) for rank, views in incoming.items()}

        def check() -> None:
            for rank, views in incoming.items():
                if hash_of(views).digest() != bytes(digests[rank]):
                    raise damaged(f"rank {rank}")

        self._run(sent, taken, alive, lambda move: None, check)

    def relay(
        self, outgoing: Mapping[int, Feed], incoming: Mapping[int, Inlet], work: Callable[[MoveSlices], None], *, alive: Callable[[], None]
    ) -> None:
        """The same for what becomes known while it flows: until all feeds are closed and sent, and all inlets have what they expect.

        ``work`` puts into the feeds. It may do so itself, and call its argument often, which moves what can be moved and waits for that at
        most so many seconds; or start threads that do. ``alive`` is called also when somebody wakes a feed.
        """
        self._run(outgoing, incoming, alive, work, lambda: None)

    def _run(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        alive: Callable[[], None] | None,
        work: Callable[[MoveSlices], None],
        check: Callable[[], None],
    ) -> None:
        if not self._busy.acquire(blocking=False):
            raise UsageError("an exchange is in progress already", hint="wait for it")
        try:
            ranks = [*outgoing, *incoming]
            if self._broken is not None or self._closing:
                why = f"an earlier exchange failed: {self._broken}" if self._broken is not None else "the connections are closed"
                raise GroupError(why, hint="the next save or load makes new connections")
            strange = sorted(set(ranks) - set(self.ranks))
            if strange:
                raise UsageError(f"{ranks_text(strange)} is not in the group", hint=f"its ranks are {ranks_text(self.ranks)}")
            self._number += 1
            exchange: Exchange | None = None
            try:
                exchange = Exchange(self._port, self._number, outgoing, incoming, alive or (lambda: None))
                exchange.start()
                work(exchange.turn)
                exchange.run()
                check()
            except BaseException as err:
                # before connections close: the others look here why they did
                self._broken = err.message if isinstance(err, CkptError) else f"{type(err).__name__}: {err}"
                if self._store is not None:
                    where, hint = (err.where, err.hint) if isinstance(err, CkptError) else (None, None)
                    report = {"rank": self._port.rank, "type": type(err).__name__, "message": self._broken, "where": where, "hint": hint}
                    try:
                        for name in (f"{self._port.rank}", "any"):  # who looks for this rank, and who waits without a connection to it
                            self._leave(f"failed/{name}", self._port.failure or report)
                    except DeadlineError as lost:
                        log.warning("an exchange failed, and the other ranks could not be told: %s", lost)
                raise
            finally:
                if exchange is not None:
                    exchange.close()
        finally:
            self._busy.release()
            if self._closing or self._broken is not None:
                self._port.close()

    def close(self) -> None:
        """Stop listening: now, or at the end of the exchange that is going on."""
        self._closing = True
        if self._busy.acquire(blocking=False):
            try:
                self._port.close()
            finally:
                self._busy.release()

    # ---- what ranks leave in the store

    @property
    def _shared_store(self) -> Store:
        if self._store is None:
            raise GroupError("a group of one rank has no store", hint="only ranks of one group can exchange")
        return self._store

    def _publish(self, where: Mapping[str, Any]) -> None:
        """Say where this rank is reached: a few ranks under one key, so that all of them are found at once."""
        if len(self.ranks) > FEW:
            self._leave(f"{self._port.rank}", where)
            return
        self._shared_store.append(self._key("all"), json.dumps([self._port.rank, where]).encode() + b"\n")
        if self._port.rank == self.ranks[0]:
            self._remember(self._key("all"))

    def _leave(self, name: str, value: Any) -> None:
        self._shared_store.set(self._key(name), json.dumps(value).encode())
        self._remember(self._key(name))

    def _look(self, name: str) -> Any:
        """What a rank left under this name, or None."""
        if name in self._known:
            return self._known[name]
        if name.isdecimal() and len(self.ranks) <= FEW:
            (data,) = self._shared_store.appended([self._key("all")])
            self._known |= {f"{rank}": where for rank, where in map(parse_json, data.splitlines())}
            return self._known.get(name)
        value = self._shared_store.peek(self._key(name))
        return parse_json(value) if value is not None else None

    def _key(self, name: str) -> str:
        return f"{self.call}/{self._name}/{name}"

    def _remember(self, key: str) -> None:
        group = self._group()
        if group is not None and group.calls:
            group.keys.remember(key)


DIGEST_BYTES = 8


_peers: WeakKeyDictionary[Members, Peers] = WeakKeyDictionary()


def peers_of(group: Members, *, timeout: float | None = None) -> Peers:
    """The connections of this rank for the call of ``group`` that is going on; all ranks of the group ask for them in that call.

    Calls are numbered alike on all ranks, so those of a call that failed somewhere are never mixed with those of the next one. Asking does
    not wait for other ranks. What an earlier call had is closed, at the latest when its exchange ends. ``timeout`` in seconds.
    """
    known = _peers.get(group)
    if known is None or known.call != group.calls:
        if known is not None:
            known.close()
        known = _peers[group] = Peers(group, settings.timeout(timeout))
    return known
