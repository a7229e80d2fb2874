"""One take of a sink, on one rank: find → match → plan → stage → switch. Each step gives a frozen value, which the next one takes.

    find     the newest version: its manifest, and where each rank of the source is
    match    the state is bound to it, as in a load; all problems of all ranks in one error
    plan     what comes from whom; a sink that relays tells the source that others may ask it
    stage    pieces of other machines come into memory of our own; segments of this machine are mapped; all is compared with its digests
    switch   all ranks have all: now it is copied into the state, from our own machine's memory alone

Nothing of the state changes before the switch. In-place takes have no memory for pieces of other machines: these come during the switch.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch

from ckpt import settings
from ckpt.concurrency import gc_paused, run_tasks
from ckpt.converters.selection import Views
from ckpt.engine.load.fill import ByteTransfer, LoadJob, fill, match, set_all, verdict_of
from ckpt.errors import CorruptError, CoverageError
from ckpt.net.channel import Row
from ckpt.plan.shared_reads import GOLDEN
from ckpt.plan.transfers import Share, TransferPlan
from ckpt.state.targets import Binding

from .filling import Filling, check_alike, in_other_names, is_packable, plan_filling, refuse_pickles, resolved, worded
from .offered import OfferedVersion
from .pieces import DTYPES, NOT_KEPT
from .pull import Holder, PiecePull, PlaceBoxes, PullBase, Pulled
from .relay import RelayedVersion
from .segment_reader import LocalHolder, check_local, copy_local, open_local
from .take_phases import MatchedTake, PlannedTake, SinkCache, StagedTake, TakeMeter


@dataclass(frozen=True, kw_only=True, eq=False)
class Puller:
    """How pieces of other machines are taken."""

    secret: bytes
    timeout: float
    threads: int
    receiver: int
    """A number that no rank of the source has."""
    local: str | None
    """The name of this machine, where memory of its other processes may be mapped."""
    base: str | None
    """The version that the state is, whole; None if it is none,"""
    no_base: str
    """and why (``pieces.dense``)."""
    alive: Callable[[], None]
    meter: TakeMeter

    def pull(
        self, planned: PlannedTake, plan: TransferPlan, filling: Filling, place: PlaceBoxes, room: Callable[[int], memoryview] | None = None
    ) -> Pulled:
        """Take the pieces of a plan, as ``PiecePull.run``; only what changed in them where that can be."""
        if not plan.shares:
            return Pulled()
        offered = planned.matched.offered

        def counted(share: Share, piece: int, view: memoryview) -> None:
            place(share, piece, view)
            self.meter.add(share.requests.bytes_of(piece))

        how = PiecePull(
            version=offered.manifest.name,
            rank=self.receiver,
            secret=self.secret,
            timeout=self.timeout,
            threads=self.threads,
            alive=self.alive,
            shared=self.local is not None,
            room=room,
            spans=self.meter.spans,
            base=PullBase(version=self.base, fill=filling.pack) if self.base is not None and planned.why_whole is None else None,
        )
        holders = {rank: _holder(rank, row) for rank, row in offered.holders.items()}
        return how.run(plan, offered.relays.holders(holders), counted)

    def why_whole(self, matched: MatchedTake) -> str | None:
        """As ``PlannedTake.why_whole``."""
        offered, catalog = matched.offered, matched.catalog
        if not any(row["delta"] for row in offered.holders.values()):
            return ""
        if self.base is None:
            return self.no_base
        if self.base not in offered.kept:
            return NOT_KEPT
        return None if is_packable(resolved(matched.fit.binding.targets.values(), catalog)[0]) else DTYPES


def _holder(rank: int, row: Row) -> Holder:
    return Holder(rank=rank, addresses=tuple((str(host), int(port)) for host, port in row["addresses"]), network=str(row["network"]))


def match_take(job: LoadJob, offered: OfferedVersion, state: object, cache: SinkCache, views: Views | None) -> MatchedTake:
    """Bind the state to a version, in the names that ``views`` give it; the leader sees whether it fits everywhere."""
    with job.call.phase("match"), worded(stored="the source"), gc_paused():
        catalog = cache.catalog_of(offered)
        if views is not None:
            catalog = in_other_names(catalog, views, strict=job.options.strict)

        def decide(rows: dict[int, Row]) -> Row:
            check_alike(rows)
            verdict = verdict_of(job.call, catalog, rows, job.options.selection, strict=job.options.strict)
            return verdict | {"objects": any(row["objects"] for row in rows.values())}

        def beside(binding: Binding) -> Row:
            refuse_pickles(binding, catalog)
            return {"objects": bool(binding.objects), "translation": catalog.translation}

        fit = match(job, catalog, state, cache.shards, beside=beside, decide=decide)
    return MatchedTake(offered=offered, catalog=catalog, fit=fit)


def plan_take(matched: MatchedTake, puller: Puller, cache: SinkCache, *, in_place: bool) -> PlannedTake:
    """Who gives what; the segments of this machine are mapped, and compared with their digests. Where one is damaged, another holder may
    have what it had."""
    offered, local, domain = matched.offered, puller.local, settings.domain()
    near = {rank for rank, row in offered.holders.items() if local is not None and row["machine"] == local}
    if local is not None:
        near |= offered.relays.within(machine=local)
    nearby = {rank for rank, row in offered.holders.items() if domain and row["domain"] == domain}
    if domain:
        nearby |= offered.relays.within(domain=domain)
    why_whole = puller.why_whole(matched)
    with gc_paused(), puller.meter.spans.span("plan"):
        plan = plan_filling(
            matched.fit.binding.targets.values(),
            matched.catalog,
            rank=puller.receiver,
            near=frozenset(near),
            domain=frozenset(nearby),
            # Changes come from the source alone, and are fewer bytes than a relay's pieces.
            relays=offered.relays.with_boxes if offered.relays.offers and why_whole is not None else None,
            cache=cache.plan,
            source=offered.manifest.tables,
        )
    puller.meter.begin(plan.transfers.needed)
    opened = open_local(
        [rank for rank in plan.transfers.shares if rank in near and rank in offered.holders],
        offered.holders,
        offered.manifest,
        lambda rank: cache.layout_of(offered, rank),
        lambda rank: cache.share_of(plan, rank, cache.layout_of(offered, rank)),
        cache.mappings,
    )
    checked, turn = cache.checks.open(offered.manifest, offered.checks), puller.receiver * GOLDEN % 1.0
    mapped, wrong = check_local(opened, checked, turn, puller.threads, puller.alive, puller.meter.spans) if opened else ({}, [])
    if wrong and in_place:  # before anything is changed: may others stand in for them?
        _check_replaceable(plan.transfers, opened.keys() - mapped.keys(), wrong[0])
    return PlannedTake(matched=matched, plan=plan, mapped=mapped, left=_without(plan.transfers, mapped), why_whole=why_whole)


def stage_take(planned: PlannedTake, puller: Puller, cache: SinkCache, *, in_place: bool, relayed: RelayedVersion | None) -> StagedTake:
    """Bring everything to this machine, and into ``relayed`` what this sink passes on."""
    pieces: list[tuple[Share, int, memoryview]] = []
    lock = threading.Lock()

    def room(length: int) -> memoryview:
        with lock:
            return cache.buffer(length).data[:length]

    def keep(share: Share, piece: int, view: memoryview) -> None:
        if relayed is not None:
            relayed.add(share.requests, piece, view)
        pieces.append((share, piece, view))

    pulled = Pulled() if in_place else puller.pull(planned, planned.left, Filling(planned.plan), keep, room)
    left = planned.left if in_place else None
    return StagedTake(planned=planned, pieces=pieces, pulled=pulled, is_relayed=relayed is not None, left=left)


def _check_replaceable(plan: TransferPlan, damaged: Set[int], error: CorruptError) -> None:
    """Raise ``error`` unless other ranks have all that is damaged on these. Their servers refuse what is, and so they are replaced."""
    try:
        for rank in damaged:
            plan.without(rank, plan.shares[rank], range(len(plan.shares[rank].requests.pieces)), damaged)
    except CoverageError:
        raise error from None


def _without(plan: TransferPlan, mapped: Mapping[int, LocalHolder]) -> TransferPlan:
    """What is left of a plan when these ranks' shares are here."""
    if not mapped:
        return plan
    return TransferPlan(
        wants=plan.wants,
        own=plan.own,
        shares={rank: share for rank, share in plan.shares.items() if rank not in mapped},
        near=plan.near - mapped.keys(),
        piece=plan.piece,
        needed=plan.needed,
        relays=plan.relays,
        domain=plan.domain,
    )


