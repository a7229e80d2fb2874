"""What a codec of chunks is (docs/format.md §10): two functions, and what the rest of the software asks of them. Values only.

A new codec is one file with such an object, and its entry in ``codecs.CODECS``. The readers of released versions refuse chunks of a codec
that they do not know, by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]

CHUNK_LIMIT = 64 << 20
"""Bytes of a chunk of more than one element, before coding: part of the format (docs/format.md §9)."""
ITEMSIZES = (1, 2, 4, 8, 16)
"""Bytes that an element may have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """Bytes in, fewer bytes out, and back. Both functions are thread-safe, and release the GIL where they take time."""

    name: str
    """As it is stored, after the ``#`` of a chunk's key: lower-case letters, digits and ``-``."""
    doc: str
    """What it is good for, in a few words."""
    encode: Callable[[Bytes, int, Bytes], int | None]
    """``encode(data, itemsize, out)`` writes to the start of ``out`` and gives how many bytes; None if ``out`` has no room. ``data`` is not
    empty, and a whole number of elements."""
    decode: Callable[[memoryview, Bytes, int], None]
    """``decode(blob, out, itemsize)`` fills all of ``out`` or raises CorruptError. It takes a few MiB beside ``out``, whatever a blob
    claims."""
    itemsizes: tuple[int, ...] = ITEMSIZES
    """Sizes of the elements that it takes; chunks of other dtypes are stored as they are."""
    anchored: bool = False
    """Whether what it codes is the chunk XOR the same chunk of an earlier checkpoint, the anchor (``xor_planes``)."""
