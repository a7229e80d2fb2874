"""One rank's part of one publication: capture the state into a segment, and seal it. Saves in the background capture in the same way
(``engine/save/capture.py``); there is no second one.

    training         publish() │ forward │ backward │ optimizer.step() waits for the rest
    ckpt-publish               └── copy into the segment ──► digests, seal ──► all ranks sealed? ──► the version is there
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ckpt import units
from ckpt.engine.devices import refuse_in_graph
from ckpt.engine.save.capture import Capture
from ckpt.engine.save.plan import RankPlan, plan_image
from ckpt.engine.save.replicas import Replicas, compare_replicas
from ckpt.engine.save.staging import CaptureFence, Outcome, Segment, StagedBatches
from ckpt.engine.save.tensor_source import ChunkSource
from ckpt.errors import ConsistencyError, DeadlineError
from ckpt.net.call import Call, grouped
from ckpt.net.channel import Row
from ckpt.plan import tree
from ckpt.plan.ownership import ChunkAssignment, TensorSpec, assign, replicated_chunks
from ckpt.plan.tables import Table, join_tables, split_tables
from ckpt.plan.values import join_values
from ckpt.state import lazy
from ckpt.state.collect import Collected
from ckpt.state.tensors import LocalShard, LocalTensor
from ckpt.telemetry.spans import SaveMeter, Spans, SpanTable, Stall
from ckpt.text import parse_json

from .holdings import Manifest, Version, digest_of_blob, own_blob
from .registry import VersionRegistry
from .segment import MemorySegment, PublishedSegment, SegmentLayout


@dataclass(frozen=True, kw_only=True, eq=False)
class ImagePlan:
    """What this rank publishes, as long as its state has the same tensors: where each box lies, the plan to capture them, and the table of
    the tensors that other ranks know too."""

    infos: tuple[TensorSpec, ...]
    aliases: dict[str, str]
    own: frozenset[str]
    layout: SegmentLayout
    plan: RankPlan
    table: bytes
    own_table: Table
    assignments: Mapping[str, ChunkAssignment]
    """How tensors that other ranks know too are cut where their replicas are compared; none if they are not."""
    replicated: Sequence[tuple[str, Sequence[int]]]

    @classmethod
    def of(cls, collected: Collected, rank: int, *, check_replicas: bool) -> ImagePlan:
        shard_table = collected.shard_table
        infos, own = tuple(t.info for t in shard_table.tensors.values()), frozenset(shard_table.own)
        layout = SegmentLayout.of(infos, rank)
        shared, alone = split_tables(infos, shard_table.aliases, own)
        assignments = assign(shared.tensors) if check_replicas else {}
        return cls(
            infos=infos,
            aliases=dict(shard_table.aliases),
            own=own,
            layout=layout,
            plan=plan_image(infos, [(b.tensor.name, b.box) for b in layout.all()]),
            table=shared.to_bytes(),
            own_table=alone,
            assignments=assignments,
            replicated=replicated_chunks(assignments, rank),
        )

    def fits(self, collected: Collected) -> bool:
        """Whether the state has the same tensors as when this was made."""
        shard_table = collected.shard_table
        return (
            len(self.infos) == len(shard_table.tensors)
            and all(a is t.info or a == t.info for a, t in zip(self.infos, shard_table.tensors.values(), strict=True))
            and self.aliases == shard_table.aliases
            and self.own == frozenset(shard_table.own)
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedImage:
    """All that a publication needs of the state; the caller's thread makes it."""

    image: ImagePlan
    state: bytes
    """The values, as JSON; equal on all ranks."""
    own: bytes
    """What this rank alone has; empty if that is nothing."""
    segment: MemorySegment
    capture: Capture
    fence: CaptureFence
    on_devices: bool
    spans: Spans
    meter: SaveMeter
    began: float
    """By ``time.perf_counter``: when it was asked for."""

    def counts(self) -> tuple[int, int]:
        """Bytes of this rank that are captured, and in all."""
        return min(self.meter.captured, self.meter.total), self.meter.total


