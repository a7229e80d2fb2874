"""What a planned load would read, without reading it: the ranges of every task, in the cuts in which the tasks read; and how long that
takes at the rates of the run so far.

A dry run goes through the phases of a load as far as the plan (``engine/load``). Here each part of the plan is asked for its reads:

    whole chunks    small neighbours together, large ones in stretches        (``whole_chunks.tasks_of``)
    scan           rows of a file that follow one another                    (``ChunkScan.runs``)
    parts           groups of neighbours, or stretches and pieces of one      (``Reader.read``)
    shared reads    slices                                                    (``ReadExchange._read``)

Nothing of the state is touched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from statistics import median
from typing import NamedTuple

import xxhash

from ckpt import settings, units
from ckpt.catalog import Extent
from ckpt.concurrency import gc_paused, run_tasks
from ckpt.engine.load.chunk_scan import ChunkScan, FilePlan
from ckpt.engine.load.read_exchange import ReadExchange
from ckpt.engine.load.reader import CopyStep, Reader, ReadPlan, same_chunk, steps_of
from ckpt.engine.load.shared_reads import SharedRead, SharedReads
from ckpt.engine.load.whole_chunks import TensorLoad, small_and_large
from ckpt.engine.save.job import SaveJob
from ckpt.engine.save.leader import Leader
from ckpt.engine.save.options import SaveOptions, SaveReport
from ckpt.engine.save.plan import NO_ID, RankPlan
from ckpt.engine.save.save import RankShare, begin_row, prepare
from ckpt.errors import CkptError
from ckpt.formats.native.clearing import check_no_link, check_no_run
from ckpt.formats.native.commit import CommitRecord, read_record
from ckpt.formats.native.datafile import plan_coded_file
from ckpt.formats.native.paths import step_number
from ckpt.formats.native.runlog import read_log
from ckpt.formats.native.spans import read_spans
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.net.channel import Row
from ckpt.net.group import Group
from ckpt.plan.reads import Part, RangeGroup, group_ranges
from ckpt.telemetry.spans import SpanTable

from .digest_reader import PAGE, SPARE, DigestReader

_SAMPLE = 64
"""Reads that are kept for a probe: so many to twice as many, spread evenly."""
_PROBED = 4 << 20
"""Most bytes of one read that a probe reads."""
_SECONDS = 0.25
"""After this a probe begins no other read."""


class PlannedRead(NamedTuple):
    """One read. ``verified``: bytes that are compared with digests afterwards; ``scratch``: memory of the reading thread, by use."""

    path: str
    offset: int
    length: int
    verified: int
    scratch: tuple[tuple[str, int], ...] = ()


@dataclass(eq=False)
class ReadForecast:
    """The sum of all reads of one rank. ``memory``: the most that the load takes beside the state, in bytes."""

    needed: int
    received: int
    read: int = 0
    verified: int = 0
    requests: int = 0
    memory: int = 0
    paths: set[str] = field(default_factory=set)
    sample: list[PlannedRead] = field(default_factory=list)

    @classmethod
    def of(cls, reader: Reader, jobs: Sequence[TensorLoad], exchange: ReadExchange | None) -> ReadForecast:
        """What ``reader`` would read for ``jobs``, and for other ranks."""
        sharing = SharedReads(rank=0, piece=0) if exchange is None else exchange.sharing
        plan = reader.plan([job for job in jobs if id(job.target) not in sharing.complete], sharing.left_out)
        # Bytes that other ranks read for the tensors of this one.
        items = (item for shared_reads in sharing.takes.values() for shared_read in shared_reads for item in shared_read.items)
        received = sum(len(item.jobs) * item.itemsize * box.numel for item in items for box in item.boxes(sharing.rank))
        forecast = cls(needed=0, received=received)
        scratch: dict[str, int] = {}
        coded, stride = plan.coded, 1
        for one in _planned(reader, plan, exchange):
            if forecast.requests % stride == 0:
                forecast.sample.append(one)
            if len(forecast.sample) == 2 * _SAMPLE:  # every other one stays
                forecast.sample, stride = forecast.sample[::2], 2 * stride
            forecast.requests += 1
            forecast.read += one.length
            forecast.verified += one.verified
            forecast.paths.add(one.path)
            for use, size in one.scratch:
                scratch[use] = max(scratch.get(use, 0), size)
        forecast.needed = reader.bytes_needed + sharing.needed
        coded = max(coded, exchange.coded if exchange is not None else 0)
        threads = min(reader.threads, max(1, settings.SCRATCH // coded)) if coded else reader.threads
        # The caller's thread may read too.
        forecast.memory = (threads + 1) * sum(max(size, reader.fetch.piece) + SPARE for size in scratch.values())
        forecast.memory += exchange.pool_bytes + len(sharing.takes) * sharing.piece if exchange is not None else 0
        return forecast

    def seconds(self, rate: float) -> float:
        """How long these reads take at so many bytes a second."""
        return self.read / max(rate, 1.0)

    def probe(self, reader: Reader) -> float:
        """Bytes a second at which a sample of the reads goes: read and hashed, by as many threads as in the load, for a quarter of a second
        at most."""
        ends, done = time.perf_counter() + _SECONDS, list[int]()

        def take(read: PlannedRead) -> None:
            if time.perf_counter() < ends or not done:
                memory = memoryview(bytearray(min(read.length, _PROBED)))
                reader.catalog.backend.read_into(read.path, read.offset, memory)
                if reader.verify != "off":
                    xxhash.xxh3_64_intdigest(memory)
                done.append(len(memory))
                reader.beat()

        began = time.perf_counter()
        run_tasks([partial(take, read) for read in self.sample], reader.threads, "ckpt-probe")
        return sum(done) / max(time.perf_counter() - began, 1e-9)


# ---- the reads of each part of a plan


def _planned(reader: Reader, plan: ReadPlan, exchange: ReadExchange | None) -> Iterator[PlannedRead]:
    fetch = reader.fetch
    for shared_read, extents in exchange.own_reads(reader.catalog) if exchange is not None else ():
        yield from _shared(fetch, shared_read, extents)
    groups, large = small_and_large(plan.exact, fetch)
    for group in groups:
        yield _together(fetch, group, [plan.exact.extents[i] for i in group.members])
    for i in large:
        yield from _stretches(fetch, plan.exact.extents[i])
    for read in plan.reads:
        yield from _grouped(reader, read, plan.parts, plan.steps)
    if plan.scan is None:
        return
    for file in plan.files or map(plan.scan.look_up, plan.scan.files):
        yield from _rows(fetch, plan.scan, file)
        if not plan.files:
            parts, reads = reader.reads(steps := steps_of(file))
            for read in reads:
                yield from _grouped(reader, read, parts, steps)
            reader.bytes_needed += file.needed


def _rows(fetch: DigestReader, scan: ChunkScan, file: FilePlan) -> Iterator[PlannedRead]:
    alike = file.stored.alike
    for first, last, stop in scan.runs(alike):
        start = int(alike.offsets[first])
        rows = set(zip(alike.offsets[first:last].tolist(), alike.lengths[first:last].tolist(), strict=True))
        verified = 0 if fetch.verify == "off" else sum(length for _, length in rows)
        yield PlannedRead(file.path, file.stored.start + start, stop - start, verified, (("read", stop - start),))


def _grouped(reader: Reader, read: RangeGroup, parts: Sequence[Part], steps: Sequence[CopyStep]) -> Iterator[PlannedRead]:
    fetch, mine = reader.fetch, [parts[i] for i in read.members]
    chunks = [list(members) for _, members in groupby(mine, lambda part: same_chunk(part, steps))]
    if read.length <= reader.max_read and len(read.members) > 1:  # they are read by one call
        touched = [(steps[members[0].copy], members[0]) for members in chunks]
        whole = [step.extent for step, part in touched if part.length == step.extent.length]
        decoded = max((step.nbytes for step, _ in touched if step.extent.codec is not None), default=0)
        yield _together(fetch, read, whole, ("decoded", decoded), shift=PAGE)
        for step, _ in touched:
            yield from _anchors(fetch, step.extent, step.nbytes)
        return
    for members in chunks:
        part, step = members[0], steps[members[0].copy]
        extent, at_offset = step.extent, members[0].offset
        verified = extent.length if part.length == extent.length and _is_compared(fetch, extent) else 0
        if extent.codec is not None:
            yield from _stretches(fetch, extent, ("blob", extent.length), ("decoded", step.nbytes))
            yield from _anchors(fetch, extent, step.nbytes)
        elif reader.straight(members, step) is not None:
            for at, length in fetch.stretches(part.length):
                yield PlannedRead(part.path, at_offset + at, length, verified and length)
        else:
            size = step.job.entry.dtype.itemsize
            for piece in reader.pieces_of(part, step):
                length = piece.length * size
                yield PlannedRead(part.path, extent.offset + piece.start * size, length, verified and length, (("read", fetch.piece),))


def _shared(fetch: DigestReader, shared_read: SharedRead, extents: Sequence[Extent]) -> Iterator[PlannedRead]:
    slices, item, extent = shared_read.slices(), shared_read.items[0], extents[0]
    if len(shared_read.items) > 1:
        for group in group_ranges(extents):
            yield _together(fetch, group, [extents[i] for i in group.members], ("piece", slices[0].nbytes))
        for member, stored in zip(shared_read.items, extents, strict=True):
            yield from _anchors(fetch, stored, member.nbytes)
    elif extent.codec is not None:
        yield from _stretches(fetch, extent, ("blob", extent.length), ("decoded", item.nbytes), ("piece", fetch.piece))
        yield from _anchors(fetch, extent, item.nbytes)
    elif len(slices) == 1:
        yield from _stretches(fetch, extent, ("piece", extent.length))
    else:
        compared = _is_compared(fetch, extent)
        for cut in slices:
            verified = cut.nbytes if compared else 0
            yield PlannedRead(extent.path, extent.offset + cut.start, cut.nbytes, verified, (("piece", cut.nbytes),))


def _together(fetch: DigestReader, group: RangeGroup, extents: Iterable[Extent], *uses: tuple[str, int], shift: int = 0) -> PlannedRead:
    """One read of neighbours; ``extents`` are those that it has all bytes of. What several want is compared once."""
    compared = {(e.offset, e.length) for e in extents if _is_compared(fetch, e)}
    verified = sum(length for _, length in compared)
    return PlannedRead(group.path, group.offset, group.length, verified, (("read", group.length + shift), *uses))


def _stretches(fetch: DigestReader, extent: Extent, *uses: tuple[str, int]) -> Iterator[PlannedRead]:
    """A whole chunk."""
    compared = _is_compared(fetch, extent)
    for at, length in fetch.stretches(extent.length):
        yield PlannedRead(extent.path, extent.offset + at, length, length if compared else 0, uses)


def _anchors(fetch: DigestReader, extent: Extent, nbytes: int) -> Iterator[PlannedRead]:
    """What is read besides of a chunk of ``nbytes`` that is stored as a difference."""
    if extent.anchor is not None:
        anchor = extent.anchor.extent
        yield from _stretches(fetch, anchor, ("anchor", nbytes), ("anchor, encoded", 0 if anchor.codec is None else anchor.length))


def _is_compared(fetch: DigestReader, extent: Extent) -> bool:
    return fetch.verify != "off" and extent.digest is not None


# How fast a run has read and written so far: what a dry run estimates seconds with.

_NEWEST = 4
"""Steps of a run that are looked at, from the newest on: that of a save that still goes on has no spans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferRate:
    """Bytes that one rank moves in a second, while the others do the same; ``measured`` says where that is known from."""

    bytes_per_second: float
    measured: str


