"""A load, from top to bottom: open → match → divide → read → set. Each phase returns a frozen value, which the next one takes.

    every rank      open index · bind state    divide chunks · fill tensors         set values
                            │                            │                             │
                         Matched ─────────► Divided ─► Filled ───────────────────────► LoadReport
                            │                            │                             │
    leader          does it fit everywhere?      what was read wrong?             (only where ranks share reads)

Invariants: nothing in a state changes before every rank knows that everything fits. All problems of all ranks go into one error. Where
ranks read for each other, values are set in a phase of their own: by then every rank has read again what another one handed out wrong.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ckpt import settings
from ckpt.catalog import Catalog
from ckpt.concurrency import gc_paused
from ckpt.engine.byte_source import source_of
from ckpt.engine.devices import devices_of, pinned_bytes, settle_devices
from ckpt.engine.opening import open_together
from ckpt.errors import ConflictError, ConsistencyError
from ckpt.formats.native.writer import replacement_noticed
from ckpt.net.channel import Row
from ckpt.net.group import Group
from ckpt.net.liveness import Members
from ckpt.net.peers import peers_of
from ckpt.plan import machines
from ckpt.plan.machines import NearFiles
from ckpt.state.shard_table import ShardCache
from ckpt.state.targets import Binding
from ckpt.telemetry.callbacks import reported
from ckpt.telemetry.spans import Spans
from ckpt.text import parse_json

from .fitting import accept, renamed, row_of_match, run_each, set_all, verdict_of
from .job import LoadJob, LoadOptions, LoadReport, StateWrites, tells_whether_written
from .read_exchange import ReadExchange
from .reader import Reader, changed
from .shared_reads import SharedReads, what_is_worth
from .whole_chunks import TensorLoad, as_if_created

# The values that the phases of a load hand on: each has all that the next phase needs, and none of them ever changes.


@dataclass(frozen=True, kw_only=True, eq=False)
class Matched:
    """A checkpoint that fits on every rank. ``sharing``: what this rank may share with others; ``refused``: the rank sets that do not
    share after all, None if nobody does; ``machines`` says which ranks are on one machine (``ckpt.plan.machines``), ``near_files`` which
    have which files near (``ckpt.plan.machines``) or is a digest of that, None where a file costs all ranks the same."""

    job: LoadJob
    catalog: Catalog
    binding: Binding
    sharing: SharedReads
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    refused: Sequence[str] | None
    machines: Any
    near_files: Any

    @property
    def jobs(self) -> list[TensorLoad]:
        """What goes into which target."""
        return list(map(TensorLoad._make, self.binding.targets.values()))


@dataclass(frozen=True, kw_only=True, eq=False)
class Divided:
    """Which chunks this rank reads itself. ``exchange`` moves those that several ranks want, None if nobody shares; ``setters`` give the
    state its values."""

    matched: Matched
    reader: Reader
    exchange: ReadExchange | None
    setters: Sequence[Callable[[], None]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Filled:
    """All tensors have their bytes, but for chunks that were ``handed_out_wrong``: these are read again."""

    divided: Divided
    handed_out_wrong: Sequence[tuple[str, int]]


log = logging.getLogger("ckpt")
R = TypeVar("R")


def load_state(url: str, state: object, group: Group, options: LoadOptions) -> LoadReport:
    """Load in place; collective over ``group``."""
    with gc_paused():  # until what the load needed is gone: else it would all be looked through once at the end
        return _load(url, state, group, options)


def _load(url: str, state: object, group: Group, options: LoadOptions) -> LoadReport:
    began = time.perf_counter()
    if recorded.get() is not None and options.spans is None and settings.spans():
        options = replace(options, spans=Spans(limit=0))
    for tries_left in reversed(range(_TRIES)):
        # The leader decides in another thread, which has another context: what is recorded goes with the job.
        job = LoadJob(call=group.call("load", url, options.timeout), options=options, recorded=recorded.get(), writes=StateWrites())
        try:
            matched = match(job, state)
            with tells_whether_written(job.writes):
                filled = read(matched)
                set_values(filled)
            job.call.linger()
            return _report(filled, time.perf_counter() - began)
        except ConflictError:  # replaced meanwhile; of several ranks, some may have begun to read
            if job.writes.begun or group.size > 1 or not tries_left:
                raise
    raise AssertionError("the last try returns or raises")


_shards: WeakKeyDictionary[Members, ShardCache] = WeakKeyDictionary()
"""Where the tensors of a job lie, as earlier loads have seen it."""

recorded: ContextVar[dict[int, Row] | None] = ContextVar("recorded", default=None)
"""Takes, on the leader, what each rank was busy with in a load, where somebody wants that; the same on all ranks."""

opened: ContextVar[list[Catalog] | None] = ContextVar("opened", default=None)
"""Takes what a load has opened, where somebody wants that."""

_TRIES = 5
"""How often ranks open a checkpoint that is replaced between the first rank and the last."""


# ---- open and match: every rank opens the same checkpoint, and it fits the states of all


def match(job: LoadJob, state: object) -> Matched:
    """Open the checkpoint and bind the state to it; the leader sees whether everything fits, and who shares reads."""
    for attempt in range(1, _TRIES + 1):
        with job.call.phase("match"):
            with job.span("open"):
                catalog = open_together(job.call, job.call.url, job.options.sources, f"index{attempt}")
            with replacement_noticed(catalog):
                binding = _bind(job, state, catalog)
                sharing = _sharing(job, catalog, binding)
                row = row_of_match(job, catalog, binding, sharing)
            decision = job.agree(row, partial(verdict_of, job, catalog))
        if "replaced" not in decision:
            if (taken := opened.get()) is not None:
                taken[:] = [catalog]
            if "machines" in decision and job.call.group.tree is not None:
                job.call.group.tree.know_machines(decision["machines"])
            return Matched(
                job=job,
                catalog=catalog,
                binding=binding,
                sharing=sharing,
                missing=tuple(decision["missing"]),
                unexpected=tuple(decision["unexpected"]),
                refused=decision["refused"],
                machines=decision.get("machines"),
                near_files=decision.get("near_files"),
            )
    raise ConsistencyError("it was replaced again and again while ranks opened it", where=job.call.url, hint="load another step")


def _bind(job: LoadJob, state: object, catalog: Catalog) -> Binding:
    group, options = job.call.group, job.options
    shards = _shards.setdefault(group, ShardCache())
    with job.span("match"):
        binding = job.bind(state, catalog, shards)
    if options.dry_run:  # nothing is created, and what a later load finds in ``shards`` must not change
        created = {id(local): device for local, device in binding.without_memory}
        jobs = {name: TensorLoad(*pair) for name, pair in binding.targets.items()}
        binding.targets |= {n: as_if_created(one, created[id(one.target)]) for n, one in jobs.items() if id(one.target) in created}
    if len(shards.known) > 4 * len(binding.targets) + 1000:
        shards.known.clear()  # of states that are not loaded any more
    return binding


def _sharing(job: LoadJob, catalog: Catalog, binding: Binding) -> SharedReads:
    """What this rank may share: nothing where it reads alone, or where reading only its parts costs less."""
    options, group = job.options, job.call.group
    wanted = group.size > 1 and (options.exchange == "all" or (options.exchange == "parts" and options.verify == "full"))
    jobs = map(TensorLoad._make, binding.targets.values()) if wanted else ()
    return SharedReads.of(jobs, group.rank, parts=options.exchange == "parts", piece=source_of(catalog).io_hints.read_size, wanted=wanted)


# ---- divide: who reads which chunk for whom


def divide(matched: Matched) -> Divided:
    """Have the objects of the state accept theirs, give memory to tensors that have none, and divide the reads among the ranks."""
    job, binding = matched.job, matched.binding
    setters = accept(binding, job.writes, job.call.url)
    reader = job.reader(matched.catalog, job.options.verify)
    job.writes.begun = bool(binding.create or binding.objects)
    run_each(binding.create)
    exchange = exchange_of(matched, reader)
    return Divided(matched=matched, reader=reader, exchange=exchange, setters=setters)


def exchange_of(matched: Matched, reader: Reader) -> ReadExchange | None:
    if matched.refused is None:
        return None
    job, sharing = matched.job, matched.sharing
    group, options = job.call.group, job.options
    for entry in sharing.entries():
        reader.check_tiling(entry)
    near = machines.neighbours(matched.machines, group.ranks.index(group.rank), group.ranks)
    parts = options.exchange == "parts"
    spelled = matched.near_files
    if isinstance(spelled, str):
        spelled = parse_json(job.call.fetch(spelled))
    near_files = None if spelled is None else NearFiles(spelled, matched.machines, group.ranks)
    sharing.divide(matched.refused, near if parts else None, what_is_worth(parts=parts, verify=options.verify), near_files)
    return ReadExchange(sharing, reader.fetch, near, reader.threads, partial(peers_of, group, timeout=options.timeout), job.call)


# ---- read: every tensor gets its bytes


def read(matched: Matched) -> Filled:
    """Divide the reads, and fill the tensors of this rank. Where nobody shares, the values are set here too."""
    job = matched.job
    with job.call.phase("read"):
        with replacement_noticed(matched.catalog):
            divided = divide(matched)
            _fill(divided)
            if divided.exchange is None:
                set_all(divided.setters, job.call.url)
        row: Row = {"again": [] if divided.exchange is None else divided.exchange.again}
        if job.recorded is not None and job.options.spans is not None:
            row["spans"] = job.options.spans.table().to_row()
        wrong = job.agree(row, partial(_end_reading, job))
    return Filled(divided=divided, handed_out_wrong=wrong)


def _fill(divided: Divided) -> None:
    matched, reader, url = divided.matched, divided.reader, divided.matched.job.call.url
    jobs, sharing = matched.jobs, matched.sharing
    devices = devices_of(job.target for job in jobs)
    settle_devices(devices, url)
    if devices:
        reader.fetch.allocate = pinned_bytes
    plan = reader.plan([job for job in jobs if id(job.target) not in sharing.complete], sharing.left_out)
    matched.job.writes.begun = True
    progress = matched.job.options.progress
    total = sum(part.memory.nbytes for job in jobs for part in job.target.parts) if progress is not None else 0
    with reported(progress, lambda: (min(reader.bytes_read, total), total)):
        reader.run(plan, divided.exchange)
    settle_devices(devices, url)
    changed([part.memory for job in jobs if id(job.target) in sharing.complete for part in job.target.parts])


def _end_reading(job: LoadJob, rows: dict[int, Row]) -> list[tuple[str, int]]:
    """Leader: keep the spans, if they are wanted; which chunks all ranks read again."""
    if job.recorded is not None:
        job.recorded.update({i: rows[rank]["spans"] for i, rank in enumerate(job.call.group.ranks) if "spans" in rows[rank]})
    return sorted({(name, number) for row in rows.values() for name, number in row["again"]})


# ---- set: the values of the state, when every tensor is right


def set_values(filled: Filled) -> None:
    """Where ranks shared reads: read again what was handed out wrong, then set the values. Some come of tensors, and what takes them may
    keep or refuse what it gets."""
    divided = filled.divided
    job = divided.matched.job
    if divided.exchange is None:
        return
    with job.call.phase("set"):
        with replacement_noticed(divided.matched.catalog):
            if filled.handed_out_wrong:
                _read_again(divided, filled.handed_out_wrong)
            set_all(divided.setters, job.call.url)
        job.agree({}, _nothing)


def _nothing(rows: dict[int, Row]) -> None:
    """Leader: all ranks have set their values; there is nothing to decide."""


def _read_again(divided: Divided, wrong: Sequence[tuple[str, int]]) -> None:
    """What this rank wants of chunks that other ranks handed out before a digest showed that they had read them wrong."""
    matched = divided.matched
    chunks: dict[str, set[int]] = {}
    for name, number in wrong:
        chunks.setdefault(name, set()).add(number)
    jobs = [job for job in matched.jobs if stored_name(job) in chunks and job.entry.rank is None]
    if not jobs:
        return
    left_out = {id(job.target): set(range(len(job.entry.grid))) - chunks[stored_name(job)] for job in jobs}
    reader = matched.job.reader(matched.catalog, "full")
    reader.run(replace(reader.plan(jobs, left_out), padding=()))
    settle_devices(devices_of(job.target for job in jobs), matched.job.call.url)
    divided.reader.fetch.read += reader.fetch.read
    divided.reader.fetch.verified += reader.fetch.verified


# ---- the report


def _report(filled: Filled, seconds: float) -> LoadReport:
    divided, matched = filled.divided, filled.divided.matched
    call, reader, binding, exchange = matched.job.call, divided.reader, matched.binding, divided.exchange
    if call.is_leader:
        log.info("loaded %s: %d tensors, %d bytes read here in %.2f s", call.url, len(binding.targets), reader.bytes_read, seconds)
    return LoadReport(
        url=call.url,
        tensors=len(binding.targets),
        missing=matched.missing,
        unexpected=matched.unexpected,
        renamed=renamed(binding, matched.job.options.selection.followed_by(binding.renames)),
        cast=tuple(binding.cast),
        bytes_needed=reader.bytes_needed + matched.sharing.needed,
        bytes_read=reader.bytes_read,
        bytes_unverified=reader.bytes_unverified,
        bytes_received=0 if exchange is None else exchange.received,
        seconds=seconds,
        requests=reader.fetch.requests,
        files=len(reader.fetch.paths),
        memory=reader.fetch.memory + (exchange.pool_bytes if exchange is not None else 0),
    )


def stored_name(job: TensorLoad) -> str:
    """The tensor whose bytes are loaded."""
    return job.entry.alias or job.entry.name
