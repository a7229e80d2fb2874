"""Taking from ranks of the same machine: their segments are mapped, compared with their digests, and copied from. No sender works."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ckpt.concurrency.workers import run_tasks
from ckpt.coordination.rows import Row
from ckpt.engine.load.copying import Stored, copy_box
from ckpt.errors import CorruptError, FormatError, NotFoundError
from ckpt.live.filling import FillPlan
from ckpt.live.versions import Manifest
from ckpt.plan.transfers import Share

from .published import BlockCheck, SegmentLayout
from .segment import MappedSegment, SegmentAddress

log = logging.getLogger("ckpt")

_STRETCH = 64
"""Requests that are checked or copied between two signs of life."""


@dataclass(frozen=True, eq=False)
class LocalHolder:
    """The mapped segment of one rank."""

    rank: int
    segment: MappedSegment
    layout: SegmentLayout

    def check(self, share: Share, plan: FillPlan, alive: Callable[[], None]) -> None:
        """Compare all that a share needs with its digests.

        Raises:
            CorruptError: memory has changed since it was published.
        """
        check = BlockCheck(self.segment.data, self.segment.digests, self.layout, f"rank {self.rank} of the source")
        for number in range(len(share.requests)):
            if number % _STRETCH == 0:
                alive()
            _, entry = plan.targets[int(share.wants[number])]
            check.box(entry.alias or entry.name, share.requests.box(number, len(entry.shape)))

    def copy(self, share: Share, plan: FillPlan) -> None:
        """Copy a share to where it belongs."""
        for number in range(len(share.requests)):
            target, entry = plan.targets[int(share.wants[number])]
            box = share.requests.box(number, len(entry.shape))
            for placed in self.layout.boxes[entry.alias or entry.name]:
                common = box if placed.box == box else placed.box.intersect(box)
                if common is not None:
                    data = self.segment.data[placed.start : placed.start + placed.nbytes]
                    copy_box(Stored(data, 0, placed.box, entry.dtype), common, target)


def open_local(
    ranks: Sequence[int], holders: Mapping[int, Row], manifest: Manifest, layout_of: Callable[[int], SegmentLayout]
) -> dict[int, LocalHolder]:
    """Map the segments of these ranks. Those that cannot be mapped are left out: their pieces come in the other way."""
    mapped: dict[int, LocalHolder] = {}
    for rank in ranks:
        layout, promised = layout_of(rank), manifest.segments[rank]
        if layout.nbytes != promised.nbytes:
            raise FormatError(f"rank {rank} of the source has {promised.nbytes} bytes, where its layout gives {layout.nbytes}")
        file, token = holders[rank]["at"]
        try:
            address = SegmentAddress(int(holders[rank]["pid"]), int(file), str(token), promised.nbytes)
            mapped[rank] = LocalHolder(rank, MappedSegment(address, promised.digest), layout)
        except (OSError, NotFoundError) as err:  # another container, a protected process; or it is gone, which the other way finds out
            log.debug("live: the memory of rank %d cannot be mapped: %s", rank, err)
    return mapped


def check_local(
    plan: FillPlan, mapped: Mapping[int, LocalHolder], threads: int, alive: Callable[[], None]
) -> tuple[dict[int, LocalHolder], list[CorruptError]]:
    """Compare all that is taken from mapped segments with its digests; those that are right, and what is wrong with the others."""
    right: dict[int, LocalHolder] = {}
    wrong: list[CorruptError] = []

    def check(rank: int, holder: LocalHolder) -> None:
        try:
            holder.check(plan.transfers.shares[rank], plan, alive)
            right[rank] = holder
        except CorruptError as err:
            log.warning("live: %s", err)
            wrong.append(err)

    run_tasks([partial(check, rank, holder) for rank, holder in mapped.items()], threads, "ckpt-check")
    return right, wrong


def copy_local(plan: FillPlan, mapped: Mapping[int, LocalHolder], threads: int) -> None:
    """Copy all that is taken from mapped segments."""
    run_tasks([partial(holder.copy, plan.transfers.shares[rank], plan) for rank, holder in mapped.items()], threads, "ckpt-read-segments")
