"""What headers of data files have in common: everything but digests and the numbers of boxes.

The files of a job are cut alike: the header of one rank's is that of another's with other numbers in the boxes of its keys. To read JSON
takes a hundred times as long as to see that, and a load that gathers what very many ranks wrote reads all of their headers. So the text of
a header is compared with those that were read and checked, in three steps:

1. It has as many bytes as one of them (a *layout*), and where they differ, a digit of a box is there and a digit is here, or one of the six
   characters after ``9``: these are nothing special in JSON, and so the upper four bits are all that is compared. All else is equal: names,
   dtypes, shapes, and where the bytes of each chunk are. Whoever looks a chunk up compares the box in its key.
2. Its boxes have more digits or fewer, and all else is equal: what lies between boxes of a layout, with the boxes of the text, is the text.
3. It is like none, but written as this software writes it: one regular expression finds all entries, and the lengths of what was found add
   up to all of the text. Columns are made of them and checked. Whatever is written otherwise, or does not cover the data, is left to the
   JSON parser of ``header``, which says why.

Headers are compared only if no two of their keys are alike up to their boxes: then keys stay different, and in order, whatever the boxes
are. Others are read as in step 3, and known again if they are equal.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from ckpt.dtypes import FROM_SAFETENSORS
from ckpt.plan.layout.geometry import IntArray

from .datafile import METADATA
from .index import LruCache

BITS = {name: 4 if name == "F4" else 8 * d.itemsize for name, d in FROM_SAFETENSORS.items()}
"""Of an element. One element of our F4 dtype is two of safetensors' 4-bit ones."""

_NUMBER = rb"(0|[1-9][0-9]*)"
_STEM = rb'[^"\\\x00-\x1f\[]*(?:\[(?![0-9:,]*\]")[^"\\\x00-\x1f\[]*)*'
_ENTRY = re.compile(
    rb',"('
    + _STEM
    + rb')(\[[0-9:,]*\]|)":\{"dtype":"([A-Z0-9_]+)","shape":\[([0-9,]*)\],"data_offsets":\['
    + _NUMBER
    + b","
    + _NUMBER
    + rb"\]\}"
)
"""Name, box, dtype, shape, begin and end."""
_FORM = len(',"":{"dtype":"","shape":[],"data_offsets":[,]}')
_BOX = re.compile(rb"\[[0-9:,]*\]|")
_GLANCE, _BLOCK = 8 << 10, 128 << 10
_PART = 1 << 20
_MOST_DIGITS = 18
"""Of a number that is read here: it fits into 64 bits."""
_SIZE = rb"(?:0|[1-9][0-9]{0,%d})" % (_MOST_DIGITS - 1)
_SHAPE = re.compile(rb"(?:" + _SIZE + rb"(?:," + _SIZE + rb")*)?")


@dataclass(frozen=True, eq=False)
class Names:
    """The keys of a header without their boxes, a line each, and ``places``, their order among all keys of the file."""

    lines: bytes
    places: IntArray

    @cached_property
    def rows(self) -> Mapping[bytes, int]:
        """The number of each."""
        return {key: i for i, key in enumerate(self.lines.split(b"\n"))}


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """The chunks of a file but for digests and boxes: ``offsets`` count from the start of the data; ``kinds`` are numbers of dtypes and
    shapes in ``kind``; ``places`` of their digests among all of the file."""

    kind: Sequence[tuple[str, tuple[int, ...]]]
    kinds: IntArray
    offsets: IntArray
    lengths: IntArray
    places: IntArray
    names: Names | None = None
    """None for columns that files do not share."""
    stems: IntArray | None = None
    """Bytes of each key without its box."""


