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
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckpt import settings
from ckpt.concurrency import gc_paused
from ckpt.converters.selection import Views
from ckpt.engine.devices import devices_of, settle_devices
from ckpt.engine.load.fitting import accept, renamed, row_of_match, run_each, set_all, verdict_of
from ckpt.engine.load.job import LoadJob, LoadOptions, StateWrites
from ckpt.engine.load.reader import changed
from ckpt.engine.load.shared_reads import SharedReads
from ckpt.engine.save.background import wait_for_pending_save
from ckpt.errors import CkptError, MismatchError, NotFoundError, RankFailedError
from ckpt.net.channel import Row
from ckpt.net.group import current_group
from ckpt.plan.match import Selection, globs_of_only, rules_of_rename
from ckpt.state.bind import bind
from ckpt.state.targets import Binding
from ckpt.state.tensors import LocalShard, LocalTensor
from ckpt.telemetry.callbacks import ProgressCallback, callback_of, reported
from ckpt.telemetry.spans import Spans

from .filling import Filling, FillPlan, Target, check_alike, in_other_names, plan_filling, views_of, worded
from .holdings import Holdings, LiveCatalog
from .pull import PiecePull, Pulled
from .reshard_offers import Fitted, Meeting, Moved, Offered, ReshardRanks, ReshardReport, Traffic, holdings_of, meet, offer, reshard_ranks
from .server import PieceServer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ckpt.plan.layout.layout import Layout


# Whether the memory of an old and a new state is the same: then bytes would be overwritten before all who want them have them.


class _Extent(NamedTuple):
    """The addresses that a part of a tensor lies at, and what is there."""

    start: int
    stop: int
    device: str
    name: str
    part: LocalShard


def shared_memory(old: Iterable[LocalTensor], new: Sequence[Target]) -> list[str]:
    """A line for each tensor of the new state that shares memory with the old one, unless it is the same box of the same tensor in the same
    place, with the same dtype: then it keeps its bytes.

    Addresses are compared as ranges, so two views that interleave count as sharing. Nothing is changed.
    """
    before = sorted(_extents((local.info.name, local) for local in old), key=lambda e: (e.device, e.start))
    problems = []
    by_device: dict[str, list[_Extent]] = {}
    for extent in before:
        by_device.setdefault(extent.device, []).append(extent)
    columns = {
        device: (np.array([e.start for e in extents]), np.maximum.accumulate(np.array([e.stop for e in extents])))
        for device, extents in by_device.items()
    }
    for local, entry in new:
        source = entry.alias or entry.name
        for extent in _extents([(local.state_name, local)]):
            starts, stops = columns.get(extent.device, (np.zeros(0), np.zeros(0)))
            first, last = int(np.searchsorted(stops, extent.start, "right")), int(np.searchsorted(starts, extent.stop, "left"))
            others = [e for e in by_device.get(extent.device, ())[first:last] if e.stop > extent.start and not _same(e, extent, source)]
            if others:
                problems.append(f"{extent.name}: its memory is also that of {others[0].name} in the old state")
                break
    return problems


def _extents(tensors: Iterable[tuple[str, LocalTensor]]) -> list[_Extent]:
    extents = []
    for name, local in tensors:
        for part in local.parts:
            memory = part.memory
            if memory.is_meta or not memory.numel():
                continue
            start, size = memory.data_ptr(), memory.element_size()
            last = sum((n - 1) * stride for n, stride in zip(memory.shape, memory.stride(), strict=True))
            extents.append(_Extent(start, start + (last + 1) * size, str(memory.device), name, part))
    return extents


def _same(old: _Extent, new: _Extent, source: str) -> bool:
    a, b = old.part, new.part
    return (
        old.name == source
        and (old.start, a.box, a.memory.dtype) == (new.start, b.box, b.memory.dtype)
        and a.memory.stride() == b.memory.stride()
    )


WHAT = "the old state"
"""What messages call the source."""
_THREADS = 4
"""Holders that a rank pulls from at once, each with a piece in memory."""

