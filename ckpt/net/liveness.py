"""Connections that notice at once when a rank's process ends, although nothing travels: the kernel closes them with it.

    leader (position 0) ◄──── positions 1 … 63               each rank keeps a connection to its parent; whose connection ends is gone
       ▲  ▲  ▲
       │  │  └────────────── position 64 ◄──── 65 … 127       heads of teams, so that 16,384 ranks cost no process more than 318 connections
       │  └───────────────── position 128 ◄─── 129 … 191

A head tells the leader whom of its team it has lost, and its team if the leader is gone. That is enough: the leader waits for rows of all
ranks and raises when one of them is gone, and everybody else waits for the leader's word.

Signs of life through the store (:class:`FailureDetector`) stay the last resort: a process that hangs keeps its connection, and where no
connection can be made, as behind a firewall, there is none to end. A process that leaves says so first, and counts as closed, not as dead.

Nobody has departed before ``GRACE`` seconds. The last row or error of a rank goes through the store, and may be slower than the end of its
connection; and a rank that lives connects again, so that a reset on the way makes nobody dead.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ckpt.errors import CkptError, DeadlineError, RankFailedError
from ckpt.plan.tables import ranks_text

from .broadcast_tree import BroadcastTree
from .channel import TEAM, Row, WrittenKeys
from .connections import ConnectionServer
from .endpoints import listen, network, prepare
from .store import Store
from .wire import Channel, dial

GRACE = 0.25
"""Seconds from the end of a connection on, after which its rank has departed."""
_PATIENCE = 5.0
"""Seconds that a rank tries to connect to its parent."""
_PATIENCE_AGAIN = 0.25
"""The same for a parent whose connection has ended: most likely nobody listens there any more."""
_PURPOSE = "liveness"
_POSITION = struct.Struct("<I")
_MESSAGE = struct.Struct("<BI")
"""What has become of a rank, and its position."""
_DEPARTED, _CLOSED = 1, 2

log = logging.getLogger("ckpt")


class LivenessLinks:
    """This rank's connection to its parent, and those of its children to it. Ranks go by their positions in ``ranks``; the leader's is 0.

    Collective: every rank makes one, heads tell where they are reached (``where``), and each calls ``connect`` with what its parent tells.
    On the leader, ``on_death`` gets each rank that has died, in some thread.
    """

    def __init__(
        self,
        position: int,
        ranks: tuple[int, ...],
        timeout: float,
        *,
        store: str | None = None,
        on_death: Callable[[int], None] = lambda rank: None,
    ) -> None:
        """``store``: the host of the job's store, if it has one. Raises as ``ckpt.net.endpoints.listen``."""
        self._position = position
        self._ranks = ranks
        self._timeout = timeout
        self._on_death = on_death
        self._lock = threading.RLock()  # close() may come from the collector of garbage, wherever this thread is
        self._children: dict[int, Channel] = {}
        self._leaving: set[int] = set()
        """Who has said good-bye."""
        self._closing = threading.Event()
        self._ports = listen(store) if position % TEAM == 0 else []
        self._server: ConnectionServer | None = None
        self._parent: Channel | None = None
        self._thread: threading.Thread | None = None
        self.departed: dict[int, bool] = {}
        """Who has left or died, by position, and whether it said good-bye. Only ever added to."""

    # ---- connecting

    @property
    def parent(self) -> int:
        """The position of the rank that this one connects to; the leader's own for the leader."""
        return 0 if self._position % TEAM == 0 else self._position - self._position % TEAM

    def where(self) -> Row:
        """Where a head is reached; empty for other ranks."""
        return {"addresses": [port.getsockname()[:2] for port in self._ports], "network": network()} if self._ports else {}

    def connect(self, secret: bytes, head: Row) -> None:
        """Connect to the parent, which tells ``head``, and let the children connect. Where that cannot be, a rank that dies is noticed by
        its silence alone. All ranks have the ``secret``."""
        if self._ports:
            self._server = ConnectionServer(self._ports, secret, self._timeout, purpose=_PURPOSE, name="ckpt-liveness", serve=self._attend)
        if self._position == 0:
            return
        parent = self.parent

        def connection(patience: float) -> Channel:
            channel = dial(
                [(str(host), int(port)) for host, port in head["addresses"]],
                secret,
                min(self._timeout, patience),
                peer=f"rank {self._ranks[parent]}",
                purpose=_PURPOSE,
                same_network=head["network"] == network(),
            )
            channel.send(_POSITION.pack(self._position))
            prepare(channel.sock, self._timeout)  # a network that is away for some seconds has killed nobody
            return channel

        try:
            self._parent = connection(_PATIENCE)
        except (CkptError, OSError) as err:
            log.warning("a rank that dies is noticed after %g s without a sign of life, not at once: %s", self._timeout, err)
            return
        self._thread = threading.Thread(target=self._stay, args=(parent, connection), name="ckpt-liveness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say good-bye to all, and end the connections."""
        with self._lock:
            self._closing.set()
            channels = [*self._children.values(), *self._upwards()]
        for channel in channels:
            _tell(channel, _CLOSED, self._position)
        for channel in self._upwards():
            channel.close()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(_PATIENCE)
        if self._server is not None:
            self._server.close()
        for port in self._ports:
            port.close()

    def departure(self, positions: Collection[int], kind: str, url: str, phase: str) -> RankFailedError:
        """The error for ranks that have departed, while a call waits for them."""
        died = [p for p in positions if not self.departed[p]]
        if died:
            why, hint = "died, as its connection has ended", "look why that process ended: its output, and the machine's log of memory"
        else:
            why, hint = "has closed its end, and takes part no longer", "let all ranks make the same calls before one of them closes"
        ranks = sorted(self._ranks[p] for p in died or positions)
        error = RankFailedError(f"{kind}: {ranks_text(ranks)} {why} (phase {phase!r})", where=url, hint=hint)
        error.ranks, error.departed = tuple(ranks), True
        return error

    # ---- hearing

    def _stay(self, parent: int, connection: Callable[[float], Channel]) -> None:
        """Be connected to the parent until it has departed."""
        while self._parent is not None and not self._closing.is_set():
            self._listen_to(self._parent)
            if self._closing.is_set():
                return
            try:
                if parent in self._leaving:
                    self._closing.wait(GRACE)
                    break
                self._parent.close()
                self._parent = connection(_PATIENCE_AGAIN)
            except (CkptError, OSError):
                break
        self._depart(parent)

    def _attend(self, channel: Channel) -> None:
        """Serve a child until its connection ends."""
        (position,) = _POSITION.unpack(channel.receive(_POSITION.size))
        if not 0 < position < len(self._ranks):
            return
        with self._lock:
            self._children[position] = channel
        self._listen_to(channel)
        if not self._closing.wait(GRACE) and self._children.get(position) is channel:
            self._depart(position)

    def _listen_to(self, channel: Channel) -> None:
        """Hear who departs, until the connection ends."""
        channel.sock.settimeout(None)  # costs nothing while nothing comes; close() and the kernel wake it
        message = b""
        with suppress(OSError):
            while data := channel.sock.recv(_MESSAGE.size - len(message)):
                message += data
                if len(message) == _MESSAGE.size:
                    what, position = _MESSAGE.unpack(message)
                    message = b""
                    if what == _CLOSED:
                        self._leaving.add(position)
                    if what == _DEPARTED:
                        self._depart(position)

    def _depart(self, position: int) -> None:
        """A rank is not there any more; tell whoever cannot see it: the leader of one of the team, the team of the leader."""
        with self._lock:
            if self._closing.is_set() or position in self.departed or not 0 <= position < len(self._ranks):
                return
            closed = position in self._leaving
            self.departed[position] = closed
            channels = self._upwards() if position else [*self._children.values()]
        for channel in channels:
            if closed:
                _tell(channel, _CLOSED, position)
            _tell(channel, _DEPARTED, position)
        log.info("live: rank %d has %s", self._ranks[position], "closed its end" if closed else "died: its connection ended")
        if not closed and not self._position:
            self._on_death(self._ranks[position])

    def _upwards(self) -> list[Channel]:
        return [] if self._parent is None else [self._parent]


def _tell(channel: Channel, what: int, position: int) -> None:
    with suppress(OSError):
        channel.sock.sendall(_MESSAGE.pack(what, position))


# Finding ranks that died or hang.

Heard = Callable[[Collection[int]], dict[int, int]]
"""Counts the signs of life of ranks, by their positions in ``ranks``."""


@dataclass(eq=False)
class FailureDetector:
    """Finds ranks of which nothing was heard for the call's timeout."""

    kind: str
    url: str
    timeout: float
    ranks: Sequence[int]
    heard: Heard
    last: dict[int, tuple[int, float]] = field(default_factory=dict, init=False)
    began: float = field(default_factory=time.monotonic, init=False)

    def check(self, waiting_for: Collection[int], phase: str) -> None:
        """Raises:
        DeadlineError: of some of these ranks nothing was heard for too long."""
        beats = self.heard(waiting_for)
        now = time.monotonic()
        quiet = []
        for position in waiting_for:
            # A rank counts as silent from its last *change* of count on, by this machine's clock. The first look
            # finds a count but no time, so it counts from the beginning of the wait.
            if position not in self.last or self.last[position][0] != beats[position]:
                self.last[position] = (beats[position], now if position in self.last else self.began)
            if now - self.last[position][1] >= self.timeout:
                quiet.append(self.ranks[position])
        if quiet:
            raise silent(self.kind, self.url, phase, self.timeout, sorted(quiet))


def silent(kind: str, url: str, phase: str, timeout: float, ranks: list[int]) -> DeadlineError:
    """The error for ranks of which nothing was heard."""
    return DeadlineError(
        f"{kind}: nothing was heard of {ranks_text(ranks)} for {timeout:g} s (phase {phase!r})",
        where=url,
        hint="every rank must make the call, without `if rank == 0:`; look whether they died or hang; a larger Job(timeout=) gives slow "
        "storage more time; `ckpt ls` shows what is committed",
    )


# Which ranks take part in collective calls, and how they reach each other.


@dataclass(eq=False)
class Members:
    """The ranks that take part, as global ranks; the first is the leader. ``store`` is None for a single process."""

    rank: int
    ranks: tuple[int, ...]
    store: Store | None = None
    calls: int = field(default=0, kw_only=True)
    """How many calls they have made. Every rank makes the same ones in the same order, so the number names a call."""
    keys: WrittenKeys = field(default_factory=WrittenKeys, kw_only=True)

    links: LivenessLinks | None = field(default=None, kw_only=True)
    """Connections that notice who dies, where the ranks have made them."""
    tree: BroadcastTree | None = field(default=None, init=False)
    """Hands on what the leader has for all ranks; None for a single process."""
    saves: bool = field(default=False, init=False)
    """Whether a save of theirs was begun in the background, and nobody has waited for it yet."""
    leader: int = field(init=False)
    size: int = field(init=False)
    position: int = field(init=False)
    """Place of this rank among those that take part: what checkpoints know it by."""

    def __post_init__(self) -> None:
        self.leader, self.size = self.ranks[0], len(self.ranks)
        self.position = self.ranks.index(self.rank)
        if self.store is not None:
            self.tree = BroadcastTree(self.store, self.position, self.ranks)
