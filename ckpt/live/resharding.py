"""Reshard: the state of some ranks of a job into the state of others, in any layout, through memory alone.

    every rank     who has what     collect, serve      bind            pull, copy          set values
                        │                 │               │                  │                   │
                     Meeting ────────► Offered ───────► Matched ───────────────────────► ReshardReport
                        │                 │               │                  │                   │
    leader         old, new ranks    join the tables   does it fit?     have all got theirs?   bytes of all ranks

The old state is a catalog whose chunks lie in memory, so a reshard is a load from it: the same matching, the same planner. Receivers plan
and pull (``ckpt.plan.transfers``); nobody gathers a tensor, and no byte goes to a rank that does not want it.

Invariants: nothing in a new state changes before every rank knows that everything fits. The old state is only read. Beside the states a
rank has the slots of its server, which stays for the next reshard, as the connections do: until the process group ends, or one fails.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ckpt import settings
from ckpt.concurrency import gc_paused
from ckpt.converters.mapping.convention import Translation, check_translation
from ckpt.converters.selection import Views
from ckpt.engine.load.fill import ByteTransfer, LoadJob, LoadOptions, Matched, accept, fill, match, nothing, set_all, verdict_of
from ckpt.engine.save.job import wait_for_pending_save
from ckpt.errors import CkptError, MismatchError, RankFailedError
from ckpt.net.channel import Row
from ckpt.net.group import Job, group_of
from ckpt.plan.layout.layout import check_layout
from ckpt.plan.match import Selection, globs_of_only, rules_of_rename
from ckpt.settings import check_flags
from ckpt.state.targets import Binding
from ckpt.state.tensors import LocalShard, LocalTensor
from ckpt.telemetry.progress import ProgressCallback, callback_of
from ckpt.telemetry.spans import Spans

from .filling import Filling, FillPlan, Target, check_alike, in_other_names, plan_filling, refuse_pickles, worded
from .pull import PiecePull, Pulled
from .reshard_offers import Meeting, Offered, ReshardRanks, ReshardReport, Traffic, holdings_of, meet, offer, reshard_ranks

if TYPE_CHECKING:
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
    translation: Translation | None = None,
    check_replicas: bool = True,
    job: Job | None = None,
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
        translation: the old state in other names; ``rename`` and ``only`` speak of these.
        check_replicas: compare the bytes of replicated tensors between the ranks that have them, as :func:`ckpt.save` does: they are then
            taken from any of these.
        job: all ranks that take part, old and new; its ``threads``: ranks that this one takes bytes from at once.
        progress: as for :func:`ckpt.load`.

    Raises:
        UsageError: no rank has an old state; or there is no such translation.
        StateError, LayoutError, ConsistencyError, CoverageError: the old states do not make one.
        ReplicaError: replicas of a tensor differ.
        NamesError, ShapeError, MismatchError: the old state does not fit the new one, or they share memory; nothing was changed.
        RankFailedError, DeadlineError, ExchangeError: a rank failed, died or hangs, and no other one has its bytes. The message states
            whether this rank's new state was changed. The old state is whole.
    """
    job = Job.of(job)
    base = group_of(job)
    wait_for_pending_save(base)
    check_flags(strict=strict, cast=cast, check_replicas=check_replicas)
    options = LoadOptions(
        layout=new_layout,
        selection=Selection(only=globs_of_only(only), rename=rules_of_rename(rename)),
        strict=strict,
        cast=cast,
        verify="full",
        timeout=settings.timeout(job.timeout),
        threads=settings.threads(job.threads) if job.threads is not None else _THREADS,
        progress=None if progress is None else callback_of(progress=progress, leads=base.rank == base.leader, title="reshard"),
        spans=Spans(on=settings.spans() == "on"),
    )
    check_translation(translation)
    views = None if translation is None else translation.views()
    into = None if translation is None else asdict(translation)
    asked = json.dumps([options.selection.only, options.selection.rename, strict, cast, check_replicas, into], sort_keys=True)
    ranks = reshard_ranks(base)
    call = ranks.group.call("reshard", WHAT, options.timeout)
    load = LoadJob(call=call, options=options)
    began = time.perf_counter()
    with gc_paused():
        try:
            ranks.connect(call)
            resharding = _Reshard(load, ranks, views, f"reshard {call.number}")
            matched, meeting, traffic = resharding.run(old_state, layout, new_state, asked, check_replicas=check_replicas)
        except MismatchError:
            raise  # it says so
        except CkptError as err:
            partly = "the new state of this rank is now partly overwritten, the old one is as it was"
            err.message += f"; {partly if load.begun else 'nothing in the new state was changed on this rank'}"
            raise
        call.drain()
        return _report(matched, meeting, traffic, time.perf_counter() - began)


