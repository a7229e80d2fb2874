"""Digests of replicated tensors, so that the ranks that have them can be compared: before a save commits, before a live state moves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from ckpt.concurrency import run_tasks
from ckpt.errors import ReplicaError
from ckpt.net.call import Call
from ckpt.net.channel import Row
from ckpt.plan.layout.geometry import Box
from ckpt.plan.ownership import ChunkAssignment
from ckpt.plan.tables import ranks_text
from ckpt.state.tensors import LocalTensor, as_bytes
from ckpt.text import parse_json

from .options import Extension
from .plan import Chunk
from .writer import RankWriter

_SHOWN = 3
"""Tensors that an error lists, and different values of each."""
GROUP = 64
"""Tensors that are hashed in one task."""


class Replicas:
    """Hashes the replicated tensors of one rank. Chunks that the rank writes are hashed when they are written.

    ``replicated``: names, and the chunks of each by which it is compared (``replicated_chunks``). ``tensor`` gives the memory of a name.
    ``written``: the chunks that are written, in the order of the digests that ``digests`` gets.
    """

    def __init__(
        self,
        assignments: Mapping[str, ChunkAssignment],
        replicated: Sequence[tuple[str, Sequence[int]]],
        tensor: Callable[[str], LocalTensor],
        rank: int,
        written: Sequence[Chunk] = (),
    ) -> None:
        self.assignments = assignments
        self.replicated = replicated
        self.tensor = tensor
        self.rank = rank
        self._written = {(c.name, c.number): i for i, c in enumerate(written)} if replicated else {}
        self._digests: dict[tuple[str, int], int] = {}
        self._hashed: set[str] = set()

    def elsewhere(self) -> frozenset[str]:
        """Names of the tensors of which this rank has bytes that only other ranks write."""
        return frozenset(name for name, numbers in self.replicated if any((name, i) not in self._written for i in numbers))

    def hash(self, threads: int, beat: Callable[[], None], names: AbstractSet[str] | None = None) -> None:
        """Hash what other ranks write: of ``names``, or all that was not. Reads the state's memory, so it must come before that changes."""
        todo = [each for each in self.replicated if each[0] not in self._hashed and (names is None or each[0] in names)]
        self._hashed.update(name for name, _ in todo)
        run_tasks([partial(self._hash, todo[i : i + GROUP], beat) for i in range(0, len(todo), GROUP)], threads, "ckpt-hash")

    def _hash(self, group: Sequence[tuple[str, Sequence[int]]], beat: Callable[[], None]) -> None:
        for name, numbers in group:
            assignment = self.assignments[name]
            for i in numbers:
                if assignment.merged:  # all that this rank has of it: its chunks are of other ranks' bytes, too
                    digest = xxhash.xxh3_64()
                    for part in self.tensor(name).parts:
                        digest.update(as_bytes(part.memory))
                    self._digests[name, i] = digest.intdigest()
                elif (name, i) not in self._written:
                    box = assignment.box(i)
                    data = as_bytes(self.tensor(name).gather(box)) if box.numel else b""
                    self._digests[name, i] = xxhash.xxh3_64_intdigest(data)
            beat()

    def row(self, call: Call, written: Sequence[int] = ()) -> dict[str, str]:
        """For the leader, which compares it (``compare_replicas``): digests of :meth:`digests`."""
        return {ranks: call.share(json.dumps(digests).encode()) for ranks, digests in self.digests(written).items()}

    def digests(self, written: Sequence[int]) -> dict[str, Mapping[str, str]]:
        """Digest of each replicated tensor, by its name and box, for each set of ranks that have the same ones. ``written``: digests of
        this rank's chunks by number.

        A set of ranks goes by the digest of its ranks: the ranks themselves would be as many as the job's, on each of them.
        """
        by_ranks: dict[str, dict[str, str]] = {}
        ids: dict[tuple[int, int], str] = {}
        for name, numbers in self.replicated:
            assignment = self.assignments[name]
            if assignment.merged:
                cell = int(np.flatnonzero((assignment.cell_holders == self.rank).any(axis=1))[0])
            else:
                cell = int(assignment.cell[numbers[0]])
            key = id(assignment.cell_holders), cell
            if key not in ids:
                ids[key] = xxhash.xxh3_64_hexdigest(assignment.cell_holders[cell].tobytes())
            # Two sources of digests: of chunks that this rank writes, the writer has computed them; of the others,
            # ``hash`` has, from this rank's own copy. Comparing across ranks therefore compares real bytes of every
            # replica.
            each = (self._digests[name, i] if (name, i) in self._digests else written[self._written[name, i]] for i in numbers)
            digests = b"".join(d.to_bytes(8, "big") for d in each)
            by_ranks.setdefault(ids[key], {})[self._label(name, numbers)] = xxhash.xxh3_64_hexdigest(digests)
        return dict(by_ranks)

    def _label(self, name: str, numbers: Sequence[int]) -> str:
        """The name of a tensor, and the box that is compared if it is not all of it: the same on all ranks that have it."""
        assignment = self.assignments[name]
        if assignment.merged or len(assignment.cell_holders) == 1:
            return name
        boxes = [assignment.box(i) for i in numbers]  # of one part of the tensor; a flat range is several boxes
        first = tuple(map(min, zip(*(box.offset for box in boxes), strict=True)))
        last = tuple(map(max, zip(*(box.end for box in boxes), strict=True)))
        return f"{name} {Box(first, tuple(end - at for at, end in zip(first, last, strict=True)))}"


