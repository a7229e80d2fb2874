"""A save, from top to bottom: prepare, begin, write, commit.

    every rank   prepare      the state's tensors get names, boxes and places; which chunks does this rank write?   → RankShare
                   │
                 begin        tables of all ranks ──► leader: do they make one checkpoint? ──► id
                   │
                 write        chunks ──► data files, hashed on the way; fragments of flat shards ⇄ other ranks
                   │
                 commit       digests of all ranks ──► leader: replicas equal? files there? ──► index, commit record → Committed

Nothing is readable before the commit record is there, which one atomic operation puts in its place; what was committed before stays until
then. An error on any rank ends the save on all of them (``net/call.py``), and every rank removes the files that it made. Only a
rank that does not know what the leader decided leaves them: a leader that is slow, not dead, may still commit, and needs them.

Invariant: ``prepare`` and ``stage`` talk to no other rank, but to open a base of which the job knows nothing, and are all that has to
happen in the caller's thread. A save in the background
(``background.py``) runs the other phases in a thread of its own, while a ``Capture`` copies the state.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ckpt.concurrency import Pending, gc_paused, program_ends, waiting_once
from ckpt.engine.devices import refuse_in_graph, settle_devices
from ckpt.errors import CkptError
from ckpt.formats.native.ranks import encode_row
from ckpt.formats.native.spans import write_spans
from ckpt.formats.native.writer import committed_id
from ckpt.io_backends import checks
from ckpt.io_backends.checks import Retries
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend
from ckpt.net.channel import Row
from ckpt.net.group import Group
from ckpt.plan import tree
from ckpt.plan.layout.mesh import coordinates
from ckpt.state.collect import Collected, collect
from ckpt.telemetry.progress import HASH, WRITE

from .capture import Capture
from .job import SaveJob, save_cache, wait_for_pending_save
from .leader import Leader
from .options import Extension, Mirrors, PartOnly, SaveOptions, SaveReport
from .plan import APART, RankPlan, WriteOptions
from .replicas import ReplicaCheck, Replicas
from .reuse import Incremental, Reuse, find_reuse
from .staging import StagedBatches, borrow, lay_out
from .tensor_source import ChunkSource, FragmentExchange
from .writer import EncodedWriter, RankWriter

log = logging.getLogger("ckpt")

OnFailure = Callable[[BaseException, str, float], None]
"""Takes an error, the phase that the save failed in, and how many seconds it had taken."""

_PATIENCE = 5.0
"""Seconds that a save that is waited for waits itself until what it replaced is removed."""
_INLINE = 4096
"""Bytes of a rank's own tensors and values that are part of its message to the leader."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankShare:
    """What one rank knows of its share before it talks to any other."""

    backend: Backend
    collected: Collected
    values: bytes
    """The state without its tensors, as JSON; equal on all ranks."""
    own_values: bytes
    """The values that only this rank has, as JSON; empty if it has none."""
    plan: RankPlan
    source: ChunkSource
    extensions: Sequence[Extension]
    fragments: FragmentExchange | None
    """Edges of flat shards that this rank sends or receives, if it does."""
    replicas: Replicas | None = None
    """What is compared with other ranks, if it is."""
    reuse: Reuse | None = None
    """What this rank refers to in the base, where saves may refer to anything; ``plan`` is what is left."""
    capture: Capture | None = None
    """Of a save in the background: the copy that is written in place of the state."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Committed:
    """The checkpoint is there. On the leader also what the ranks met on the way."""

    report: SaveReport
    busy: Mapping[int, float] = field(default_factory=dict)
    """Seconds that each rank, counted from 0, was busy with the save."""
    retries: Retries = field(default_factory=Retries)
    """What storage has refused on all ranks."""


def save_state(url: str, state: object, group: Group, options: SaveOptions, failed: OnFailure | None = None) -> SaveReport:
    """Save; collective over ``group``. ``failed`` is called if that fails, before the error is raised."""
    with save_cache(group).turn:
        wait_for_pending_save(group)  # which another thread has begun since the caller looked
        job = SaveJob.begin(group.call("save", url, options.timeout), options)
        try:
            # Paused until what the save needed is gone: else it would all be looked through once at the end.
            with gc_paused(), job.noted():
                with job.spans.span("agree"), job.call.phase("begin"):
                    share = prepare(job, state)
                    if devices := share.collected.shard_table.devices:
                        settle_devices(devices, url)
                    writer, leader = begin(job, share)
                return write_and_commit(job, share, writer, leader).report
        except BaseException as err:
            if failed is not None:
                failed(err, job.call.phase_name, time.perf_counter() - job.began)
            raise


def write_and_commit(job: SaveJob, share: RankShare, writer: RankWriter, leader: Leader | None) -> Committed:
    """The second half of a save, the same for one in the background."""
    try:
        with job.call.phase("write"):
            return commit(job, share, writer, leader, write(job, share, writer))
    except BaseException:
        # A leader that is slow, not dead, may commit later: files that it counts on must stay.
        with waiting_once(job.call.timeout, since=writer.journal.began):
            if not job.call.undecided and not _is_committed(share.backend, writer.id):
                writer.journal.discard()
        raise


def _is_committed(backend: Backend, id: str) -> bool:
    """Whether this save is the committed one, or may be: then its files must stay."""
    try:
        return committed_id(backend) == id
    except CkptError:
        return True  # the storage cannot say; an orphan is better than a loss


# ---- prepare: in the caller's thread


def prepare(job: SaveJob, state: object, *, background: bool = False) -> RankShare:
    """Collect the state and plan what this rank writes; in the ``background``, from a copy."""
    group, options, spans = job.call.group, job.options, job.spans
    backend = open_backend(job.call.url)
    with spans.span("collect"):
        collected = collect(
            state, rank=group.rank, ranks=group.ranks, layout=options.layout, shards=job.cache.plans.shards, part=options.part
        )
        values = tree.text(collected.state, sort_keys=False).encode()
        own_values = json.dumps(collected.own).encode() if collected.own else b""
    with spans.span("plan"):
        how = WriteOptions(
            rank=group.rank,
            position=group.position,
            merge_flat_shards=options.merge_flat_shards and group.size > 1,
            codec=options.codec,
            mirrors=options.mirrors,
        )
        plan = job.cache.plans.plan(collected, how)
        source = ChunkSource(plan, collected.shard_table.tensors)
    extensions: list[Extension] = []
    reuse, replicas = None, None
    if options.reusable:
        with spans.span("hash"):
            reuse = find_reuse(job, backend, collected.shard_table, source)
        if reuse.references or reuse.digests:
            plan = job.cache.plans.without(plan, reuse.remaining(), has_128=bool(reuse.digests))
            source = ChunkSource(plan, collected.shard_table.tensors)
        extensions.append(Incremental(job=job, backend=backend, reuse=reuse, plan=plan))
    if options.mirrors is not None:
        extensions.append(Mirrors(options.mirrors, plan.mirrored))
    if options.part is not None:
        extensions.append(PartOnly(options.part, collected))
    if options.check_replicas and group.size > 1:
        replicas = Replicas(plan.assignments, plan.replicated, source.tensor, group.rank, plan.chunks)
        extensions.append(ReplicaCheck(replicas, job.call, 0 if background else options.threads))
    job.meter.total = plan.nbytes
    moves = plan.sends or plan.receives
    fragments = None
    if moves:
        from ckpt.net.peers import peers_of

        fragments = FragmentExchange(plan, source, peers_of(group, timeout=options.timeout))
    return RankShare(
        backend=backend,
        collected=collected,
        values=values,
        own_values=own_values,
        plan=plan,
        source=source,
        extensions=extensions,
        fragments=fragments,
        replicas=replicas,
        reuse=reuse,
    )


def stage(job: SaveJob, share: RankShare) -> Capture:
    """Make room for a copy of this rank's share, so that the state may change before it is written."""
    shard_table, plan = share.collected.shard_table, share.plan
    with job.spans.span("stage"):
        if devices := shard_table.devices:
            refuse_in_graph(devices, job.call.url)
        # Lent memory is not pinned, as a device's copies need it; and the size of a coded file is not known yet.
        lends = share.backend.io_hints.in_memory and not devices and job.options.codec is None
        lent = borrow(share.backend, [file.size for file in plan.files]) if lends else ()
        if lent:
            batches = StagedBatches.in_lent(plan.batches, lent)
        else:
            segments, nbytes = lay_out(plan.batches, job.options.staging)
            arena = [job.cache.arena.reserve(nbytes, next(iter(devices), None))] if segments else []
            batches = StagedBatches(segments, arena * len(segments))
    job.meter.staged = True
    return Capture(share.source, shard_table, batches, job.spans, job.meter, fragments=share.fragments, replicas=share.replicas)


