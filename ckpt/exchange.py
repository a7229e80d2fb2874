"""One exchange of one rank: all its streams to and from the others, served by one thread."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .errors import CkptError, ConsistencyError, DeadlineError
from .plan.tables import ranks_text
from .relay import Feed
from .streams import HELLO, MAGIC, READY, REFUSED, Greeting, Incoming, Outgoing, Receiving, Refused, Sending, Views
from .told import failed_on

CONNECTIONS = 64
"""Ranks that one rank sends to at the same time, if one can end after another: each takes a file descriptor. Feeds end only all together,
so all of them have to be connected."""
CONNECT_SECONDS = 5.0
"""After this long the next address of a rank is tried."""
TURN = 0.2
"""Seconds: a rank looks at its deadlines, and gives a sign of life, about this often."""

log = logging.getLogger("ckpt")


@dataclass(eq=False)
class Port:
    """Where a rank is reached: what all exchanges of one call share. ``look`` finds what a rank left in the job's store, or None."""

    rank: int
    ranks: int
    timeout: float
    secret: bytes
    look: Callable[[str], Any]
    listener: socket.socket | None = None
    early: list[tuple[int, int, int, socket.socket]] = field(default_factory=list)
    """Number of the exchange, rank, size: of streams from ranks that are ahead of this one."""
    told: dict[str, Any] | None = None
    """The error of another rank that ended an exchange of this one."""

    def close(self) -> None:
        for *_, sock in self.early:
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
        self.queue = deque(sorted((r for r in self.outgoing if r != self.me), key=lambda r: (r - self.me) % (max(self.outgoing) + 1)))
        self.most = len(self.outgoing) if any(isinstance(views, Feed) for views in self.outgoing.values()) else CONNECTIONS
        self.hosts: dict[int, deque[tuple[str, int]]] = {}
        self.secrets: dict[int, bytes] = {}
        self.looked = self.checked = 0.0
        self.pause = 0.005
        self.selector = selectors.DefaultSelector()
        self.moved = dict.fromkeys([*self.outgoing, *self.incoming], time.monotonic())
        """When something last moved to or from each rank."""
        self.connecting: dict[Sending, float] = {}
        self.sending: set[Sending] = set()
        self.awake = False
        """Whether it has been woken and has not yet looked."""
        self.thread = threading.get_ident()
        self.woken, self.waker = socket.socketpair()
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
        self._copy_own()
        if self.port.listener is not None:
            self.port.listener.setblocking(False)
            self.selector.register(self.port.listener, selectors.EVENT_READ)
        self.selector.register(self.woken, selectors.EVENT_READ, self.woken)
        waiting, self.port.early = self.port.early, []
        for said in waiting:
            self._meet(*said)

    def run(self) -> None:
        """Move everything that is left. Raises as ``Peers.exchange`` says."""
        while self.outgoing or self.incoming:
            self.turn(TURN)

    def turn(self, timeout: float) -> None:
        """Move what can be moved; wait at most ``timeout`` seconds until something can."""
        self._connect_more()
        if self.awake:
            self._look()
        for key, _ in self.selector.select(min(self.pause, timeout) if self.queue and not self._full() else timeout):
            self._step(key.data)
        if time.monotonic() - self.checked >= TURN:
            self._check_deadlines()
            self.alive()
            self.checked = time.monotonic()

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            if key.data is not None and key.data is not self.woken:
                self._drop(key.data)
        self.selector.close()
        self.woken.close()
        self.waker.close()

    def _copy_own(self) -> None:
        """What a rank has for itself needs no connection."""
        out, into = self.outgoing.pop(self.me, None), self.incoming.pop(self.me, None)
        if (out.size if out else 0) != (into.size if into else 0):
            raise ConsistencyError(f"rank {self.me} does not expect what it has for itself")
        if isinstance(out, Views) and isinstance(into, Views):
            into.fill(out)

    # ---- connections

    def _full(self) -> bool:
        return len(self.outgoing) - len(self.queue) >= self.most

    def _connect_more(self) -> None:
        """Begin what there is room for. The store is asked ever more rarely for ranks that have not come to this call."""
        if self._full() or time.monotonic() - self.looked < self.pause:
            return
        for _ in range(len(self.queue)):
            rank = self.queue.popleft()
            found = self.port.look(f"{rank}")
            if found is None:
                self.queue.append(rank)
                continue
            self.secrets[rank] = bytes.fromhex(found["secret"])
            self.hosts[rank] = deque((host, found["port"]) for host in found["hosts"])
            self._connect(rank, OSError("no address"))
            if self._full():
                return
        self.looked = time.monotonic()
        self.pause = min(2 * self.pause, max(0.05, self.port.ranks / 4096))

    def _connect(self, rank: int, why: OSError) -> None:
        """Try the next address of a rank."""
        while self.hosts[rank]:
            host, port = self.hosts[rank].popleft()
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            hello = HELLO.pack(MAGIC, self.secrets[rank], self.number, self.me, self.outgoing[rank].size)
            try:
                sock.connect((host, port))
            except BlockingIOError:
                pass
            except OSError as err:
                sock.close()
                why = err
                continue
            stream = Sending(rank, sock, hello, self.outgoing[rank])
            self.connecting[stream] = self.moved[rank] = time.monotonic()
            self.selector.register(sock, selectors.EVENT_WRITE, stream)
            self.sending.add(stream)
            return
        raise self._lost(rank, why)

    def _accept(self) -> None:
        assert self.port.listener is not None
        with suppress(BlockingIOError, ConnectionError):  # whoever it was is gone already
            sock, _ = self.port.listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.selector.register(sock, selectors.EVENT_READ, Greeting(sock, self.port.secret))

    def _meet(self, number: int, rank: int, size: int, sock: socket.socket) -> None:
        """A rank has said what it has for this one."""
        if number > self.number:
            self.port.early.append((number, rank, size, sock))
            return
        views = self.incoming.get(rank)
        expected, unit = (views.size, views.unit) if views else (0, "bytes")
        if number < self.number or views is None or size != expected:
            sock.send(REFUSED)
            sock.close()
            raise ConsistencyError(f"rank {rank} has {size} {unit} for rank {self.me}, which expects {expected} (exchange {self.number})")
        sock.send(READY)
        self.moved[rank] = time.monotonic()
        self.selector.register(sock, selectors.EVENT_READ, Receiving(rank, sock, views))

    # ---- streams

    def _step(self, stream: Sending | Receiving | Greeting | socket.socket | None) -> None:
        if stream is None:
            self._accept()
        elif isinstance(stream, socket.socket):
            self._woke()
        elif isinstance(stream, Greeting):
            self._greet(stream)
        elif isinstance(stream, Receiving):
            self._move(stream, self.incoming)
        else:
            self._send(stream)

    def _woke(self) -> None:
        with suppress(BlockingIOError):
            self.woken.recv(4096)
        if self.awake:
            self._look()

    def _look(self) -> None:
        """Send what there is now, as far as it goes; the rest when there is room again."""
        self.awake = False  # from now on who has something wakes again; what was there before is found below
        self.alive()
        for stream in list(self.sending):
            if stream.ready and stream.writes:
                self._send(stream)

    def _greet(self, stream: Greeting) -> None:
        try:
            said = stream.step()
        except OSError as err:
            log.debug("a connection to rank %d was closed: %s", self.me, err)
            self._drop(stream)
            return
        if said is not None:
            self.selector.unregister(stream.sock)
            self._meet(*said, stream.sock)

    def _send(self, stream: Sending) -> None:
        try:
            self._move(stream, self.outgoing)
        except Refused:
            raise self._refused(stream.rank) from None
        if stream.ready:
            self.connecting.pop(stream, None)
        events = selectors.EVENT_WRITE if stream.writes else selectors.EVENT_READ
        if stream.sock.fileno() >= 0 and self.selector.get_key(stream.sock).events != events:
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
            self._connect(stream.rank, err)
            return
        self.moved[stream.rank] = time.monotonic()
        if done:
            self._drop(stream)
            del table[stream.rank]

    def _drop(self, stream: Sending | Receiving | Greeting) -> None:
        with suppress(KeyError):
            self.selector.unregister(stream.sock)
        stream.sock.close()
        if isinstance(stream, Sending):
            self.connecting.pop(stream, None)
            self.sending.discard(stream)

    # ---- what goes wrong

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for stream, began in list(self.connecting.items()):
            if not stream.greeted and self.hosts[stream.rank] and now - began > min(CONNECT_SECONDS, self.port.timeout / 4):
                self._drop(stream)
                self._connect(stream.rank, TimeoutError("no answer"))
        waiting = {*(r for r, views in self.outgoing.items() if not views.idle), *self.incoming}
        if self._full():
            waiting -= {*self.queue} - {*self.incoming}  # it is their turn later
        silent = [r for r in waiting if now - self.moved[r] >= self.port.timeout]
        if silent:
            raise DeadlineError(
                f"nothing moved to or from {ranks_text(silent)} for {self.port.timeout:g} s",
                hint="look whether they died or hang; a larger timeout= gives a slow network more time",
            )

    def _lost(self, rank: int, why: OSError) -> CkptError:
        """The error for a rank that has closed its connections, with what it left in the store about it."""
        told = self.port.told = self.port.look(f"failed/{rank}")
        if told is None:
            return DeadlineError(f"rank {rank} cannot be reached, so it probably died ({why})", hint=f"look at the log of rank {rank}")
        return failed_on(told["rank"], told)

    def _refused(self, rank: int) -> CkptError:
        size, unit = self.outgoing[rank].size, self.outgoing[rank].unit
        return ConsistencyError(f"rank {self.me} has {size} {unit} for rank {rank}, which expects another number (exchange {self.number})")
