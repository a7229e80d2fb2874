"""One take of a sink, on one rank: open → match → stage → switch. Each step gives a frozen value, which the next one takes.

    find     the newest version: its manifest, and where each rank of the source is
    match    the state is bound to it, as in a load; all problems of all ranks in one error
    stage    pieces of other machines come into memory of our own; segments of this machine are mapped; all is compared with its digests
    switch   all ranks have all: now it is copied into the state, from our own machine's memory alone

Nothing of the state changes before the switch. In-place takes have no memory for pieces of other machines: these come during the switch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckpt.adapters.binding.bind import bind
from ckpt.adapters.binding.targets import Binding
from ckpt.adapters.shard_cache import ShardCache
from ckpt.concurrency.gc_paused import gc_paused
from ckpt.coordination.rows import Row
from ckpt.engine.devices import devices_of, settle_devices
from ckpt.engine.load.fitting import row_of_match, verdict_of
from ckpt.engine.load.job import LoadJob
from ckpt.engine.load.reader import changed
from ckpt.engine.load.setting import run_each, set_all
from ckpt.engine.load.shared_reads import SharedReads
from ckpt.errors import CorruptError, CoverageError
from ckpt.plan.transfers import Share, TransferPlan
from ckpt.settings import limits

from .catalog import LiveCatalog
from .client import Holder, PullBase, Pulled, pull_all
from .filling import Filling, FillPlan, PlanCache, plan_filling
from .segments.mapped import LocalHolder, SegmentShare, check_local, copy_local, open_local
from .segments.published import SegmentLayout
from .versions import Manifest, Version, catalog_of, tensors_of

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeReport:
    """What a take did on this rank. Bytes: ``needed`` by its state, as the source has them; ``mapped``: copied from memory of other
    processes of this machine; ``received`` from other ranks of the source, by rank; ``transferred`` came for these over the network or in
    slots: fewer, where only changes came. ``lost``: ranks that others stood in for, and why.
    ``waited``: seconds for the version to be there, ``seconds`` for the rest, of which ``switch`` for the copy into the state.
    ``missing``, ``unexpected``, as for ``ckpt.load``."""

    version: Version
    needed: int
    mapped: int
    received: Mapping[int, int]
    transferred: int
    lost: Mapping[int, str]
    waited: float
    seconds: float
    switch: float
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class OfferedVersion:
    """A version that may be taken: where each rank of the source is, and all that its manifest refers to."""

    version: Version
    manifest: Manifest
    blobs: Mapping[str, bytes]
    holders: Mapping[int, Row]


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


def match_take(job: LoadJob, offered: OfferedVersion, state: object, cache: SinkCache) -> MatchedTake:
    """Bind the state to a version; the leader sees whether it fits everywhere.

    Raises:
        NamesError, ShapeError, MismatchError: it does not.
    """
    group, options = job.call.group, job.options
    with job.call.phase("match"), gc_paused():
        catalog = cache.catalog_of(offered)
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
        row["objects"] = bool(binding.objects)

        def decide(rows: dict[int, Row]) -> Row:
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
class StagedTake:
    """All that this rank needs is here, and compared with its digests; or, in place, will come."""

    matched: MatchedTake
    plan: FillPlan
    mapped: Mapping[int, LocalHolder]
    pieces: Sequence[tuple[Share, int, memoryview]]
    pulled: Pulled
    left: TransferPlan | None
    """What comes during the switch, in place."""


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
    """The version that the state is, whole; None if it is none."""
    alive: Callable[[], None]

    def pull(
        self,
        offered: OfferedVersion,
        plan: TransferPlan,
        filling: Filling,
        place: Callable[[Share, int, memoryview], None],
        room: Callable[[int], memoryview] | None = None,
    ) -> Pulled:
        """Take the pieces of a plan; as ``pull_all``. Where the state has the source's dtypes, it is the base of changes."""
        if not plan.shares:
            return Pulled()
        return pull_all(
            plan,
            {rank: _holder(rank, row) for rank, row in offered.holders.items()},
            place,
            version=offered.manifest.name,
            rank=self.receiver,
            secret=self.secret,
            timeout=self.timeout,
            threads=self.threads,
            alive=self.alive,
            shared=self.local is not None,
            room=room,
            base=PullBase(version=self.base, fill=filling.pack) if self.base is not None and filling.plan.is_packable else None,
        )


def _holder(rank: int, row: Row) -> Holder:
    return Holder(rank=rank, addresses=tuple((str(host), int(port)) for host, port in row["addresses"]), network=str(row["network"]))


def stage_take(matched: MatchedTake, puller: Puller, cache: SinkCache, *, in_place: bool) -> StagedTake:
    """Bring everything to this machine. Where a segment here is damaged, another holder may have what it had.

    Raises:
        NotFoundError: the version was dropped.
        CorruptError: bytes are not what was published.
        RankFailedError, DeadlineError, ExchangeError: a holder is lost, and nobody else has what it had.
    """
    offered, local = matched.offered, puller.local
    near = frozenset(rank for rank, row in offered.holders.items() if local is not None and row["machine"] == local)
    with gc_paused():
        targets = matched.binding.targets.values()
        plan = plan_filling(targets, matched.catalog, rank=puller.receiver, near=near, cache=cache.plan, source=offered.manifest.tables)
    opened = open_local(
        [rank for rank in plan.transfers.shares if rank in near],
        offered.holders,
        offered.manifest,
        lambda rank: cache.layout_of(offered, rank),
        lambda rank: cache.share_of(plan, rank, cache.layout_of(offered, rank)),
    )
    mapped, wrong = check_local(opened, puller.threads, puller.alive)
    if wrong and in_place:  # before anything is changed: may others stand in for them?
        _check_replaceable(plan.transfers, opened.keys() - mapped.keys(), wrong[0])
    pieces: list[tuple[Share, int, memoryview]] = []
    lock = threading.Lock()

    def room(length: int) -> memoryview:
        with lock:
            return cache.buffer(length).data[:length]

    def keep(share: Share, piece: int, view: memoryview) -> None:
        pieces.append((share, piece, view))

    left = _without(plan.transfers, mapped)
    pulled = Pulled() if in_place else puller.pull(offered, left, Filling(plan), keep, room)
    return StagedTake(matched=matched, plan=plan, mapped=mapped, pieces=pieces, pulled=pulled, left=left if in_place else None)


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
    )


def switch_take(staged: StagedTake, puller: Puller, cache: SinkCache, setters: Sequence[Callable[[], None]], where: str) -> Pulled:
    """Copy everything into the state. What an in-place take still lacks comes now."""
    matched = staged.matched
    run_each(matched.binding.create)
    plan = staged.plan.with_memory() if matched.binding.create else staged.plan
    filling = Filling(plan)
    devices = devices_of(target for target, _ in plan.targets)
    settle_devices(devices, where)
    filling.zero_padding()
    copy_local(plan, staged.mapped, puller.threads)
    for share, piece, data in staged.pieces:
        filling.place(share, piece, data)
        cache.buffers.append(np.frombuffer(memoryview(data.obj), dtype=np.uint8))  # all of what the view is a part of
    pulled = staged.pulled if staged.left is None else puller.pull(matched.offered, staged.left, filling, filling.place)
    settle_devices(devices, where)
    changed([part.memory for target, _ in plan.targets for part in target.parts])
    set_all(setters, where)
    return pulled
