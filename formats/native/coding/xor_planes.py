"""The codec ``xor-planes-zstd`` (docs/format.md §15): a chunk XOR the same chunk of an earlier checkpoint, the anchor, in byte planes.

    chunk    3e 4c cc cd   3d cc 00 10        an optimizer's step moves most elements by little: sign, exponent and the
    anchor   3e 4c d1 02   3d cb fe 77        highest bits of the mantissa stay, and XOR makes zeros of what stays
    XOR      00 00 1d cf   00 07 fe 67  ──►   planes of zeros take almost nothing; the low planes are noise, and stay as large as they were

How much is saved depends on how far the weights have moved since the anchor, so for each chunk both ways are tried, and the difference is
taken only where it is more than ``GAIN`` percent smaller. An anchor is never a difference itself: one read and one XOR give the chunk.
"""

from __future__ import annotations

import numpy as np

from .codec import Bytes, Codec
from .frames import worth
from .planes import decode_planes, encode_planes, sample

GAIN = 10
"""Percent by which a difference has to be smaller than the chunk in byte planes."""


def encode_xor_planes(chunk: Bytes, anchor: Bytes, itemsize: int, out: Bytes) -> int | None:
    """Write the difference to the start of ``out``, and give where it ends; None if it is not enough smaller than the chunk would be
    without it. ``anchor`` is overwritten."""
    difference = np.bitwise_xor(chunk, anchor, out=anchor)
    # Of a large chunk a sample tells which way is shorter, so that it is coded once and not twice.
    sampled = sample(chunk, itemsize)
    if sampled is not None and not _gains(sampled, sample(difference, itemsize), itemsize):
        return None
    size = encode_planes(difference, itemsize, out)
    if size is None or (sampled is None and not _is_smaller(size, _size(chunk, itemsize))):
        return None
    return size


def _gains(chunk: Bytes, difference: Bytes | None, itemsize: int) -> bool:
    return difference is not None and _is_smaller(_size(difference, itemsize), _size(chunk, itemsize))


def _is_smaller(difference: int, chunk: int) -> bool:
    return 100 * difference < (100 - GAIN) * chunk


def _size(chunk: Bytes, itemsize: int) -> int:
    """Bytes that it takes in byte planes, or as it is."""
    size = encode_planes(chunk, itemsize, np.empty(worth(len(chunk)), dtype=np.uint8))
    return len(chunk) if size is None else size


XOR_PLANES = Codec(
    name="xor-planes-zstd",
    doc="steps that follow each other closely, as differences from an earlier one",
    encode=encode_planes,
    decode=decode_planes,
    anchored=True,
)
