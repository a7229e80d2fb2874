"""The nodes that a run's checkpoints are spread over, as one process sees them. No torch."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ckpt.concurrency import map_tasks
from ckpt.errors import StorageError
from ckpt.io_backends.protocol import Backend

log = logging.getLogger("ckpt")

R = TypeVar("R")

ROOT, PARITY = -1, -2
"""In place of the number of a node: the root of the run, and what is computed from parity."""
AWAY_SECONDS = 30.0
"""For so long a node that did not answer is not asked for bytes that others have."""
_THREADS = 16
"""Nodes that are asked at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StorageNode:
    """A directory of one machine, or its memory. ``below`` opens what lies below a prefix, which ends in a slash unless it is empty."""

    name: str
    domain: str
    below: Callable[[str], Backend]
    ranks: tuple[int, ...] = ()
    """Those that run on it."""
    host: str = ""
    """The name of the machine."""
    in_memory: bool = False
    shared: bool = False
    """A directory that all machines see."""


@dataclass(eq=False)
class NodeSet:
    """All nodes in an order that every process has, and the number of this process's ``own``. ``url`` is the run's; ``fallback`` opens what
    the root of the run has below a prefix: a file of the same name there has the same bytes, since names bear the id of the save.

    ``further`` are read and never written to: the memory of machines where no rank runs, or disks behind the memory. Their numbers go on
    after those of ``nodes``."""

    url: str
    nodes: Sequence[StorageNode]
    own: int
    copies: int
    parity: int | None = None
    """How many domains a parity group has; None for copies."""
    further: Sequence[StorageNode] = ()
    fallback: Callable[[str], Backend] | None = None
    read_from: Counter[int] = field(default_factory=Counter)
    """Bytes of data files that this process has read, by the number of the node, ``PARITY`` or ``ROOT``."""
    _away: dict[int, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def domains(self) -> list[str]:
        return [node.domain for node in self.nodes]

    def node(self, number: int) -> StorageNode:
        """One of ``nodes``, or of ``further``."""
        count = len(self.nodes)
        return self.nodes[number] if number < count else self.further[number - count]

    @property
    def total(self) -> int:
        """How many there are to read from."""
        return len(self.nodes) + len(self.further)

    def by_nearness(self) -> list[int]:
        """All numbers: the own one, the disk of this machine, the memory of others, their disks; each machine begins with another one, so
        that not all read from the first. Those that did not answer a moment ago come last."""
        own, count = self.nodes[self.own], self.total

        def key(number: int) -> tuple[bool, bool, bool, bool, int]:
            node = self.node(number)
            return number != self.own, self.is_away(number), node.host != own.host, not node.in_memory, (number - self.own) % count

        return sorted(range(count), key=key)

    def place_of(self, number: int) -> str:
        """What a node is for this process: ``memory of this host``, ``disk of host b``."""
        node = self.node(number)
        if node.shared:
            return "local tier"
        machine = "this host" if node.host == self.nodes[self.own].host else f"host {node.host}"
        return f"{'memory' if node.in_memory else 'disk'} of {machine}"

    def count(self, node: int, nbytes: int) -> None:
        """So many bytes were read there; ``node`` may be ``PARITY`` or ``ROOT``."""
        with self._lock:
            self.read_from[node] += nbytes

    def is_away(self, node: int) -> bool:
        """Whether it did not answer a moment ago."""
        return time.monotonic() < self._away.get(node, 0.0)

    def lost(self, node: int, err: Exception) -> None:
        """It did not answer: others are asked first for a while."""
        first = node not in self._away
        self._away[node] = time.monotonic() + AWAY_SECONDS
        (log.warning if first else log.debug)("node %s is passed over: %s", self.node(node).name, err)

    def ask_all(self, question: Callable[[int], R], *, reachable: bool = False) -> dict[int, R]:
        """What each node answers, asked at once. With ``reachable``, those that are away are left out, and ``further`` ones asked, too."""
        asked = [n for n in range(self.total if reachable else len(self.nodes)) if not (reachable and self.is_away(n))] or [self.own]

        def ask(node: int) -> R | StorageError:
            try:
                return question(node)
            except StorageError as err:
                if not reachable or node == self.own:
                    raise
                self.lost(node, err)
                return err

        if len(asked) == 1:
            answers: Mapping[int, R | StorageError] = {asked[0]: ask(asked[0])}
        else:
            answers = dict(zip(asked, map_tasks(ask, asked, _THREADS, "ckpt-nodes"), strict=True))
        return {node: answer for node, answer in answers.items() if not isinstance(answer, StorageError)}