def prepare_image(
    collected: Collected,
    image: ImagePlan,
    take: Callable[[int], MemorySegment],
    where: str,
    *,
    lazy: bool,
    threads: int,
    beat: Callable[[], None],
    spans: Spans,
    stall: Stall,
    began: float,
) -> PreparedImage:
    """Make room in a segment, and capture what nothing waits for before it changes. Talks to no other rank."""
    tensors = collected.shard_table.tensors
    if devices := collected.shard_table.devices:
        refuse_in_graph(devices, where)
    segment = take(image.layout.nbytes)
    memory = torch.from_numpy(segment.data)
    batches = image.plan.batches[0]
    stage = StagedBatches([Segment(batches, 0, 0, None)], [memory], [segment])
    source = ChunkSource(image.plan, tensors)
    meter = SaveMeter()
    meter.total = sum(batch.length for batch in batches)
    # Whoever publishes eagerly waits for the copy alone: to hash on the way takes less in all, and blocks for longer.
    filled = segment.digests.filled if lazy else None
    capture = Capture(source, collected.shard_table, stage, spans, meter, filled=filled)
    if lazy:
        capture.capture_unfenced(collected.fenced(), threads, beat)
    own = image.own_table
    return PreparedImage(
        image=image,
        state=tree.text(collected.state, sort_keys=False).encode(),
        own=own_blob(collected.own, own) if collected.own or own.tensors else b"",
        segment=segment,
        capture=capture,
        fence=CaptureFence(stall, stage.backoff),
        on_devices=bool(devices),
        spans=spans,
        meter=meter,
        began=began,
    )


def capture_image(prepared: PreparedImage, threads: int, beat: Callable[[], None]) -> None:
    """Copy the state into the segment; after it the state may change. Raises nothing: the fence does."""
    error: BaseException | None = None
    try:
        prepared.capture.run(threads, beat)
    except BaseException as err:  # noqa: BLE001  the publication fails with it
        error = err
    prepared.fence.down(error)


def seal_image(prepared: PreparedImage, call: Call, threads: int) -> PublishedSegment:
    """Seal what was captured."""
    with prepared.spans.span("digest", prepared.segment.digests.left):
        digests = prepared.segment.seal(threads, call.check_failures)
    layout = prepared.image.layout
    return PublishedSegment(prepared.segment, layout, digests, f"rank {call.group.rank} of {call.url}, process {os.getpid()}")


def replica_digests(prepared: PreparedImage, call: Call, threads: int) -> dict[str, str]:
    """What the leader compares replicas by: digests of what was captured, which is not sealed yet. The state may be another one by now."""
    image, segment = prepared.image, prepared.segment

    def captured(name: str) -> LocalTensor:
        boxes = image.layout.boxes[name]
        memory = torch.from_numpy(segment.data)
        parts = []
        for placed in boxes:
            raw = memory[placed.start : placed.start + placed.nbytes].view(lazy.RAW[placed.tensor.dtype.itemsize])
            parts.append(LocalShard(placed.box, raw.view(placed.box.shape)))
        return LocalTensor(boxes[0].tensor, parts, name)

    replicas = Replicas(image.assignments, image.replicated, captured, call.group.rank)
    with prepared.spans.span("replicas"):
        replicas.hash(threads, call.check_failures)
    return replicas.row(call)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """What a publication did on this rank: ``bytes`` of its part; ``seconds`` from the call until the version was there, of which training
    waited ``blocked``: in ``publish``, in ``fence`` and in optimizers' steps.

    ``spans.sums`` has the seconds and bytes of its phases: ``plan`` (what the state consists of), ``capture`` (the copy; the threads' sum),
    ``digest`` (of what was not hashed while it was captured), ``replicas`` (digests for the comparison with other ranks) and ``agree``
    (waiting for the other ranks); none with ``CKPT_SPANS=off``."""

    version: Version
    bytes: int
    seconds: float
    blocked: float
    spans: SpanTable

    def __str__(self) -> str:
        return f"published step {self.version.step}, {units.size(self.bytes)}, in {units.duration(self.seconds)}"


class Publication:
    """A version on its way, as :meth:`Source.publish` gives it. ``step`` is the caller's."""

    def __init__(self, step: int, fence: CaptureFence) -> None:
        self.step = step
        self.report: PublishReport | None = None
        """Once the version is there."""
        self.captured: Outcome[None] = fence.captured
        self.sealed: Outcome[Version] = Outcome()
        self._fence = fence

    def __repr__(self) -> str:
        return f"<ckpt publication of step {self.step}: {'done' if self.sealed.done() else 'going on'}>"

    def fence(self) -> None:
        """Wait until the state may change again. Call it before you change the state by hand; an optimizer's step does it by itself.

        Raises what capturing raised.
        """
        self._fence.wait()

    def done(self) -> bool:
        """Whether the version is there for sinks, or publishing has failed."""
        return self.sealed.done()

    def result(self, timeout: float | None = None) -> Version:
        """The version, once every rank has sealed its part.

        Raises:
            TimeoutError: it is still in progress after ``timeout`` seconds.
            ConsistencyError: the state was changed while it was captured, or the ranks' states do not make one.
            RankFailedError, DeadlineError: another rank failed, died or hangs.
        """
        self._fence.backoff.haste.set()
        return self.sealed.result(timeout)


