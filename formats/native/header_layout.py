"""What headers of data files have in common: everything but digests and the numbers of boxes.

The files of a job are cut alike: the header of one rank's is that of another's with other numbers in the boxes of its keys. To read JSON
takes a hundred times as long as to see that, and a load that gathers what very many ranks wrote reads all of their headers. So the text of
a header is compared with those that were read and checked. Where it has as many bytes, and each that differs is a digit of a box in both,
all else is equal: names, dtypes, shapes, and where the bytes of each chunk are. Whoever looks a chunk up compares the box in its key.

A text that is like no other, since its boxes have more digits or its chunks other shapes, is read here too if it is written as this
software writes it: one regular expression finds all entries, columns are made of them, and the lengths of what was found have to add up to
all of the text. Whatever is written otherwise, or does not cover the data, is left to the JSON parser of ``header``, which says why.

All this goes only for headers in which no two keys are alike up to their boxes: then keys stay different, and in order, whatever the boxes
are. Files whose keys are alike but for boxes share one ``Names``.
"""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from ckpt.dtypes import FROM_SAFETENSORS
from ckpt.geometry import IntArray

from .keys import METADATA

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
_SHAPE = re.compile(rb"(?:(?:0|[1-9][0-9]*)(?:,(?:0|[1-9][0-9]*))*)?")
_MOST_DIGITS = 18
"""Of a number that is read here: it fits into 64 bits."""


@dataclass(frozen=True, eq=False)
class Names:
    """The keys of a header without their boxes: ``rows`` has the number of each, ``places`` their order among all keys of the file."""

    rows: Mapping[bytes, int]
    places: IntArray


class HeaderLayout:
    """The chunks of a file but for their digests, as columns: ``offsets`` count from the start of the data; ``kinds`` are numbers of dtypes
    and shapes in ``kind``. ``places`` of their digests among all of the file. ``text`` is the JSON that it was made of. Files share one if
    they are alike, but not without ``names``; ``ends`` is where their keys end in the text, ``sizes`` how many bytes they have."""

    def __init__(
        self,
        *,
        kind: Sequence[tuple[str, tuple[int, ...]]],
        kinds: IntArray,
        offsets: IntArray,
        lengths: IntArray,
        places: IntArray,
        text: bytes,
        keys: Sequence[str] | None = None,
        names: Names | None = None,
        boxes: Sequence[bytes] = (),
        ends: IntArray | None = None,
        sizes: IntArray | None = None,
    ) -> None:
        self.kind = kind
        self.kinds = kinds
        self.offsets = offsets
        self.lengths = lengths
        self.places = places
        self.text = text
        self.names = names
        self.ends = ends
        self._keys = keys
        self._sizes = sizes
        self._mask, self._digits = _where_digits(text, boxes, ends) if ends is not None else (_NONE, _NO_PLACES)

    def __len__(self) -> int:
        return len(self.offsets)

    def keys_in(self, text: bytes | memoryview) -> Sequence[str]:
        """The keys of a header that is alike."""
        if self._keys is not None:
            return self._keys
        assert self.ends is not None and self._sizes is not None
        spans = zip((self.ends - self._sizes).tolist(), self.ends.tolist(), strict=True)
        return [str(text[a:b], "utf-8") for a, b in spans]

    @cached_property
    def _bytes(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.text, dtype=np.uint8)

    def is_of(self, text: bytes | memoryview) -> bool:
        """Whether a header with this text has this layout."""
        if len(text) != len(self.text):
            return False
        if self.ends is None:
            return text == self.text
        given, differs = np.frombuffer(text, dtype=np.uint8), _scratch(len(text))
        np.bitwise_xor(given, self._bytes, out=differs)
        np.bitwise_and(differs, self._mask, out=differs)
        return not differs.max(initial=0) and bool(given[self._digits].max(initial=0) <= _NINE)


def _where_digits(text: bytes, boxes: Sequence[bytes], ends: IntArray) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.intp]]:
    """Which bits of the text have to be the same, and where digits of boxes are, of which the upper four bits do: a colon is alike in
    these."""
    sizes = np.fromiter(map(len, boxes), dtype=np.int64, count=len(boxes))
    inside = np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    places = inside + np.repeat(ends - sizes, sizes)
    given = np.frombuffer(text, dtype=np.uint8)
    digits = places[given[places] - 48 <= 9]
    mask = np.full(len(text), 0xFF, dtype=np.uint8)
    mask[digits] = 0xF0
    return mask, digits


_local = threading.local()


def _scratch(size: int) -> npt.NDArray[np.uint8]:
    """This thread's memory for one comparison."""
    kept: npt.NDArray[np.uint8] | None = getattr(_local, "scratch", None)
    if kept is None or len(kept) < size:
        kept = _local.scratch = np.empty(size, dtype=np.uint8)
    return kept[:size]


# ------------------------------------------------------------------------------------------------------------- a new layout


