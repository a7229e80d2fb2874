"""Merging: ranks send each other the edges of flat shards, so that every stored chunk is whole rows (docs/decisions.md).

A flat shard begins and ends anywhere in the flattening of a tensor, here of 4 rows of 6 elements over 3 ranks:

    row 0   000000      rank 0 has elements 0 to 7, rank 1 has 8 to 15, rank 2 has 16 to 23
    row 1   001111      rank 0 sends its 2 elements of row 1 to rank 1, which writes rows 1 and 2
    row 2   111122      rank 2 sends its 2 elements of row 2 to rank 1
    row 3   222222      stored: row 0 by rank 0, rows 1 to 2 by rank 1, row 3 by rank 2: three boxes instead of six

Boundaries move to the nearest whole row, so who writes a mixed row follows from the plan (``plan/flat_fragments.py``), which every rank
has, and nobody asks. Fragments are copied out of the state before it may change; they travel beside the writing, and only a mixed chunk
waits for them.

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
    """The fragments of one rank and one save. ``take`` them before the state changes, and ``settle`` them; ``run`` moves them; who writes
    a mixed chunk waits."""

    def __init__(self, plan: RankPlan, source: ChunkSource, peers: Peers) -> None:
        self.plan = plan
        self.source = source
        self.peers = peers
        wanted = {(f.name, f.chunk) for f in plan.receives}
        self.mixed = {(c.name, c.number): i for i, c in enumerate(plan.chunks) if (c.name, c.number) in wanted}
        """Number in this rank's plan of each chunk that gets fragments."""
        self.moved = 0
        """Bytes that this rank sent."""
        self._fragments: list[torch.Tensor] | None = None
        """Copies of what is sent, on the devices where it lies in the state."""
        self._outgoing: dict[int, list[memoryview]] = {}
        self._taken = threading.Event()
        self._done = threading.Event()
        self._error: BaseException | None = None

    def take(self) -> None:
        """Copy what other ranks need out of the state. On a device the copy is only queued."""
        self._fragments = [self.source.fragment(f.name, f.start, f.stop) for f in self.plan.sends]

    def settle(self) -> None:
        """Have the copies, which are made now if they were not, on the host."""
        try:
            if self._fragments is None:
                self.take()
            for f, fragment in zip(self.plan.sends, self._fragments or (), strict=True):
                data = fragment.cpu().numpy().data
                self._outgoing.setdefault(f.target, []).append(data)
                self.moved += len(data)
            self._fragments = None
        except BaseException as err:
            self._error = err
            raise
        finally:
            self._taken.set()

    def run(self, alive: Callable[[], None]) -> None:
        """Send and receive, once all is taken. Raises what the transport raises, and so do all that wait."""
        try:
            # Nothing is sent before everything was copied out of the state. So the exchange, once it has begun, waits
            # for the network alone, and never for a capture that waits for training.
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