def rate_of_loads(url: str) -> TransferRate | None:
    """Of the newest load in the log of the run that the checkpoint is a step of; None if there is none."""
    run, _, _ = url.rstrip("/").rpartition("/")
    try:
        entries = [entry for entry in read_log(open_backend(run)) if entry.kind == "load" and entry.error is None] if run else []
    except CkptError:
        return None
    for entry in reversed(entries):
        rate = _rate(entry.tables, ("read", "verify", "decode", "copy", "exchange"), "read")
        if rate is not None:
            return TransferRate(bytes_per_second=rate, measured=f"the run's log: a load by {units.plural(entry.ranks, 'rank')}")
    return None


def rate_of_saves(url: str) -> TransferRate | None:
    """Of the save at ``url``, if there is one, or of the newest step beside it whose spans were kept; None if there is none."""
    run, _, name = url.rstrip("/").rpartition("/")
    urls = [url]
    try:
        beside = [n.rstrip("/") for n in open_backend(run).list_dir("") if n.endswith("/")] if run else []
    except CkptError:
        beside = []
    steps = sorted(((number, n) for n in beside if n != name and (number := step_number(n)) is not None), reverse=True)
    urls += [join_url(run, step) for _, step in steps[:_NEWEST]]
    for one in urls:
        try:
            backend = open_backend(one)
            data = read_record(backend)
            tables = {} if data is None else read_spans(backend, CommitRecord.from_bytes(data, one))
        except CkptError:
            continue
        rate = _rate(tables, ("encode", "write", "sync"), "write")
        if rate is not None:
            return TransferRate(bytes_per_second=rate, measured=f"the spans of {one}")
    return None


