"""What a codec is, and frames of zstd: the codec ``zstd`` (docs/format.md §10), and what each thread keeps for coding.

Invariant: a frame is decoded only if it says itself how long its content is, and that is what belongs there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import CorruptError

# What a codec of chunks is (docs/format.md §10): two functions, and what the rest of the software asks of them.
#
# A new codec is one file with such an object, and its entry in ``codecs.CODECS``. The readers of released versions refuse chunks of a codec
# that they do not know, by its name.

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
    """Whether what it codes is the chunk XOR the same chunk of an earlier checkpoint, the anchor (``encode_xor_planes``)."""


WORTH = 97
"""Percent of its own size that a coded chunk, or plane, has at most; one that would be larger is not coded."""
FRAME_BYTES = 1 << 20
"""Most bytes in one frame of ``zstd``."""
BLOCK = 1 << 19
"""Bytes of the blocks of ``planes-zstd`` that are written: they and their planes stay in the cache."""

_FRAME_BLOCKS = 1024
"""Most blocks of a zstd frame that are looked at; the frames that are written have 8."""
_WINDOW = 8 << 20


def worth(size: int) -> int:
    """Bytes that ``size`` bytes may have coded."""
    return size * WORTH // 100


def damaged(what: str) -> CorruptError:
    return CorruptError(f"a coded chunk is damaged: {what}", hint="restore its file from a copy, or load another checkpoint")


class Tools:
    """What a thread keeps from chunk to chunk: compressors, which are not thread-safe, and scratch."""

    def __init__(self) -> None:
        import zstandard as z

        # Almost no matches, so that the time goes into the entropy coding of literals: exponents have no repetitions.
        literals = z.ZstdCompressionParameters(
            strategy=z.STRATEGY_FAST, hash_log=6, chain_log=6, window_log=17, search_log=1, min_match=7, target_length=0
        )
        self.literals = z.ZstdCompressor(compression_params=literals)
        self.general = z.ZstdCompressor(level=1)
        self.decompressor = z.ZstdDecompressor(max_window_size=_WINDOW)
        self.plane: Bytes = np.empty(BLOCK, dtype=np.uint8)
        self._words: tuple[Bytes, Bytes] = (np.empty(BLOCK, dtype=np.uint8), np.empty(BLOCK, dtype=np.uint8))

    def words(self, which: int, count: int, size: int) -> Words:
        """One of two scratch arrays of ``count`` words of ``size`` bytes."""
        own = self._words[which]
        if len(own) < count * size:  # a block of another writer
            own = np.empty(count * size, dtype=np.uint8)
        return own[: count * size].view(f"<u{size}")


class _ThreadTools(threading.local):
    tools: Tools | None = None


_own = _ThreadTools()


def tools() -> Tools:
    """Those of this thread."""
    own = _own.tools
    if own is None:
        own = _own.tools = Tools()
    return own


def encode_zstd(data: Bytes, _: int, out: Bytes) -> int | None:
    """Write frames to the start of ``out``. Gives where they end; None if there is no room."""
    at = 0
    for start in range(0, len(data), FRAME_BYTES):
        frame = tools().general.compress(data[start : start + FRAME_BYTES].data)
        if at + len(frame) > len(out):
            return None
        out[at : at + len(frame)] = np.frombuffer(frame, dtype=np.uint8)
        at += len(frame)
    return at


def decode_zstd(blob: memoryview, out: Bytes, _: int) -> None:
    """Fill ``out`` from frames, or raise CorruptError."""
    at = done = 0
    while at < len(blob):
        length, size = _measure(blob[at:])
        if size > len(out) - done:
            raise damaged(f"it has more than {len(out)} bytes")
        out[done : done + size] = unpack(blob[at : at + length], size)
        at, done = at + length, done + size
    if done != len(out):
        raise damaged(f"it has {done} bytes, not {len(out)}")


def _measure(blob: memoryview) -> tuple[int, int]:
    """How long the zstd frame is that ``blob`` starts with, and how long its content, as its headers say."""
    import zstandard

    try:
        at = zstandard.frame_header_size(blob)
        frame = zstandard.get_frame_parameters(blob)
    except zstandard.ZstdError as err:
        raise damaged(f"there is no zstd frame where one has to start ({err})") from err
    if not 1 <= frame.content_size <= FRAME_BYTES:  # also if the frame does not say: that reads as a huge one
        raise damaged(f"a zstd frame does not say that it has 1 to {FRAME_BYTES} bytes")
    for _ in range(_FRAME_BLOCKS):
        # A zstd frame does not say how long it is; its blocks do. A block header is 3 bytes: bit 0 marks the last
        # block, bits 1 and 2 are the type, the rest is the size. Walking them finds the end without decompressing
        # anything.
        header = int.from_bytes(blob[at : at + 3], "little")
        at += 3 + (1 if header >> 1 & 3 == 1 else header >> 3)  # blocks of type 1 are one byte, repeated
        if at > len(blob):
            raise damaged("a zstd frame is truncated")
        if header & 1:
            return at + (4 if frame.has_checksum else 0), frame.content_size
    raise damaged(f"a zstd frame has more than {_FRAME_BLOCKS} blocks")


def unpack(frame: memoryview, size: int) -> Bytes:
    """The content of ``frame``, which is to be one zstd frame with ``size`` bytes and nothing else."""
    import zstandard

    try:
        # Memory is taken only for a size that is expected. A frame of a few bytes can claim, and produce, gigabytes.
        says = zstandard.frame_content_size(frame)
        if says != size:  # before memory is taken for it
            raise damaged(f"a zstd frame says that it has {says} bytes, where {size} belong")
        data = tools().decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as err:
        raise damaged(f"a zstd frame cannot be decoded ({err})") from err
    if len(data) != size:
        raise damaged(f"a zstd frame has {len(data)} bytes, where {size} belong")
    return np.frombuffer(data, dtype=np.uint8)


ZSTD = Codec(name="zstd", doc="any bytes that repeat; weights gain little", encode=encode_zstd, decode=decode_zstd)
