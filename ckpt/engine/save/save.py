"""A save, from top to bottom: prepare, begin, write, commit. Each phase takes the frozen value that the one before it gave.

    every rank   prepare      the state's tensors get names, boxes and places; which chunks does this rank write?   → Prepared
                   │
                 begin        tables of all ranks ──► leader: do they make one checkpoint? ──► id                    → Begun
                   │
                 write        chunks ──► data files, hashed on the way; fragments of flat shards ⇄ other ranks       → Written
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
from collections.abc import Callable
from functools import partial

from ckpt.concurrency import Pending, gc_paused, program_ends
from ckpt.engine.devices import devices_of, refuse_in_graph, settle_devices
from ckpt.engine.opening import open_together
from ckpt.errors import CkptError
from ckpt.formats.native.coding.codecs import WITHOUT_ANCHOR
from ckpt.formats.native.datafiles.references import split_url
from ckpt.formats.native.ranks import encode_row
from ckpt.formats.native.writer import committed_id
from ckpt.io_backends import retries
from ckpt.io_backends.registry import open_backend
from ckpt.io_backends.retries import Retries
from ckpt.net.channel import Row
from ckpt.net.group import Group
from ckpt.net.peers import peers_of
from ckpt.plan import tree
from ckpt.plan.layout.mesh import coordinates
from ckpt.state.collect import collect
from ckpt.telemetry.progress import HASH, WRITE

from .base import AnchorChunks, BaseLookup, WrittenChunks, encode_references
from .capture import Capture
from .job import SaveJob, SaveOptions, SaveReport
from .leader import Leader, OpenSave, RecordedSave
from .phases import Begun, Committed, Prepared, Written
from .plan import APART
from .replicas import Replicas
from .reuse import Trust, find_reuse
from .staging import StagedBatches, borrow, lay_out
from .tensor_source import ChunkSource, FragmentExchange
from .writer import Alive, EncodedWriter, RankWriter, WriteInput

log = logging.getLogger("ckpt")

OnFailure = Callable[[BaseException, str, float], None]
"""Takes an error, the phase that the save failed in, and how many seconds it had taken."""

_PATIENCE = 5.0
"""Seconds that a save that is waited for waits itself until what it replaced is removed."""
_INLINE = 4096
"""Bytes of a rank's own tensors and values that are part of its message to the leader."""


def save_state(url: str, state: object, group: Group, options: SaveOptions, failed: OnFailure | None = None) -> SaveReport:
    """Save; collective over ``group``. ``failed`` is called if that fails, before the error is raised."""
    job = SaveJob.begin(group.call("save", url, options.timeout), options)
    try:
        with gc_paused():  # until what the save needed is gone: else it would all be looked through once at the end
            return _save_now(job, state)
    except BaseException as err:
        if failed is not None:
            failed(err, job.call.phase_name, time.perf_counter() - job.began)
        raise


def _save_now(job: SaveJob, state: object) -> SaveReport:
    with job.noted():
        with job.spans.span("agree"), job.call.phase("begin"):
            prepared = prepare(job, state)
            settle_devices(devices_of(prepared.collected.shard_table.tensors.values()), job.call.url)
            begun = begin(prepared)
        return write_and_commit(begun).report


def write_and_commit(begun: Begun) -> Committed:
    """The second half of a save, the same for one in the background."""
    call = begun.prepared.job.call
    try:
        with call.phase("write"):
            written = write(begun)
            committed = commit(written)
    except BaseException:
        # A leader that is slow, not dead, may commit later: files that it counts on must stay.
        if not call.undecided and not _is_committed(begun):
            begun.writer.discard()
        raise
    return committed


# ---- prepare: in the caller's thread


