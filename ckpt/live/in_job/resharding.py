"""Reshard: the state of some ranks of a job into the state of others, in any layout, through memory alone.

    every rank     who has what     collect, serve      bind            pull, copy          set values
                        │                 │               │                  │                   │
                     Meeting ────────► Offered ───────► Fitted ──────────► Moved ────────► ReshardReport
                        │                 │               │                  │                   │
    leader         old, new ranks    join the tables   does it fit?     have all got theirs?   bytes of all ranks

The old state is a catalog whose chunks lie in memory, so a reshard is a load from it: the same matching, the same planner. Receivers plan
and pull (``ckpt.plan.transfers``); nobody gathers a tensor, and no byte goes to a rank that does not want it.

Invariants: nothing in a new state changes before every rank knows that everything fits. The old state is only read. Beside the states a
rank has the slots of its server and a piece for each thread that pulls.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from ckpt import settings, tree
from ckpt.adapters.binding.bind import bind
from ckpt.adapters.binding.targets import Binding
from ckpt.adapters.collect import collect
from ckpt.adapters.shard_cache import ShardCache
from ckpt.adapters.tensors import LocalTensor
from ckpt.concurrency.gc_paused import gc_paused
from ckpt.coordination.group import Group, current_group
from ckpt.coordination.members import Members
from ckpt.coordination.rows import Row
from ckpt.engine.devices import devices_of, settle_devices
from ckpt.engine.load.fitting import renamed, row_of_match, verdict_of
from ckpt.engine.load.job import LoadJob, StateWrites
from ckpt.engine.load.options import LoadOptions
from ckpt.engine.load.reader import changed
from ckpt.engine.load.setting import accept, run_each, set_all
from ckpt.engine.load.shared_reads import SharedReads
from ckpt.engine.save.background import wait_for_pending_save
from ckpt.engine.save.leader import grouped
from ckpt.errors import CkptError, ConsistencyError, MismatchError, NotFoundError, UsageError
from ckpt.live.catalog import LiveCatalog
from ckpt.live.client import Holder, Pulled, pull_all
from ckpt.live.filling import Filling, FillPlan, PlanCache, plan_filling
from ckpt.live.holdings import Holdings
from ckpt.live.server import PieceServer
from ckpt.plan import machines
from ckpt.plan.match import Selection, several
from ckpt.plan.tables import Table, join_tables
from ckpt.plan.values import join_values
from ckpt.tracing.progress_callback import ProgressCallback, callback_of, reported
from ckpt.transport.shm_pool import machine

from .aliasing import shared_memory
from .tensor_holdings import holdings_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ckpt.layout.layout import Layout

WHAT = "the old state"
"""What messages call the source."""
_THREADS = 4
"""Holders that a rank pulls from at once, each with a piece in memory."""

log = logging.getLogger("ckpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes of one rank: ``needed`` by its new state as the old one has them, ``sent`` to others, ``copied`` within its own memory,
    ``received`` from others."""

    needed: int
    sent: int
    copied: int
    received: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardReport:
    """What a reshard did on this rank; ``ranks`` has the bytes of all.

    ``missing``, ``unexpected``, ``renamed`` and ``cast`` are as in a :class:`ckpt.LoadReport`. ``bytes_needed`` by the tensors of the new
    state, as the old one has them: ``bytes_copied`` of them within this rank, ``bytes_received`` from others. ``bytes_sent`` to others.
    ``seconds`` of wall time.
    """

    tensors: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    renamed: Mapping[str, str]
    cast: tuple[str, ...]
    bytes_needed: int
    bytes_sent: int
    bytes_copied: int
    bytes_received: int
    seconds: float
    ranks: Mapping[int, Traffic]