log = logging.getLogger("ckpt")


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
    names: str | os.PathLike[str] | None = None,
    convention: str | None = None,
    numbers: Mapping[str, int] | None = None,
    check_replicas: bool = True,
    timeout: float | None = None,
    threads: int | None = None,
    process_group: ProcessGroup | None = None,
    progress: bool | ProgressCallback | None = None,
) -> ReshardReport:
    """Fill ``new_state`` with the values of ``old_state``, from memory to memory, whatever their layouts. Collective: every rank that has
    either of them calls it.

    Each rank takes the bytes that it wants from a rank that has them, and no others; every piece is verified. Tensors, modules, optimizers,
    ``PerRank`` values and plain values come along as in a :func:`ckpt.load` of a checkpoint of the old state. The old state is only read,
    and must not change before the call returns.

    Args:
        old_state: what a rank has; None or ``{}`` on ranks that join. At least one rank has one.
        new_state: what a rank is to have; None or ``{}`` on ranks that leave. It may share memory with the old one only where a tensor is
            the same box of the same tensor in both.
        layout, new_layout: places of plain tensors that are parts of larger ones. ``layout`` is for the ranks that have an old state,
            ``new_layout`` for those that have a new one.
        only: globs of names in the new state to fill; all others are left alone.
        rename, strict, cast: as for :func:`ckpt.load`, with the old state in the place of the checkpoint.
        names, convention, numbers: as for :func:`ckpt.translated`: the old state in other names, where fused tensors come apart and others
            are put together. ``rename`` and ``only`` speak of the new names.
        check_replicas: compare the bytes of replicated tensors between the ranks that have them, as :func:`ckpt.save` does: they are then
            taken from any of these.
        timeout: seconds without a sign of life after which a rank counts as dead.
        threads: ranks that this one takes bytes from at once.
        process_group: all ranks that take part; by default the world.
        progress: as for :func:`ckpt.load`.

    Raises:
        UsageError: no rank has an old state; or there is no such translation.
        StateError, LayoutError, ConsistencyError, CoverageError: the old states do not make one.
        ReplicaError: replicas of a tensor differ.
        NamesError, ShapeError, MismatchError: the old state does not fit the new one, or they share memory; nothing was changed.
        RankFailedError, DeadlineError, ExchangeError: a rank failed, died or hangs, and no other one has its bytes. The message says
            whether this rank's new state was changed. The old state is whole.
    """
    base = current_group(process_group)
    wait_for_pending_save(base)
    options = LoadOptions(
        layout=new_layout,
        selection=Selection(only=globs_of_only(only), rename=rules_of_rename(rename)),
        strict=strict,
        cast=cast,
        verify="full",
        timeout=settings.timeout(timeout),
        threads=settings.threads(threads) if threads is not None else _THREADS,
        progress=callback_of(progress=progress, leads=base.rank == base.leader, title="reshard"),
        spans=Spans(on=settings.spans()),
    )
    views = views_of(names, convention, numbers)
    translation = names if names is None else os.fspath(names), convention, sorted((numbers or {}).items())
    asked = json.dumps([options.selection.only, options.selection.rename, strict, cast, check_replicas, translation])
    ranks = reshard_ranks(base)
    call = ranks.group.call("reshard", WHAT, options.timeout)
    job = LoadJob(call=call, options=options, recorded=None, writes=StateWrites())
    with gc_paused():
        with _telling_whether_changed(job.writes):
            ranks.connect(call)
        return _Reshard(job, ranks, views, asked).run(old_state, layout, new_state, check_replicas=check_replicas)