def prepare(job: SaveJob, state: object) -> Prepared:
    """Collect the state and plan what this rank writes."""
    group, options, plans = job.call.group, job.options, job.cache.plans
    backend = open_backend(job.call.url)
    with job.spans.span("collect"):
        collected = collect(state, rank=group.rank, ranks=group.ranks, layout=options.layout, shards=plans.shards, part=options.part)
        values = tree.text(collected.state).encode()
        own_values = json.dumps(collected.own).encode() if collected.own else b""
    with job.spans.span("plan"):
        position = group.ranks.index(group.rank)
        merge_flat_shards = options.merge_flat_shards and group.size > 1
        plan = plans.plan(
            collected,
            rank=group.rank,
            position=position,
            merge_flat_shards=merge_flat_shards,
            codec=options.codec,
            mirrors=options.mirrors,
        )
        source = ChunkSource(plan, collected.shard_table.tensors)
    reuse = None
    if options.reusable:
        with job.spans.span("hash"):
            asked = job.cache.seen.candidates(collected.shard_table)
            settle_devices(devices_of(collected.shard_table.tensors[name] for name in asked), job.call.url)
            seen, trust = job.cache.seen, None
            if options.trust is not None:
                trust = Trust.of(options.trust, seen.trusted, collected.shard_table, asked, seen.versions)
            lookup = BaseLookup(
                base=options.base,
                backend=backend,
                remembered=job.cache.bases,
                open_together=partial(open_together, job.call, sources=None, name="base"),
            )
            reuse = find_reuse(lookup, plan, source, asked, seen, options.threads, trust)
        has_128 = bool(reuse.digests)
        if reuse.references or has_128:
            remaining = reuse.remaining()
            plan = plans.without(plan, remaining, position=position, codec=options.codec, has_128=has_128)
            source = ChunkSource(plan, collected.shard_table.tensors)
    job.meter.total = plan.nbytes
    moves = plan.sends or plan.receives
    return Prepared(
        job=job,
        backend=backend,
        collected=collected,
        values=values,
        own_values=own_values,
        plan=plan,
        source=source,
        fragments=FragmentExchange(plan, source, peers_of(group, timeout=options.timeout)) if moves else None,
        replicas=Replicas(plan.assignments, plan.replicated, source.tensor, group.rank, plan.chunks)
        if options.check_replicas and group.size > 1
        else None,
        reuse=reuse,
    )


def stage(prepared: Prepared) -> Capture:
    """Make room for a copy of this rank's share, so that the state may change before it is written."""
    job, shard_table, plan = prepared.job, prepared.collected.shard_table, prepared.plan
    with job.spans.span("stage"):
        devices = devices_of(shard_table.tensors.values())
        refuse_in_graph(devices, job.call.url)
        # Lent memory is not pinned, as a device's copies need it; and the size of a coded file is not known yet.
        lent = borrow(prepared.backend, [file.size for file in plan.files]) if not devices and job.options.codec is None else ()
        if lent:
            batches = StagedBatches.in_lent(plan.batches, lent)
        else:
            segments, nbytes = lay_out(plan.batches, job.options.staging)
            batches = StagedBatches.in_arena(segments, job.cache.arena.reserve(nbytes, next(iter(devices), None)))
    job.meter.staged = True
    return Capture(plan, shard_table, prepared.source, batches, prepared.fragments, prepared.replicas, job.spans, job.meter)


# ---- begin: do all ranks' states make one checkpoint?


def begin(prepared: Prepared) -> Begun:
    """Agree on what is saved; the id of the save."""
    job, backend = prepared.job, prepared.backend
    call, options = job.call, job.options
    row = begin_row(prepared)
    opened: OpenSave | None = None
    if call.is_leader:
        leader = Leader(
            call=call,
            backend=backend,
            known=job.cache.tables,
            merge_flat_shards=options.merge_flat_shards,
            metrics=options.metrics,
            earlier=options.earlier,
            branches=options.branches,
            mirrors=options.mirrors,
            base=_base_of(prepared),
            reusable=options.reusable,
        )
        opened = call.lead(row, leader.open, OpenSave.public)
        id = opened.id
    else:
        decision = call.follow(row)
        id = decision["id"]
        if decision["storage"] is not None:
            backend.assume(decision["storage"])
    if job.notes is not None:
        job.notes.id = id
    job.meter.phase = WRITE
    return Begun(prepared=prepared, id=id, writer=_make_writer(prepared, id), opened=opened)


def begin_row(prepared: Prepared) -> Row:
    """This rank's tables and values, which stay here until the leader asks for them."""
    call, collected, plan = prepared.job.call, prepared.collected, prepared.plan
    row: Row = {
        "table": " ".join(map(call.share, plan.shared)),
        "state": call.share(prepared.values),
        "options": f"merge_flat_shards={prepared.job.options.merge_flat_shards} codec={prepared.job.options.codec}",
    }
    base, mirrors, part = _base_of(prepared), prepared.job.options.mirrors, prepared.job.options.part
    if base is not None:  # all ranks must refer to one save of one base
        row["options"] += f" base={base[0]} {base[1]}"
    if mirrors is not None:
        row["options"] += f" mirrors={mirrors.text}"
    if part is not None:
        row["options"] += f" {part.text()}"
        row["idle"] = collected.idle
        row["nothing_trained"] = part.trainable and not collected.trains
    if collected.own and call.group.size > APART:
        own_row = encode_row(plan.own_tensors, collected.own)
        # No two ranks have the same row: most are too small to be worth messages of their own.
        row |= {"own_row": own_row.decode()} if len(own_row) <= _INLINE else {"own_blob": call.share(own_row)}
        row["own_bytes"] = sum(t.info.nbytes for n, t in collected.shard_table.tensors.items() if n in collected.shard_table.own)
    elif collected.own:
        row["own"] = call.share(plan.own)
        row["values"] = call.leave(prepared.own_values)
    return row