def reshard(
    old_state: Mapping[str, Any] | None,
    new_state: Mapping[str, Any] | None,
    *,
    layout: Layout | None = None,
    new_layout: Layout | None = None,
    only: str | Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    strict: bool = True,
    cast: bool = False,
    timeout: float | None = None,
    threads: int | None = None,
    process_group: ProcessGroup | None = None,
    progress: bool | ProgressCallback | None = None,
) -> ReshardReport:
    """Fill ``new_state`` with the values of ``old_state``, from memory to memory, whatever their layouts. Collective: every rank that has
    either of them calls it.

    Each rank takes the bytes that it wants from a rank that has them, and no others; every piece is verified. Tensors, modules, optimizers,
    ``PerRank`` values and plain values come along as in a :func:`ckpt.load` of a checkpoint of the old state. The old state is only read,
    and must not change before the call returns. Copies that several ranks hold of a tensor are taken from any of them: they are not
    compared with each other, as a save does.

    Args:
        old_state: what a rank has; None or ``{}`` on ranks that join. At least one rank has one.
        new_state: what a rank is to have; None or ``{}`` on ranks that leave. It may share memory with the old one only where a tensor is
            the same box of the same tensor in both.
        layout, new_layout: places of plain tensors that are parts of larger ones. ``layout`` is for the ranks that have an old state,
            ``new_layout`` for those that have a new one.
        only: globs of names in the new state to fill; all others are left alone.
        rename, strict, cast: as for :func:`ckpt.load`, with the old state in the place of the checkpoint.
        timeout: seconds without a sign of life after which a rank counts as dead.
        threads: ranks that this one takes bytes from at once.
        process_group: all ranks that take part; by default the world.
        progress: as for :func:`ckpt.load`.

    Raises:
        UsageError: no rank has an old state.
        StateError, LayoutError, ConsistencyError, CoverageError: the old states do not make one.
        NamesError, ShapeError, MismatchError: the old state does not fit the new one, or they share memory; nothing was changed.
        RankFailedError, DeadlineError, ExchangeError: a rank failed, died or hangs, and no other one has its bytes. The message says
            whether this rank's new state was changed. The old state is whole.
    """
    group = current_group(process_group)
    wait_for_pending_save(group)
    options = LoadOptions(
        layout=new_layout,
        selection=Selection(only=several(only or ()), rename=tuple((rename or {}).items())),
        strict=strict,
        cast=cast,
        verify="full",
        timeout=settings.timeout(timeout),
        threads=settings.threads(threads) if threads is not None else _THREADS,
        progress=callback_of(progress=progress, leads=group.rank == group.leader, title="reshard"),
    )
    call = group.call("reshard", WHAT, options.timeout)
    job = LoadJob(call=call, options=options, recorded=None, writes=StateWrites())
    with gc_paused():
        return _Reshard(job, group, _memory.setdefault(group, _Memory())).run(old_state, layout, new_state)


@dataclass(eq=False)
class _Memory:
    """What the last reshard of a group found: between the same layouts the next one joins no tables and makes no plan."""

    old_shards: ShardCache = field(default_factory=ShardCache)
    new_shards: ShardCache = field(default_factory=ShardCache)
    key: tuple[object, ...] = ()
    catalog: LiveCatalog | None = None
    plans: PlanCache = field(default_factory=PlanCache)


