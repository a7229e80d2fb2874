"""From a range of a flat buffer to boxes of the tensors in it: what readers of Megatron's and DeepSpeed's states share. Pure."""

# Optimizers that are divided over ranks keep all parameters of a kind one after another in one flat buffer, and each rank has a range of
# it. The ranges know nothing of tensors: they begin and end in the middle of rows.
#
#     buffer    |-------- A [3, 4] --------|--pad--|------ B [2, 3] ------|
#     ranks     |..... rank 0 .....|...... rank 1 ......|..... rank 2 .....|
#
# A catalog needs boxes. Where rank 0's range ends at element 7 of A, it has three of them at most (2·d − 1 for d dimensions): the rest of
# the row it begins in, whole rows, and the beginning of the row it ends in. They follow one another in the buffer, so that each begins
# where the elements of those before it end:
#
#     A   0  1  2  3      box [0:1, 0:4], 0 elements into the range
#         4  5  6| 7      box [1:2, 0:3], 4 elements into it
#         8  9 10 11
#
# What differs is where a parameter lies in the buffer: ``deepspeed/flat`` has ZeRO's rules, ``megatron/buffers`` those of
# Megatron's buckets.

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt.layout.geometry import Box, flat_to_boxes


def flat_pieces(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """The boxes of elements ``[start, stop)`` of the row-major flattening of ``shape``, in order, each with how many elements into that
    range it begins."""
    before = 0
    for box in flat_to_boxes(shape, start, stop):
        yield box, before
        before += box.numel
