"""A load, from top to bottom: open → match → fill → set, by the driver of ``fill.py``.

    every rank      open index · bind state    divide chunks · fill tensors         set values
    leader          does it fit everywhere?      what was read wrong?             (only where ranks share reads)

Where ranks read for each other, values are set in a phase of their own: by then every rank has read again what another one handed out
wrong.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import xxhash

from ckpt import settings
from ckpt.catalog import Catalog, identity
from ckpt.concurrency import gc_paused
from ckpt.engine.devices import devices_of, pinned_bytes, settle_devices
from ckpt.errors import CkptError, ConflictError, ConsistencyError
from ckpt.formats.native.catalog import open_native, read_index, read_index_file, replacement_noticed
from ckpt.formats.native.commit import CommitRecord
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.registry import is_file_system, open_backend
from ckpt.net.call import Call
from ckpt.net.channel import Row
from ckpt.net.group import Group
from ckpt.net.liveness import Members
from ckpt.plan import tree
from ckpt.state.shard_table import ShardCache
from ckpt.state.targets import Binding, inline_only
from ckpt.telemetry.spans import Spans
from ckpt.text import parse_json

from .fill import ByteTransfer, LoadJob, LoadOptions, LoadReport, Matched, accept, fill, match, nothing, set_all, verdict_of
from .reader import Reader
from .whole_chunks import TensorLoad, as_if_created, note_writes

if TYPE_CHECKING:
    import torch

    from ckpt.io_backends.protocol import Backend

    from .read_exchange import ReadExchange
    from .shared_reads import SharedReads


# Opens one checkpoint on all ranks of a call: one rank reads the index, and ranks hand it on to each other. No torch.
#
# On storage that every rank reaches over the network, opening on each rank would be five requests and a copy of the same bytes for each.
# So one rank reads, and the others get what it read (``Call.broadcast``). Whoever gets nothing, whatever the reason, reads the storage as
# if it were alone; so a checkpoint that is missing or damaged gives every rank the error that it would have given without. What is handed
# on is compared with digests: the leader's of all of it, the commit record's own, and those in it of the files.


def open_together(call: Call, url: str, sources: Sequence[str] | None, name: str) -> Catalog:
    """The checkpoint at ``url``, which all ranks of a call open; ``name`` tells this time from others in the same call. File systems are
    read by each rank: the ranks of a machine share what its memory has of them."""
    if call.group.size == 1 or is_file_system(url):
        return open_catalog(url, sources=sources)
    opening = Opening(url, sources)
    bundle = call.broadcast(name, opening.read)
    return opening.catalog or opening.of(bundle)


@dataclass(eq=False)
class Opening:
    """One rank's opening of a checkpoint. ``catalog``: as it was read here."""

    url: str
    sources: Sequence[str] | None
    catalog: Catalog | None = None

    def read(self) -> bytes:
        """Open the checkpoint; the bytes of its index."""
        files: dict[str, bytes] = {}

        def read(backend: Backend, record: CommitRecord, name: str) -> bytes:
            files[name] = read_index(backend, record, name)
            return files[name]

        self.catalog = open_catalog(self.url, sources=self.sources, read=read)
        if not isinstance(self.catalog.record, CommitRecord):
            return b""  # of another format: it has none
        return pack(self.url, self.catalog.record, files)  # but rows of single ranks, of which each reads its own

    def of(self, bundle: bytes) -> Catalog:
        """With what was handed on, as far as it is right."""
        handed = unpack(bundle, self.url)
        if handed is None:
            return open_catalog(self.url, sources=self.sources)
        record, files = handed

        def read(backend: Backend, record: CommitRecord, name: str) -> bytes:
            data, file = files.get(name, b""), record.index[name]
            right = len(data) == file.size and xxhash.xxh3_128_hexdigest(data) == file.digest
            return data if right else read_index_file(backend, record, name)

        try:
            return open_native(open_backend(self.url), record, self.sources, read)
        except CkptError as err:
            log.warning("the index of %s is read again, as what was handed on is wrong: %s", self.url, err)
            return open_catalog(self.url, sources=self.sources)


