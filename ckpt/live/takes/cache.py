"""What one sink keeps from take to take."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckpt.adapters.shard_cache import ShardCache
from ckpt.live.catalog import LiveCatalog
from ckpt.live.filling import FillPlan, PlanCache
from ckpt.live.offered import OfferedVersion
from ckpt.live.segments.mapped import SegmentShare
from ckpt.live.segments.published import SegmentLayout
from ckpt.live.segments.reader import SegmentMappings
from ckpt.live.versions import catalog_of, tensors_of
from ckpt.plan.transfers import TransferPlan
from ckpt.settings import limits

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