@dataclass(eq=False)
class _Reshard:
    """One rank's side of one reshard."""

    job: LoadJob
    ranks: ReshardRanks
    views: Views | None
    version: str

    def run(
        self, old: Mapping[str, Any] | None, layout: Layout | None, new: Mapping[str, Any] | None, asked: str, *, check_replicas: bool
    ) -> tuple[Matched, Meeting, dict[int, Traffic]]:
        call, ranks = self.job.call, self.ranks
        meeting = meet(call, asked, ranks.secret, has_old=bool(old), has_new=bool(new))
        server, served = None, False
        if old and ranks.group.size > 1:
            try:
                server = ranks.server(meeting.secret, call.timeout)
            except BaseException as err:  # the other ranks wait for what this one offers
                call.fail("offer", err)
                raise
        before = 0 if server is None else server.bytes_sent
        try:
            offered = offer(self.job, meeting, old or {}, layout, server, ranks.cache, check_replicas=check_replicas)
            numbers = offered.catalog.numbers
            ranks.served[self.version] = holdings_of({numbers[name]: tensor for name, tensor in offered.local.items()})
            matched, plan = self.fit(offered, new or {})
            setters, copied, pulled = self.move(matched, plan, offered)
            ranks.served.clear()
            served = server is None or server.rest()
            sent = 0 if server is None else server.bytes_sent - before
            row = [plan.transfers.needed, sent, copied, sum(pulled.received.values())]
            return matched, meeting, self.set_values(matched, offered, setters, row)
        finally:
            ranks.served.clear()
            if not served:
                ranks.disconnect()

    # ---- fit: all problems of all ranks, before anything changes

    def fit(self, offered: Offered, state: Mapping[str, Any]) -> tuple[Matched, FillPlan]:
        """The old state fits the new ones of all ranks. A rank that leaves has nothing to fill."""
        meeting, catalog, options = offered.meeting, offered.catalog, self.job.options
        call, rank, cache = self.job.call, self.ranks.group.rank, self.ranks.cache
        plans: list[FillPlan] = []

        def beside(binding: Binding) -> Row:
            with self.job.span("plan"):
                plan = plan_filling(binding.targets.values(), catalog, rank=rank, near=meeting.near, cache=cache.plans, source=cache.key)
            refuse_pickles(binding, catalog)
            binding.misfits += shared_memory(offered.local.values(), plan.targets)
            plans.append(plan)
            return {} if self.views is None else {"translation": catalog.translation}

        def decide(rows: dict[int, Row]) -> Row:
            if self.views is not None:
                check_alike(rows)
            takers = {rank: rows[rank] for rank in meeting.new}
            if not takers:
                return {"missing": [], "unexpected": []}
            return verdict_of(call, catalog, takers, options.selection, strict=options.strict)

        with call.phase("fit"), worded(stored=WHAT, state="the new state", layout="new_layout="):
            if self.views is not None:
                catalog = in_other_names(catalog, self.views, strict=options.strict)
            if options.layout is not None and rank in meeting.new:
                check_layout(options.layout, meeting.new)
            matched = match(self.job, catalog, state, cache.new_shards, ranks=meeting.new, beside=beside, decide=decide)
        return matched, plans[0]

    # ---- move: every tensor gets its bytes

    def move(self, matched: Matched, plan: FillPlan, offered: Offered) -> tuple[Sequence[Callable[[], None]], int, Pulled]:
        """Gives what sets the values of the new state, and what was copied within this rank and pulled from others."""
        call, options = self.job.call, self.job.options
        pull = PiecePull(
            version=self.version,
            rank=self.ranks.group.rank,
            secret=offered.meeting.secret,
            timeout=call.timeout,
            threads=options.threads,
            alive=call.check_failures,
            spans=options.spans,
            kept=self.ranks.clients,
        )
        filling = Filling(plan)
        pulled = Pulled()

        def run() -> None:
            nonlocal pulled
            with self.job.span("copy", sum(box.numel * filling.plan.targets[n][1].dtype.itemsize for n, box in plan.transfers.own)):
                filling.copy_own(offered.local, call.heartbeat)
            try:
                pulled = pull.run(plan.transfers, offered.holders, filling.place)
            except RankFailedError:
                call.check_failures(at_once=True)  # a holder that goes because another rank failed is not the cause
                raise

        def transfer(devices: Collection[torch.device]) -> ByteTransfer:
            if matched.binding.create:
                filling.plan = plan.with_memory()
            return ByteTransfer(padding=filling.plan.padding, run=run, counts=lambda: (filling.placed, plan.transfers.needed))

        with call.phase("move"):
            setters = accept(matched)
            fill(matched, transfer)
            call.agree({}, nothing)
        return setters, filling.copied, pulled

    # ---- set: the values of the state, when every tensor of every rank is right

    def set_values(self, matched: Matched, offered: Offered, setters: Sequence[Callable[[], None]], row: list[int]) -> dict[int, Traffic]:
        """``row`` is this rank's traffic."""
        call, rank = self.job.call, self.ranks.group.rank
        with call.phase("set"):
            offered.check_unchanged(local for local, _ in matched.binding.targets.values())
            set_all(setters, WHAT)
            by_rank = {rank: row}
            if call.is_leader:
                by_rank = call.lead({"bytes": row}, lambda rows: {r: row["bytes"] for r, row in rows.items()}, nothing)
            else:
                call.follow({"bytes": row})
        return {rank: Traffic(needed=n, sent=s, copied=c, received=r) for rank, (n, s, c, r) in by_rank.items()}


def _report(matched: Matched, meeting: Meeting, traffic: dict[int, Traffic], seconds: float) -> ReshardReport:
    call, options = matched.job.call, matched.job.options
    mine, total = traffic[call.group.rank], sum(t.needed for t in traffic.values())
    if call.is_leader:
        log.info("resharded %d bytes from %d to %d ranks in %.2f s", total, len(meeting.old), len(meeting.new), seconds)
    return ReshardReport(
        tensors=len(matched.binding.targets),
        missing=tuple(matched.verdict["missing"]),
        unexpected=tuple(matched.verdict["unexpected"]),
        renamed=matched.renamed,
        cast=tuple(matched.binding.cast),
        bytes_needed=mine.needed,
        bytes_sent=mine.sent,
        bytes_copied=mine.copied,
        bytes_received=mine.received,
        seconds=seconds,
        ranks=traffic,
        spans=(options.spans or Spans(on=False)).table(),
    )