# ---- begin: do all ranks' states make one checkpoint?


def begin(job: SaveJob, share: RankShare) -> tuple[RankWriter, Leader | None]:
    """Agree on what is saved, and get ready to write it; on the leader also with what commits it later."""
    call, backend, options = job.call, share.backend, job.options
    row, leader = begin_row(job, share), None
    if call.is_leader:
        leader = Leader(call=call, backend=backend, options=options, known=job.cache.tables)
        decision = call.lead(row, leader.open)
    else:
        decision = call.follow(row)
        if decision["storage"] is not None:
            backend.assume(decision["storage"])
    if job.notes is not None:
        job.notes.id = decision["id"]
    job.meter.phase = WRITE
    kind = RankWriter if options.codec is None else partial(EncodedWriter, codec=options.codec)
    writer = kind(
        backend=backend,
        plan=share.plan,
        source=share.source,
        id=decision["id"],
        position=call.group.position,
        threads=max(options.threads, backend.io_hints.concurrency),
        beat=job.beat,
        alive_while=call.alive_while,
        spans=job.spans,
        meter=job.meter,
        stage=share.capture.stage if share.capture is not None else None,
        fragments=share.fragments,
    )
    for extension in share.extensions:
        extension.equip(writer)
    return writer, leader


def begin_row(job: SaveJob, share: RankShare) -> Row:
    """This rank's tables and values, which stay here until the leader asks for them."""
    call, collected, plan = job.call, share.collected, share.plan
    row: Row = {
        "table": " ".join(map(call.share, plan.shared)),
        "state": call.share(share.values),
        "options": f"merge_flat_shards={job.options.merge_flat_shards} codec={job.options.codec}",
    }
    for extension in share.extensions:
        extension.begin(row)
    if collected.own and call.group.size > APART:
        own_row = encode_row(plan.own_tensors, collected.own)
        # No two ranks have the same row: most are too small to be worth messages of their own.
        row |= {"own_row": own_row.decode()} if len(own_row) <= _INLINE else {"own_blob": call.share(own_row)}
        row["own_bytes"] = sum(t.info.nbytes for n, t in collected.shard_table.tensors.items() if n in collected.shard_table.own)
    elif collected.own:
        row["own"] = call.share(plan.own)
        row["values"] = call.leave(share.own_values)
    return row


