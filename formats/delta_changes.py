"""The elements of a run that changed between two versions, found and written in few bytes. Pure; also what travels between jobs.

Invariants: comparing is bitwise, so ``-0.0`` differs from ``0.0`` and a NaN equals itself. What is decoded lies inside the run, in order.
"""

# A run is a contiguous range of elements, of a tensor or of a packed box. Its changes are increasing indices and the new values. What is
# stored of an index is its gap: how many elements since the last change stay as they are.
#
#     elements   . . x . . . . x x . . . . . . x .       x: changed
#     gaps           2         4 0             6
#
# Gaps take 1, 2 or 4 bytes each, whatever is the shortest for all of the run. The highest code of a width, 255 for a byte, stands for so
# many unchanged elements and no change: a gap of 600 in bytes is 255, 255, 90. At 1 % changed elements of two bytes a change takes 3.08
# bytes; the entropy of random places is 1.01 bytes, and the values are 2.
#
# A run in which so many elements changed that this is no shorter is *dense*: no gaps, and all of its elements. A run without changes has
# neither gaps nor values.
#
# Comparing goes over words of 8 bytes, in blocks that stay in the cache; only words that differ are looked into element by element.

from __future__ import annotations

import functools
import struct
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from ckpt.errors import CorruptError, UsageError
from ckpt.plan.layout.geometry import IntArray

WIDTHS = (1, 2, 4)
"""Bytes of a gap."""
_BLOCK = 1 << 20
"""Bytes that are compared in one step: what differs is read again while it is in the cache, and calls of numpy cost little beside."""
_GLANCE, _SAMPLE = 512, 4096
"""Elements that are looked at first, and then, if many of these changed."""
_CODES: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_HEAD = struct.Struct("<BxxxII")
"""Of an encoded run: bytes of a gap (0: dense), number of gap codes, number of values."""

RunBytes = bytes | memoryview | npt.NDArray[np.uint8]


class Changes(NamedTuple):
    """Changed elements: increasing ``indices`` from the start of the run, and their new ``values`` as unsigned integers of their size."""

    indices: IntArray
    values: npt.NDArray[Any]


class Section(NamedTuple):
    """A run as it is stored: gap codes of ``width`` bytes each and the bytes of values. ``width`` 0: values are all elements, or none."""

    width: int
    codes: npt.NDArray[np.uint8]
    values: npt.NDArray[np.uint8]


def unit(itemsize: int) -> np.dtype[Any]:
    """The integer that elements of ``itemsize`` bytes are compared as; of more than 8 bytes, half of an element is."""
    if itemsize not in (1, 2, 4, 8, 16):
        raise UsageError(f"elements of {itemsize} bytes are not compared", hint="1, 2, 4, 8 or 16 bytes")
    return np.dtype(f"<u{min(itemsize, 8)}")


def find_changes(base: RunBytes, new: RunBytes, itemsize: int) -> Changes:
    """What differs between two versions of the same run."""
    kind = unit(itemsize)
    before, after = np.frombuffer(base, np.uint8), np.frombuffer(new, np.uint8)
    if len(before) != len(after) or len(before) % itemsize:
        raise UsageError(
            f"{len(before)} bytes are compared with {len(after)}, in elements of {itemsize}", hint="compare runs of one length"
        )
    whole = len(after) // 8 * 8
    old_words, new_words = before[:whole].view(np.uint64), after[:whole].view(np.uint64)
    step, per = _BLOCK // 8, 8 // kind.itemsize
    bits = per.bit_length() - 1
    mask = np.empty(min(step, len(new_words)), dtype=np.bool_)
    indices: list[IntArray] = []
    values: list[npt.NDArray[Any]] = []
    for start in range(0, len(new_words), step):
        old, now = old_words[start : start + step], new_words[start : start + step]
        words = _true_places(np.not_equal(old, now, out=mask[: len(now)]))
        if not len(words):
            continue
        taken = now.take(words).view(kind)
        (places,) = (old.take(words).view(kind) != taken).nonzero()
        at = words.take(places >> bits)
        at += start
        at <<= bits
        values.append(taken.take(places))
        places &= per - 1
        at += places
        indices.append(at)
    rest = after[whole:].view(kind)
    (places,) = (before[whole:].view(kind) != rest).nonzero()
    indices.append(places + len(new_words) * per)
    values.append(rest.take(places))
    return Changes(np.concatenate(indices), np.concatenate(values))