def _base_of(prepared: Prepared) -> tuple[str, str] | None:
    """Directory and id of the save that this one may refer to."""
    reuse = prepared.reuse
    return (reuse.directory, reuse.id) if reuse is not None and reuse.directory else None


def _make_writer(prepared: Prepared, id: str) -> RankWriter:
    job, capture, reuse = prepared.job, prepared.capture, prepared.reuse
    given = WriteInput(
        backend=prepared.backend,
        plan=prepared.plan,
        source=prepared.source,
        id=id,
        position=job.call.group.ranks.index(job.call.group.rank),
        threads=max(job.options.threads, prepared.backend.io_hints.concurrency),
        alive=Alive(beat=job.heartbeat.give, during=job.call.alive_while),
        spans=job.spans,
        meter=job.meter,
        stage=capture.stage if capture is not None else None,
        fragments=prepared.fragments,
        digests128={i: reuse.digests[n] for i, n in enumerate(prepared.plan.numbers) if n in reuse.digests} if reuse is not None else {},
    )
    options = job.options
    if options.codec is None:
        return RankWriter(given)
    anchors = None
    if options.codec in WITHOUT_ANCHOR and reuse is not None and reuse.base is not None:
        required = options.base is not None and options.base.required
        anchors = AnchorChunks(reuse.base, split_url(prepared.backend)[1], required=required)
    return EncodedWriter(given, options.codec, anchors)


# ---- write: this rank's data files


def write(begun: Begun) -> Written:
    """Write this rank's data files and make them durable; meanwhile exchange the edges of flat shards."""
    prepared, writer = begun.prepared, begun.writer
    exchange = _start_exchange(prepared)
    try:
        files = writer.run()
    finally:
        if exchange is not None:
            exchange.wait()
    if exchange is not None:
        exchange.result()
    job = prepared.job
    job.meter.phase = HASH
    own = len(files) - prepared.plan.mirrored
    listed = [[f.path, f.size, f.header, f.digest] for f in files]
    row: Row = {"files": listed[:own], "replicas": _replica_digests(prepared, writer)}
    if prepared.plan.mirrored:
        row["mirrored"] = listed[own:]
    if isinstance(writer, EncodedWriter):
        row["coded"] = len(writer.codecs)
    if prepared.plan.has_128:
        row["has_128"] = True
    anchored = writer.anchored if isinstance(writer, EncodedWriter) else {}
    reuse = prepared.reuse
    if reuse is not None and (reuse.references or anchored):
        anchors = [(prepared.plan.chunks[n], file) for n, file in sorted(anchored.items())]
        row["references"] = job.call.share(encode_references(reuse.rows, anchors, coded=reuse.coded))
    if not job.call.is_leader:
        row["spans"] = _row_of_spans(prepared)
    return Written(begun=begun, files=files, mirrored_bytes=sum(f.size for f in files[own:]), row=row)


def _start_exchange(prepared: Prepared) -> Pending[None] | None:
    """Move the edges of flat shards between ranks, beside the writing of chunks that need none."""
    job, fragments = prepared.job, prepared.fragments
    if fragments is None:
        return None
    if prepared.capture is None:
        fragments.settle()

    def move() -> None:
        with job.spans.span("exchange", fragments.moved):
            fragments.run(job.heartbeat.give)

    return Pending(move, "ckpt-exchange")


def _replica_digests(prepared: Prepared, writer: RankWriter) -> dict[str, str]:
    """Digests by which the leader compares replicated tensors."""
    job, replicas = prepared.job, prepared.replicas
    if prepared.capture is not None:
        prepared.capture.result()
        job.heartbeat.give()
    if replicas is None:
        return {}
    if prepared.capture is None:
        with job.spans.span("hash"):
            replicas.hash(job.options.threads, job.heartbeat.give)
    return replicas.row(job.call, writer.digests)