# ---- write: this rank's data files


def write(job: SaveJob, share: RankShare, writer: RankWriter) -> Row:
    """Write this rank's data files and make them durable; meanwhile exchange the edges of flat shards. Gives what the leader has to know
    of them."""
    exchange = None if share.fragments is None else _start_exchange(job, share.fragments, settled=share.capture is not None)
    try:
        writer.run()
    finally:
        if exchange is not None:
            exchange.wait()
    if exchange is not None:
        exchange.result()
    job.meter.phase = HASH
    if share.capture is not None:
        share.capture.result()
        job.beat()
    row = writer.row()
    for extension in share.extensions:
        extension.written(row, writer)
    if not job.call.is_leader:
        row["spans"] = _row_of_spans(job, share)
    return row


def _start_exchange(job: SaveJob, fragments: FragmentExchange, *, settled: bool) -> Pending[None]:
    """Move the edges of flat shards between ranks, beside the writing of chunks that need none."""
    if not settled:
        fragments.settle()

    def move() -> None:
        with job.spans.span("exchange", fragments.moved):
            fragments.run(job.beat)

    return Pending(move, "ckpt-exchange")


def _row_of_spans(job: SaveJob, share: RankShare) -> Row:
    """This rank's spans, and what else of it explains them; empty if they are off."""
    row = job.spans.to_json()
    if row:
        layout, meshes = job.options.layout, share.collected.shard_table.meshes
        row["host"] = job.meter.host or None
        if meshes or layout is not None:
            row["at"] = coordinates((layout.mesh, *meshes) if layout is not None else meshes, job.call.group.rank)
        if any(refused := checks.total(job.refused_before)):
            row["storage"] = list(refused)
        if job.blocked is not None:
            row |= job.blocked.report()
    return row