def _true_places(mask: npt.NDArray[np.bool_]) -> IntArray:
    """As ``mask.nonzero()``, in half of its time where a few percent are true."""
    # numpy's own is without branches where more than a tenth is true. Below that it searches from one to the next,
    # which costs a mispredicted branch each. So first eight at a time are looked for, which more often differ; of
    # those that are looked into then, more than a tenth are true.
    count = np.count_nonzero(mask)
    if 10 * count > len(mask) or 2000 * count < len(mask) or len(mask) % 8:
        return mask.nonzero()[0]
    eights = mask.view(np.uint64)
    some = _true_places(eights != 0)
    (places,) = eights.take(some).view(np.bool_).nonzero()
    at = some.take(places >> 3)
    at <<= 3
    places &= 7
    at += places
    return at


def mostly_changed(base: RunBytes, new: RunBytes, itemsize: int) -> bool:
    """Whether so many elements differ, by a sample of a few thousand, that to look for each would be in vain."""
    kind = unit(itemsize)
    before, after = np.frombuffer(base, kind), np.frombuffer(new, kind)
    if len(after) < 16 * _SAMPLE:
        return False
    most = kind.itemsize / (kind.itemsize + 1) + 0.05
    # A glance first: it leaves no doubt where few changed, and most of a sample's time goes into misses of the cache.
    for count, least in ((_GLANCE, most - 0.2), (_SAMPLE, most)):
        places = _sample(count, len(after))
        if np.count_nonzero(before.take(places) != after.take(places)) <= least * count:
            return False
    return True


@functools.lru_cache(maxsize=16)
def _sample(count: int, length: int) -> IntArray:
    """Places by the golden ratio: no pattern of rows and columns falls in with them."""
    places: IntArray = (np.arange(count) * 0.6180339887498949 % 1.0 * length).astype(np.int64)
    return places


def gaps_of(indices: IntArray) -> IntArray:
    """How many elements stay as they are before each change."""
    gaps = np.empty_like(indices)
    gaps[:1] = indices[:1]
    np.subtract(indices[1:], indices[:-1], out=gaps[1:])
    gaps[1:] -= 1
    return gaps


