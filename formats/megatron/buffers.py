"""The flat buffers of Megatron's distributed optimizer: where each parameter lies in them. Pure arithmetic, in elements.

The parameters of a model chunk that have one dtype and are reduced over the same ranks share a buffer, in the reverse of their order in the
model. It is cut into buckets, and each bucket is padded so that all data-parallel ranks have an equal part.
(Sources: ``_ParamAndGradBuffer`` of Megatron-LM core/distributed/param_and_grad_buffer.py and ``DistributedOptimizer`` of
core/optimizer/distrib_optimizer.py, versions 0.12 to 0.20.)
"""

# A buffer with three parameters in the model's order a, b, c, buckets of about 100 elements, 2 ranks (step = lcm(2, 128) = 128):
#
#     buffer   |0 ....... c .......|pad|.... b ....|pad to 64| a |.. padding ..|
#              '------ bucket 0 -------'------------- bucket 1 ----------------'
#              parameters in reverse   each starts at a multiple of 64, each bucket ends at a multiple of 128
#
# A bucket is closed when it has ``bucket_size`` elements, and before and after a parameter that two pipeline stages share. Each rank has
# an equal part of each bucket. Files that have a buffer in one piece leave the padding of buckets out (``compact``), so a parameter lies
# earlier there than in memory, by the padding of all buckets before its own.

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckpt.formats.external_elements import flat_pieces, reach

from .names import LocalParam
from .pieces import Source, SourcePiece

ALIGNMENT = 64
"""Every parameter starts at a multiple of this."""
BUCKET_DIVISOR = 128
"""The size of a bucket is a multiple of this, and of the number of data-parallel ranks."""


class BufferParam(NamedTuple):
    """A parameter of a buffer, in the model's order: elements, and whether the first and last pipeline stage share it."""

    numel: int
    shared: bool = False


class Bucket(NamedTuple):
    """``numel`` elements, the last of which are padding: ``used`` are not."""

    numel: int
    used: int


class Slot(NamedTuple):
    """Where a parameter lies: from ``start`` of the whole buffer, in bucket number ``bucket``."""

    start: int
    bucket: int


class BufferLayout(NamedTuple):
    """A buffer: ``slots`` of its members in the model's order, and its buckets."""

    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]

    @property
    def used(self) -> int:
        """Elements without the padding of buckets."""
        return sum(b.used for b in self.buckets)

    def compact(self, slot: Slot) -> int:
        """Where a parameter lies once the padding of buckets is left out, as files have it."""
        return slot.start - sum(b.numel - b.used for b in self.buckets[: slot.bucket])