# ---- commit: everything is there, so it becomes one checkpoint


def commit(job: SaveJob, share: RankShare, writer: RankWriter, leader: Leader | None, row: Row) -> Committed:
    """Agree that everything is written; the leader commits, and then removes what the checkpoint has replaced."""
    call, cache = job.call, job.cache
    spans: dict[int, Row] = {}

    def decide(rows: dict[int, Row]) -> int:
        assert leader is not None
        spans.update((position, rows[rank].get("spans", {})) for position, rank in enumerate(call.group.ranks))
        if job.notes is not None:
            job.notes.stop()
        with job.spans.span("commit"):
            leader.commit(rows)
        return leader.tensor_bytes

    tensor_bytes: int = call.follow(row) if leader is None else call.lead(row, decide)
    for extension in share.extensions:
        extension.committed(writer)
    if not job.options.reusable and cache.bases:
        cache.forget(share.backend.url)
    busy: Mapping[int, float] = {}
    if leader is not None:
        spans[0] = _row_of_spans(job, share)
        try:  # a failure harms nothing: the checkpoint is there
            busy = write_spans(leader.backend, leader.id, spans)
        except CkptError as err:
            log.warning("the spans of the save %s are not kept: %s", call.url, err)
        if call.group.size > 1:
            call.drain()
        # Remove what the checkpoint has replaced. The others have left this call, and no sign of life reaches them in the next one: so if
        # it takes long, it goes on in the background.
        removing, timeout = Pending(leader.remove_older, "ckpt-remove"), call.timeout
        if leader.backend.io_hints.in_memory or program_ends():  # the next save needs what this frees; or nobody waits later
            seconds = timeout
        else:
            seconds = 0.0 if job.blocked is not None else min(_PATIENCE, timeout / 2)
        if removing.wait(seconds):
            removing.result()
    report = SaveReport(
        url=call.url,
        id=writer.id,
        tensor_bytes=tensor_bytes,
        rank_bytes=sum(f.size for f in writer.files),
        sent_bytes=share.fragments.moved if share.fragments is not None else 0,
        reused_bytes=share.reuse.nbytes if share.reuse is not None else 0,
        mirrored_bytes=sum(f.size for f in writer.files[len(writer.files) - share.plan.mirrored :]),
        seconds=time.perf_counter() - job.began,
        requests=share.plan.requests,
        files=len(share.plan.batches),
    )
    if leader is None:
        return Committed(report=report)
    log.info("saved %s: %d bytes of tensors from %d ranks in %.2f s", call.url, tensor_bytes, call.group.size, report.seconds)
    refused = Retries(*map(sum, zip(*(row.get("storage", (0, 0)) for row in spans.values()), strict=True)))
    return Committed(report=report, busy=busy, retries=refused)