def code_counts(gaps: IntArray) -> dict[int, int]:
    """How many codes gaps take, by width."""
    counts, longer = {}, gaps
    for width in WIDTHS:
        # Divisions take longer than all else here, so only gaps that are too long for one code are divided. These are few,
        # and what is too long for a width is so for all before it.
        longer = longer.take((longer >= _most(width)).nonzero()[0])
        counts[width] = len(gaps) + int((longer // _most(width)).sum())
    return counts


def encode_gaps(gaps: IntArray, width: int) -> npt.NDArray[np.uint8]:
    """Gaps as codes of ``width`` bytes each."""
    most = _most(width)
    codes = gaps.astype(_CODES[width])
    longer = (gaps >= most).nonzero()[0]
    if not len(longer):
        return codes.view(np.uint8)
    long_gaps = gaps.take(longer)
    skips = long_gaps // most
    codes[longer] = long_gaps - skips * most
    # As ``np.insert``, which would sort the places first.
    at = longer.repeat(skips)
    at += np.arange(len(at))
    lengthened = np.full(len(codes) + len(at), most, dtype=codes.dtype)
    is_gap = np.ones(len(lengthened), dtype=np.bool_)
    is_gap[at] = False
    lengthened[is_gap] = codes
    return lengthened.view(np.uint8)


def decode_gaps(codes: npt.NDArray[np.uint8], width: int, count: int, length: int, where: str) -> IntArray:
    """The ``count`` indices that codes stand for, in a run of ``length`` elements."""
    read = codes.view(_CODES[width])
    changed = read != _most(width)
    reached = np.cumsum(read.astype(np.int64) + changed)
    indices: IntArray = reached[changed] - 1
    if len(indices) != count or (len(read) and not changed[-1]):
        _damaged(f"gaps for {len(indices):,} changed elements and values for {count:,}", where)
    if count and int(reached[-1]) > length:
        _damaged(f"a change of element {int(reached[-1]) - 1:,} of a run of {length:,}", where)
    return indices


def encode_run(base: RunBytes, new: RunBytes, itemsize: int) -> Section:
    """The shortest way to make ``new`` of ``base``, but for what a sample takes for changed throughout."""
    if mostly_changed(base, new, itemsize):
        return Section(0, np.empty(0, np.uint8), np.frombuffer(new, np.uint8))
    indices, values = find_changes(base, new, itemsize)
    gaps = gaps_of(indices)
    width, count = min(code_counts(gaps).items(), key=lambda of: of[0] * of[1])
    if len(indices) and width * count + values.nbytes >= len(new):
        return Section(0, np.empty(0, np.uint8), np.frombuffer(new, np.uint8))
    return Section(width if len(indices) else 0, encode_gaps(gaps, width) if len(indices) else np.empty(0, np.uint8), values.view(np.uint8))


def decode_section(section: Section, length: int, itemsize: int, where: str) -> Changes:
    """The changes that a section of a run of ``length`` bytes stands for."""
    kind = unit(itemsize)
    units = length // kind.itemsize
    if section.width not in (0, *WIDTHS):
        _damaged(f"gaps of {section.width} bytes", where)
    if len(section.values) % kind.itemsize or (section.width and len(section.codes) % section.width):
        _damaged(f"{len(section.codes):,} bytes of gaps and {len(section.values):,} of values, which are not whole ones", where)
    values = section.values.view(kind)
    if section.width == 0:
        if len(section.codes) or len(section.values) not in (0, length):
            _damaged(f"{len(section.values):,} bytes for a run of {length:,}", where)
        return Changes(np.arange(len(values), dtype=np.int64), values)
    return Changes(decode_gaps(section.codes, section.width, len(values), units, where), values)


def apply_section(into: memoryview, section: Section, itemsize: int, where: str) -> None:
    """Make the new version of a run of the old one, in place."""
    changes = decode_section(section, into.nbytes, itemsize, where)
    if section.width == 0:
        if len(section.values):
            into.cast("B")[:] = section.values.data
        return
    np.frombuffer(into, unit(itemsize))[changes.indices] = changes.values


def pack(section: Section) -> bytes:
    """A section as one string of bytes, for a message. Empty: nothing changed."""
    if not len(section.values):
        return b""
    head = _HEAD.pack(section.width, len(section.codes) // (section.width or 1), len(section.values))
    return b"".join((head, section.codes.data, section.values.data))


def unpack(data: RunBytes, where: str) -> Section:
    """What ``pack`` has packed."""
    if not len(data):
        return Section(0, np.empty(0, np.uint8), np.empty(0, np.uint8))
    if len(data) < _HEAD.size:
        _damaged(f"{len(data)} bytes, fewer than its head", where)
    body = np.frombuffer(data, np.uint8)
    width, codes, values = _HEAD.unpack(body[: _HEAD.size].tobytes())
    body = body[_HEAD.size :]
    if width * codes + values != len(body) or width not in (0, *WIDTHS):
        _damaged(f"{len(body):,} bytes, and its head accounts for {width * codes + values:,}", where)
    return Section(width, body[: width * codes], body[width * codes :])


def _most(width: int) -> int:
    """The code that stands for so many unchanged elements and no change."""
    return (1 << 8 * width) - 1


def _damaged(what: str, where: str) -> NoReturn:
    raise CorruptError(f"a delta has {what}", where=where, hint="it is damaged: take it again, or use another version")
