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
from .header_layout import Names
from .keys import box_text


class Stretches(NamedTuple):
    """Bytes of chunks in one file, as columns: offset and length of each, and XXH3-64 in hex (``S16``)."""

    offsets: IntArray
    lengths: IntArray
    digests: npt.NDArray[np.bytes_]


Rows = dict[tuple[int, int], tuple[Names, Sequence[TensorEntry], IntArray | None]]
"""Where files with these names have chunks of these tensors, by the ids of both; None if not all of them have a key with a box there.
Files that are cut alike have the same tensors in the same rows."""


def find_alike(header: Header, entries: Sequence[TensorEntry], box: Box, known: Rows) -> Stretches | None:
    """The chunk ``box`` of each of ``entries``, which have one shape and dtype; None if not all have it under a key with a box, uncoded.

    Each key is compared: its name when its layout was made, its box in every file.
    """
    layout, first = header.layout, entries[0]
    names, ends = layout.names, layout.ends
    if box.shape == first.shape or names is None or ends is None:
        return None
    key = id(names), id(entries)
    if key not in known:
        known[key] = names, entries, _rows(names, entries)
    rows = known[key][2]
    if rows is None:
        return None
    kinds = layout.kinds[rows]
    if (kinds != kinds[0]).any() or layout.kind[int(kinds[0])] != (first.dtype.safetensors, first.dtype.stored_shape(box.shape)):
        return None
    text = np.frombuffer(box_text(box, first.shape).encode(), dtype=np.uint8)
    places = ends[rows][:, None] + np.arange(-len(text), 0)  # a box has but one bracket that opens, so it is all of it
    if (np.frombuffer(header.text, dtype=np.uint8)[places] != text).any():
        return None
    digests = np.frombuffer(header.digests, dtype=f"S{CHUNK_DIGITS}")
    return Stretches(layout.offsets[rows] + header.start, layout.lengths[rows], digests[layout.places[rows]])


def _rows(names: Names, entries: Sequence[TensorEntry]) -> IntArray | None:
    numbers = [names.rows.get(f"{e.name if e.alias is None else e.alias}[".encode(), -1) for e in entries]
    return None if -1 in numbers else np.array(numbers, dtype=np.int64)