def pack(url: str, record: CommitRecord, files: Mapping[str, bytes]) -> bytes:
    """All that opening reads, as one message."""
    parts = {"": record.to_bytes(), **files}
    head = json.dumps({"url": url, "sizes": {name: len(data) for name, data in parts.items()}}).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *parts.values()])


def unpack(bundle: bytes, url: str) -> tuple[bytes, dict[str, bytes]] | None:
    """Record and files; None if there are none, or it cannot be seen where they are, or they are those of another URL: then the ranks do
    not make the same call."""
    if not bundle:
        return None
    at = 8 + int.from_bytes(bundle[:8], "little")
    files: dict[str, bytes] = {}
    try:
        head = parse_json(bundle[8:at])
        if head["url"] != url:
            return None
        for name, size in head["sizes"].items():
            files[name] = bundle[at : at + size]
            at += size
        return files.pop(""), files
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


log = logging.getLogger("ckpt")
PARTLY_WRITTEN = "the state given to load is now partly overwritten: load another checkpoint into it before using it"
UNCHANGED = "nothing in the state was changed on this rank"

_shards: WeakKeyDictionary[Members, ShardCache] = WeakKeyDictionary()
"""Where the tensors of a job lie, as earlier loads have seen it."""

recorded: ContextVar[dict[int, Row] | None] = ContextVar("recorded", default=None)
"""Takes, on the leader, what each rank was busy with in a load, where somebody wants that; the same on all ranks."""

opened: ContextVar[list[Catalog] | None] = ContextVar("opened", default=None)
"""Takes what a load has opened, where somebody wants that."""

_TRIES = 5
"""How often ranks open a checkpoint that is replaced between the first rank and the last."""


def load_state(url: str, state: object, group: Group, options: LoadOptions) -> LoadReport:
    """Load in place; collective over ``group``."""
    began = time.perf_counter()
    # The leader decides in another thread, which has another context: what is recorded goes along.
    spans_of_ranks = recorded.get()
    if spans_of_ranks is not None and options.spans is None and settings.spans() == "on":
        options = replace(options, spans=Spans(limit=0))
    with gc_paused():  # until what the load needed is gone: else it would all be looked through once at the end
        for tries_left in reversed(range(_TRIES)):
            job = LoadJob(call=group.call("load", url, options.timeout), options=options)
            try:
                return _load(job, state, spans_of_ranks, began)
            except ConflictError:  # replaced meanwhile; of several ranks, some may have begun to read
                if job.begun or group.size > 1 or not tries_left:
                    raise
    raise AssertionError("the last try returns or raises")


def _load(job: LoadJob, state: object, spans_of_ranks: dict[int, Row] | None, began: float) -> LoadReport:
    call, options = job.call, job.options
    matched, sharing = open_and_match(job, state)
    catalog = matched.catalog
    try:
        with call.phase("read"):
            with replacement_noticed(catalog):
                setters = accept(matched)
                reader = job.reader(catalog)
                exchange = None if sharing is None else exchange_of(matched, sharing, reader)
                fill(matched, partial(_transfer, matched, reader, exchange))
                if call.group.size == 1:
                    set_all(setters, call.url)
            row: Row = {"again": [] if exchange is None else exchange.again}
            if spans_of_ranks is not None and options.spans is not None:
                row["spans"] = options.spans.table().to_row()
            wrong = call.agree(row, partial(_end_reading, job, spans_of_ranks))
        if call.group.size > 1:
            # Not before all ranks have read: what sets may be collective (DeepSpeed's partitions), and a rank that failed is not there.
            # Some values come of tensors, and what takes them may keep or refuse what it gets.
            with call.phase("set"):
                with replacement_noticed(catalog):
                    if wrong:
                        _read_again(matched, reader, wrong)
                    set_all(setters, call.url)
                call.agree({}, nothing)
    except CkptError as err:
        err.message += f"; {PARTLY_WRITTEN if job.begun else UNCHANGED}"
        raise
    if call.group.size > 1:
        call.drain()
    seconds, fetch = time.perf_counter() - began, reader.fetch
    if call.is_leader:
        log.info("loaded %s: %d tensors, %d bytes read here in %.2f s", call.url, len(matched.binding.targets), fetch.read, seconds)
    return matched.report(
        bytes_needed=reader.bytes_needed + (0 if exchange is None else exchange.sharing.needed),
        bytes_read=fetch.read,
        bytes_unverified=fetch.read - fetch.verified,
        bytes_received=0 if exchange is None else exchange.received,
        seconds=seconds,
        requests=fetch.requests,
        files=len(fetch.paths),
        memory=fetch.memory + (0 if exchange is None else exchange.pool_bytes),
    )


