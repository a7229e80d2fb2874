"""A save: agree, write, commit. Nothing is readable before the commit record is; what was committed before stays until then.

Two phases. *begin*: ranks collect their states, the leader checks that they make one checkpoint; nothing is written if they do not.
*write*: every rank writes its data files; the leader compares replicas, writes the index and commits.

Invariant: ``prepare`` needs no other rank and is all that has to happen in the caller's thread; ``run`` may go on in another one.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakKeyDictionary

import torch

from ckpt import settings, tree
from ckpt.adapters.collect import Collected, collect
from ckpt.concurrency.gc_paused import uncollected
from ckpt.concurrency.workers import Pending
from ckpt.coordination.call import Call
from ckpt.coordination.group import Group
from ckpt.coordination.members import Members
from ckpt.coordination.rows import Row
from ckpt.engine.devices import devices_of, refuse_in_graph, settle_devices
from ckpt.errors import CancelledError, CkptError
from ckpt.formats.native.ranks import encode_row
from ckpt.formats.native.writer import committed_id
from ckpt.io_backends import retries
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend
from ckpt.io_backends.retries import Retries
from ckpt.layout.layout import Layout
from ckpt.layout.mesh import coordinates
from ckpt.tracing.spans import Spans, limit_for
from ckpt.transport.peers import peers_of

from .capture import Capture
from .encoded_writer import EncodedWriter
from .flat_merge import FragmentExchange
from .leader import Leader, Tables
from .plan import APART, Plans, RankPlan
from .progress import ProgressWriter, Signer
from .replicas import Replicas
from .staging import Arena, StagedBatches, lay_out
from .tensor_source import ChunkSource
from .writer import Alive, RankWriter

log = logging.getLogger("ckpt")

_INLINE = 4096
"""Bytes of what a rank has of its own that are part of its message to the leader."""

When = Literal["lazy", "eager"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """What a save did. ``tensor_bytes`` is the whole checkpoint's, ``rank_bytes`` what this rank wrote (headers included),
    ``sent_bytes`` what it sent to other ranks to merge flat shards, ``seconds`` wall time from the call to the commit."""

    url: str
    id: str
    tensor_bytes: int
    rank_bytes: int
    sent_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    layout: Layout | None
    timeout: float
    check_replicas: bool
    threads: int
    merge: bool = True
    codec: str | None = None
    spans: bool = True
    staging: int | None = None
    metrics: Mapping[str, float] | None = None
    earlier: Callable[[], str | None] | None = None
    """Gives, on the leader, the id of a save that this one comes after, wherever that is; it must not take long."""


@dataclass(eq=False)
class Memory:
    """What a job keeps between its saves."""

    plans: Plans = field(default_factory=Plans)
    tables: list[Tables] = field(default_factory=list)
    arena: Arena = field(default_factory=Arena)


_memories: WeakKeyDictionary[Members, Memory] = WeakKeyDictionary()


def memory_of(group: Members) -> Memory:
    return _memories.setdefault(group, Memory())


def save_state(url: str, state: object, group: Group, options: SaveOptions) -> SaveReport:
    """Save; collective over ``group``."""
    with uncollected():  # until what the save needed is gone: else it would all be looked through once at the end
        return _save(Save(group.call("save", url, options.timeout), options), state)


def _save(save: Save, state: object) -> SaveReport:
    def prepare() -> None:
        save.prepare(state)
        settle_devices(devices_of(save.collected.placer.tensors.values()), save.call.url)

    return save.run(prepare)


class Heartbeat:
    """Signs of life of one save. Not the save itself: what it starts holds this, and a circle would keep the state's memory until the
    collector finds it."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.cancelled = threading.Event()

    def give(self) -> None:
        """A sign of life, from a rank that is meant to go on."""
        if self.cancelled.is_set():
            raise CancelledError("the save was cancelled", where=self.call.url)
        self.call.heartbeat()