def switch_take(staged: StagedTake, puller: Puller, cache: SinkCache, setters: Sequence[Callable[[], None]], where: str) -> Pulled:
    """Copy everything into the state. What an in-place take still lacks comes now."""
    fit, planned = staged.planned.matched.fit, staged.planned.plan
    pulled = staged.pulled

    def transfer(devices: Collection[torch.device]) -> ByteTransfer:
        plan = planned.with_memory() if fit.binding.create else planned
        filling = Filling(plan)

        def placed(share: Share, piece: int, data: memoryview) -> None:
            filling.place(share, piece, data)
            if not staged.is_relayed:
                cache.give(data)

        def run() -> None:
            nonlocal pulled
            copy_local(plan, staged.planned.mapped, puller.threads, puller.meter.add)
            run_tasks([partial(placed, *each) for each in staged.pieces], puller.threads, "ckpt-place")
            if staged.left is not None:
                pulled = puller.pull(staged.planned, staged.left, filling, filling.place)

        return ByteTransfer(padding=plan.padding, run=run)

    fill(fit, transfer)
    set_all(setters, where)
    return pulled


# ---- the leader


def dropped_anywhere(rows: dict[int, Row]) -> Row:
    """Leader: did a rank find that the version is there no longer."""
    return {"dropped": any(row["dropped"] for row in rows.values())}


def bytes_that_came(rows: dict[int, Row]) -> Row:
    """Leader: bytes of all ranks, by whom they came from, and why they came whole."""
    return dropped_anywhere(rows) | {what: _summed(row[what] for row in rows.values()) for what in ("from", "dense")}


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
