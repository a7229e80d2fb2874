"""Codecs of chunks (docs/format.md §10): what a codec is, ``zstd``, ``planes-zstd`` and ``xor-planes-zstd``.

Invariants: coding is thread-safe, and what takes time releases the GIL. Decoding fills exactly ``out`` and touches nothing else, or raises;
beside ``out`` it takes a few MiB, whatever a blob claims. A frame is decoded only if it says itself how long its content is, and that is
what belongs there.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import CorruptError, FormatError, UsageError
from ckpt.formats.external_elements import PREFIX, gather
from ckpt.needs import plugin, plugin_names

# What a codec of chunks is (docs/format.md §10): two functions, and what the rest of the software asks of them.
#
# A new codec is one file with such an object, and its entry in ``codecs.CODECS``; or, in another distribution, an entry point of the group
# ``ckpt.codecs`` whose name is the codec's. The readers of released versions refuse chunks of a codec
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
        # A zstd frame does not say how long it is; its blocks do. A block header is 3 bytes: bit 0 marks the last block, bits 1 and 2 are
        # the type, the rest is the size. Walking them finds the end without decompressing anything.
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
            raise damaged(f"a zstd frame announces {says} bytes, where {size} belong")
        data = tools().decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as err:
        raise damaged(f"a zstd frame cannot be decoded ({err})") from err
    if len(data) != size:
        raise damaged(f"a zstd frame has {len(data)} bytes, where {size} belong")
    return np.frombuffer(data, dtype=np.uint8)


ZSTD = Codec(name="zstd", doc="any bytes that repeat; weights gain little", encode=encode_zstd, decode=decode_zstd)


# The codec ``planes-zstd`` (docs/format.md §10): elements are taken apart into byte planes, and only planes that gain from it are coded.
#
# Data is worked on in blocks that stay in the cache together with their planes, so that splitting, coding and storing them is one pass
# over memory.

BLOCK_ELEMENTS = range(1 << 12, (1 << 20) + 1)
"""How many elements a block may have."""

_VERSION = 1
_HEADER = struct.Struct("<BBHI")
_RAW, _CODED, _CONSTANT = range(3)
_SPANS, _SPAN = 8, 1 << 13
"""Of a large chunk this many spans of this many elements each show which planes are worth coding."""


def encode_planes(data: Bytes, itemsize: int, out: Bytes) -> int | None:
    """Write planes to the start of ``out``. Gives where they end; None if no plane gains enough or there is no room."""
    tried = _worth_trying(data, itemsize)
    if not any(tried) or len(out) < _HEADER.size:
        return None
    count = BLOCK // itemsize
    out[: _HEADER.size] = np.frombuffer(_HEADER.pack(_VERSION, itemsize, 0, count), dtype=np.uint8)
    at = _HEADER.size
    for start in range(0, len(data), BLOCK):
        end = _encode_block(data[start : start + BLOCK], itemsize, tried, out, at)
        if end is None:
            return None
        at = end
    return at


def _encode_block(block: Bytes, itemsize: int, tried: Sequence[bool], out: Bytes, start: int) -> int | None:
    """Write a block to ``out``, from ``start``. Gives where it ends; None if there is no room."""
    count = len(block) // itemsize
    header = _block_header(itemsize)
    at = start + header.size
    kinds, lengths = [], []
    for p, word, byte in _bytes_of_words(itemsize):
        # A word is read once and gives all of its bytes: planes come word by word, the low byte first.
        if byte == 0:
            words = _read_words(block, itemsize, word)
        room = out[at : at + count]
        in_place = not tried[p] and len(room) == count
        plane = _extract(words, byte, room if in_place else tools().plane[:count])
        kind, stored = _encode_plane(plane, coded=tried[p])
        if len(stored) > len(room):
            return None
        if not in_place:
            room[: len(stored)] = stored
        kinds.append(kind)
        lengths.append(len(stored))
        at += len(stored)
    if start + header.size > len(out):
        return None
    out[start : start + header.size] = np.frombuffer(header.pack(*kinds, *lengths), dtype=np.uint8)
    return at


def _worth_trying(data: Bytes, itemsize: int) -> list[bool]:
    """Which planes to code. Those of small chunks are all tried; what does not get smaller is stored as it is, block by block."""
    # Why sample: coding a plane of mantissa bytes takes most of the time and gains nothing. A few spans, spread over
    # the chunk, show which planes shrink; blocks of the other planes are stored without trying.
    spans = sample(data, itemsize)
    if spans is None:
        return [True] * itemsize
    tried = []
    for _, word, byte in _bytes_of_words(itemsize):
        if byte == 0:
            words = _read_words(spans, itemsize, word)
        tried.append(_encode_plane(_extract(words, byte, tools().plane[: len(words)]), coded=True)[0] != _RAW)
    return tried


def sample(data: Bytes, itemsize: int) -> Bytes | None:
    """A few spans of elements, spread over a large chunk; None of a small one."""
    count = len(data) // itemsize
    if count < 2 * _SPANS * _SPAN:
        return None
    starts = np.linspace(0, count - _SPAN, _SPANS).astype(np.int64) * itemsize
    return np.concatenate([data[s : s + _SPAN * itemsize] for s in starts.tolist()])


def _encode_plane(plane: Bytes, *, coded: bool) -> tuple[int, Bytes]:
    """Kind and stored bytes."""
    # All blocks are looked at for being constant: three bytes show almost always that they are not.
    count = len(plane)
    if plane[0] == plane[-1] == plane[count // 2] and (plane == plane[0]).all():
        return _CONSTANT, plane[:1]
    if coded:
        frame = tools().literals.compress(plane.data)
        if len(frame) <= worth(count):
            return _CODED, np.frombuffer(frame, dtype=np.uint8)
    return _RAW, plane


def decode_planes(blob: memoryview, out: Bytes, itemsize: int) -> None:
    """Fill ``out`` from planes, or raise CorruptError or FormatError."""
    if len(blob) < _HEADER.size:
        raise damaged("it has no header")
    version, planes, zero, count = _HEADER.unpack_from(blob)
    if version != _VERSION:
        raise FormatError(f"version {version} of planes-zstd is not known, only {_VERSION}", hint="use a newer release of this software")
    if planes != itemsize or zero or count not in BLOCK_ELEMENTS:
        raise damaged(f"its header lists {planes} planes, {count} elements in a block, and {zero}")
    at = _HEADER.size
    for start in range(0, len(out), count * itemsize):
        at = _decode_block(blob, at, out[start : start + count * itemsize], itemsize)
    if at != len(blob):
        raise damaged(f"its blocks end at byte {at} of {len(blob)}")


def _decode_block(blob: memoryview, start: int, out: Bytes, itemsize: int) -> int:
    """Fill ``out`` from the block at ``start``. Gives where it ends."""
    header = _block_header(itemsize)
    at = start + header.size
    if at > len(blob):
        raise damaged("it is truncated")
    fields = header.unpack_from(blob, start)
    kinds, ends = fields[:itemsize], np.cumsum(fields[itemsize:], dtype=np.int64) + at
    if ends[-1] > len(blob):
        raise damaged("it is truncated")
    planes = [blob[a:b] for a, b in zip([at, *ends[:-1].tolist()], ends.tolist(), strict=True)]
    size = min(itemsize, 4)
    for word in range(itemsize // size):
        words = out.view(f"<u{itemsize}") if itemsize <= 4 else tools().words(0, len(out) // itemsize, 4)
        for byte in reversed(range(size)):
            p = word * size + byte
            _merge(_decode_plane(kinds[p], planes[p], len(words)), words, first=byte == size - 1, last=byte == 0)
        if itemsize > 4:
            out.view("<u4").reshape(-1, itemsize // 4)[:, word] = words
    return int(ends[-1])


def _decode_plane(kind: int, stored: memoryview, count: int) -> Bytes:
    """The bytes of a plane; a single one if all are alike."""
    if kind == _CODED:
        return unpack(stored, count)
    if kind not in (_RAW, _CONSTANT) or len(stored) != (count if kind == _RAW else 1):
        raise damaged(f"a plane of {count} bytes is of kind {kind} and stored in {len(stored)}")
    return np.frombuffer(stored, dtype=np.uint8)


# ------------------------------------------------------------------------------------------------------ bytes of words


def _block_header(itemsize: int) -> struct.Struct:
    return struct.Struct(f"<{itemsize}B{itemsize}I")


def _bytes_of_words(itemsize: int) -> list[tuple[int, int, int]]:
    """For each plane its number, the word of an element that has it, and its byte there: elements are words of at most 4 bytes."""
    return [(p, *divmod(p, min(itemsize, 4))) for p in range(itemsize)]


def _read_words(block: Bytes, itemsize: int, word: int) -> Words:
    if itemsize <= 4:
        return block.view(f"<u{itemsize}")
    words = tools().words(0, len(block) // itemsize, 4)
    words[...] = block.view("<u4").reshape(-1, itemsize // 4)[:, word]
    return words


def _extract(words: Words, byte: int, out: Bytes) -> Bytes:
    """Byte number ``byte`` of all words, in ``out``."""
    # Shifting and narrowing runs several times as fast as picking with a stride.
    if byte:
        words = np.right_shift(words, 8 * byte, out=tools().words(1, len(words), words.itemsize))
    np.copyto(out, words, casting="unsafe")
    return out


def _merge(plane: Bytes, words: Words, *, first: bool, last: bool) -> None:
    """Add a plane to words; they come from the highest down."""
    if first and last:
        words[...] = plane
    elif first:
        np.left_shift(plane, 8, out=words, dtype=words.dtype)
    else:
        if len(plane) > 1 or len(words) == 1 or plane[0]:
            np.bitwise_or(words, plane, out=words)
        if not last:
            np.left_shift(words, 8, out=words)


PLANES = Codec(name="planes-zstd", doc="floating-point numbers, by byte planes", encode=encode_planes, decode=decode_planes)


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
    changed = sample(difference, itemsize)
    if sampled is not None and changed is not None and not _is_smaller(_size(changed, itemsize), _size(sampled, itemsize)):
        return None
    size = encode_planes(difference, itemsize, out)
    if size is None or (sampled is None and not _is_smaller(size, _size(chunk, itemsize))):
        return None
    return size


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
"""By name. A new codec is one more entry; one of another distribution is entered when its name is met."""
_GROUP, _NAME = "ckpt.codecs", re.compile("[a-z0-9-]+")


WITHOUT_ANCHOR: dict[str, str] = {XOR_PLANES.name: PLANES.name}
"""Codecs of differences from an anchor, and what codes the chunks that have no anchor, or do not gain by it."""


def is_known(codec: str) -> bool:
    """Whether chunks of this codec can be read. Raises UsageError if another distribution has it, and cannot be used."""
    if codec not in CODECS and (given := plugin(_GROUP, codec, Codec)) is not None:
        if given.name != codec or not _NAME.fullmatch(codec) or given.anchored:
            hint = "its name is that of its entry point, of lower-case letters, digits and -; and it needs no other checkpoint"
            raise UsageError(f"the codec {given.name!r}, installed as {codec!r}, cannot be used", hint=hint)
        CODECS[codec] = given
    return codec in CODECS


def check_choice(codec: object) -> None:
    """Raise UsageError unless saves can use this codec."""
    if codec is not None and not (isinstance(codec, str) and (codec in CODECS or is_known(codec))):
        choices = "; ".join([*(f"{known.name!r}: {known.doc}" for known in CODECS.values()), *map(repr, plugin_names(_GROUP))])
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
    if codec not in CODECS and not is_known(codec):
        raise unknown_codec(codec, "a chunk")
    if itemsize not in ITEMSIZES or size % itemsize:
        raise ValueError(f"{size} bytes are not elements of {itemsize} bytes")
    return CODECS[codec]


def unknown_codec(codec: str, chunk: str, where: str | None = None) -> FormatError:
    """The error for a stored chunk whose codec is not in the registry."""
    return FormatError(
        f"{chunk} is coded with the unknown codec {codec!r}",
        where=where,
        hint=f"install what has this codec, or a newer release of this software; this one knows {', '.join(CODECS)}",
    )