class HeaderLayout:
    """Columns, and where in the ``text`` of a header their keys are: those that end at ``ends``, with boxes of so many bytes. Without
    ``ends``, ``keys`` are those of this text alone."""

    def __init__(
        self, columns: Columns, text: bytes, keys: Sequence[str] = (), *, ends: IntArray | None = None, boxes: IntArray | None = None
    ) -> None:
        self.columns = columns
        self.text = text
        self.ends = ends
        self._keys = keys
        self._boxes = boxes
        self._bytes = np.frombuffer(text, dtype=np.uint8)

    # Made when another header is compared: most files of one rank, whose headers may be long, are never compared.

    @cached_property
    def _mask(self) -> npt.NDArray[np.uint8]:
        """Which bits of a text are the same in all texts of this layout: all but the lower four of the digits of boxes."""
        text, ends, boxes = self._bytes, self.ends, self._boxes
        if ends is None or boxes is None:
            return text
        inside = np.arange(int(boxes.sum()), dtype=np.int64) - np.repeat(np.cumsum(boxes) - boxes, boxes)
        places = inside + np.repeat(ends - boxes, boxes)
        mask = np.full(len(text), 0xFF, dtype=np.uint8)
        mask[places[text[places] - 48 <= 9]] = 0xF0
        return mask

    @cached_property
    def _between(self) -> Sequence[bytes]:
        """The text before the first box, between boxes, and after the last one."""
        assert self.ends is not None and self._boxes is not None
        edges = zip([0, *self.ends.tolist()], [*(self.ends - self._boxes).tolist(), len(self.text)], strict=True)
        return [self.text[a:b] for a, b in edges]

    def keys_in(self, text: bytes | memoryview) -> Sequence[str]:
        """The keys of a header that is alike."""
        stems = self.columns.stems
        if self.ends is None or self._boxes is None or stems is None:
            return self._keys
        spans = zip((self.ends - self._boxes - stems).tolist(), self.ends.tolist(), strict=True)
        return [str(text[a:b], "utf-8") for a, b in spans]

    def is_of(self, text: bytes | memoryview) -> bool:
        """Whether a header with this text has this layout."""
        if len(text) != len(self.text):
            return False
        if self.ends is None:
            return text == self.text
        given, middle = np.frombuffer(text, dtype=np.uint8), len(text) // 2
        # Texts of other layouts that happen to have as many bytes differ almost everywhere: look at a few first. Blocks stay in the cache.
        blocks = (slice(at, at + _BLOCK) for at in range(0, len(text), _BLOCK))
        return all(self._stays(given, part) for part in (slice(middle, middle + _GLANCE), *blocks))

    def _stays(self, given: npt.NDArray[np.uint8], part: slice) -> bool:
        """Whether a part of a text as long as this one is the same but for digits of boxes."""
        own = self._bytes[part]
        # This thread's memory for one comparison
        size = len(own)
        kept: npt.NDArray[np.uint8] | None = getattr(_local, "scratch", None)
        if kept is None or len(kept) < size:
            kept = _local.scratch = np.empty(size, dtype=np.uint8)
        differs = kept[:size]
        np.bitwise_xor(given[part], own, out=differs)
        np.bitwise_and(differs, self._mask[part], out=differs)
        return not differs.max(initial=0)

    def fitted(self, text: bytes) -> HeaderLayout | None:
        """The layout of a text that differs in boxes alone, whatever their lengths; None if it does not."""
        at = 0
        if self._boxes is None:
            return None
        between, boxes = self._between, list[bytes]()
        for fixed in between[:-1]:
            at += len(fixed)
            end = text.find(b'"', at)
            boxes.append(text[at:end])
            at = end
        if not all(map(_BOX.fullmatch, set(boxes))):
            return None
        parts = [*chain.from_iterable(zip(between, boxes, strict=False)), between[-1]]
        sizes = np.fromiter(map(len, boxes), dtype=np.int64, count=len(boxes))
        if b"".join(parts) != text or ((sizes > 0) != (self._boxes > 0)).any():
            return None
        fixed_sizes = np.fromiter(map(len, between[:-1]), dtype=np.int64, count=len(boxes))
        fitted = HeaderLayout(self.columns, text, ends=np.cumsum(fixed_sizes + sizes), boxes=sizes)
        fitted._between = between
        return fitted


_local = threading.local()


# ------------------------------------------------------------------------------------------------------------- a new layout