_memory: WeakKeyDictionary[Members, _Memory] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True, eq=False)
class Meeting:
    """Which ranks have an old state, which a new one, and which are on this rank's machine."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    near: Set[int]
    secret: bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Offered:
    """The old states of all ranks as one catalog, and this rank's part of it."""

    meeting: Meeting
    local: Mapping[str, LocalTensor]
    written: Sequence[tuple[str, torch.Tensor, int]]
    """Name, memory and autograd's count of writes of each part."""
    catalog: LiveCatalog
    holders: Mapping[int, Holder]

    def check_unchanged(self, targets: Iterable[LocalTensor]) -> None:
        """Raise ConsistencyError if the old state was written to since it was offered, but for memory that the new one shares."""
        shared = {part.memory.untyped_storage().data_ptr() for target in targets for part in target.parts}
        for name, memory, count in self.written:
            if memory._version != count and memory.untyped_storage().data_ptr() not in shared:
                raise ConsistencyError(
                    f"tensor {name} of the old state was changed while it was resharded, so what came of it may be a mix",
                    hint="let nothing write to the old state before the call returns, and reshard again",
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """The old state fits the new ones of all ranks; ``binding`` and ``plan`` are None on a rank that leaves."""

    offered: Offered
    binding: Binding | None
    plan: FillPlan | None
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Moved:
    """All tensors have their bytes; ``setters`` give the new state its values."""

    fitted: Fitted
    setters: Sequence[Callable[[], None]]
    copied: int
    pulled: Pulled


class _Reshard:
    """One rank's side of one reshard."""

    def __init__(self, job: LoadJob, group: Group, memory: _Memory) -> None:
        self.job = job
        self.call = job.call
        self.group = group
        self.memory = memory
        self.version = f"reshard {job.call.number}"
        self.served: dict[str, Holdings] = {}
        """What the server gives, once the numbers of the tensors are known."""

    def run(self, old: Mapping[str, Any] | None, layout: Layout | None, new: Mapping[str, Any] | None) -> ReshardReport:
        began = time.perf_counter()
        with _telling_whether_changed(self.job.writes):
            meeting = self.meet(has_old=bool(old), has_new=bool(new))
            server = None
            if old and self.group.size > 1:
                store = self.group.store
                try:
                    server = PieceServer(self._holdings, meeting.secret, self.call.timeout, store=None if store is None else store.host)
                except BaseException as err:  # the other ranks wait for what this one offers
                    self.call.fail("offer", err)
                    raise
            try:
                offered = self.offer(meeting, old or {}, layout, server)
                fitted = self.fit(offered, new or {})
                moved = self.move(fitted)
                traffic = self.set_values(moved, server)
            finally:
                if server is not None:
                    server.close()
        self.call.linger()
        return self._report(moved, traffic, time.perf_counter() - began)

    def _holdings(self, version: str) -> Holdings:
        if version not in self.served:
            raise NotFoundError(f"there is no {version} here")
        return self.served[version]

    # ---- meet: who has what

    def meet(self, *, has_old: bool, has_new: bool) -> Meeting:
        options = self.job.options
        asked = json.dumps([options.selection.only, options.selection.rename, options.strict, options.cast])

        def local() -> Row:
            return {"old": has_old, "new": has_new, "machine": machine(), "options": asked}

        agreed: Row = self.call.map_reduce("meet", local, self._lead_meeting)
        place = self.group.ranks.index(self.group.rank)
        return Meeting(
            old=tuple(agreed["old"]),
            new=tuple(agreed["new"]),
            near=machines.neighbours(agreed["machines"], place, self.group.ranks),
            secret=bytes.fromhex(agreed["secret"]),
        )

    def _lead_meeting(self, rows: dict[int, Row]) -> Row:
        old = [rank for rank in self.group.ranks if rows[rank]["old"]]
        if not old:
            raise UsageError("no rank has an old state: all are empty", hint="pass the state that the job has as old_state")
        if len({row["options"] for row in rows.values()}) > 1:
            raise ConsistencyError(
                "the ranks reshard with different options", hint="give the same only=, rename=, strict= and cast= everywhere"
            )
        return {
            "old": old,
            "new": [rank for rank in self.group.ranks if rows[rank]["new"]],
            "machines": machines.spell([rows[rank]["machine"] for rank in self.group.ranks]),
            "secret": secrets.token_hex(32),
        }

    # ---- offer: the old states make one catalog

    def offer(self, meeting: Meeting, state: Mapping[str, Any], layout: Layout | None, server: PieceServer | None) -> Offered:
        local: dict[str, LocalTensor] = {}

        def collected() -> Row:
            if self.group.rank not in meeting.old:
                return {}
            if layout is not None:
                layout.check_ranks(meeting.old)
            mine = collect(state, rank=self.group.rank, ranks=meeting.old, layout=layout, shards=self.memory.old_shards)
            table = mine.shard_table
            local.update(table.tensors)
            settle_devices(devices_of(table.tensors.values()), WHAT)
            row: Row = {
                "table": self.call.share(_part(mine.shard_table.tensors, table.aliases, lambda n: n not in table.own).to_bytes()),
                "state": self.call.share(tree.text(mine.state).encode()),
            }
            if mine.own or table.own:
                own = _part(table.tensors, table.aliases, lambda n: n in table.own)
                row["own"] = self.call.share(json.dumps({"values": mine.own, "table": own.to_bytes().decode()}).encode())
            if server is not None:
                row |= {"addresses": server.addresses, "network": server.network}
            return row

        agreed: Row = self.call.map_reduce("offer", collected, partial(self._lead_offer, meeting))
        catalog = self._catalog(meeting, agreed)
        if server is not None:
            self.served[self.version] = holdings_of({catalog.numbers[name]: tensor for name, tensor in local.items()})
        holders = {
            rank: Holder(rank=rank, addresses=tuple((host, port) for host, port in addresses), network=network)
            for rank, addresses, network in json.loads(self.call.fetch(agreed["holders"]))
        }
        parts = [(name, part.memory) for name, tensor in local.items() for part in tensor.parts if not part.memory.is_inference()]
        written = [(name, memory, memory._version) for name, memory in parts]
        return Offered(meeting=meeting, local=local, written=written, catalog=catalog, holders=holders)

    def _lead_offer(self, meeting: Meeting, rows: dict[int, Row]) -> Row:
        """Check that the old states make one, and leave for all ranks what they need to know of it."""
        offers = {rank: rows[rank] for rank in meeting.old}
        call = self.call
        call.fetch_all(row[key] for row in offers.values() for key in ("table", "state", "own") if key in row)
        own = {meeting.old.index(rank): json.loads(call.fetch(row["own"])) for rank, row in offers.items() if "own" in row}
        state = join_values([(ranks, json.loads(call.fetch(digest))) for digest, ranks in grouped(offers, "state")])
        agreed = {
            "tables": [[call.leave(call.fetch(digest)), ranks] for digest, ranks in grouped(offers, "table")],
            "state": call.leave(json.dumps(state).encode()),
            "own": call.leave(json.dumps(own).encode()),
            "holders": call.leave(
                json.dumps([[rank, row["addresses"], row["network"]] for rank, row in offers.items() if "addresses" in row]).encode()
            ),
        }
        self._catalog(meeting, agreed)
        return agreed

    def _catalog(self, meeting: Meeting, agreed: Row) -> LiveCatalog:
        """The catalog of all old states. Its tensors are those of the last reshard where all tables are."""
        call, memory = self.call, self.memory
        own = json.loads(call.fetch(agreed["own"]))
        own_tables = {int(place): Table.from_bytes(row["table"].encode()) for place, row in own.items()}
        key = (meeting.old, json.dumps(agreed["tables"]), *(row["table"] for row in own.values()))
        state = json.loads(call.fetch(agreed["state"]))
        ranks = {int(place): row["values"] for place, row in own.items()}
        if memory.catalog is None or memory.key != key:
            joined = join_tables([(ranks, Table.from_bytes(call.fetch(digest))) for digest, ranks in agreed["tables"]])
            aliases = joined.aliases | {n: to for table in own_tables.values() for n, to in table.aliases.items()}
            memory.catalog = LiveCatalog.of(
                replace(joined, aliases=aliases),
                state,
                url=WHAT,
                world_size=len(meeting.old),
                own=[(place, tensor) for place, table in own_tables.items() for tensor in table.tensors],
            )
            memory.key = key
        return memory.catalog.with_values(state, ranks)

    # ---- fit: all problems of all ranks, before anything changes

    def fit(self, offered: Offered, state: Mapping[str, Any]) -> Fitted:
        meeting, catalog, options, call = offered.meeting, offered.catalog, self.job.options, self.call
        binding: Binding | None = None
        plan: FillPlan | None = None
        with call.phase("fit"):
            row: Row = {}
            if self.group.rank in meeting.new:
                if options.layout is not None:
                    options.layout.check_ranks(meeting.new)
                binding = bind(
                    state,
                    catalog,
                    rank=self.group.rank,
                    ranks=meeting.new,
                    layout=options.layout,
                    selection=options.selection,
                    cast=options.cast,
                    shards=self.memory.new_shards,
                )
                targets = list(binding.targets.values())
                binding.misfits += shared_memory(offered.local.values(), targets)
                plan = plan_filling(
                    targets, catalog, rank=self.group.rank, near=meeting.near, cache=self.memory.plans, source=self.memory.key
                )
                row = row_of_match(self.job, catalog, binding, SharedReads.of((), self.group.rank, parts=False, piece=1, wanted=False))
            verdict = self.job.agree(row, partial(self._lead_fit, meeting, catalog))
        return Fitted(
            offered=offered, binding=binding, plan=plan, missing=tuple(verdict["missing"]), unexpected=tuple(verdict["unexpected"])
        )

    def _lead_fit(self, meeting: Meeting, catalog: LiveCatalog, rows: dict[int, Row]) -> Row:
        takers = {rank: rows[rank] for rank in meeting.new}
        return verdict_of(self.job, catalog, takers) if takers else {"missing": [], "unexpected": []}

    # ---- move: every tensor gets its bytes

    def move(self, fitted: Fitted) -> Moved:
        with self.call.phase("move"):
            setters: Sequence[Callable[[], None]] = ()
            copied, pulled = 0, Pulled()
            if fitted.binding is not None and fitted.plan is not None:
                setters = accept(fitted.binding, self.job.writes, WHAT)
                self.job.writes.begun = bool(fitted.binding.create or fitted.binding.objects)
                run_each(fitted.binding.create)
                copied, pulled = self._fill(fitted, fitted.plan)
            self.job.agree({}, _nothing)
        return Moved(fitted=fitted, setters=setters, copied=copied, pulled=pulled)

    def _fill(self, fitted: Fitted, plan: FillPlan) -> tuple[int, Pulled]:
        offered, options = fitted.offered, self.job.options
        filling = Filling(plan)
        targets = [local for local, _ in plan.targets]
        devices = devices_of(targets)
        settle_devices(devices, WHAT)
        self.job.writes.begun = True
        with reported(options.progress, lambda: (filling.placed, plan.transfers.needed)):
            filling.zero_padding()
            filling.copy_own(offered.local, self.call.heartbeat)
            pulled = pull_all(
                plan.transfers,
                offered.holders,
                filling.place,
                version=self.version,
                rank=self.group.rank,
                secret=offered.meeting.secret,
                timeout=self.call.timeout,
                threads=options.threads,
                alive=self.call.check_failures,
            )
        settle_devices(devices, WHAT)
        changed([part.memory for local in targets for part in local.parts])
        return filling.copied, pulled

    # ---- set: the values of the state, when every tensor of every rank is right

    def set_values(self, moved: Moved, server: PieceServer | None) -> dict[int, Traffic]:
        with self.call.phase("set"):
            binding = moved.fitted.binding
            moved.fitted.offered.check_unchanged(() if binding is None else (local for local, _ in binding.targets.values()))
            set_all(moved.setters, WHAT)
            plan = moved.fitted.plan
            row = [
                0 if plan is None else plan.transfers.needed,
                0 if server is None else server.bytes_sent,
                moved.copied,
                sum(moved.pulled.received.values()),
            ]
            agreed = self.job.agree({"bytes": row}, _collect_traffic)
        return {rank: Traffic(needed=n, sent=s, copied=c, received=r) for rank, (n, s, c, r) in agreed["ranks"]}

    def _report(self, moved: Moved, traffic: dict[int, Traffic], seconds: float) -> ReshardReport:
        fitted, mine = moved.fitted, traffic[self.group.rank]
        binding = fitted.binding
        if self.call.is_leader:
            total = sum(t.needed for t in traffic.values())
            log.info("resharded %d bytes from %d to %d ranks in %.2f s", total, *map(len, _sides(fitted)), seconds)
        return ReshardReport(
            tensors=0 if binding is None else len(binding.targets),
            missing=fitted.missing,
            unexpected=fitted.unexpected,
            renamed={} if binding is None else renamed(binding, self.job.options.selection),
            cast=() if binding is None else tuple(binding.cast),
            bytes_needed=mine.needed,
            bytes_sent=mine.sent,
            bytes_copied=mine.copied,
            bytes_received=mine.received,
            seconds=seconds,
            ranks=traffic,
        )


def _sides(fitted: Fitted) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return fitted.offered.meeting.old, fitted.offered.meeting.new


def _part(tensors: Mapping[str, LocalTensor], aliases: Mapping[str, str], taken: Callable[[str], bool]) -> Table:
    """The table of the tensors whose names are ``taken``."""
    return Table(tensors=tuple(t.info for n, t in tensors.items() if taken(n)), aliases={n: to for n, to in aliases.items() if taken(n)})


def _nothing(rows: dict[int, Row]) -> None:
    """Leader: all ranks have their bytes; there is nothing to decide."""


def _collect_traffic(rows: dict[int, Row]) -> Row:
    return {"ranks": [[rank, row["bytes"]] for rank, row in rows.items()]}


@contextmanager
def _telling_whether_changed(writes: StateWrites) -> Iterator[None]:
    try:
        yield
    except MismatchError:
        raise  # it says so
    except CkptError as err:
        partly = "the new state of this rank is now partly overwritten, the old one is as it was"
        err.message += f"; {partly if writes.begun else 'nothing in the new state was changed on this rank'}"
        raise
