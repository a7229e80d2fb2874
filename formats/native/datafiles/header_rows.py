"""Looks chunks of many tensors up in one header at once.

What is found in one header holds for all of its layout but for the boxes and the digests. So it is kept, sorted and ready to be read, and
for each further file the boxes in its keys are compared and its digests are picked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ckpt.catalog import TensorEntry
from ckpt.layout.geometry import Box, IntArray

from .datafile import CHUNK_DIGITS
from .header import Header
from .header_layout import HeaderLayout, Names
from .keys import box_text

Sought = Sequence[tuple[Sequence[TensorEntry], Box]]
"""Tensors of one shape and dtype, and the chunk that is sought of each of them; several such groups."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Alike:
    """Where files of one layout have chunks that are sought, in the order of their bytes: each is the chunk of tensor ``members[i]`` of
    group ``groups[i]``. ``offsets`` count from the start of the data, ``digests`` are places of them. ``boxes``: for each group where in
    the text the boxes of its keys are, ``[tensors, bytes]``, or None if not all of it have a key with a box, uncoded."""

    groups: IntArray
    members: IntArray
    offsets: IntArray
    lengths: IntArray
    digests: IntArray
    boxes: Sequence[IntArray | None]
    all_boxes: IntArray
    """The same for all groups, one after another."""


class Stretches(NamedTuple):
    """Chunks in one file: ``start`` is where its data begin, ``digests`` are XXH3-64 in hex (``S16``)."""

    alike: Alike
    start: int
    digests: npt.NDArray[np.bytes_]


class Known:
    """What was found in layouts, as long as these are kept. ``names``: the rows of groups of tensors, by the ids of both."""

    def __init__(self) -> None:
        self.layouts: WeakKeyDictionary[HeaderLayout, dict[tuple[object, ...], Alike]] = WeakKeyDictionary()
        self.names: dict[tuple[int, int], tuple[Names, Sequence[TensorEntry], IntArray | None]] = {}


def find_alike(header: Header, sought: Sought, known: Known) -> Stretches:
    """The chunks that are sought, but those of groups of which not all are there under a key with a box, uncoded.

    Each key is compared: its name when its layout was made, its box in every file.
    """
    layout = header.layout
    texts = [box_text(box, entries[0].shape).encode() for entries, box in sought]
    key = tuple((id(entries), box.shape, len(text)) for (entries, box), text in zip(sought, texts, strict=True))
    kept = known.layouts.get(layout)
    if kept is None:
        kept = known.layouts.setdefault(layout, {})
    alike = kept.get(key)
    if alike is None:
        alike = kept[key] = _find(layout, sought, texts, known)
    given = np.frombuffer(header.text, dtype=np.uint8)
    expected = b"".join([text * len(places) for text, places in zip(texts, alike.boxes, strict=True) if places is not None])
    if given[alike.all_boxes].tobytes() != expected:  # seldom: the index is of other files
        alike = _without(
            alike, [g for g, places in enumerate(alike.boxes) if places is None or (given[places].tobytes() != texts[g] * len(places))]
        )
    digests = np.frombuffer(header.digests, dtype=f"S{CHUNK_DIGITS}")
    return Stretches(alike, header.start, digests[alike.digests])


def _find(layout: HeaderLayout, sought: Sought, texts: Sequence[bytes], known: Known) -> Alike:
    boxes: list[IntArray | None] = []
    rows_of_boxes: list[IntArray] = []
    for (entries, box), text in zip(sought, texts, strict=True):
        rows = _rows(layout, entries, box, known)
        if rows is not None:
            assert layout.ends is not None
            rows_of_boxes.append(rows)
            boxes.append(layout.ends[rows][:, None] + np.arange(-len(text), 0))  # a box has but one bracket that opens: it is all of it
        else:
            boxes.append(None)
    none = np.zeros(0, dtype=np.int64)
    all_rows = np.concatenate([none, *rows_of_boxes])
    groups = np.concatenate([none, *(np.full(len(b), i, dtype=np.int64) for i, b in enumerate(boxes) if b is not None)])
    members = np.concatenate([none, *(np.arange(len(rows)) for rows in rows_of_boxes)])
    columns = layout.columns
    order = np.lexsort((-columns.lengths[all_rows], columns.offsets[all_rows]))
    rows = all_rows[order]
    return Alike(
        groups=groups[order],
        members=members[order],
        offsets=columns.offsets[rows],
        lengths=columns.lengths[rows],
        digests=columns.places[rows],
        boxes=boxes,
        all_boxes=np.concatenate([none, *(places.ravel() for places in boxes if places is not None)]),
    )


def _rows(layout: HeaderLayout, entries: Sequence[TensorEntry], box: Box, known: Known) -> IntArray | None:
    """The rows of a layout that are chunks of this shape of ``entries``."""
    columns, first = layout.columns, entries[0]
    names = columns.names
    if names is None or box.shape == first.shape:
        return None
    key = id(names), id(entries)
    if key not in known.names:
        numbers = [names.rows.get(f"{e.name if e.alias is None else e.alias}[".encode(), -1) for e in entries]
        known.names[key] = names, entries, None if -1 in numbers else np.array(numbers, dtype=np.int64)
    rows = known.names[key][2]
    if rows is None:
        return None
    kinds = columns.kinds[rows]
    right = (kinds == kinds[0]).all() and columns.kind[int(kinds[0])] == (first.dtype.safetensors, first.dtype.stored_shape(box.shape))
    return rows if right else None


def _without(alike: Alike, groups: Sequence[int]) -> Alike:
    stays = ~np.isin(alike.groups, groups)
    boxes = [None if group in groups else places for group, places in enumerate(alike.boxes)]
    return Alike(
        groups=alike.groups[stays],
        members=alike.members[stays],
        offsets=alike.offsets[stays],
        lengths=alike.lengths[stays],
        digests=alike.digests[stays],
        boxes=boxes,
        all_boxes=np.concatenate([np.zeros(0, dtype=np.int64), *(places.ravel() for places in boxes if places is not None)]),
    )
