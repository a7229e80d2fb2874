"""Codecs of chunks (docs/format.md §10): bytes in, fewer bytes out, and back. Thread-safe; what takes time releases the GIL.

Invariants: decoding fills exactly ``out`` and touches nothing else, or raises; beside ``out`` it takes a few MiB, whatever a blob claims.
"""

from __future__ import annotations

import numpy as np

from ckpt.errors import FormatError, UsageError
from ckpt.formats.external.elements import PREFIX, gather

from .frames import ITEMSIZES, ZSTD, Bytes, Codec, damaged, worth
from .planes import PLANES, decode_planes, encode_planes, sample

# The codec ``xor-planes-zstd`` (docs/format.md §15): a chunk XOR the same chunk of an earlier checkpoint, the anchor, in byte planes.
#
#     chunk    3e 4c cc cd   3d cc 00 10        an optimizer's step moves most elements by little: sign, exponent and the
#     anchor   3e 4c d1 02   3d cb fe 77        highest bits of the mantissa stay, and XOR makes zeros of what stays
#     XOR      00 00 1d cf   00 07 fe 67  ──►   planes of zeros take almost nothing; the low planes are noise, and stay as they were
#
# How much is saved depends on how far the weights have moved since the anchor, so for each chunk both ways are tried, and the difference is
# taken only where it is more than ``GAIN`` percent smaller. An anchor is never a difference itself: one read and one XOR give the chunk.

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


CODECS: dict[str, Codec] = {codec.name: codec for codec in (ZSTD, PLANES, XOR_PLANES)}
"""By name. A new codec is one more entry."""


WITHOUT_ANCHOR: dict[str, str] = {XOR_PLANES.name: PLANES.name}
"""Codecs of differences from an anchor, and what codes the chunks that have no anchor, or do not gain by it."""


def check_choice(codec: str | None) -> None:
    """Raise UsageError unless saves can use this codec."""
    if codec is not None and codec not in CODECS:
        choices = "; ".join(f"{known.name!r}: {known.doc}" for known in CODECS.values())
        raise UsageError(f"codec must be one of {', '.join(CODECS)} or None, not {codec!r}", hint=choices)


def encode(codec: str, data: memoryview, itemsize: int) -> memoryview | None:
    """``data`` coded, in memory of its own; None if that is not worth it. Otherwise as ``encode_into``."""
    out = np.empty(worth(data.nbytes), dtype=np.uint8).data  # pages that are not written to are never made
    size = encode_into(codec, data, itemsize, out)
    return None if size is None else out[:size]


def encode_into(codec: str, data: memoryview, itemsize: int, out: memoryview) -> int | None:
    """Code ``data``, elements of ``itemsize`` bytes, to the start of ``out``. Gives the bytes that were written there.

    None if it is not worth it (more than 97 % of ``data``, nothing at all, or elements that the codec does not take) or ``out`` has no
    room; ``out`` is then undefined. Both are contiguous and must not overlap.
    """
    coder = _coder(codec, data.nbytes, itemsize)
    if coder.anchored:
        raise ValueError(f"{codec} needs an anchor: see encode_difference")
    if itemsize not in coder.itemsizes or not data.nbytes:
        return None
    return coder.encode(np.frombuffer(data, dtype=np.uint8), itemsize, np.frombuffer(out, dtype=np.uint8)[: worth(data.nbytes)])


def encode_difference(data: memoryview, anchor: memoryview, itemsize: int) -> memoryview | None:
    """``data`` coded as its difference from ``anchor``, as many bytes, which are overwritten; None if that is not worth it."""
    if itemsize not in XOR_PLANES.itemsizes or not data.nbytes:
        return None
    out = np.empty(worth(data.nbytes), dtype=np.uint8)
    size = encode_xor_planes(np.frombuffer(data, dtype=np.uint8), np.frombuffer(anchor, dtype=np.uint8), itemsize, out)
    return None if size is None else out.data[:size]


def decode(codec: str, blob: memoryview, out: memoryview, itemsize: int, anchor: memoryview | None = None) -> None:
    """Fill ``out``, elements of ``itemsize`` bytes, with what ``blob``, bytes, was coded from. If this raises, ``out`` is undefined.
    ``anchor``: the bytes of the anchor's chunk, for codecs that need it."""
    if codec.startswith(PREFIX):  # of another format's file: never in the registry, since no data file may have it
        gather(codec, blob, out, itemsize)
        return
    coder = _coder(codec, out.nbytes, itemsize)
    if itemsize not in coder.itemsizes:
        raise damaged(f"{codec} has no elements of {itemsize} bytes")
    if not 0 < blob.nbytes <= out.nbytes:
        raise damaged(f"{blob.nbytes} bytes for a chunk of {out.nbytes}")
    if coder.anchored != (anchor is not None) or (anchor is not None and anchor.nbytes != out.nbytes):
        raise ValueError(f"{codec} and an anchor of {0 if anchor is None else anchor.nbytes} bytes do not go together")
    decoded = np.frombuffer(out, dtype=np.uint8)
    coder.decode(blob, decoded, itemsize)
    if anchor is not None:
        np.bitwise_xor(decoded, np.frombuffer(anchor, dtype=np.uint8), out=decoded)


def _coder(codec: str, size: int, itemsize: int) -> Codec:
    if codec not in CODECS:
        raise unknown_codec(codec, "a chunk")
    if itemsize not in ITEMSIZES or size % itemsize:
        raise ValueError(f"{size} bytes are not elements of {itemsize} bytes")
    return CODECS[codec]


def unknown_codec(codec: str, chunk: str, where: str | None = None) -> FormatError:
    """The error for a stored chunk whose codec is not in the registry."""
    return FormatError(
        f"{chunk} is coded with the unknown codec {codec!r}",
        where=where,
        hint=f"use a newer release of this software; this one knows {', '.join(CODECS)}",
    )
