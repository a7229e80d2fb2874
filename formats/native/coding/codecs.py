"""Codecs of chunks (docs/format.md §10): bytes in, fewer bytes out, and back. Thread-safe; what takes time releases the GIL.

Invariants: decoding fills exactly ``out`` and touches nothing else, or raises; beside ``out`` it takes a few MiB, whatever a blob claims.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ckpt.errors import FormatError
from ckpt.formats.external.strided import PREFIX, gather

from .frames import Bytes, damaged, decode_zstd, encode_zstd, worth
from .planes import decode_planes, encode_planes

ZSTD = "zstd"
PLANES = "planes-zstd"
CODECS = (ZSTD, PLANES)
ITEMSIZES = (1, 2, 4, 8, 16)


def encode(codec: str, data: memoryview, itemsize: int) -> memoryview | None:
    """``data`` coded, in memory of its own; None if that is not worth it. Otherwise as ``encode_into``."""
    out = np.empty(worth(data.nbytes), dtype=np.uint8).data  # pages that are not written to are never made
    size = encode_into(codec, data, itemsize, out)
    return None if size is None else out[:size]


def encode_into(codec: str, data: memoryview, itemsize: int, out: memoryview) -> int | None:
    """Code ``data``, elements of ``itemsize`` bytes, to the start of ``out``. Gives the bytes that were written there.

    None if it is not worth it (more than 97 % of ``data``, or nothing at all) or ``out`` has no room; ``out`` is then undefined. Both are
    contiguous and must not overlap.

    Raises:
        FormatError: the codec is not known.
        ValueError: ``data`` is not a whole number of elements, or elements of this size have no planes.
    """
    coder = _coder(codec, data.nbytes, itemsize)[0]
    room = np.frombuffer(out, dtype=np.uint8)[: worth(data.nbytes)]
    return coder(np.frombuffer(data, dtype=np.uint8), itemsize, room) if data.nbytes else None


def decode(codec: str, blob: memoryview, out: memoryview, itemsize: int) -> None:
    """Fill ``out``, elements of ``itemsize`` bytes, with what ``blob``, bytes, was coded from. If this raises, ``out`` is undefined.

    Raises:
        FormatError: the codec, or the version of the blob, is not known.
        CorruptError: ``blob`` is not what the codec makes of as many bytes as ``out`` has.
        ValueError: ``out`` is not a whole number of elements, or elements of this size have no planes.
    """
    if codec.startswith(PREFIX):
        return gather(codec, blob, out, itemsize)
    coder = _coder(codec, out.nbytes, itemsize)[1]
    if not 0 < blob.nbytes <= out.nbytes:
        raise damaged(f"{blob.nbytes} bytes for a chunk of {out.nbytes}")
    return coder(blob, np.frombuffer(out, dtype=np.uint8), itemsize)


_Encoder = Callable[[Bytes, int, Bytes], "int | None"]
_Decoder = Callable[[memoryview, Bytes, int], None]


def _coder(codec: str, size: int, itemsize: int) -> tuple[_Encoder, _Decoder]:
    if codec not in CODECS:
        raise FormatError(f"unknown codec {codec!r}", hint=f"known codecs: {', '.join(CODECS)}")
    if itemsize not in ITEMSIZES or size % itemsize:
        raise ValueError(f"{size} bytes are not elements of {itemsize} bytes")
    return (encode_zstd, decode_zstd) if codec == ZSTD else (encode_planes, decode_planes)
