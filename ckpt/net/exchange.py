"""One exchange of one rank: all its streams to and from the others, served by one thread."""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckpt.errors import CkptError, ConsistencyError, DeadlineError
from ckpt.plan.tables import ranks_text

from .channel import failed_on
from .connections import Listener, Listening
from .dialing import Dial, Dialer
from .endpoints import exhausted, from_here
from .streams import OPENED, PURPOSE, READY, REFUSED, Feed, Hello, Incoming, Outgoing, Receiving, Refused, Sending, Views
from .wire import Prover, Proving

CONNECTIONS = 64
"""Ranks that one rank sends to at the same time, if one can end after another: each takes a file descriptor. Feeds end only all together,
so all of them have to be connected."""
TURN = 0.2
"""Seconds: a rank looks at its deadlines, and gives a sign of life, about this often."""

LOOK = 1.0
"""Seconds between two looks for failures of ranks that this one has no connection with."""
_SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)

log = logging.getLogger("ckpt")


@dataclass(eq=False)
class Port:
    """Where a rank is reached: what all exchanges of one call share. ``look`` finds what a rank left in the job's store, or None."""

    rank: int
    ranks: int
    timeout: float
    secret: bytes
    look: Callable[[str], Any]
    network: str = ""
    """Equal for ranks that have the same interfaces."""
    listener: Listener | None = None
    early: list[tuple[Hello, socket.socket]] = field(default_factory=list)
    """Streams from ranks that are ahead of this one."""
    met: set[tuple[int, int]] = field(default_factory=set)
    """Number of the exchange and rank: of streams that have begun. A rank may come at several addresses, and is served at the first."""
    failure: dict[str, Any] | None = None
    """The error of another rank that ended an exchange of this one."""

    def close(self) -> None:
        for _, sock in self.early:
            sock.close()
        self.early.clear()
        if self.listener is not None:
            self.listener.close()


