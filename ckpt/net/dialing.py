"""Reaches other ranks: their addresses are tried one after another, each a moment after the one before, until a rank answers at one. And
keeps connections for the next question.

An address that leads nowhere costs that moment (as in RFC 8305), not the timeout. A rank answers once it has come to the exchange, so an
address at which somebody listens is kept; another one is tried beside it after some seconds, as another machine may have it.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ckpt.concurrency import when_dropped
from ckpt.text import address_text

from .endpoints import EXHAUSTED, prepare
from .streams import Outgoing, Sending
from .wire import Prover

Address = tuple[str, int]

STAGGER = 0.25
"""Seconds after which the next address is tried while there is no connection."""
SILENT_SECONDS = 5.0
"""Seconds after which it is tried while there is one that has not been answered."""
_MOST_SILENT = 2
"""Connections that wait for an answer; with so many the rank is late."""
_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds before an address that can be tried again is."""


@dataclass(eq=False)
class Dial:
    """What was tried to reach one rank, and what is left."""

    rank: int
    prover: Callable[[], Prover]
    """Proves who this is at an address, and says what it has."""
    views: Outgoing
    left: deque[Address]
    next: float = 0.0
    """When the next address may be tried."""
    pause: float = _PAUSE
    open: dict[Sending, Address] = field(default_factory=dict)
    outcomes: dict[Address, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Each address and what happened there."""
        return ", ".join(f"{address_text(*address)}: {outcome}" for address, outcome in self.outcomes.items()) or "no address"


class Dialer:
    """The ranks that this one is reaching in one exchange."""

    def __init__(self, selector: selectors.BaseSelector, timeout: float) -> None:
        self._selector = selector
        self._timeout = timeout
        self.dials: dict[int, Dial] = {}

    def begin(self, rank: int, addresses: list[Address], prover: Callable[[], Prover], views: Outgoing) -> None:
        self.dials[rank] = Dial(rank, prover, views, deque(addresses))

    def advance(self) -> list[Dial]:
        """Often: try what is due. Those of which nothing is left to wait for."""
        now = time.monotonic()
        for dial in self.dials.values():
            # Addresses are tried in parallel with a delay between them (Happy Eyeballs, RFC 8305): a good address is used after
            # milliseconds, and one that drops packets delays the others by STAGGER instead of by a connect timeout.
            while dial.left and now >= dial.next and sum(stream.greeted for stream in dial.open) < _MOST_SILENT:
                self._try(dial, dial.left.popleft(), now)
        return [dial for dial in self.dials.values() if not dial.left and not dial.open]

    def wait(self, most: float) -> float:
        """Seconds until something is due, at most so many."""
        due = [dial.next for dial in self.dials.values() if dial.left]
        return min(most, max(0.0, min(due) - time.monotonic())) if due else most

    def connected(self, stream: Sending) -> None:
        """Somebody listens there, and has been told who this is."""
        dial = self.dials[stream.rank]
        dial.outcomes[dial.open[stream]] = "connected, no answer"
        dial.next = time.monotonic() + min(SILENT_SECONDS, self._timeout / 4)

    def answered(self, stream: Sending) -> list[Sending]:
        """This is the connection to that rank; what was tried beside it, to be closed."""
        dial = self.dials.pop(stream.rank)
        del dial.open[stream]
        return list(dial.open)

    def failed(self, stream: Sending, err: OSError) -> None:
        """This connection did not come about, or ended without an answer. Who listens may have had no room: that address is tried again."""
        dial = self.dials[stream.rank]
        address = dial.open.pop(stream)
        now = time.monotonic()
        # Refused before the greeting: nobody listens there, so the next address is due at once. Closed after it: somebody listens who had
        # no room or was not ready, and the same address is tried again, after pauses that double.
        if stream.greeted:
            dial.outcomes[address] = f"closed without an answer ({_why(err)})"
            self._again(dial, address, now)
        else:
            dial.outcomes[address] = _why(err)
            dial.next = now

    def _again(self, dial: Dial, address: Address, now: float) -> None:
        dial.left.append(address)
        dial.next = now + dial.pause
        dial.pause = min(2 * dial.pause, _LONGEST_PAUSE)

    def _try(self, dial: Dial, address: Address, now: float) -> None:
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as err:
            dial.outcomes[address] = _why(err)
            if err.errno in EXHAUSTED:
                self._again(dial, address, now)
            return
        try:
            prepare(sock, self._timeout)
            sock.connect(address)
        except BlockingIOError:
            pass
        except OSError as err:
            sock.close()
            dial.outcomes[address] = _why(err)
            return
        stream = Sending(dial.rank, sock, dial.prover(), dial.views)
        self._selector.register(sock, selectors.EVENT_WRITE, stream)
        dial.open[stream] = address
        dial.outcomes[address] = "no connection yet"
        dial.next = now + STAGGER


def _why(err: OSError) -> str:
    return os.strerror(err.errno) if err.errno is not None else str(err)


# Connections over which nothing is going on, kept for the next question: making one takes longer than most answers.


class Closable(Protocol):
    """A connection that a pool can look at and let go of."""

    def is_open(self) -> bool:
        """Whether the other end is there, as far as can be seen, and has said nothing that nobody asked for."""
        ...

    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class IdleConnections(Generic[C]):
    """At most ``most`` connections, which are closed with the pool. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._idle: list[C] = []
        when_dropped(self, _close_all, self._idle)

    def take(self, connect: Callable[[], C]) -> C:
        """One that is open, else what ``connect`` makes."""
        return self.take_open() or connect()

    def take_open(self) -> C | None:
        """One that is open; None if there is none."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_open():
                return connection
            connection.close()

    def keep(self, connection: C) -> None:
        """Nothing goes on over it any more."""
        with self._lock:
            if len(self._idle) < self._most:
                self._idle.append(connection)
                return
        connection.close()

    def clear(self) -> None:
        """Close all of them."""
        with self._lock:
            idle = self._idle[:]
            self._idle.clear()
        _close_all(idle)


def _close_all(connections: list[C]) -> None:
    for connection in connections:
        connection.close()
