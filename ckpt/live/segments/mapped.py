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
from ckpt.layout.geometry import Box
from ckpt.live.filling import FillPlan
from ckpt.live.versions import Manifest
from ckpt.tracing.spans import Spans

from .published import BlockCheck, SegmentBox, SegmentLayout
from .reader import MappedSegment, SegmentMappings
from .segment import BLOCK, SegmentAddress

log = logging.getLogger("ckpt")

_STRETCH = 64 * BLOCK
"""Bytes that are compared between two signs of life."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentShare:
    """What a receiver takes from one mapped segment.

    Requests are cut so that a piece fits a slot. Here nothing is sent, so those of one box are joined again. ``spans``: first byte, one
    past the last and the tensor of each; ``copies``: number of the want, the box of the segment, and what of it is copied.
    """

    spans: Sequence[tuple[int, int, str]]
    copies: Sequence[tuple[int, SegmentBox, Box]]

    @classmethod
    def of(cls, plan: FillPlan, rank: int, layout: SegmentLayout) -> SegmentShare:
        """For the share of ``rank``, which has a segment of this layout."""
        share, wants = plan.transfers.shares[rank], plan.transfers.wants
        joined: list[tuple[int, Box]] = []
        for number, want in enumerate(share.wants.tolist()):
            box = share.requests.box(number, len(plan.targets[want][1].shape))
            while joined and joined[-1][0] == want:
                both = joined[-1][1].joined(box)
                if both is None or not any(wanted.contains(both) for wanted in wants[want].boxes):  # memory of the receiver is one box
                    break
                joined.pop()
                box = both
            joined.append((want, box))
        spans: list[tuple[int, int, str]] = []
        copies: list[tuple[int, SegmentBox, Box]] = []
        for want, box in joined:
            entry = plan.targets[want][1]
            name = entry.alias or entry.name
            for placed in layout.boxes[name]:
                common = box if placed.box == box else placed.box.intersect(box)
                if common is not None:
                    spans.append((*placed.span(common), name))
                    copies.append((want, placed, common))
        return cls(spans=spans, copies=copies)


@dataclass(frozen=True, eq=False)
class LocalHolder:
    """The mapped segment of one rank, and what is taken from it."""

    rank: int
    segment: MappedSegment
    layout: SegmentLayout
    share: SegmentShare

    def check(self, alive: Callable[[], None]) -> None:
        """Compare all that is taken with its digests."""
        check = BlockCheck(self.segment.data, self.segment.digests, self.layout, f"rank {self.rank} of the source")
        for start, stop, name in self.share.spans:
            self.segment.populate(start, stop)
            for at in range(start, stop, _STRETCH):
                alive()
                check.range(at, min(at + _STRETCH, stop), name)

    def copy(self, plan: FillPlan, copied: Callable[[int], None]) -> None:
        """Copy what is taken to where it belongs; ``copied`` gets the bytes of each box."""
        for want, placed, common in self.share.copies:
            target, entry = plan.targets[want]
            data = self.segment.data[placed.start : placed.start + placed.nbytes]
            copy_box(Stored(data, 0, placed.box, entry.dtype), common, target)
            copied(common.numel * entry.dtype.itemsize)


def open_local(
    ranks: Sequence[int],
    holders: Mapping[int, Row],
    manifest: Manifest,
    layout_of: Callable[[int], SegmentLayout],
    share_of: Callable[[int], SegmentShare],
    mappings: SegmentMappings,
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
            mapped[rank] = LocalHolder(rank, MappedSegment(address, promised.digest, mappings), layout, share_of(rank))
        except (OSError, NotFoundError) as err:  # another container, a protected process; or it is gone, which the other way finds out
            log.debug("live: the memory of rank %d cannot be mapped: %s", rank, err)
    return mapped


def check_local(
    mapped: Mapping[int, LocalHolder], threads: int, alive: Callable[[], None], spans: Spans
) -> tuple[dict[int, LocalHolder], list[CorruptError]]:
    """Compare all that is taken from mapped segments with its digests; those that are right, and what is wrong with the others."""
    right: dict[int, LocalHolder] = {}
    wrong: list[CorruptError] = []

    def check(rank: int, holder: LocalHolder) -> None:
        try:
            with spans.span("verify", sum(stop - start for start, stop, _ in holder.share.spans)):
                holder.check(alive)
            right[rank] = holder
        except CorruptError as err:
            log.warning("live: %s", err)
            wrong.append(err)

    run_tasks([partial(check, rank, holder) for rank, holder in mapped.items()], threads, "ckpt-check")
    return right, wrong


def copy_local(plan: FillPlan, mapped: Mapping[int, LocalHolder], threads: int, copied: Callable[[int], None]) -> None:
    """Copy all that is taken from mapped segments; ``copied`` gets the bytes of each box, from several threads."""
    run_tasks([partial(holder.copy, plan, copied) for holder in mapped.values()], threads, "ckpt-read-segments")