def _rate(tables: Mapping[int, SpanTable], phases: Iterable[str], counted: str) -> float | None:
    """Bytes of the phase ``counted`` in each second from the first start of ``phases`` to their last end, on the middle rank."""
    rates = []
    for table in tables.values():
        sums = [table.sums[phase] for phase in phases if phase in table.sums]
        if counted in table.sums and table.sums[counted].nbytes:
            wall = max(s.last for s in sums) - min(s.first for s in sums)
            rates.append(1e6 * table.sums[counted].nbytes / max(1, wall))
    return median(rates) if rates else None


# A dry run of a save: its first phases, which write nothing, and in place of the others what they would write.


def dry_run(url: str, state: object, group: Group, options: SaveOptions) -> SaveReport:
    """What a save of ``state`` would write on this rank; collective over ``group``. Nothing is written."""
    job = SaveJob.begin(group.call("save", url, options.timeout), options)
    call = job.call
    with job.cache.turn, gc_paused(), call.phase("plan"):
        share = prepare(job, state)
        row = begin_row(job, share) | {"bytes": _rank_bytes(share.plan)}

        def decide(rows: dict[int, Row]) -> Row:
            check_no_link(share.backend)
            if read_record(share.backend) is None:
                check_no_run(share.backend)
            known = list(job.cache.tables)  # a copy: the next save is still the first one, if it is
            leader = Leader(call=call, backend=share.backend, options=options, known=known)
            tables = leader.join(rows)
            _ = leader.values  # they may contradict each other
            tensors = [*tables.joined.tensors.values(), *(t for table in tables.own.values() for t in table.tensors)]
            rate = rate_of_saves(url)
            longest = max(row["bytes"] for row in rows.values())
            return {
                "tensor_bytes": sum(row.get("own_bytes", 0) for row in rows.values()) + sum(t.nbytes for t in tensors),
                "seconds": None if rate is None else longest / max(rate.bytes_per_second, 1.0),
                "measured": None if rate is None else rate.measured,
            }

        decision: Row = call.agree(row, decide)
    call.drain()
    return SaveReport(
        url=url,
        id="",
        tensor_bytes=decision["tensor_bytes"],
        rank_bytes=row["bytes"],
        sent_bytes=_moved(share.plan)[0],
        seconds=math.nan if decision["seconds"] is None else decision["seconds"],
        requests=share.plan.requests,
        files=len(share.plan.batches),
        memory=_memory(job, share),
        dry_run=True,
        reused_bytes=share.reuse.nbytes if share.reuse is not None else 0,
        estimated_from=decision["measured"],
    )