def _row_of_spans(prepared: Prepared) -> Row:
    """This rank's spans, and what else of it explains them; empty if they are off."""
    job = prepared.job
    row = job.spans.to_json()
    if not row:
        return row
    layout, meshes = job.options.layout, prepared.collected.shard_table.meshes
    at = coordinates((layout.mesh, *meshes) if layout is not None else meshes, job.call.group.rank)
    refused = list(retries.total().since(job.refused_before))
    return {
        **row,
        "host": job.meter.host or None,
        "at": at,
        "storage": refused,
        **(job.blocked.report() if job.blocked is not None else {}),
    }


# ---- commit: everything is there, so it becomes one checkpoint


def commit(written: Written) -> Committed:
    """Agree that everything is written; the leader commits, and then removes what the checkpoint has replaced."""
    opened, call = written.begun.opened, written.begun.prepared.job.call
    if opened is None:
        decision = call.follow(written.row)
        _remember(written)
        return Committed(report=_report(written, decision["tensor_bytes"]))
    return _commit_on_leader(written, opened)


def _commit_on_leader(written: Written, opened: OpenSave) -> Committed:
    prepared = written.begun.prepared
    job, call = prepared.job, prepared.job.call
    spans: dict[int, Row] = {}

    def decide(rows: dict[int, Row]) -> RecordedSave:
        spans.update((position, rows[rank].get("spans", {})) for position, rank in enumerate(call.group.ranks))
        if job.notes is not None:
            job.notes.stop()
        with job.spans.span("commit"):
            return opened.commit(rows)

    recorded = call.lead(written.row, decide, RecordedSave.public)
    _remember(written)
    spans[0] = _row_of_spans(prepared)
    busy = recorded.keep_spans(spans)
    call.linger()
    _remove_older(prepared, recorded)
    report = _report(written, recorded.tensor_bytes)
    nbytes, ranks = report.tensor_bytes, call.group.size
    log.info("saved %s: %d bytes of tensors from %d ranks in %.2f s", call.url, nbytes, ranks, report.seconds)
    refused = Retries(*map(sum, zip(*(row.get("storage", (0, 0)) for row in spans.values()), strict=True)))
    return Committed(report=report, busy=busy, retries=refused)


def _remember(written: Written) -> None:
    """Later saves may refer to this one, and need not read what this rank wrote of it."""
    begun = written.begun
    prepared, writer = begun.prepared, begun.writer
    cache, reuse = prepared.job.cache, prepared.reuse
    if reuse is not None:
        chunks = WrittenChunks(
            files=written.files,
            layouts=writer.layouts,
            digests=writer.stored if isinstance(writer, EncodedWriter) else writer.digests,
            strong_digests=writer.digests128,
            codecs=writer.codecs if isinstance(writer, EncodedWriter) else {},
        )
        cache.remember(reuse.remembered(prepared.backend, begun.id, prepared.plan, chunks), reuse.base)
    elif cache.bases:
        cache.forget(prepared.backend.url)


def _remove_older(prepared: Prepared, recorded: RecordedSave) -> None:
    """Remove what the checkpoint has replaced. The others have left this call, and no sign of life reaches them in the next one: so if it
    takes long, it goes on in the background."""
    removing = Pending(recorded.remove_older, "ckpt-remove")
    timeout = prepared.job.call.timeout
    if prepared.backend.io_hints.in_memory or program_ends():  # the next save needs what this frees; or nobody waits later
        seconds = timeout
    else:
        seconds = 0.0 if prepared.job.blocked is not None else min(_PATIENCE, timeout / 2)
    if removing.wait(seconds):
        removing.result()


def _report(written: Written, tensor_bytes: int) -> SaveReport:
    prepared = written.begun.prepared
    return SaveReport(
        url=prepared.job.call.url,
        id=written.begun.id,
        tensor_bytes=tensor_bytes,
        rank_bytes=sum(f.size for f in written.files),
        sent_bytes=prepared.fragments.moved if prepared.fragments is not None else 0,
        reused_bytes=prepared.reuse.nbytes if prepared.reuse is not None else 0,
        mirrored_bytes=written.mirrored_bytes,
        seconds=time.perf_counter() - prepared.job.began,
        requests=prepared.plan.requests,
        files=len(prepared.plan.batches),
    )


def _is_committed(begun: Begun) -> bool:
    """Whether this save is the committed one, or may be: then its files must stay."""
    try:
        return committed_id(begun.prepared.backend) == begun.id
    except CkptError:
        return True  # the storage cannot say; an orphan is better than a loss
