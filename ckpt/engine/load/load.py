"""A load: match on every rank, then read. Nothing in the state changes before every rank has found that everything fits.

*match*: each rank binds its state to the checkpoint; the leader puts all problems of all ranks into one report. *read*: each rank fills
its tensors and sets its values. *set*: where ranks read for each other, they set their values only here, after what was handed out wrong
is read again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal
from weakref import WeakKeyDictionary

from ckpt import settings
from ckpt.adapters.binding.bind import bind
from ckpt.adapters.binding.targets import Binding
from ckpt.adapters.shard_cache import ShardCache
from ckpt.adapters.stateful import take_all
from ckpt.byte_source.storage import source_of
from ckpt.catalog import Catalog, identity
from ckpt.concurrency.gc_paused import uncollected
from ckpt.coordination.call import Call
from ckpt.coordination.group import Group
from ckpt.coordination.members import Members
from ckpt.coordination.rows import Row
from ckpt.engine.devices import devices_of, pinned_bytes, settle_devices
from ckpt.errors import CkptError, ConflictError, ConsistencyError, CorruptError, NotFoundError, StorageError
from ckpt.formats.native.replaced import replacement
from ckpt.layout.layout import Layout
from ckpt.plan import machines
from ckpt.plan.match import Selection
from ckpt.tracing.spans import Spans
from ckpt.transport.peers import peers_of
from ckpt.transport.shm_pool import machine

from .fitting import judge, names_of
from .opening import open_together
from .parcels import Carrier
from .reader import Job, Reader, Verify, changed
from .sharing import Sharing, refused, worth_all, worth_parts, worth_replicas

log = logging.getLogger("ckpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What a load did.

    ``missing``: names of the state, on any rank, that the checkpoint lacks. ``unexpected``: names of the checkpoint that no rank's
    state has. ``renamed``: a tensor's stored name → its name in the state. ``cast``: tensors of this rank whose dtype was converted.
    Bytes are this rank's: ``bytes_needed`` by its tensors as they are stored, ``bytes_read`` from storage, for others too,
    ``bytes_unverified`` read without a check of their digest, ``bytes_received`` of those needed that other ranks had read.
    """

    url: str
    tensors: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    renamed: Mapping[str, str]
    cast: tuple[str, ...]
    bytes_needed: int
    bytes_read: int
    bytes_unverified: int
    bytes_received: int
    seconds: float