def read_layout(text: bytes, data: int) -> HeaderLayout | None:
    """The layout of a header with this text, of a file with so many bytes of data; None if it is not written as this software writes it,
    if keys are alike up to their boxes, or if the entries do not cover the data exactly."""
    entries = _ENTRY.findall(text)
    # The last byte of a text that ends in this way is in no entry. So if only one byte is in none, nothing lies between entries.
    if not entries or text[-3:] != b"]}}" or len(b"".join(chain.from_iterable(entries))) + _FORM * len(entries) + 1 != len(text):
        return None
    stems, boxes, dtypes, shapes, begins, ends = zip(*entries, strict=True)
    names = _names([stem + box[:1] for stem, box in zip(stems, boxes, strict=True)], text)
    codes: dict[tuple[bytes, bytes], int] = {}
    kinds = np.array([codes.setdefault(kind, len(codes)) for kind in zip(dtypes, shapes, strict=True)], dtype=np.int64)
    kind = [_kind(*code) for code in codes]
    if names is None or max(map(len, ends)) > _MOST_DIGITS or max(map(len, begins)) > _MOST_DIGITS:
        return None
    starts, stops = (np.array(column, dtype=f"S{_MOST_DIGITS}").astype(np.int64) for column in (begins, ends))
    if not _covers(starts, stops, data) or any(k is None for k in kind):
        return None
    known = [k for k in kind if k is not None]
    if (np.array([_bits(*k) for k in known], dtype=np.int64)[kinds] != 8 * (stops - starts)).any():
        return None
    columns = [np.fromiter(map(len, column), dtype=np.int64, count=len(entries)) for column in (stems, boxes, dtypes, shapes, begins, ends)]
    sizes, reached = columns[0] + columns[1], np.cumsum(np.sum(columns, axis=0) + _FORM)
    return HeaderLayout(
        kind=known,
        kinds=kinds,
        offsets=starts,
        lengths=stops - starts,
        places=names.places,
        text=text,
        names=names,
        boxes=boxes,
        ends=np.append(0, reached[:-1]) + len(',"') + sizes,
        sizes=sizes,
    )


def _covers(starts: IntArray, stops: IntArray, data: int) -> bool:
    """Whether chunks follow each other from 0 to ``data``, in the order in which they are given."""
    return bool(starts[0] == 0 and stops[-1] == data and (starts[1:] == stops[:-1]).all() and (starts <= stops).all())


def _kind(dtype: bytes, shape: bytes) -> tuple[str, tuple[int, ...]] | None:
    """dtype and shape, or None if they are not what they have to be."""
    if dtype.decode() not in BITS or _SHAPE.fullmatch(shape) is None:
        return None
    return dtype.decode(), tuple(map(int, shape.split(b","))) if shape else ()


def _bits(dtype: str, shape: tuple[int, ...]) -> int:
    """Of a chunk; -1 for more than there can be."""
    bits = BITS[dtype] * math.prod(shape)
    return bits if bits < 1 << 62 else -1


def _names(bare: Sequence[bytes], text: bytes) -> Names | None:
    """What keys are called without what follows the bracket of a box; None if keys are alike up to their boxes, or cannot be names."""
    joined = b"\n".join(bare)  # no key has a control character
    with _lock:
        names = _known_names.get(joined)
        if names is not None:
            _known_names.move_to_end(joined)
            return names
    order = sorted(range(len(bare)), key=bare.__getitem__)
    # What begins others comes right before one of these.
    if METADATA.encode() in bare or any(bare[b].startswith(bare[a]) for a, b in pairwise(order)) or not _is_utf8(text):
        return None
    places = np.empty(len(bare), dtype=np.int64)
    places[order] = np.arange(len(bare))
    names = Names({key: i for i, key in enumerate(bare)}, places)
    if len(joined) <= _TEXT_BYTES:
        with _lock:
            _known_names[joined] = names
            while len(_known_names) > _MOST_NAMES:
                _known_names.popitem(last=False)
    return names


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
_known_names: OrderedDict[bytes, Names] = OrderedDict()
_lock = threading.Lock()


def recall(text: bytes | memoryview, data: int) -> HeaderLayout | None:
    """The layout of a header with this text, of a file with so many bytes of data; None if none is known."""
    with _lock:
        alike = [entry for entry in _known if entry[0] == data and len(entry[1].text) == len(text)]
    for entry in alike:
        if entry[1].is_of(text):
            with _lock:
                _put_first(entry)
            return entry[1]
    return None


def remember(layout: HeaderLayout, data: int) -> None:
    """Keep a layout whose chunks were found to cover so many bytes of data."""
    if len(layout.text) <= _TEXT_BYTES:
        with _lock:
            _put_first((data, layout))
            del _known[_MOST:]
            while sum(len(kept.text) for _, kept in _known) > _ALL_TEXT:
                del _known[-1]


def _put_first(entry: tuple[int, HeaderLayout]) -> None:
    """With the lock."""
    if entry in _known:  # another thread may have dropped it
        _known.remove(entry)
    _known.insert(0, entry)


def forget() -> None:
    """Know no layout any more."""
    with _lock:
        _known.clear()
        _known_names.clear()


_NONE: npt.NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
_NO_PLACES: npt.NDArray[np.intp] = np.zeros(0, dtype=np.intp)
_NINE = ord("9")