# ---- open and match: every rank opens the same checkpoint, and it fits the states of all


def open_and_match(job: LoadJob, state: object) -> tuple[Matched, SharedReads | None]:
    """Open the checkpoint and bind the state to it; the leader sees whether everything fits, and who shares reads. Gives what this rank may
    share, None if nobody shares anything."""
    call = job.call
    for attempt in range(1, _TRIES + 1):
        with call.phase("match"):
            matched, sharing = _match(job, state, f"index{attempt}")
        verdict = matched.verdict
        if "replaced" not in verdict:
            if (taken := opened.get()) is not None:
                taken[:] = [matched.catalog]
            if "machines" in verdict and call.group.tree is not None:
                call.group.tree.know_machines(verdict["machines"])
            return matched, None if verdict.get("refused") is None else sharing
    raise ConsistencyError("it was replaced again and again while ranks opened it", where=call.url, hint="load another step")


def _match(job: LoadJob, state: object, name: str) -> tuple[Matched, SharedReads | None]:
    call, options = job.call, job.options
    # What this rank may share: nothing where it reads alone, or where reading only its parts costs less.
    shares = call.group.size > 1 and (options.exchange == "all" or (options.exchange == "parts" and options.verify == "full"))
    with job.span("open"):
        if call.group.size == 1:
            catalog = open_catalog(call.url, sources=options.sources)
        else:
            catalog = open_together(call, call.url, options.sources, name)
    known = _shards.setdefault(call.group, ShardCache())
    sharing: SharedReads | None = None

    def beside(binding: Binding) -> Row:
        nonlocal sharing
        if binding.trials:
            _try_extra_states(catalog, binding)
        if alone:
            return {}
        if options.dry_run:  # nothing is created, and what a later load finds in ``known`` must not change
            created = {id(local): device for local, device in binding.without_memory}
            jobs = {name: TensorLoad(*pair) for name, pair in binding.targets.items()}
            binding.targets |= {n: as_if_created(one, created[id(one.target)]) for n, one in jobs.items() if id(one.target) in created}
        row: Row = {"id": identity(catalog)}
        if shares:
            from .shared_reads import SharedReads, row_of_sharing

            loads, piece = map(TensorLoad._make, binding.targets.values()), catalog.backend.io_hints.read_size
            sharing = SharedReads.of(loads, call.group.rank, parts=options.exchange == "parts", piece=piece)
            row |= row_of_sharing(call, catalog, sharing)
        return row

    def decide(rows: dict[int, Row]) -> Row:
        if len({row.get("id") for row in rows.values()}) > 1:
            return {"replaced": True}
        verdict = verdict_of(call, catalog, rows, options.selection, strict=options.strict)
        if not (all("shares" in row for row in rows.values()) and any(row["shares"] for row in rows.values())):
            return verdict  # nobody reads for others, or there is nothing to share
        from .shared_reads import what_is_shared

        return verdict | what_is_shared(call, rows)

    alone = call.group.size == 1 and not options.dry_run
    with replacement_noticed(catalog):
        matched = match(job, catalog, state, known, beside=beside, decide=decide)
    if len(known.known) > 4 * len(matched.binding.targets) + 1000:
        known.known.clear()  # of states that are not loaded any more
    return matched, sharing


