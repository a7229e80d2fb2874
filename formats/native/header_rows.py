"""Looks chunks of many tensors up in one header at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.catalog import TensorEntry
from ckpt.geometry import Box, IntArray

from .datafile import CHUNK_DIGITS
from .header import Header
from .header_layout import HeaderLayout
from .keys import box_text


class Stretches(NamedTuple):
    """Bytes of chunks in one file, as columns: offset and length of each, and XXH3-64 in hex (``S16``)."""

    offsets: IntArray
    lengths: IntArray
    digests: npt.NDArray[np.bytes_]


class _Found(NamedTuple):
    """Where a layout has chunks of these tensors: their ``rows``, and where in the text their boxes are, of ``size`` bytes."""

    layout: HeaderLayout
    entries: Sequence[TensorEntry]
    rows: IntArray
    boxes: IntArray
    size: int
    shape: tuple[int, ...]


Rows = dict[tuple[int, int], _Found | None]
"""By the ids of a layout and of the tensors: files that are cut alike have the same tensors in the same rows."""


def find_alike(header: Header, entries: Sequence[TensorEntry], box: Box, known: Rows) -> Stretches | None:
    """The chunk ``box`` of each of ``entries``, which have one shape and dtype; None if not all have it under a key with a box, uncoded.

    Each key is compared: its name when its layout was seen first, its box in every file.
    """
    layout, first = header.layout, entries[0]
    if box.shape == first.shape or layout.ends is None:
        return None
    text = box_text(box, first.shape).encode()
    key = id(layout), id(entries)
    if key not in known:
        known[key] = _find(header, entries, text)
    found = known[key]
    if found is None or found.shape != first.dtype.stored_shape(box.shape) or found.size != len(text):
        return None
    stored = np.frombuffer(header.text, dtype=np.uint8)[found.boxes]
    if not (stored == np.frombuffer(text, dtype=np.uint8)).all():
        return None
    digests = np.frombuffer(header.digests.encode(), dtype=f"S{CHUNK_DIGITS}")
    return Stretches(layout.offsets[found.rows] + header.start, layout.lengths[found.rows], digests[layout.places[found.rows]])


def _find(header: Header, entries: Sequence[TensorEntry], text: bytes) -> _Found | None:
    layout, first, suffix = header.layout, entries[0], text.decode()
    numbers = [header.rows.get((e.name if e.alias is None else e.alias) + suffix, -1) for e in entries]
    shapes = {layout.shapes[n] for n in numbers if n >= 0}
    if -1 in numbers or len(shapes) != 1 or {layout.dtypes[n] for n in numbers} != {first.dtype.safetensors}:
        return None
    assert layout.ends is not None
    rows = np.array(numbers, dtype=np.int64)
    boxes = layout.ends[rows][:, None] + np.arange(-len(text), 0)
    return _Found(layout, entries, rows, boxes, len(text), shapes.pop())