@dataclass(frozen=True, eq=False)
class ReplicaCheck(Extension):
    """The leader compares what this rank has of replicated tensors with what others have. Of a save in the background, ``Capture`` hashes
    what other ranks write."""

    replicas: Replicas
    call: Call
    threads: int
    """That hash it, from the state's own memory; 0: it is hashed already."""

    def written(self, row: Row, writer: RankWriter) -> None:
        if self.threads:
            with writer.spans.span("hash"):
                self.replicas.hash(self.threads, writer.beat)
        row["replicas"] = self.replicas.row(self.call, writer.digests)


def replica_problems(variants: Sequence[tuple[list[int], Mapping[str, str]]]) -> list[str]:
    """Name the tensors that differ, and which ranks have the same bytes. ``variants``: ranks, and their digests by name."""
    problems = []
    for name in sorted({n for _, digests in variants for n in digests}):
        by_digest: dict[str | None, list[int]] = {}
        for ranks, digests in variants:
            by_digest.setdefault(digests.get(name), []).extend(ranks)
        if len(by_digest) > 1:
            text = " ≠ ".join(map(ranks_text, by_digest.values()))
            if len(by_digest) > _SHOWN:
                text = f"{len(by_digest)} different values on {ranks_text([rank for ranks in by_digest.values() for rank in ranks])}"
            problems.append(f"tensor {name}: {text}")
    return problems


def compare_replicas(call: Call, rows: Mapping[int, Row]) -> None:
    """Raise ReplicaError if ranks that have the same tensors have different bytes. Digests of tensors are fetched only where those of whole
    sets of ranks differ."""
    # Two levels, so that the common case costs one digest per set of ranks. Only where the digests of a set differ
    # are its per-tensor digests fetched, to name the tensors.
    sets: dict[str, dict[str, list[int]]] = {}
    for rank, row in rows.items():
        for ranks, digest in row["replicas"].items():
            sets.setdefault(ranks, {}).setdefault(digest, []).append(rank)
    differing = [by_digest for by_digest in sets.values() if len(by_digest) > 1]
    call.fetch_all(digest for by_digest in differing for digest in by_digest)
    problems = []
    for by_digest in differing:
        problems += replica_problems([(ranks, parse_json(call.fetch(d))) for d, ranks in by_digest.items()])
    if problems:
        more = len(problems) > _SHOWN
        raise ReplicaError(
            f"replicas differ: {'; '.join(problems[:_SHOWN])}{f'; and {len(problems) - _SHOWN:,} more tensors' if more else ''}",
            where=call.url,
            hint="parts of larger tensors need layout= with a rule for each (docs/layouts.md), and values that are meant to differ "
            "go into ckpt.PerRank; real replicas drift apart by unsynchronised gradients or buffers, or bad memory",
        )
