"""The codec ``planes-zstd`` (docs/format.md §10): elements are taken apart into byte planes, and only planes that gain from it are coded.

Data is worked on in blocks that stay in the cache together with their planes, so that splitting, coding and storing them is one pass
over memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from ckpt.errors import FormatError

from .frames import BLOCK, Bytes, Codec, Words, damaged, tools, unpack, worth

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
        raise damaged(f"its header says {planes} planes, {count} elements in a block, and {zero}")
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