def read_layout(text: bytes, data: int) -> HeaderLayout | None:
    """The layout of a header with this text, of a file with so many bytes of data; None if it is not written as this software writes it,
    if a key is there twice, or if the entries do not cover the data exactly."""
    codes: dict[tuple[bytes, bytes], int] = {}
    stems, boxes, parts = list[bytes](), list[bytes](), list[IntArray]()
    at = read = 0
    while at < len(text):  # part by part: the matches take several times the memory of the text
        end = text.find(b']},"', at + _PART) + 2
        end = len(text) if end < 2 else end
        entries = _ENTRY.findall(text, at, end)
        if not entries:
            return None
        read += len(b"".join(chain.from_iterable(entries))) + _FORM * len(entries)
        fields = list(zip(*entries, strict=True))
        sizes = [np.fromiter(map(len, column), dtype=np.int64, count=len(entries)) for column in fields]
        if max(sizes[4].max(), sizes[5].max()) > _MOST_DIGITS:
            return None
        numbers = [np.array(column, dtype=f"S{_MOST_DIGITS}").astype(np.int64) for column in fields[4:]]
        kinds = np.array([codes.setdefault(kind, len(codes)) for kind in zip(*fields[2:4], strict=True)], dtype=np.int64)
        parts.append(np.array([kinds, *numbers, sizes[0], sizes[1], np.sum(sizes, axis=0) + _FORM]))
        stems += fields[0]
        boxes += fields[1]
        at = end
    # The last byte of a text that ends in this way is in no entry. So if only one byte is in none, nothing lies between entries.
    if not stems or text[-3:] != b"]}}" or read + 1 != len(text) or not _is_utf8(text):
        return None
    kinds, starts, stops, stem_sizes, box_sizes, entry_sizes = np.concatenate(parts, axis=1)
    kind = [_kind(*code) for code in codes]
    known = [k for k in kind if k is not None]
    if not (bool(starts[0] == 0 and stops[-1] == data and (starts[1:] == stops[:-1]).all() and (starts <= stops).all())) or len(
        known
    ) < len(kind):
        return None
    bits = [BITS[dtype] * math.prod(shape) for dtype, shape in known]
    addressable = [n if n < 1 << 62 else -1 for n in bits]
    if (np.array(addressable, dtype=np.int64)[kinds] != 8 * (stops - starts)).any():
        return None
    names = _names([stem + box[:1] for stem, box in zip(stems, boxes, strict=True)])
    columns = Columns(
        kind=known,
        kinds=kinds,
        offsets=starts,
        lengths=stops - starts,
        places=_sorted([stem + box for stem, box in zip(stems, boxes, strict=True)])[1] if names is None else names.places,
        names=names,
        stems=None if names is None else stem_sizes,
    )
    if names is None:
        keys = [str(stem + box, "utf-8") for stem, box in zip(stems, boxes, strict=True)]
        return None if METADATA in keys or len(set(keys)) < len(keys) else HeaderLayout(columns, text, keys)
    key_ends = np.append(0, np.cumsum(entry_sizes)[:-1]) + len(',"') + stem_sizes + box_sizes
    return HeaderLayout(columns, text, ends=key_ends, boxes=box_sizes)


def _kind(dtype: bytes, shape: bytes) -> tuple[str, tuple[int, ...]] | None:
    """dtype and shape, or None if they are not what they have to be."""
    if dtype.decode() not in BITS or _SHAPE.fullmatch(shape) is None:
        return None
    return dtype.decode(), tuple(map(int, shape.split(b","))) if shape else ()


def _names(bare: Sequence[bytes]) -> Names | None:
    """What keys are called without what follows the bracket of a box; None if keys are alike up to their boxes, or cannot be names."""
    joined = b"\n".join(bare)  # no key has a control character
    names = _known_names.get(joined)
    if names is not None:
        return names
    order, places = _sorted(bare)
    # What begins others comes right before one of these.
    if METADATA.encode() in bare or any(bare[b].startswith(bare[a]) for a, b in pairwise(order)):
        return None
    names = Names(joined, places)
    if len(joined) <= _TEXT_BYTES:
        _known_names.put(joined, names)
    return names


def _sorted(keys: Sequence[bytes]) -> tuple[list[int], IntArray]:
    """The numbers of keys in their order, and the place of each in it."""
    order = sorted(range(len(keys)), key=keys.__getitem__)
    places = np.empty(len(keys), dtype=np.int64)
    places[order] = np.arange(len(keys))
    return order, places


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- layouts that are known

_TEXT_BYTES = 8 << 20
_ALL_TEXT = 32 << 20
"""Bytes of the texts of layouts that are kept: what is made of a text takes twice as much once more."""
_MOST = 32
_MOST_NAMES = 8
_known: list[tuple[int, HeaderLayout]] = []
"""Layouts with the bytes of data that they cover, those that were used last first."""
_known_names: LruCache[bytes, Names] = LruCache(_MOST_NAMES)
_lock = threading.Lock()


def recall(text: bytes | memoryview, data: int) -> HeaderLayout | None:
    """The layout of a header with this text, of a file with so many bytes of data; None if it is like none that is known."""
    with _lock:
        alike = [layout for covered, layout in _known if covered == data]
    layout = next((layout for layout in alike if layout.is_of(text)), None)
    if layout is None:
        own, columns = bytes(text), {id(layout.columns): layout for layout in alike}
        layout = next(filter(None, (other.fitted(own) for other in columns.values())), None)
    if layout is not None:
        remember(layout, data)
    return layout


def remember(layout: HeaderLayout, data: int) -> None:
    """Keep a layout whose chunks were found to cover so many bytes of data, before all others."""
    if len(layout.text) <= _TEXT_BYTES:
        with _lock:
            entry = data, layout
            if entry in _known:
                _known.remove(entry)
                _known.insert(0, entry)
                return
            _known.insert(0, entry)
            del _known[_MOST:]
            while sum(len(kept.text) for _, kept in _known) > _ALL_TEXT:
                del _known[-1]


def forget() -> None:
    """Know no layout any more."""
    with _lock:
        _known.clear()
    _known_names.clear()
