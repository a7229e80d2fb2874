"""One take of a sink, on one rank: open → match → stage → switch. Each step gives a frozen value, which the next one takes.

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
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckpt import settings
from ckpt.adapters.binding.bind import bind
from ckpt.adapters.binding.targets import Binding
from ckpt.adapters.shard_cache import ShardCache
from ckpt.concurrency.gc_paused import gc_paused
from ckpt.converters.select.selection import Views
from ckpt.coordination.rows import Row
from ckpt.engine.devices import devices_of, settle_devices
from ckpt.engine.load.fitting import row_of_match, verdict_of
from ckpt.engine.load.job import LoadJob
from ckpt.engine.load.reader import changed
from ckpt.engine.load.setting import run_each, set_all
from ckpt.engine.load.shared_reads import SharedReads
from ckpt.errors import CorruptError, CoverageError
from ckpt.live.naming.wording import worded
from ckpt.plan.transfers import Share, TransferPlan
from ckpt.settings import limits
from ckpt.tracing.spans import SpanTable

from .catalog import LiveCatalog
from .client import Holder, PullBase, Pulled, pull_all
from .filling import Filling, FillPlan, PlanCache, is_packable, plan_filling, resolved
from .naming.renaming import check_alike, in_other_names
from .offered import OfferedVersion
from .pieces.dense import DTYPES, NOT_KEPT
from .relays.relayed import RelayedVersion
from .segments.mapped import LocalHolder, SegmentShare, check_local, copy_local, open_local
from .segments.published import SegmentLayout
from .segments.reader import SegmentMappings
from .take_meter import TakeMeter
from .versions import Version, catalog_of, tensors_of

Bytes = npt.NDArray[np.uint8]
SOURCE = "source"


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeReport:
    """What a take did on this rank. Bytes: ``needed`` by its state, as the source has them; ``mapped``: copied from memory of other
    processes of this machine; ``received`` from other ranks of the source, by rank; ``relayed`` from other sinks, by their names;
    ``transferred`` came for these over the network or in slots: fewer, where only changes came. ``lost``: ranks of the source, and
    ``lost_relays``: sinks, that others stood in for, and why. ``took_from``: bytes of all ranks of the sink by whom they came from,
    ``"source"`` or another sink. ``dense``: of these, what came whole from a source with ``delta=True``, by why: ``"first version"``,
    ``"base not kept"`` (the source keeps the version no more that this sink had), ``"changes no shorter"``, ``"state was changed"`` (by
    somebody else), ``"state was torn"``, ``"other dtypes"``, ``"base has other tensors"``, ``"shared memory"``.
    ``waited``: seconds for the version to be there, ``seconds`` for the rest, of which ``switch`` for the copy into the state.
    ``spans.sums`` has the seconds and bytes of its phases: ``match``, ``plan``, ``pull`` (one for each connection to a rank), ``verify``
    (within ``pull``, but for memory of this machine) and ``switch``; none with ``CKPT_SPANS=off``.
    ``missing``, ``unexpected``, as for ``ckpt.load``."""

    version: Version
    needed: int
    mapped: int
    received: Mapping[int, int]
    relayed: Mapping[str, int]
    transferred: int
    lost: Mapping[int, str]
    lost_relays: Mapping[str, str]
    took_from: Mapping[str, int]
    dense: Mapping[str, int]
    waited: float
    seconds: float
    switch: float
    spans: SpanTable
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @classmethod
    def of(
        cls,
        staged: StagedTake,
        switched: SwitchedTake,
        *,
        waited: float,
        seconds: float,
        switch: float,
        spans: SpanTable,
    ) -> TakeReport:
        """Of a take that has ended."""
        matched = staged.planned.matched
        offered, pulled = matched.offered, switched.pulled
        lost = {rank: (offered.relays.offer_of(rank), str(err)) for rank, err in pulled.lost.items()}
        return cls(
            version=offered.version,
            needed=staged.planned.plan.transfers.needed,
            mapped=staged.planned.mapped_bytes,
            received={rank: count for rank, count in pulled.received.items() if rank in offered.holders},
            relayed={who: count for who, count in staged.came_from(pulled).items() if who != SOURCE},
            transferred=pulled.transferred,
            lost={rank: why for rank, (offer, why) in lost.items() if offer is None},
            lost_relays={offer.sink: why for offer, why in lost.values() if offer is not None},
            took_from=switched.took_from,
            dense=switched.dense,
            waited=waited,
            seconds=seconds,
            switch=switch,
            spans=spans,
            missing=matched.missing,
            unexpected=matched.unexpected,
        )


@dataclass(eq=False)
class SinkCache:
    """What one sink keeps from take to take: nothing of it is needed, all of it takes time."""

    shards: ShardCache = field(default_factory=ShardCache)
    tables: tuple[tuple[str, tuple[int, ...]], ...] = ()
    catalog: LiveCatalog | None = None
    layouts: dict[int, SegmentLayout] = field(default_factory=dict)
    plan: PlanCache = field(default_factory=PlanCache)
    shared: dict[int, SegmentShare] = field(default_factory=dict)
    """What is taken from the segment of each rank,"""
    shared_under: TransferPlan | None = None
    """under this plan."""
    buffers: list[Bytes] = field(default_factory=list)
    mappings: SegmentMappings = field(default_factory=SegmentMappings)

    def catalog_of(self, offered: OfferedVersion) -> LiveCatalog:
        """The catalog of a version. Layouts and plans are forgotten where the tensors are others."""
        manifest = offered.manifest
        made = catalog_of(manifest, offered.blobs, str(offered.version), like=self.catalog if manifest.tables == self.tables else None)
        if self.catalog is None or made.tensors is not self.catalog.tensors:
            self.layouts, self.plan = {}, PlanCache()
        self.tables, self.catalog = manifest.tables, made
        return made

    def layout_of(self, offered: OfferedVersion, rank: int) -> SegmentLayout:
        """Where the boxes of one rank of the source lie in its segment."""
        layout = self.layouts.get(rank)
        if layout is None:
            layout = self.layouts[rank] = SegmentLayout.of(tensors_of(offered.manifest, offered.blobs, rank), rank)
        return layout

    def share_of(self, plan: FillPlan, rank: int, layout: SegmentLayout) -> SegmentShare:
        """What is taken from the segment of one rank of the source."""
        if self.shared_under is not plan.transfers:
            self.shared, self.shared_under = {}, plan.transfers
        share = self.shared.get(rank)
        if share is None:
            share = self.shared[rank] = SegmentShare.of(plan, rank, layout)
        return share

    def buffer(self, length: int) -> Bytes:
        """Memory for a piece of so many bytes, of an earlier take if there is some; it may have more."""
        for number in range(len(self.buffers) - 1, -1, -1):
            if len(self.buffers[number]) >= length:
                return self.buffers.pop(number)
        return np.empty(max(length, limits.CACHE_BLOCK), dtype=np.uint8)

    def give(self, memory: memoryview) -> None:
        """Memory of a piece that nobody reads any more."""
        self.buffers.append(np.frombuffer(memoryview(memory.obj), dtype=np.uint8))  # all of what the view is a part of


@dataclass(frozen=True, kw_only=True, eq=False)
class MatchedTake:
    """A version that fits on every rank."""

    offered: OfferedVersion
    catalog: LiveCatalog
    binding: Binding
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    objects: bool
    """Whether a rank has objects that may refuse their state."""


def match_take(job: LoadJob, offered: OfferedVersion, state: object, cache: SinkCache, views: Views | None) -> MatchedTake:
    """Bind the state to a version, in the names that ``views`` give it; the leader sees whether it fits everywhere.

    Raises:
        NamesError, ShapeError, MismatchError: it does not.
        UsageError, ConsistencyError: the translation does not fit the version, or is another one on another rank.
    """
    group, options = job.call.group, job.options
    with job.call.phase("match"), worded(stored="the source"), gc_paused():
        with job.span("match"):
            catalog = cache.catalog_of(offered)
            if views is not None:
                catalog = in_other_names(catalog, views, strict=options.strict)
            binding = bind(
                state,
                catalog,
                rank=group.rank,
                ranks=group.ranks,
                layout=options.layout,
                selection=options.selection,
                cast=options.cast,
                shards=cache.shards,
            )
        row = row_of_match(job, catalog, binding, SharedReads.of((), group.rank, parts=False, piece=1, wanted=False))
        row |= {"objects": bool(binding.objects), "translation": catalog.translation}

        def decide(rows: dict[int, Row]) -> Row:
            check_alike(rows)
            return verdict_of(job, catalog, rows) | {"objects": any(row["objects"] for row in rows.values())}

        verdict = job.agree(row, decide)
    return MatchedTake(
        offered=offered,
        catalog=catalog,
        binding=binding,
        missing=tuple(verdict["missing"]),
        unexpected=tuple(verdict["unexpected"]),
        objects=verdict["objects"],
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedTake:
    """What comes from whom: from ``mapped`` segments of this machine, and what is ``left`` in pieces."""

    matched: MatchedTake
    plan: FillPlan
    mapped: Mapping[int, LocalHolder]
    left: TransferPlan
    why_whole: str | None
    """Why no changes can come, but all bytes; None if they can, empty if the source never sends them."""

    @property
    def mapped_bytes(self) -> int:
        return sum(self.plan.transfers.shares[rank].requests.total for rank in self.mapped)


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedTake:
    """All that this rank needs is here, and compared with its digests; or, in place, will come. ``is_relayed``: others read the pieces."""

    planned: PlannedTake
    is_relayed: bool
    pieces: Sequence[tuple[Share, int, memoryview]]
    pulled: Pulled
    left: TransferPlan | None
    """What comes during the switch, in place."""

    def came_from(self, pulled: Pulled) -> dict[str, int]:
        """Bytes of this rank by whom they came from."""
        came = Counter({SOURCE: self.planned.mapped_bytes})
        for rank, count in pulled.received.items():
            offer = self.planned.matched.offered.relays.offer_of(rank)
            came[SOURCE if offer is None else offer.sink] += count
        return {who: count for who, count in came.items() if count}

    def came_whole(self, pulled: Pulled) -> dict[str, int]:
        """Bytes of this rank that came whole where changes could have, by why."""
        why = self.planned.why_whole
        if why is None:
            return dict(pulled.dense)
        return {why: sum(pulled.received.values())} if why and pulled.received else {}


@dataclass(frozen=True, kw_only=True, eq=False)
class SwitchedTake:
    """The state of every rank is the version. ``began``: when this one's began to be. The counts of bytes are those of all ranks."""

    began: float
    pulled: Pulled
    took_from: Mapping[str, int]
    dense: Mapping[str, int]


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
        self,
        planned: PlannedTake,
        plan: TransferPlan,
        filling: Filling,
        place: Callable[[Share, int, memoryview], None],
        room: Callable[[int], memoryview] | None = None,
    ) -> Pulled:
        """Take the pieces of a plan, as ``pull_all``; only what changed in them where that can be."""
        if not plan.shares:
            return Pulled()
        offered = planned.matched.offered

        def counted(share: Share, piece: int, view: memoryview) -> None:
            place(share, piece, view)
            self.meter.add(share.requests.bytes_of(piece))

        return pull_all(
            plan,
            offered.relays.holders({rank: _holder(rank, row) for rank, row in offered.holders.items()}),
            counted,
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

    def why_whole(self, matched: MatchedTake) -> str | None:
        """As ``PlannedTake.why_whole``."""
        offered, catalog = matched.offered, matched.catalog
        if not any(row["delta"] for row in offered.holders.values()):
            return ""
        if self.base is None:
            return self.no_base
        if self.base not in offered.kept:
            return NOT_KEPT
        return None if is_packable(resolved(matched.binding.targets.values(), catalog)[0]) else DTYPES


def _holder(rank: int, row: Row) -> Holder:
    return Holder(rank=rank, addresses=tuple((str(host), int(port)) for host, port in row["addresses"]), network=str(row["network"]))


def plan_take(matched: MatchedTake, puller: Puller, cache: SinkCache, *, in_place: bool) -> PlannedTake:
    """Who gives what; the segments of this machine are mapped, and compared with their digests. Where one is damaged, another holder may
    have what it had.

    Raises:
        CorruptError: a segment is damaged, in place: there, nobody waits with the first change for the last piece.
    """
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
            matched.binding.targets.values(),
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
    mapped, wrong = check_local(opened, puller.threads, puller.alive, puller.meter.spans)
    if wrong and in_place:  # before anything is changed: may others stand in for them?
        _check_replaceable(plan.transfers, opened.keys() - mapped.keys(), wrong[0])
    return PlannedTake(matched=matched, plan=plan, mapped=mapped, left=_without(plan.transfers, mapped), why_whole=why_whole)


def stage_take(planned: PlannedTake, puller: Puller, cache: SinkCache, *, in_place: bool, relayed: RelayedVersion | None) -> StagedTake:
    """Bring everything to this machine, and into ``relayed`` what this sink passes on.

    Raises:
        NotFoundError: the version was dropped.
        CorruptError: bytes are not what was published.
        RankFailedError, DeadlineError, ExchangeError: a holder is lost, and nobody else has what it had.
    """
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
    matched, planned = staged.planned.matched, staged.planned.plan
    run_each(matched.binding.create)
    plan = planned.with_memory() if matched.binding.create else planned
    filling = Filling(plan)
    devices = devices_of(target for target, _ in plan.targets)
    settle_devices(devices, where)
    filling.zero_padding()
    copy_local(plan, staged.planned.mapped, puller.threads, puller.meter.add)
    for share, piece, data in staged.pieces:
        filling.place(share, piece, data)
        if not staged.is_relayed:
            cache.give(data)
    pulled = staged.pulled if staged.left is None else puller.pull(staged.planned, staged.left, filling, filling.place)
    settle_devices(devices, where)
    changed([part.memory for target, _ in plan.targets for part in target.parts])
    set_all(setters, where)
    return pulled
