"""What headers of data files have in common: everything but digests and the numbers of boxes.

The files of a job are cut alike: the header of one rank's is that of another's with other numbers in the boxes of its keys. To parse JSON
takes ten times as long as to see that, and a load that gathers what very many ranks wrote reads all of their headers. So the text of a
header is compared with one that was parsed and checked. Where it has as many bytes, and each that differs is a digit of a box in both, all
else is equal: names, dtypes, shapes, and where the bytes of each chunk are. Whoever looks a chunk up compares the box in its key. This goes
only for headers in which no two keys are alike up to their boxes: then keys stay different, and in order, whatever the boxes are.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ckpt.geometry import IntArray

_Mask = npt.NDArray[np.bool_]
_KEY = re.compile(rb'"([^"]*)":\{')
_BOXED = re.compile(rb"\[[0-9:,]*\]\Z")


class HeaderLayout:
    """The chunks of a file but for their digests, as columns; ``offsets`` count from the start of the data. ``places`` of their digests
    among all of the file. ``text`` is the JSON that it was made of. Files share one if they are alike."""

    def __init__(
        self,
        *,
        keys: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        offsets: IntArray,
        lengths: IntArray,
        places: IntArray,
        text: bytes,
    ) -> None:
        self.keys = keys
        self.dtypes = dtypes
        self.shapes = shapes
        self.offsets = offsets
        self.lengths = lengths
        self.places = places
        self.text = text

    def __len__(self) -> int:
        return len(self.keys)

    def keys_in(self, text: bytes) -> Sequence[str]:
        """The keys of a header that is alike."""
        if text is self.text or text == self.text or self.ends is None:
            return self.keys
        spans = zip((self.ends - self.sizes).tolist(), self.ends.tolist(), strict=True)
        return [text[a:b].decode() for a, b in spans]

    @cached_property
    def sizes(self) -> IntArray:
        """Bytes of each key."""
        return np.array([len(key.encode()) for key in self.keys], dtype=np.int64)

    @cached_property
    def ends(self) -> IntArray | None:
        """Where the keys end in the text; None if their boxes may not differ."""
        if b"\\" in self.text:
            return None
        spans = [match.span(1) for match in _KEY.finditer(self.text)]
        if [self.text[a:b].decode() for a, b in spans] != list(self.keys) or not _stay_apart([self.text[a:b] for a, b in spans]):
            return None
        return np.array([b for _, b in spans], dtype=np.int64)

    @cached_property
    def _bytes(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.text, dtype=np.uint8)

    @cached_property
    def _fixed(self) -> _Mask:
        """Where the text has to be the same."""
        fixed = np.ones(len(self.text), dtype=bool)
        digits = self._bytes - 48 <= 9
        assert self.ends is not None
        for end, key in zip(self.ends.tolist(), self.keys, strict=True):
            if (box := _BOXED.search(key.encode())) is not None:
                start = end - (box.end() - box.start())
                fixed[start:end] = ~digits[start:end]
        return fixed

    def is_of(self, text: bytes) -> bool:
        """Whether a header with this text has this layout."""
        if len(text) != len(self.text):
            return False
        if text == self.text:
            return True
        if self.ends is None:
            return False
        found = np.frombuffer(text, dtype=np.uint8)
        differs = np.flatnonzero(found != self._bytes)
        return not self._fixed[differs].any() and bool((found[differs] - 48 <= 9).all())


def _stay_apart(keys: Sequence[bytes]) -> bool:
    """Whether keys stay different and in order whatever digits their boxes have: each differs from the next before its box begins."""
    ordered = sorted(keys)
    bare = [_BOXED.sub(b"[", key) for key in ordered]
    for (a, b), (stem, other) in zip(pairwise(ordered), pairwise(bare), strict=True):
        short = min(len(stem), len(other))
        if a[:short] == b[:short]:
            return False
    return True


_TEXT_BYTES = 8 << 20
_MOST = 16
_known: OrderedDict[tuple[int, int], HeaderLayout] = OrderedDict()
"""Layouts by the bytes of the text and of the data: those that were used last."""
_lock = threading.Lock()


def recall(text: bytes, data: int) -> HeaderLayout | None:
    """The layout of a header with this text, of a file with so many bytes of data; None if none is known."""
    key = len(text), data
    with _lock:
        layout = _known.get(key)
        if layout is not None:
            _known.move_to_end(key)
    return layout if layout is not None and layout.is_of(text) else None


def remember(layout: HeaderLayout, data: int) -> None:
    """Keep a layout whose chunks were found to cover so many bytes of data."""
    if len(layout.text) > _TEXT_BYTES:
        return
    with _lock:
        _known[len(layout.text), data] = layout
        _known.move_to_end((len(layout.text), data))
        while len(_known) > _MOST:
            _known.popitem(last=False)