def conclude(publication: Publication, version: Version, prepared: PreparedImage) -> None:
    """The version is there."""
    publication.report = PublishReport(
        version=version,
        bytes=prepared.meter.total,
        seconds=time.perf_counter() - prepared.began,
        blocked=prepared.fence.stall.seconds,
        spans=prepared.spans.table(),
    )
    publication.sealed.set_result(version)


def settle(publication: Publication) -> None:
    """Wait until it has ended, and raise its error if nobody has asked for it."""
    publication._fence.backoff.haste.set()
    publication.sealed.error()
    if not (publication.sealed.error_reported or publication.captured.error_reported):
        publication.sealed.result()


def not_sealed(name: str, seconds: float) -> DeadlineError:
    """A sink asks for a version that this rank does not have within some seconds."""
    return DeadlineError(f"this rank has not sealed version {name} within {seconds:g} s", hint="look whether the trainer hangs")


# The leader's part of a publication: do the parts that all ranks have sealed make one state? Then it is a version.


class VersionLeader:
    """Completes versions, and has them registered. ``endpoints``: where each rank gives its pieces."""

    def __init__(self, registry: VersionRegistry, endpoints: Mapping[int, Row]) -> None:
        self.registry = registry
        self._endpoints = endpoints
        self._tables = ""
        """What the tensors of the last version came from; as long as it is the same, so are they."""
        self._names = ""
        """The digest of their names, sorted."""

    def complete(self, call: Call, number: int, rows: dict[int, Row]) -> Row:
        """Make the version ``number`` of what all ranks have sealed; what they need to serve it, and the numbers that are dropped."""
        steps = {rank: row["step"] for rank, row in rows.items()}
        if len(set(steps.values())) > 1:
            raise ConsistencyError(
                f"the ranks publish different steps: {steps}", where=call.url, hint="publish the same step on every rank"
            )
        compare_replicas(call, rows)
        digests = [d for row in rows.values() for d in (row["table"], row["state"], row["own"]) if d is not None]
        new = [d for d in dict.fromkeys(digests) if not self.registry.knows(d)]
        call.fetch_all(new)
        blobs = {d: call.fetch(d) for d in new}
        known = {d: blobs[d] if d in blobs else self.registry.blob(d) for d in digests}
        tables = tuple((digest, tuple(ranks)) for digest, ranks in grouped(rows, "table"))
        own = {rank: row["own"] for rank, row in rows.items() if row["own"] is not None}
        states = grouped(rows, "state")
        state = states[0][0]
        if len(states) > 1:
            joined = json.dumps(join_values([(ranks, parse_json(known[digest])) for digest, ranks in states])).encode()
            state = digest_of_blob(joined)
            blobs[state] = joined
        own_tables = [parse_json(known[digest])["table"] for digest in own.values()]
        same = json.dumps([tables, own_tables])
        if same != self._tables:
            joined_tables = join_tables([(ranks, Table.from_bytes(known[digest])) for digest, ranks in tables], stored=False)
            names = {*joined_tables.tensors}
            names.update(t.name for text in own_tables for t in Table.from_bytes(text.encode()).tensors)
            self._tables, self._names = same, call.leave(json.dumps(sorted(names)).encode())
        manifest = Manifest(
            run=self.registry.run,
            step=next(iter(steps.values())),
            number=number,
            ranks=call.group.ranks,
            tables=tables,
            state=state,
            own=own,
            segments={rank: (row["segment"][0], row["segment"][1]) for rank, row in rows.items()},
        )
        holders = [{"rank": rank, **self._endpoints[rank], "at": row["at"]} for rank, row in rows.items()]
        version, oldest = self.registry.add(manifest, holders, blobs)
        return {"version": version.to_json(), "oldest": oldest, "names": self._names}