class Exchange:
    """The streams of one exchange. ``run`` it, then ``close`` it, whatever happened."""

    def __init__(
        self, port: Port, number: int, outgoing: Mapping[int, Outgoing], incoming: Mapping[int, Incoming], alive: Callable[[], None]
    ) -> None:
        self.port = port
        self.me = port.rank
        self.number = number
        self.alive = alive
        self.outgoing = {r: views for r, views in outgoing.items() if views.size}
        self.incoming = {r: views for r, views in incoming.items() if views.size}
        # Each rank begins with its right-hand neighbour and goes round. If all began with rank 0, it would be flooded
        # while the others wait.
        self.queue = deque(sorted((r for r in self.outgoing if r != self.me), key=lambda r: (r - self.me) % (max(self.outgoing) + 1)))
        self.most = len(self.outgoing) if any(isinstance(views, Feed) for views in self.outgoing.values()) else CONNECTIONS
        self.looked = self.checked = 0.0
        self.heard = time.monotonic()
        self.pause = 0.005
        self.moved = dict.fromkeys([*self.outgoing, *self.incoming], time.monotonic())
        """When something last moved to or from each rank."""
        self.sending: set[Sending] = set()
        self.awake = False
        """Whether it has been woken and has not yet looked."""
        self.thread = threading.get_ident()
        try:
            self.selector = selectors.DefaultSelector()
            self.woken, self.waker = socket.socketpair()
        except OSError as err:
            raise exhausted("no connection between ranks can be made", err) from err
        self.dialer = Dialer(self.selector, port.timeout)
        for sock in (self.woken, self.waker):
            sock.setblocking(False)
        for views in self.outgoing.values():
            if isinstance(views, Feed):
                views.wake = self.wake

    def wake(self) -> None:
        """From any thread: there is something to send, or an error to find."""
        if not self.awake:
            self.awake = True
            if threading.get_ident() != self.thread:  # this one looks before it waits
                with suppress(OSError):  # all is over
                    self.waker.send(b"w")

    def start(self) -> None:
        """Before the first turn."""
        # What a rank has for itself needs no connection
        out, into = self.outgoing.pop(self.me, None), self.incoming.pop(self.me, None)
        if (out.size if out else 0) != (into.size if into else 0):
            raise ConsistencyError(f"rank {self.me} does not expect what it has for itself")
        if isinstance(out, Views) and isinstance(into, Views):
            into.fill(out)
        if self.port.listener is not None:
            self.port.listener.attach(self.selector)
        self.selector.register(self.woken, selectors.EVENT_READ, self.woken)
        waiting, self.port.early = self.port.early, []
        for hello, sock in waiting:
            self._meet(hello, sock)

    def run(self) -> None:
        """Move everything that is left. Raises as ``Peers.exchange`` says."""
        while self.outgoing or self.incoming:
            self.turn(TURN)

    def turn(self, timeout: float) -> None:
        """Move what can be moved; wait at most ``timeout`` seconds until something can."""
        self._connect_more()
        for dial in self.dialer.advance():
            raise self._unreachable(dial)
        if self.awake:
            self._look()
        timeout = self.dialer.wait(timeout)
        for key, _ in self.selector.select(min(self.pause, timeout) if self.queue and not self._full() else timeout):
            self._step(key.data)
        if time.monotonic() - self.checked >= TURN:
            self._check_deadlines()
            self.alive()
            self.checked = time.monotonic()

    def close(self) -> None:
        if self.port.listener is not None:
            self.port.listener.detach()
        for key in list(self.selector.get_map().values()):
            if key.data is not self.woken:
                self._drop(key.data)
        self.selector.close()
        self.woken.close()
        self.waker.close()

    # ---- connections

    def _full(self) -> bool:
        return len(self.outgoing) - len(self.queue) >= self.most

    def _connect_more(self) -> None:
        """Begin what there is room for."""
        # The store is asked ever more rarely for ranks that have not come to this call.
        if self._full() or time.monotonic() - self.looked < self.pause:
            return
        for _ in range(len(self.queue)):
            rank = self.queue.popleft()
            entry = self.port.look(f"{rank}")
            if entry is None:
                self.queue.append(rank)
                continue
            addresses = [(host, port) for host, port in entry["addresses"]]
            hello = Hello(number=self.number, rank=self.me, size=self.outgoing[rank].size, announcement=self.outgoing[rank].announcement)
            self.dialer.begin(
                rank,
                from_here(addresses, same_network=entry["network"] == self.port.network),
                partial(Prover, bytes.fromhex(entry["secret"]), PURPOSE, f"rank {rank}", hello.pack()),
                self.outgoing[rank],
            )
            self.moved[rank] = time.monotonic()
            if self._full():
                return
        self.looked = time.monotonic()
        self.pause = min(2 * self.pause, max(0.05, self.port.ranks / 4096))

    def _meet(self, hello: Hello, sock: socket.socket) -> None:
        """A rank has said what it has for this one."""
        rank, key = hello.rank, (hello.number, hello.rank)
        # A rank dials several addresses and may connect at more than one. The first connection that greets is served,
        # the others are closed; the other side drops them too when it gets an answer.
        if key in self.port.met:
            sock.close()
            return
        # That rank is already in the next exchange. Its connection is kept until this one is over.
        if hello.number > self.number:
            self.port.early.append((hello, sock))
            return
        views = self.incoming.get(rank)
        expected, unit = (views.size, views.unit) if views else (0, "bytes")
        if hello.number < self.number or views is None or hello.size != expected:
            with suppress(OSError):  # it is gone already
                sock.send(REFUSED)
            sock.close()
            raise ConsistencyError(
                f"rank {rank} has {hello.size} {unit} for rank {self.me}, which expects {expected} (exchange {self.number})"
            )
        opened = bool(hello.announcement) and views.open(hello.announcement)
        try:
            sock.send(OPENED if opened else READY)
        except OSError as err:  # it has not begun, and connects again if it can
            log.debug("rank %d closed a connection before it was answered: %s", rank, err)
            sock.close()
            return
        self.port.met.add(key)
        self.moved[rank] = time.monotonic()
        self.selector.register(sock, selectors.EVENT_READ, Receiving(rank, sock, views))

    # ---- streams

    def _step(self, stream: Sending | Receiving | Proving | Listening | socket.socket) -> None:
        listener = self.port.listener
        if isinstance(stream, Listening) and listener is not None:
            for client in listener.accept(stream):
                self._meet(Hello.unpack(client.said), client.sock)
        elif isinstance(stream, socket.socket):
            with suppress(BlockingIOError):
                self.woken.recv(4096)
            if self.awake:
                self._look()
        elif isinstance(stream, Proving) and listener is not None:
            if listener.greet(stream):
                self._meet(Hello.unpack(stream.said), stream.sock)
        elif isinstance(stream, Receiving):
            self._move(stream, self.incoming)
        elif isinstance(stream, Sending):
            self._send(stream)

    def _look(self) -> None:
        """Send what there is now, as far as it goes; the rest when there is room again."""
        # The flag is cleared before the queues are looked at. Cleared after it, an entry that a thread puts in between would wake nobody.
        self.awake = False  # from now on who has something wakes again; what was there before is found below
        self.alive()
        for stream in list(self.sending):
            if stream.ready and stream.writes:
                self._send(stream)

    def _send(self, stream: Sending) -> None:
        if stream.sock.fileno() < 0:  # another connection to that rank was answered in this turn
            return
        greeted, ready = stream.greeted, stream.ready
        try:
            self._move(stream, self.outgoing)
        except Refused:
            views = self.outgoing[stream.rank]
            what = f"rank {self.me} has {views.size} {views.unit} for rank {stream.rank}"
            raise ConsistencyError(f"{what}, which expects another number (exchange {self.number})") from None
        if stream.sock.fileno() < 0:
            return
        if stream.greeted and not greeted:
            self.dialer.connected(stream)
        if stream.ready and not ready:
            for other in self.dialer.answered(stream):
                self._drop(other)
            self.sending.add(stream)
        events = selectors.EVENT_WRITE if stream.writes else selectors.EVENT_READ
        if self.selector.get_key(stream.sock).events != events:
            self.selector.modify(stream.sock, events, stream)

    def _move(self, stream: Sending | Receiving, table: dict[int, Outgoing] | dict[int, Incoming]) -> None:
        try:
            done = stream.step()
        except BlockingIOError:
            return
        except OSError as err:
            self._drop(stream)
            if not isinstance(stream, Sending) or stream.ready:
                raise self._lost(stream.rank, err) from err
            self.dialer.failed(stream, err)
            if stream.greeted and (failed := self._failed(stream.rank)) is not None:
                raise failed from err
            return
        if isinstance(stream, Receiving) or stream.ready:  # to connect is no progress: who listens need not be that rank
            self.moved[stream.rank] = time.monotonic()
        if done:
            self._drop(stream)
            del table[stream.rank]

    def _drop(self, stream: Sending | Receiving) -> None:
        with suppress(KeyError):
            self.selector.unregister(stream.sock)
        stream.sock.close()
        if isinstance(stream, Sending):
            self.sending.discard(stream)

    # ---- what goes wrong

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self.port.listener is not None:
            self.port.listener.tick()
        # A rank that has nothing to send to or get from this one at the moment owes it nothing: only those that are waited for can be late.
        waiting = {*(r for r, views in self.outgoing.items() if not views.idle), *self.incoming}
        if self._full():
            waiting -= {*self.queue} - {*self.incoming}  # it is their turn later
        silent = [r for r in waiting if now - self.moved[r] >= self.port.timeout]
        if silent:
            tried = "; ".join(f"rank {r} at {dial}" for r in silent if (dial := self.dialer.dials.get(r)) is not None)
            raise DeadlineError(
                f"nothing moved to or from {ranks_text(silent)} for {self.port.timeout:g} s" + (f" ({tried})" if tried else ""),
                hint="look whether they died or hang; a larger Job(timeout=) gives a slow network more time",
            )
        # While there are ranks without a connection to this one: it would not see one break. Raises the error of a rank that failed.
        # A connected rank that dies closes its socket. Of the others only the job's store can tell, and asking costs
        # a round trip, so it is asked seldom: each second, and less often in very large jobs.
        apart = bool(self.queue or self.dialer.dials) or any((self.number, rank) not in self.port.met for rank in self.incoming)
        if apart and now - self.heard >= max(LOOK, self.port.ranks / 1024):
            failed = self._failed("any")
            self.heard = now + 10 * (time.monotonic() - now)  # where the store is far away nothing moves meanwhile
            if failed is not None:
                raise failed

    def _failed(self, rank: int | str) -> CkptError | None:
        """What a rank, or ``any``, left in the store about the error that ended its exchange, if it did."""
        # A rank that fails leaves its error in the store before it closes its connections. So the cause is looked for
        # first, and "the connection broke" is said only where there is none.
        report = self.port.failure = self.port.look(f"failed/{rank}")
        return failed_on(report["rank"], report) if report is not None else None

    def _lost(self, rank: int, why: OSError) -> CkptError:
        """The error for a rank whose connection broke."""
        if (failed := self._failed(rank)) is not None:
            return failed
        likely = "it or its machine died, or the network lets nothing through" if why.errno in _SILENCE else "it probably died"
        return DeadlineError(f"the connection to rank {rank} broke ({why}): {likely}", hint=f"look at the log of rank {rank}")

    def _unreachable(self, dial: Dial) -> CkptError:
        """The error for a rank that was reached at none of its addresses."""
        return self._failed(dial.rank) or DeadlineError(
            f"rank {dial.rank} cannot be reached ({dial})",
            hint=f"look at the log of rank {dial.rank}: a process that has ended does not answer. If it runs, look for a firewall, "
            "and choose the network by CKPT_SOCKET_IFNAME",
        )