class Save:
    """One rank's side of one save."""

    def __init__(self, call: Call, options: SaveOptions) -> None:
        self.began = time.perf_counter()
        self.call = call
        self.options = options
        self.rank = call.group.rank
        self.memory = memory_of(call.group)
        self.spans = Spans(on=options.spans, limit=limit_for(call.group.size))
        self.heartbeat = Heartbeat(call)
        self.signer = call.signer = Signer()
        interval = settings.progress()  # on all ranks: one that cannot be read fails the call on each of them
        self.progress = ProgressWriter(call, interval) if call.is_leader else None
        self.writer: RankWriter | None = None
        self.capture: Capture | None = None
        self.devices: set[torch.device] = set()
        self._rows: dict[int, Row] = {}
        self.busy: Mapping[int, float] = {}
        """Seconds that each rank, counted from 0, was busy with the save; on the leader, when it is committed."""
        self.retries = Retries()
        """What storage has refused on all ranks; on the leader, when it is committed."""
        self._retries = retries.total()

    # ---- in the caller's thread

    def prepare(self, state: object) -> None:
        """Collect the state and plan what this rank writes. Talks to no other rank.

        Raises:
            StateError, LayoutError, UsageError: as for ``ckpt.save``.
        """
        group = self.call.group
        self.backend: Backend = open_backend(self.call.url)
        plans = self.memory.plans
        with self.spans.span("collect"):
            self.collected: Collected = collect(state, rank=group.rank, ranks=group.ranks, layout=self.options.layout, shards=plans.shards)
            self.values = tree.text(self.collected.state).encode()
            self.own_values = json.dumps(self.collected.own).encode() if self.collected.own else b""
        with self.spans.span("plan"):
            self.plan: RankPlan = plans.plan(
                self.collected,
                rank=self.rank,
                position=group.ranks.index(self.rank),
                merge=self.options.merge and group.size > 1,
                codec=self.options.codec,
            )
            self.source = ChunkSource(self.plan, self.collected.placer.tensors)
        moves = self.plan.sends or self.plan.receives
        self.merge = FragmentExchange(self.plan, self.source, peers_of(group, timeout=self.options.timeout)) if moves else None
        checked = self.options.check_replicas and group.size > 1
        self.replicas = Replicas(self.plan, self.source, self.rank) if checked else None
        self.leader = Leader(
            self.call,
            self.backend,
            self.memory.tables,
            merge=self.options.merge,
            metrics=self.options.metrics,
            earlier=self.options.earlier,
        )

    def stage(self) -> Capture:
        """Make room for a copy of this rank's share: the state may change before it is written.

        Raises:
            UsageError: the staging budget is too small, or a CUDA graph is being captured.
            CkptError: there is no memory for it.
        """
        placer = self.collected.placer
        with self.spans.span("stage"):
            segments, nbytes = lay_out(self.plan.batches, self.options.staging)
            self.devices = devices_of(placer.tensors.values())
            refuse_in_graph(self.devices, self.call.url)
            stage = StagedBatches(segments, self.memory.arena.reserve(nbytes, next(iter(self.devices), None)))
        self.capture = Capture(self.plan, placer, self.source, stage, self.merge, self.replicas, self.spans)
        return self.capture

    # ---- in any thread

    def run(self, prepare: Callable[[], None]) -> SaveReport:
        """Agree, write, commit."""
        if self.progress is None:
            return self._run(prepare)
        self.progress.start()
        try:
            return self._run(prepare)
        finally:
            self.progress.stop()

    def _run(self, prepare: Callable[[], None]) -> SaveReport:
        with self.spans.span("agree"):
            begin = self.call.map_reduce("begin", lambda: self.begin(prepare), self.leader_check)
        if not self.call.is_leader and begin["storage"] is not None:
            self.backend.assume(begin["storage"])
        self.writer = writer = self.make_writer(begin["id"])
        try:
            found = self.call.map_reduce("write", lambda: self.write(writer), lambda rows: self.leader_commit(begin["id"], rows))
        except BaseException:
            # A leader that is slow, not dead, may commit later: files that it counts on must stay.
            if not self.call.undecided and not self.is_committed(begin["id"]):
                writer.discard()
            raise
        if self.call.is_leader:
            self.leader.remove_older(begin["id"])
            self._rows[0] = self.row_of_spans()
            self.busy = self.leader.keep_spans(begin["id"], self._rows)
            self.retries = Retries(*map(sum, zip(*(row.get("storage", (0, 0)) for row in self._rows.values()), strict=True)))
            self.call.linger()
        return self.report(found)

    def report(self, found: Row) -> SaveReport:
        seconds = time.perf_counter() - self.began
        if self.call.is_leader:
            nbytes, ranks = found["tensor_bytes"], self.call.group.size
            log.info("saved %s: %d bytes of tensors from %d ranks in %.2f s", self.call.url, nbytes, ranks, seconds)
        return SaveReport(
            url=self.call.url,
            id=found["id"],
            tensor_bytes=found["tensor_bytes"],
            rank_bytes=self.rank_bytes,
            sent_bytes=self.merge.moved if self.merge is not None else 0,
            seconds=seconds,
        )

    def begin(self, prepare: Callable[[], None]) -> Row:
        """Leave tables and values for the leader."""
        prepare()
        share = self.call.share
        row: Row = {
            "table": " ".join(map(share, self.plan.shared)),
            "state": share(self.values),
            "options": f"merge={self.options.merge} codec={self.options.codec}",
        }
        if self.collected.own and self.call.group.size > APART:
            found = encode_row(self.plan.own_tensors, self.collected.own)
            # No two ranks have the same row: most are too small to be worth messages of their own.
            row |= {"own_row": found.decode()} if len(found) <= _INLINE else {"own_blob": share(found)}
            row["own_bytes"] = sum(t.info.nbytes for n, t in self.collected.placer.tensors.items() if n in self.collected.placer.own)
        elif self.collected.own:
            row["own"] = share(self.plan.own)
            row["values"] = self.call.leave(self.own_values)
        return row

    def leader_check(self, rows: dict[int, Row]) -> Row:
        found = self.leader.check(rows)
        if self.progress is not None:
            self.progress.id = found["id"]
        return found

    def leader_commit(self, id: str, rows: dict[int, Row]) -> Row:
        self._rows = {i: rows[rank].get("spans", {}) for i, rank in enumerate(self.call.group.ranks)}
        if self.progress is not None:
            self.progress.stop()
        with self.spans.span("commit"):
            return self.leader.commit(id, rows)

    def make_writer(self, id: str) -> RankWriter:
        kind = RankWriter if self.options.codec is None else EncodedWriter
        writer = kind(
            backend=self.backend,
            plan=self.plan,
            source=self.source,
            id=id,
            position=self.call.group.ranks.index(self.rank),
            threads=max(self.options.threads, self.backend.io_hints.concurrency),
            alive=Alive(beat=self.heartbeat.give, during=self.call.alive_while),
            spans=self.spans,
            stage=self.capture.stage if self.capture is not None else None,
            merge=self.merge,
        )
        if isinstance(writer, EncodedWriter) and self.options.codec is not None:
            writer.codec = self.options.codec
            writer.doubtful = self.capture.doubtful if self.capture is not None else frozenset()
        self.signer.begin(writer, self.capture, self.plan.nbytes)
        return writer

    def write(self, writer: RankWriter) -> Row:
        exchange = self.exchange() if self.merge is not None else None
        try:
            files = writer.run()
        finally:
            if exchange is not None:
                exchange.wait()
        if exchange is not None:
            exchange.result()
        self.rank_bytes = sum(f.size for f in files)
        row: Row = {"files": [[f.path, f.size, f.header, f.digest] for f in files], "replicas": self.compared(writer)}
        if isinstance(writer, EncodedWriter):
            row["coded"] = writer.coded
        if not self.call.is_leader:
            row["spans"] = self.row_of_spans()
        return row

    def row_of_spans(self) -> Row:
        """This rank's spans, and what else of it explains them; empty if they are off."""
        row = self.spans.to_json()
        if not row:
            return row
        layout, meshes = self.options.layout, self.collected.placer.meshes
        at = coordinates((layout.mesh, *meshes) if layout is not None else meshes, self.rank)
        return {**row, "host": self.signer.host or None, "at": at, "storage": list(retries.total().since(self._retries)), **self.stalled()}

    def stalled(self) -> dict[str, int]:
        """For how many microseconds training has waited, where that is another time than the save's."""
        return {}

    def exchange(self) -> Pending[None]:
        """Move the edges of flat shards between ranks, beside the writing of what needs none."""
        assert self.merge is not None
        merge = self.merge
        if self.capture is None:
            merge.take()

        def move() -> None:
            with self.spans.span("exchange", merge.moved):
                merge.run(self.heartbeat.give)

        return Pending(move, "ckpt-exchange")

    def compared(self, writer: RankWriter) -> dict[str, str]:
        self.signer.hashing = True
        if self.replicas is None:
            return {}
        if self.capture is None:
            with self.spans.span("hash"):
                self.replicas.hash(self.options.threads, self.heartbeat.give)
        return {ranks: self.call.share(json.dumps(digests).encode()) for ranks, digests in self.replicas.found(writer.digests).items()}

    def is_committed(self, id: str) -> bool:
        """Whether this save's record is the committed one after all: then its files must stay."""
        try:
            return committed_id(self.backend) == id
        except CkptError:
            return True  # the storage cannot say; an orphan is better than a loss
