"""Merging: ranks send each other the edges of flat shards, so that every stored chunk is whole rows (docs/decisions.md).

ByteCheckpoint moves whole tensors to one rank (v1) or stores up to 2d-1 boxes per shard (arXiv 2407.20143, section 3.2). Here less than a
row moves at each boundary between two ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ckpt.plan.flat_fragments import Fragment
from ckpt.transport.peers import Peers

from .plan import RankPlan
from .tensor_source import ChunkSource


class FragmentExchange:
    """The fragments of one rank and one save. ``take`` them before the state changes; ``run`` moves them; who writes a mixed chunk
    waits."""

    def __init__(self, plan: RankPlan, source: ChunkSource, peers: Peers) -> None:
        self.plan = plan
        self.source = source
        self.peers = peers
        self.mixed = self._numbers()
        self.moved = 0
        """Bytes that this rank sent."""
        self._outgoing: dict[int, list[memoryview]] = {}
        self._taken = threading.Event()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def _numbers(self) -> dict[tuple[str, int], int]:
        """Number in this rank's plan of each chunk that gets fragments."""
        wanted = {(f.name, f.chunk) for f in self.plan.receives}
        return {(c.name, c.number): i for i, c in enumerate(self.plan.chunks) if (c.name, c.number) in wanted}

    def take(self) -> None:
        """Copy what other ranks need out of the state."""
        try:
            for f in self.plan.sends:
                data = self.source.fragment(f.name, f.start, f.stop).numpy().data
                self._outgoing.setdefault(f.target, []).append(data)
                self.moved += len(data)
        except BaseException as err:
            self._error = err
            raise
        finally:
            self._taken.set()

    def run(self, alive: Callable[[], None]) -> None:
        """Send and receive, once all is taken. Raises what the transport raises, and so do all that wait."""
        try:
            self._taken.wait()
            if self._error is not None:
                raise self._error
            incoming: dict[int, list[memoryview]] = {}
            received: dict[int, list[tuple[int, int, memoryview]]] = {}
            for f in self.plan.receives:
                room = torch.empty(self._nbytes(f), dtype=torch.uint8).numpy().data
                incoming.setdefault(f.source, []).append(room)
                received.setdefault(self.mixed[f.name, f.chunk], []).append((f.start, f.stop, room))
            self.peers.exchange(self._outgoing, incoming, alive=alive)
            self._outgoing.clear()
            self.source.received = received
        except BaseException as err:
            self._error = err
            raise
        finally:
            self._done.set()

    def _nbytes(self, fragment: Fragment) -> int:
        return (fragment.stop - fragment.start) * self.source.tensors[fragment.name].info.dtype.itemsize

    def wait(self) -> None:
        """Wait until all fragments are here."""
        self._done.wait()
        if self._error is not None:
            raise self._error