class _Reshard:
    """One rank's side of one reshard."""

    def __init__(self, job: LoadJob, ranks: ReshardRanks, views: Views | None, asked: str) -> None:
        self.job = job
        self.call = job.call
        self.ranks = ranks
        self.group = ranks.group
        self.cache = ranks.cache
        self.views = views
        self.asked = asked
        self.version = f"reshard {job.call.number}"
        self.served: dict[str, Holdings] = {}
        """What the server gives, once the numbers of the tensors are known."""

    def run(
        self, old: Mapping[str, Any] | None, layout: Layout | None, new: Mapping[str, Any] | None, *, check_replicas: bool
    ) -> ReshardReport:
        began = time.perf_counter()
        with _telling_whether_changed(self.job.writes):
            meeting = meet(self.call, self.asked, has_old=bool(old), has_new=bool(new))
            server = None
            if old and self.group.size > 1:
                try:
                    server = PieceServer(self._holdings, meeting.secret, self.call.timeout, ports=self.ranks.ports())
                except BaseException as err:  # the other ranks wait for what this one offers
                    self.call.fail("offer", err)
                    raise
            try:
                offered = offer(self.job, meeting, old or {}, layout, server, self.cache, check_replicas=check_replicas)
                numbers = offered.catalog.numbers
                self.served[self.version] = holdings_of({numbers[name]: tensor for name, tensor in offered.local.items()})
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

    # ---- fit: all problems of all ranks, before anything changes

    def fit(self, offered: Offered, state: Mapping[str, Any]) -> Fitted:
        meeting, catalog, options, call = offered.meeting, offered.catalog, self.job.options, self.call
        binding: Binding | None = None
        plan: FillPlan | None = None
        with call.phase("fit"), worded(stored=WHAT, state="the new state", layout="new_layout="):
            row: Row = {}
            if self.views is not None:
                catalog = in_other_names(catalog, self.views, strict=options.strict)
                row["translation"] = catalog.translation
            if self.group.rank in meeting.new:
                if options.layout is not None:
                    options.layout.check_ranks(meeting.new)
                with self.job.span("match"):
                    binding = bind(
                        state,
                        catalog,
                        rank=self.group.rank,
                        ranks=meeting.new,
                        layout=options.layout,
                        selection=options.selection,
                        cast=options.cast,
                        shards=self.cache.new_shards,
                    )
                with self.job.span("plan"):
                    plan = plan_filling(
                        binding.targets.values(),
                        catalog,
                        rank=self.group.rank,
                        near=meeting.near,
                        cache=self.cache.plans,
                        source=self.cache.key,
                    )
                binding.misfits += shared_memory(offered.local.values(), plan.targets)
                row |= row_of_match(self.job, catalog, binding, SharedReads.of((), self.group.rank, parts=False, piece=1, wanted=False))
            verdict = self.job.agree(row, partial(self._lead_fit, meeting, catalog))
        return Fitted(
            offered=offered, binding=binding, plan=plan, missing=tuple(verdict["missing"]), unexpected=tuple(verdict["unexpected"])
        )

    def _lead_fit(self, meeting: Meeting, catalog: LiveCatalog, rows: dict[int, Row]) -> Row:
        if self.views is not None:
            check_alike(rows)
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
                copied, pulled = self._fill(fitted, fitted.plan.with_memory() if fitted.binding.create else fitted.plan)
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
            with self.job.span("copy", sum(box.numel * plan.targets[n][1].dtype.itemsize for n, box in plan.transfers.own)):
                filling.copy_own(offered.local, self.call.heartbeat)
            pull = PiecePull(
                version=self.version,
                rank=self.group.rank,
                secret=offered.meeting.secret,
                timeout=self.call.timeout,
                threads=options.threads,
                alive=self.call.check_failures,
                spans=options.spans,
            )
            try:
                pulled = pull.run(plan.transfers, offered.holders, filling.place)
            except RankFailedError:
                self.call.check_failures(at_once=True)  # a holder that goes because another rank failed is not the cause
                raise
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
            by_rank = {self.group.rank: row}
            if self.call.is_leader:
                by_rank = self.call.lead({"bytes": row}, _collect_traffic, _nothing)
            else:
                self.call.follow({"bytes": row})
        return {rank: Traffic(needed=n, sent=s, copied=c, received=r) for rank, (n, s, c, r) in by_rank.items()}

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
            spans=(self.job.options.spans or Spans(on=False)).table(),
        )


def _sides(fitted: Fitted) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return fitted.offered.meeting.old, fitted.offered.meeting.new


def _nothing(rows: Mapping[int, object]) -> None:
    """Leader: all ranks have their bytes; there is nothing to decide, or to tell the others."""


def _collect_traffic(rows: dict[int, Row]) -> dict[int, list[int]]:
    return {rank: row["bytes"] for rank, row in rows.items()}


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
