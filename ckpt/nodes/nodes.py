"""The nodes that a run's checkpoints are spread over, as one process sees them, and where the bytes of a file are. No torch."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from ckpt.concurrency import map_tasks
from ckpt.errors import CkptError, CorruptError, NotFoundError, StorageError, UsageError
from ckpt.io_backends.protocol import Backend

from .parity import ParitySource

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
    strict: bool = False
    """What one node does not answer is an error, in reads too: for removing, which has to reach all."""
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
        """What each node answers. With ``reachable``, those that are away are left out, and ``further`` ones asked, too; unless all nodes
        have to answer."""
        reachable = reachable and not self.strict
        asked = [n for n in range(self.total if reachable else len(self.nodes)) if not (reachable and self.is_away(n))] or [self.own]
        answers, errors = self.ask_each(question, asked)
        for node, err in errors.items():
            if not reachable or node == self.own:
                raise err
            self.lost(node, err)
        return answers

    def ask_each(self, question: Callable[[int], R], asked: Sequence[int]) -> tuple[dict[int, R], dict[int, StorageError]]:
        """What these nodes answer, asked at once, and why others do not: an error of one keeps no other from being asked."""
        answers, errors = dict[int, R](), dict[int, StorageError]()

        def ask(node: int) -> None:
            try:
                answers[node] = question(node)
            except StorageError as err:
                errors[node] = err

        map_tasks(ask, asked, _THREADS, "ckpt-nodes")
        return {node: answers[node] for node in asked if node in answers}, errors


# Where the bytes of a file are, nearest first: here, on other nodes, computed from parity, at the root.
#
# Damage: whoever compares digests evicts what was wrong and reads again. That is taken as: the place that gave these bytes gave wrong ones;
# the next read of this range goes to the next place. After the last, the first is asked again, so that real damage is reported.


FilePlace = Backend | ParitySource
"""Where a file is read, or computed."""


class NodeReader:
    """What the nodes have below ``prefix`` (empty, or ending in a slash)."""

    def __init__(self, nodes: NodeSet, prefix: str) -> None:
        self.nodes = nodes
        self.prefix = prefix
        self.parity = ParitySource(self)
        self._lock = threading.Lock()
        self._listed: dict[str, dict[str, dict[int, int]]] = {}
        """What nodes have in a folder, by its name: as of the first read of a file that is not here."""
        self._distrusted: dict[str, list[tuple[int, int, int]]] = {}
        """Ranges of a path that a place has wrong, or could not give: first byte, byte behind the last, its number."""

    @property
    def url(self) -> str:
        return f"{self.nodes.url}/{self.prefix}".rstrip("/")

    def node(self, node: int) -> Backend:
        """What one node has, or the root of the run."""
        if node == ROOT:
            root = self.root()
            if root is None:
                raise UsageError("these nodes have no root", where=self.url)
            return root
        return self.nodes.node(node).below(self.prefix)

    def root(self) -> Backend | None:
        """What the root of the run has below the same prefix, if there is one to read from."""
        return self.nodes.fallback(self.prefix) if self.nodes.fallback is not None else None

    def name(self, node: int) -> str:
        """What messages call a node, or another place."""
        return {ROOT: "root", PARITY: "parity"}.get(node) or self.nodes.node(node).name

    # ---- who has what

    def holders(self, prefix: str = "") -> dict[str, dict[int, int]]:
        """For each file whose path starts with ``prefix``, its size on each node that has it. Nodes that do not answer are left out."""
        listed = self.nodes.ask_all(lambda node: list(self.node(node).list_prefix(prefix)), reachable=True)
        sizes: dict[str, dict[int, int]] = {}
        for node, entries in listed.items():
            for entry in entries:
                sizes.setdefault(entry.path, {})[node] = entry.size
        return sizes

    def _folder(self, name: str) -> dict[str, dict[int, int]]:
        with self._lock:
            if name not in self._listed:
                self._listed[name] = self.holders(f"{name}/" if self.prefix else "")
            return self._listed[name]

    def nearby(self, paths: Collection[str]) -> set[str]:
        """Those of ``paths`` that a node of this machine has."""
        own = self.nodes.node(self.nodes.own)
        here = [n for n in range(self.nodes.total) if n == self.nodes.own or self.nodes.node(n).host == own.host]
        near: set[str] = set()
        for folder in {path.rpartition("/")[0] for path in paths}:
            for node in here:
                with suppress(CkptError):
                    near |= {entry.path for entry in self.node(node).list_prefix(f"{folder}/")}
        return near.intersection(paths)

    def places(self, path: str) -> Iterator[int]:
        """Where to read a file, in order."""
        yield self.nodes.own
        if self.nodes.total > 1:
            having = self._folder("data").get(path, {}) if path.startswith("data/") else None
            yield from (n for n in self.nodes.by_nearness() if n != self.nodes.own and (having is None or n in having))
            if having is not None:
                yield PARITY
        if self.nodes.fallback is not None:
            yield ROOT

    # ---- reading

    def read(
        self,
        path: str,
        offset: int,
        length: int | None,
        read: Callable[[FilePlace], R],
        nbytes: Callable[[R], int],
        begun: Callable[[], bool] = lambda: False,
    ) -> R:
        """What ``read`` gives for the first place that can give the bytes; ``nbytes``: how many these are. ``begun``: whether bytes of a
        place that failed are used."""
        last = 1 << 63 if length is None else offset + length
        wrong = [node for start, stop, node in self._distrusted.get(path, ()) if start < last and offset < stop]
        failed: CkptError | None = None
        for node in self.places(path):
            if node in wrong:
                continue
            try:
                result = read(self._place(node))
            except NotFoundError:
                continue
            except (StorageError, CorruptError) as err:  # it is away, or its file is cut off
                if node not in (ROOT, PARITY, self.nodes.own) and isinstance(err, StorageError):
                    self.nodes.lost(node, err)
                if not begun():  # else the next place that gives wrong bytes would be taken for this one
                    self._distrust(path, offset, last, node)
                failed = failed or err
            else:
                if "data/" in path:
                    self.nodes.count(node, nbytes(result))
                return result
        if wrong:  # of all that have it nobody has it right: whoever compares says so
            self._distrusted.pop(path, None)
            return self.read(path, offset, length, read, nbytes, begun)
        hint = "`ckpt ls` lists the checkpoints there; nodes that are gone had the only copy if none was finished"
        raise failed or NotFoundError("no node that answers has this file", where=f"{self.url}/{path}", hint=hint)

    def _place(self, node: int) -> FilePlace:
        return self.parity if node == PARITY else self.node(node)

    def read_from_any(self, path: str, offset: int, view: memoryview) -> None:
        """Fill ``view`` from the nearest node that has the file: nothing is computed, and the root is not asked."""
        failed: CkptError | None = None
        having = self._folder(path.partition("/")[0]).get(path, {})
        for node in (n for n in self.nodes.by_nearness() if n in having):
            try:
                self.node(node).read_into(path, offset, view)
            except (StorageError, CorruptError) as err:
                if node != self.nodes.own and isinstance(err, StorageError) and not isinstance(err, NotFoundError):
                    self.nodes.lost(node, err)
                failed = failed or err
            else:
                return
        raise failed or NotFoundError("no node that answers has this file", where=f"{self.url}/{path}")

    def evict(self, path: str, start: int, stop: int) -> None:
        """The place that would be read now gave wrong bytes, and is not read for this range any more."""
        wrong = [node for first, last, node in self._distrusted.get(path, ()) if first < stop and start < last]
        left = [node for node in self.places(path) if node not in wrong and self._has(node, path)]
        if not left:
            return
        self._place(left[0]).evict(path, start, stop - start if stop < 1 << 63 else None)
        if len(left) > 1:
            log.warning("%s: node %s gave wrong bytes; node %s is read", f"{self.url}/{path}", *map(self.name, left[:2]))
        self._distrust(path, start, stop, left[0])

    def _distrust(self, path: str, start: int, stop: int, node: int) -> None:
        with self._lock:
            self._distrusted.setdefault(path, []).append((start, stop, node))

    def _has(self, node: int, path: str) -> bool:
        with suppress(NotFoundError, StorageError):
            self._place(node).size(path)
            return True
        return False
