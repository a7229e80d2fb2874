"""Ranks that want the same bytes read each of them once and send them to each other (ByteCheckpoint, arXiv 2407.20143, section 4.3).

Each rank computes from the layouts alone who reads what of the tensors that are replicated; the leader compares what ranks that share
have computed, and lets them share only if it is the same. Tensors go whole to one reader: the one that has least so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash

from ckpt.adapters.memory import as_bytes, raw_view, writable_bytes
from ckpt.adapters.tensors import LocalTensor
from ckpt.group import Row
from ckpt.peers import Peers

from .exact import Job

MOST = 32
"""Ranks that share; more replicas form several circles, so that a rank talks to few others."""
ROUND = 128 << 20
"""Bytes of tensors of one circle that move at once: what has no contiguous host memory goes through buffers of this size."""


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """A target that ``ranks`` have alike: ``reader`` reads it, and all have it after round ``turn``."""

    job: Job
    ranks: tuple[int, ...]
    reader: int
    turn: int


@dataclass(eq=False)
class Sharing:
    """What one rank shares with others in one load. ``mine``: jobs that it reads itself."""

    rank: int
    mine: list[Job] = field(default_factory=list)
    shared: list[_Shared] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    """For each circle of ranks what they share, for the leader to compare."""
    received: int = 0
    """Bytes that other ranks sent."""

    @property
    def rounds(self) -> int:
        return 1 + max((s.turn for s in self.shared), default=-1)

    @classmethod
    def plan(cls, jobs: Iterable[Job], rank: int) -> Sharing:
        """Divide the jobs of a rank. Changes nothing."""
        found = cls(rank)
        circles: dict[tuple[int, ...], list[Job]] = {}
        for job in jobs:
            ranks = circle(job.target, rank)
            if len(ranks) > 1:
                circles.setdefault(ranks, []).append(job)
            else:
                found.mine.append(job)
        for ranks, members in circles.items():
            found._divide(ranks, members)
        return found

    def _divide(self, ranks: tuple[int, ...], jobs: Sequence[Job]) -> None:
        load = dict.fromkeys(ranks, 0)
        digest = xxhash.xxh3_128()
        done = 0
        for job in sorted(jobs, key=lambda job: (-_nbytes(job.target), job.target.info.name)):
            reader = min(ranks, key=lambda r: (load[r], r))
            nbytes = _nbytes(job.target)
            load[reader] += nbytes
            boxes = [(p.box.offset, p.box.shape) for p in job.target.parts]
            digest.update(repr((job.target.info.name, job.target.info.dtype.name, job.entry.name, boxes)).encode())
            self.shared.append(_Shared(job, ranks, reader, done // ROUND))
            done += nbytes
            if reader == self.rank:
                self.mine.append(job)
        self.digests[",".join(map(str, ranks))] = digest.hexdigest()

    def alone(self) -> None:
        """Share nothing after all."""
        self.mine += [s.job for s in self.shared if s.reader != self.rank]
        self.shared.clear()

    def exchange(self, peers: Peers, rounds: int, alive: Callable[[], None]) -> None:
        """Send what this rank has read, and fill what others have. All ranks of the load take part, with the same ``rounds``.

        Raises:
            DeadlineError, RankFailedError: another rank died, hangs or failed.
        """
        for turn in range(rounds):
            outgoing: dict[int, list[memoryview]] = {}
            incoming: dict[int, list[memoryview]] = {}
            bounced: list[tuple[torch.Tensor, torch.Tensor]] = []
            for s in self.shared:
                if s.turn != turn:
                    continue
                if s.reader == self.rank:
                    views = [as_bytes(p.memory) for p in s.job.target.parts]
                    for other in s.ranks:
                        if other != self.rank:
                            outgoing.setdefault(other, []).extend(views)
                else:
                    incoming.setdefault(s.reader, []).extend(_room(p.memory, bounced) for p in s.job.target.parts)
            peers.exchange(outgoing, incoming, alive=alive)
            for memory, buffer in bounced:
                raw_view(memory).copy_(buffer.view(raw_view(memory).dtype).view(memory.shape))
            self.received += sum(len(v) for views in incoming.values() for v in views)
        for s in self.shared:
            for part in s.job.target.parts if s.reader != self.rank else ():
                if not part.memory.is_inference():
                    torch.autograd.graph.increment_version(part.memory)  # autograd did not see the bytes change


def _room(memory: torch.Tensor, bounced: list[tuple[torch.Tensor, torch.Tensor]]) -> memoryview:
    """Bytes to receive a target in: its own memory, or a buffer to be copied from."""
    if memory.numel() == 0:
        return memoryview(b"")
    straight = writable_bytes(memory)
    if straight is not None:
        return straight
    buffer = torch.empty(memory.numel() * memory.element_size(), dtype=torch.uint8)
    bounced.append((memory, buffer))
    return buffer.numpy().data


def _nbytes(target: LocalTensor) -> int:
    return sum(p.box.numel for p in target.parts) * target.info.dtype.itemsize


def circle(target: LocalTensor, rank: int) -> tuple[int, ...]:
    """The ranks, this one among them, that have just the same part of a tensor; at most ``MOST``."""
    if not target.parts or any(p.memory.is_conj() or p.memory.is_neg() for p in target.parts):
        return (rank,)
    holders = target.info.layout.tiling(target.info.shape).holders
    rows = holders[(holders == rank).any(axis=1)] if holders.ndim == 2 else holders[:0]
    if not len(rows) or rows.shape[1] == 1:
        return (rank,)
    ranks = np.unique(rows[0])
    if any(not np.array_equal(np.unique(row), ranks) for row in rows[1:]):
        return (rank,)
    at = int(np.searchsorted(ranks, rank)) // MOST * MOST
    return tuple(ranks[at : at + MOST].tolist())


def agreed(rows: dict[int, Row]) -> int:
    """Leader: in how many rounds the ranks share; 0 if they do not, or if ranks of one circle would share different things."""
    if any("shares" not in row for row in rows.values()):
        return 0
    for rank, row in rows.items():
        for ranks, digest in row["shares"].items():
            members = [int(r) for r in ranks.split(",")]
            if any(r not in rows or rows[r]["shares"].get(ranks) != digest for r in members if r != rank):
                return 0
    return max((int(row["rounds"]) for row in rows.values()), default=0)