def _try_extra_states(catalog: Catalog, binding: Binding) -> None:
    """Whether modules refuse a stored extra state: the first that does is a misfit."""
    from ckpt.engine.view import StoredTensor

    def special(kind: str, payload: Any) -> object:
        return StoredTensor(catalog, catalog.tensors[payload]).read() if kind == "$tensor" else inline_only(kind, payload)

    for path, node, take in binding.trials:
        value = tree.decode(node, special)
        try:
            take(value)
        except Exception as err:  # noqa: BLE001  whatever the module raises: all ranks hear of it in one error
            binding.misfits.append(f"{path}: {err}")
            return


# ---- fill: who reads which chunk for whom, and every tensor gets its bytes


def exchange_of(matched: Matched, sharing: SharedReads, reader: Reader) -> ReadExchange:
    """Divide the reads among the ranks."""
    from ckpt.net.peers import peers_of
    from ckpt.plan import machines

    from .read_exchange import ReadExchange
    from .shared_reads import what_is_worth

    call, options, verdict = matched.job.call, matched.job.options, matched.verdict
    group = call.group
    for entry in sharing.entries():
        reader.check_tiling(entry)
    near = machines.neighbours(verdict["machines"], group.position, group.ranks)
    parts = options.exchange == "parts"
    spelled = verdict.get("near_files")
    if isinstance(spelled, str):
        spelled = parse_json(call.fetch(spelled))
    near_files = None if spelled is None else machines.NearFiles(spelled, verdict["machines"], group.ranks)
    sharing.divide(verdict["refused"], near if parts else None, what_is_worth(parts=parts, verify=options.verify), near_files)
    return ReadExchange(sharing, reader.fetch, near, reader.threads, partial(peers_of, group, timeout=options.timeout), call)


def _transfer(matched: Matched, reader: Reader, exchange: ReadExchange | None, devices: Collection[torch.device]) -> ByteTransfer:
    jobs = list(map(TensorLoad._make, matched.binding.targets.values()))
    if devices:
        reader.fetch.allocate = pinned_bytes
    total = sum(part.memory.nbytes for job in jobs for part in job.target.parts) if matched.job.options.progress is not None else 0
    if exchange is not None:
        jobs = [job for job in jobs if id(job.target) not in exchange.sharing.complete]
    plan = reader.plan(jobs, None if exchange is None else exchange.sharing.left_out)
    return ByteTransfer(
        padding=plan.padding, run=partial(reader.run, plan, exchange), counts=lambda: (min(reader.fetch.read, total), total)
    )


def _end_reading(job: LoadJob, spans_of_ranks: dict[int, Row] | None, rows: dict[int, Row]) -> list[tuple[str, int]]:
    """Leader: keep the spans, if they are wanted; which chunks all ranks read again."""
    if spans_of_ranks is not None:
        spans_of_ranks.update({i: rows[rank]["spans"] for i, rank in enumerate(job.call.group.ranks) if "spans" in rows[rank]})
    return sorted({(name, number) for row in rows.values() for name, number in row["again"]})


def _read_again(matched: Matched, reader: Reader, wrong: Sequence[tuple[str, int]]) -> None:
    """What this rank wants of chunks that other ranks handed out before a digest showed that they had read them wrong."""
    chunks: dict[str, set[int]] = {}
    for name, number in wrong:
        chunks.setdefault(name, set()).add(number)
    loads = [(TensorLoad(*pair), pair[1].alias or pair[1].name) for pair in matched.binding.targets.values() if pair[1].rank is None]
    jobs = {id(job.target): (job, set(range(len(job.entry.grid))) - chunks[name]) for job, name in loads if name in chunks}
    if not jobs:
        return
    second = matched.job.reader(matched.catalog, "full")
    second.run(second.plan([job for job, _ in jobs.values()], {target: left_out for target, (_, left_out) in jobs.items()}))
    settle_devices(devices_of(job.target for job, _ in jobs.values()), matched.job.call.url)
    note_writes(job.target for job, _ in jobs.values())
    reader.fetch.read += second.fetch.read
    reader.fetch.verified += second.fetch.verified
