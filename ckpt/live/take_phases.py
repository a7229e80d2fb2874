"""The values between the steps of a take, what a take reports, and what a sink keeps from one take to the next."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckpt import settings, units
from ckpt.engine.load.fill import Matched
from ckpt.plan.transfers import Share, TransferPlan
from ckpt.state.shard_table import ShardCache
from ckpt.telemetry.spans import Spans, SpanTable

from .filling import FillPlan, PlanCache
from .holdings import LiveCatalog, Version, catalog_of, tensors_of
from .offered import OfferedVersion
from .pieces import FIRST, NOT_KEPT, TORN
from .pull import Pulled
from .segment import SegmentLayout
from .segment_reader import LocalHolder, SegmentMappings, SegmentShare, SharedChecks

SOURCE = "source"
"""What reports call the source among those who gave bytes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MatchedTake:
    """A version that fits on every rank."""

    offered: OfferedVersion
    catalog: LiveCatalog
    fit: Matched


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeReport:
    """The result of an update on this rank. Bytes: ``needed`` by its state, as the source has them; ``mapped``: copied from memory of other
    processes of this machine; ``received`` from other ranks of the source, by rank; ``relayed`` from other sinks, by their names;
    ``transferred`` came for these over the network or in slots: fewer, where only changes came. ``lost``: ranks of the source, and
    ``lost_relays``: sinks, that others stood in for, and why. ``took_from``: bytes of all ranks of the sink by whom they came from,
    ``"source"`` or another sink. ``dense``: of these, what came whole from a source with ``delta=True``, by why: ``"first version"``,
    ``"base not kept"`` (the source keeps the version no more that this sink had), ``"changes no shorter"``, ``"state was changed"`` (by
    another process), ``"state was torn"``, ``"other dtypes"``, ``"base has other tensors"``, ``"shared memory"``. ``waited``: seconds for
    the version to be there, ``seconds`` for the rest, of which ``switch`` for the copy into the state. ``spans.sums`` has the seconds and
    bytes of its phases: ``match``, ``plan``, ``pull`` (one for each connection to a rank), ``verify`` (within ``pull``, but for memory of
    this machine) and ``switch``; none with ``CKPT_SPANS=off``. ``missing``, ``unexpected``, as for ``ckpt.load``."""

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

    def __str__(self) -> str:
        return f"took step {self.version.step}, {units.size(self.needed)}, in {units.duration(self.seconds)}"

    @classmethod
    def of(
        cls, staged: StagedTake, switched: SwitchedTake, *, waited: float, seconds: float, switch: float, spans: SpanTable
    ) -> TakeReport:
        """Of a take that has ended."""
        offered, verdict = staged.planned.matched.offered, staged.planned.matched.fit.verdict
        pulled = switched.pulled
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
            missing=tuple(verdict["missing"]),
            unexpected=tuple(verdict["unexpected"]),
        )


# How far one take of a sink is on this rank, and how long its phases took.


class TakeMeter:
    """Counts bytes of the state; threads of the take add to it, and a progress callback reads it. ``spans`` has the phases."""

    def __init__(self, spans: Spans) -> None:
        self.spans = spans
        self._total = 0
        self._done = 0
        self._lock = threading.Lock()

    def begin(self, total: int) -> None:
        """So many bytes are to come; a version that was dropped on the way is followed by another one."""
        with self._lock:
            self._total, self._done = total, 0

    def add(self, nbytes: int) -> None:
        """So many more came from other processes: compared with their digests, or copied from memory that was."""
        with self._lock:
            self._done += nbytes

    def counts(self) -> tuple[int, int]:
        """Bytes done, and in all."""
        with self._lock:
            return min(self._done, self._total), self._total


Bytes = npt.NDArray[np.uint8]


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
    checks: SharedChecks = field(default_factory=SharedChecks)

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
        return np.empty(max(length, settings.PIECE), dtype=np.uint8)

    def give(self, memory: memoryview) -> None:
        """Memory of a piece that nobody reads any more."""
        self.buffers.append(np.frombuffer(memoryview(memory.obj), dtype=np.uint8))  # all of what the view is a part of


@dataclass(eq=False)
class StateVersion:
    """``version``: the last one that was taken, None before the first. ``torn`` says that the state is none, and why: a take that changes
    it goes on, or broke off."""

    version: Version | None = None
    torn: str | None = None
    _name: str | None = None
    _shows_changes: bool = False

    @property
    def base(self) -> str | None:
        """How holders call the version that the state is; None if it is none,"""
        return self._name if self.torn is None else None

    @property
    def no_base(self) -> str:
        """and why then."""
        return FIRST if self.version is None and self.torn is None else TORN

    @property
    def delta_base(self) -> str | None:
        """``base``, where the source can tell what changed since."""
        return self.base if self._shows_changes else None

    def mixed_with(self, version: Version) -> str:
        """What a state is that is on the way to a version."""
        was = "what was there before" if self.version is None or self.torn is not None else str(self.version)
        return f"the state is a mix of {was} and {version}, as a take broke off"

    def become(self, version: Version, name: str, why_whole: str | None) -> None:
        """All of a version is in the state of this rank; others may still be on the way. ``name`` is that of its manifest, ``why_whole``
        as of ``PlannedTake``."""
        self.version, self._name = version, name
        self._shows_changes = why_whole in (None, FIRST, TORN, NOT_KEPT)