def _rank_bytes(plan: RankPlan) -> int:
    """Bytes of this rank's files. With a codec: if no chunk shrinks."""
    sizes = [file.size for file in plan.files]
    for number, group in enumerate(plan.groups):
        specs = plan.specs[group]
        stored = plan_coded_file(specs, [None] * len(specs), [s.nbytes for s in specs], id=NO_ID, rank=0, number=number)
        sizes.append(stored.size)
    return sum(sizes)


def _moved(plan: RankPlan) -> tuple[int, int]:
    """Bytes of the fragments of flat shards that this rank sends, and of those that it receives."""
    sizes = {t.name: t.dtype.itemsize for t in plan.key.infos}
    sent, received = (sum((f.stop - f.start) * sizes[f.name] for f in fragments) for fragments in (plan.sends, plan.receives))
    return sent, received


def _memory(job: SaveJob, share: RankShare) -> int:
    """A block for each thread, the fragments, and with a codec the coded chunks of one file."""
    plan, options = share.plan, job.options
    threads = max(options.threads, share.backend.io_hints.concurrency)
    small = any(len(batch.numbers) > 1 for batches in plan.batches for batch in batches)
    coded = max((sum(batch.length for batch in batches) for batches in plan.batches), default=0) if plan.groups else 0
    return (threads * settings.CACHE_BLOCK if small else 0) + sum(_moved(plan)) + coded