def buffer_layout(
    members: Sequence[BufferParam], *, bucket_size: int | None, data_parallel: int, divisor: int = BUCKET_DIVISOR
) -> BufferLayout:
    """The layout of a buffer.

    Args:
        bucket_size: a bucket that has as many elements is closed; None for a single bucket.
        data_parallel: ranks that share the buffer, context parallelism included.
        divisor: 128, or 65536 with ``--ddp-pad-buckets-for-high-nccl-busbw``.
    """
    # The same loop as Megatron's own, in elements: ``at`` is where the next parameter may begin, ``opened`` where the current bucket began.
    # A bucket is closed when it is full, and around a shared parameter, which has to be alone in its bucket.
    step = math.lcm(data_parallel, divisor)
    slots: list[Slot] = []
    buckets: list[Bucket] = []
    start = opened = at = 0

    def close(end: int) -> int:
        buckets.append(Bucket(-(-end // step) * step - opened, end - opened))
        return opened + buckets[-1].numel

    for member in reversed(members):
        start = _aligned(at)
        if member.shared and slots and slots[-1].bucket == len(buckets):
            start = opened = close(start)
        slots.append(Slot(start, len(buckets)))
        at = start + member.numel
        if member.shared or (bucket_size is not None and at - opened >= bucket_size):
            at = opened = close(at)
    if slots and slots[-1].bucket == len(buckets):
        close(at)
    return BufferLayout(tuple(reversed(slots)), tuple(buckets))


def layout_in(members: Sequence[BufferParam], buckets: Sequence[Bucket]) -> BufferLayout | None:
    """The layout of a buffer whose buckets are known; None if the members do not fill them exactly."""
    slots: list[Slot] = []
    number = opened = at = 0
    for member in reversed(members):
        if number < len(buckets) and _aligned(at) - opened >= buckets[number].used:
            opened += buckets[number].numel
            number, at = number + 1, opened
        start = _aligned(at)
        at = start + member.numel
        if number >= len(buckets) or at - opened > buckets[number].used:
            return None
        slots.append(Slot(start, number))
    full = number == len(buckets) - 1 and at - opened == buckets[number].used if buckets else not slots
    return BufferLayout(tuple(reversed(slots)), tuple(buckets)) if full else None


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


# ------------------------------------------------------------------------------------------------------ from flat to boxes


class BufferSegment(NamedTuple):
    """Elements ``[start, stop)`` of a flat buffer are those of ``source`` from ``at`` on."""

    start: int
    stop: int
    source: Source
    at: int


def pieces_of(param: LocalParam, start: int, segments: Sequence[BufferSegment]) -> Iterator[tuple[str, SourcePiece]]:
    """What a flat buffer has of a parameter that begins at ``start``: the tensor's name and a piece of it, for each box.

    ``segments`` are in order and do not overlap.
    """
    for block in param.blocks:
        first = start + block.start
        span = block.numel if block.strides is None else reach(block.shape, block.strides, 1)
        for segment in _overlapping(segments, first, first + span):
            if block.strides is None:
                low, high = max(first, segment.start), min(first + span, segment.stop)
                for box, begins in flat_pieces(block.shape, low - first, high - first):
                    at = segment.at + low - segment.start + begins
                    yield block.name, SourcePiece(box.shifted(block.offset).offset, box.shape, segment.source, at)
            elif segment.start <= first and first + span <= segment.stop:
                yield block.name, SourcePiece(block.offset, block.shape, segment.source, segment.at + first - segment.start, block.strides)
            else:
                raise ValueError(block.name)


def _overlapping(segments: Sequence[BufferSegment], start: int, stop: int) -> Iterator[BufferSegment]:
    number = max(bisect_right(segments, start, key=lambda segment: segment.start) - 1, 0)
    while number < len(segments) and segments[number].start < stop:
        if segments[number].stop > start:
            yield segments[number]
        number += 1


# --------------------------------------------------------------------------------------------- a defect that can be undone


class Shift(NamedTuple):
    """Elements ``[start, stop)`` of parameter ``member`` were written as those of parameter ``written_as`` from ``at`` on, which is None
    where they were not written at all. Members have the numbers of the layout's slots."""

    member: int
    start: int
    stop: int
    written_as: int | None
    at: int


def shifts(layout: BufferLayout, numels: Sequence[int]) -> list[Shift]:
    """Where the elements of each parameter are in a ``fully_reshardable`` optimizer state that Megatron-Core 0.15 to 0.19 wrote.

    They took elements at places that count the padding of buckets from a buffer without it, so every parameter got what lies as many
    elements later as there is padding before its bucket (Megatron-LM pull request 5077). What no parameter got is lost. With a single
    bucket, or without padding, nothing moved.
    """
    # What went wrong there, in one drawing (P: padding of bucket 0):
    #
    #  places that were used     |-- c --|P|-- b --|         they count the padding
    #  elements there were       |-- c --|-- b --|           without the padding
    #  taken as b                          |-------|         lacks the first P of b, and has P others at its end
    #
    # ``true`` is where the member's own elements lie without padding. Each was taken for the member whose place, with
    # padding, has the same number: the overlaps of [true, true + numel) with all places say as what it was written.
    starts = [slot.start for slot in layout.slots]
    by_start = sorted(range(len(starts)), key=starts.__getitem__)
    in_order = sorted(starts)
    moves = []
    for member, (slot, numel) in enumerate(zip(layout.slots, numels, strict=True)):
        true = layout.compact(slot)
        at = true
        first, last = bisect_right(in_order, true) - 1, bisect_right(in_order, true + numel)
        for other in by_start[max(first, 0) : last]:
            low, high = max(at, starts[other]), min(true + numel, starts[other] + numels[other], layout.used)
            if low >= high:
                continue
            if low > at:
                moves.append(Shift(member, at - true, low - true, None, 0))
            moves.append(Shift(member, low - true, high - true, other, low - starts[other]))
            at = high
        if at < true + numel:
            moves.append(Shift(member, at - true, numel, None, 0))
    return moves