Shares = Literal["all", "parts", "none"]
"""What ranks read for each other: all that several want, on one machine only what several want different parts of, or nothing."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    layout: Layout | None
    selection: Selection
    strict: bool
    cast: bool
    verify: Verify
    timeout: float
    threads: int
    exchange: Shares = "none"
    spans: Spans | None = None
    sources: tuple[str, ...] | None = None
    """Where the files may lie that a virtual checkpoint points into; None: as CKPT_SOURCES says."""


def load_state(url: str, state: object, group: Group, options: LoadOptions) -> LoadReport:
    """Load in place; collective over ``group``."""
    with uncollected():  # until what the load needed is gone: else it would all be looked through once at the end
        return _load(url, state, group, options)


def _load(url: str, state: object, group: Group, options: LoadOptions) -> LoadReport:
    began = time.perf_counter()
    if recorded.get() is not None and options.spans is None and settings.spans():
        options = replace(options, spans=Spans(limit=0))
    for tries_left in reversed(range(_TRIES)):
        load = _Load(group.call("load", url, options.timeout), options)
        try:
            names = load.run(state)
            break
        except ConflictError:  # replaced meanwhile; of several ranks, some may have begun to read
            if load.touched or group.size > 1 or not tries_left:
                raise
    assert load.binding is not None and load.reader is not None
    seconds = time.perf_counter() - began
    if load.call.is_leader:
        log.info("loaded %s: %d tensors, %d bytes read here in %.2f s", url, len(load.binding.targets), load.reader.bytes_read, seconds)
    return LoadReport(
        url=url,
        tensors=len(load.binding.targets),
        missing=tuple(names["missing"]),
        unexpected=tuple(names["unexpected"]),
        renamed=renamed(load.binding, options.selection),
        cast=tuple(load.binding.cast),
        bytes_needed=load.reader.bytes_needed + (load.sharing.needed if load.sharing is not None else 0),
        bytes_read=load.reader.bytes_read,
        bytes_unverified=load.reader.bytes_unverified,
        bytes_received=load.carrier.received if load.carrier is not None else 0,
        seconds=seconds,
    )


_shards: WeakKeyDictionary[Members, ShardCache] = WeakKeyDictionary()
"""What earlier loads of a job found out about where its tensors lie."""

recorded: ContextVar[dict[int, Row] | None] = ContextVar("recorded", default=None)
"""Takes, on the leader, what each rank was busy with in a load, where somebody wants that; the same on all ranks."""

_TRIES = 5
"""How often ranks open a checkpoint that is replaced between the first rank and the last."""
_TOUCHED = "the state given to load is now partly overwritten: load another checkpoint into it before using it"
_UNTOUCHED = "nothing in the state was changed on this rank"


class _Load:
    def __init__(self, call: Call, options: LoadOptions) -> None:
        self.call = call
        self.options = options
        self.catalog: Catalog | None = None
        self.binding: Binding | None = None
        self.reader: Reader | None = None
        self.sharing: Sharing | None = None
        self.carrier: Carrier | None = None
        self.touched = False
        self.opened = 0
        self.recorded = recorded.get()  # the leader decides in another thread, which has another context

    def run(self, state: object) -> Row:
        for _ in range(_TRIES):
            names = self.call.map_reduce("match", lambda: self.noticing(lambda: self.match(state)), self.judge)
            if "replaced" not in names:
                break
        else:
            raise ConsistencyError("it was replaced again and again while ranks opened it", where=self.call.url, hint="load another step")
        try:
            again = self.call.map_reduce("read", lambda: self.noticing(lambda: self.read(names)), self.end_reading)
            if names["refused"] is not None:
                self.call.map_reduce("set", lambda: self.noticing(lambda: self.correct(again)), lambda rows: None)
        except CkptError as err:
            err.message += f"; {_TOUCHED if self.touched else _UNTOUCHED}"
            raise
        self.call.linger()
        return names

    def span(self, phase: str) -> AbstractContextManager[object]:
        return nullcontext() if self.options.spans is None else self.options.spans.span(phase)

    def noticing(self, work: Callable[[], Row]) -> Row:
        """What ``work`` gives; an error that comes of a replacement says so."""
        try:
            return work()
        except (CorruptError, NotFoundError, StorageError) as err:
            replaced = None if self.catalog is None else replacement(self.catalog)
            if replaced is None:
                raise
            raise replaced from err

    def match(self, state: object) -> Row:
        """Every rank: bind, and say what does not fit."""
        group = self.call.group
        shards = _shards.setdefault(group, ShardCache())
        with self.span("open"):
            self.opened += 1
            self.catalog = open_together(self.call, self.options.sources, f"index{self.opened}")
        with self.span("match"):
            self.binding = bind(
                state,
                self.catalog,
                rank=group.rank,
                ranks=group.ranks,
                layout=self.options.layout,
                selection=self.options.selection,
                cast=self.options.cast,
                shards=shards,
            )
        if len(shards.known) > 4 * len(self.binding.targets) + 1000:
            shards.known.clear()  # of states that are not loaded any more
        said = {"missing": self.binding.missing, "misfits": self.binding.misfits}
        everything = self.binding.used >= names_of(self.catalog)
        used = {"used": None if everything else sorted(self.binding.used), "values": sorted(self.binding.values)}
        row: Row = {"id": identity(self.catalog)}
        row |= {k: self.call.share(json.dumps(v).encode()) for k, v in {"said": said, "used": used}.items()}
        if group.size > 1 and (self.options.exchange == "all" or (self.options.exchange == "parts" and self.options.verify == "full")):
            jobs = map(Job._make, self.binding.targets.values())
            piece = self.catalog.backend.io_hints.read_size
            self.sharing = Sharing.of(jobs, group.rank, parts=self.options.exchange == "parts", piece=piece)
            row |= {"shares": self.call.share(json.dumps(self.sharing.said()).encode()), "machine": machine()}
        return row

    def judge(self, rows: dict[int, Row]) -> Row:
        """Leader: whether it fits everywhere, and who shares. Small: every rank reads it.

        Raises:
            NamesError, ShapeError, MismatchError: the checkpoint does not fit the state.
        """
        assert self.catalog is not None
        if len({row["id"] for row in rows.values()}) > 1:
            return {"replaced": True}
        self.call.fetch_all(row[key] for row in rows.values() for key in ("said", "used", "shares") if key in row)
        verdict: Row = judge(rows, self._once, self.catalog, self.options.selection, strict=self.options.strict, url=self.call.url)
        return verdict | self.share_out(rows)

    def share_out(self, rows: dict[int, Row]) -> Row:
        """Leader: which circles of ranks cannot share, and which ranks are on one machine."""
        if any("shares" not in row for row in rows.values()):
            return {"refused": None}
        said = {digest: self._once(digest) for digest in {row["shares"] for row in rows.values()}}
        return {
            "refused": refused(said[row["shares"]] for row in rows.values()),
            "machines": machines.spell([rows[rank]["machine"] for rank in self.call.group.ranks]),
        }

    def _once(self, digest: str) -> Row:
        found: Row = json.loads(self.call.fetch(digest))
        return found

    def read(self, names: Row) -> Row:
        """Every rank: give memory to what has none, and fill it, with what other ranks read for it too. Where they do, values wait: some
        come of tensors, and what takes them may keep or refuse what it gets."""
        assert self.binding is not None and self.catalog is not None
        options = self.options
        self.ask()
        self.reader = Reader(
            catalog=self.catalog,
            source=source_of(self.catalog),
            verify=options.verify,
            threads=options.threads,
            beat=self.call.heartbeat,
            spans=options.spans,
        )
        self.touched = bool(self.binding.create or self.binding.objects)
        run_each(self.binding.create)
        if self.sharing is not None and names["refused"] is not None:
            self.carrier = self.divide(self.sharing, names)
        jobs = list(map(Job._make, self.binding.targets.values()))
        left_out, complete = (self.sharing.left_out, self.sharing.complete) if self.sharing is not None else ({}, set[int]())
        devices = devices_of(job.target for job in jobs)
        settle_devices(devices, self.call.url)
        if devices:
            self.reader.fetch.allocate = pinned_bytes
        plan = self.reader.plan([job for job in jobs if id(job.target) not in complete], left_out)
        self.touched = True
        self.reader.run(plan, self.carrier)
        settle_devices(devices, self.call.url)
        changed([part.memory for job in jobs if id(job.target) in complete for part in job.target.parts])
        if self.carrier is None:
            self.apply()
        row: Row = {"again": self.carrier.again if self.carrier is not None else []}
        if self.recorded is not None and options.spans is not None:
            row["spans"] = options.spans.table().to_row()
        return row

    def end_reading(self, rows: dict[int, Row]) -> list[tuple[str, int]]:
        """Leader: keep the spans, if they are wanted; what all ranks read again."""
        if self.recorded is not None:
            self.recorded |= {i: rows[rank]["spans"] for i, rank in enumerate(self.call.group.ranks) if "spans" in rows[rank]}
        return handed_out_wrong(rows)

    def correct(self, again: Sequence[tuple[str, int]]) -> Row:
        """Every rank: set the values, when it has the right bytes of what was handed out wrong."""
        if again:
            self.read_again(again)
        self.apply()
        return {}

    def read_again(self, again: Sequence[tuple[str, int]]) -> None:
        """What this rank wants of chunks that other ranks handed out before a digest showed that they had read them wrong."""
        assert self.binding is not None and self.catalog is not None and self.reader is not None
        chunks: dict[str, set[int]] = {}
        for name, number in again:
            chunks.setdefault(name, set()).add(number)
        jobs = [job for job in map(Job._make, self.binding.targets.values()) if stored_name(job) in chunks and job.entry.rank is None]
        if not jobs:
            return
        left_out = {id(job.target): set(range(len(job.entry.grid))) - chunks[stored_name(job)] for job in jobs}
        reader = Reader(
            catalog=self.catalog,
            source=source_of(self.catalog),
            verify="full",
            threads=self.options.threads,
            beat=self.call.heartbeat,
            spans=self.options.spans,
        )
        reader.run(replace(reader.plan(jobs, left_out), padding=()))
        settle_devices(devices_of(job.target for job in jobs), self.call.url)
        self.reader.fetch.read += reader.fetch.read
        self.reader.fetch.verified += reader.fetch.verified

    def ask(self) -> None:
        """Let the objects of the state take theirs before any tensor changes."""
        assert self.binding is not None
        if not self.binding.objects:
            self.binding.apply[:0] = [each.take for each in self.binding.options]
            return
        refusal = take_all([*self.binding.options, *self.binding.objects])
        if refusal is not None:
            self.touched = not refusal.undone
            if isinstance(refusal.error, CkptError):
                raise refusal.error
            raise _refused(refusal.error, f"{refusal.path} in {self.call.url}") from refusal.error

    def divide(self, sharing: Sharing, names: Row) -> Carrier:
        """Every rank: find what it reads for others, and they for it."""
        assert self.reader is not None
        group, options = self.call.group, self.options
        for entry in sharing.entries():
            self.reader.check_tiling(entry)
        near = machines.neighbours(names["machines"], group.ranks.index(group.rank), group.ranks)
        worth = worth_parts if options.exchange == "parts" else worth_all if options.verify == "full" else worth_replicas
        sharing.divide(names["refused"], near if options.exchange == "parts" else None, worth)
        return Carrier(sharing, self.reader.fetch, near, self.reader.threads, lambda: peers_of(group, timeout=options.timeout), self.call)

    def apply(self) -> None:
        """Set the values, now that all bytes are there."""
        assert self.binding is not None
        try:
            run_each(self.binding.apply)
        except CkptError:
            raise
        except Exception as err:  # whatever an object of the user's raises: it has to say that the state was touched
            raise _refused(err, self.call.url) from err


def handed_out_wrong(rows: dict[int, Row]) -> list[tuple[str, int]]:
    """Leader: the chunks that all ranks read again."""
    return sorted({(name, number) for row in rows.values() for name, number in row["again"]})


def stored_name(job: Job) -> str:
    """The tensor whose bytes are loaded."""
    return job.entry.alias or job.entry.name


def _refused(err: Exception, where: str) -> CkptError:
    return CkptError(
        f"an object of the state did not take its loaded value: {type(err).__name__}: {err}",
        where=where,
        hint="`ckpt inspect URL --state` shows what is stored; only=[...] leaves the object out",
    )


def renamed(binding: Binding, selection: Selection) -> dict[str, str]:
    """Stored names of loaded tensors that have another name in the state."""
    if not selection.rename:
        return {}
    entries = {n: e for n, (_, e) in binding.targets.items() if e.rank is None}
    return {e.name: n for n, e in entries.items() if selection.renamed(e.name) != e.name}


def run_each(actions: Iterable[Callable[[], None]]) -> None:
    for action in actions:
        action()
