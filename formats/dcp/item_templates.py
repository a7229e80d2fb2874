"""Where the bytes of stored boxes begin in their items, and their checksums. Items with boxes of one shape and dtype differ in the elements
and in checksums alone: what was found out about one of them holds for all that are, byte for byte, the same elsewhere.

Invariant: an item counts as like another one only if all that was looked at there, its beginning up to the elements and its directory, is
the same here but for the checksums, which are not looked at.
"""

# DCP stores each box as an archive of ``torch.save`` of its own: pickle and directory around the elements. Most of the archives of a
# large checkpoint differ in nothing but the elements and their checksums:
#
#     item        |head: headers, pickle|elements .....|tail: directory|
#     template    |same bytes           |              |same bytes     |     checksums are cut out of both before comparing
#
# So the first item of a kind is parsed in full. Of others of the same length, dtype and shape, head and tail are read, and if they equal
# a template byte for byte, the elements begin where they do there. If not, the item is parsed in full too.

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt import dtypes
from ckpt.formats.external.ranges import read_ranges

from .items import AT_ONCE, archive_of, box_place, ranges_of

if TYPE_CHECKING:
    from ckpt.formats.torchzip.archive import Archive
    from ckpt.io_backends.protocol import Backend

    from .items import Held
    from .metadata import DcpBox, DcpItem

_SIZES, _SUM = struct.Struct("<3H"), struct.Struct("<I")
_ENTRY, _ENTRY_SIZES, _ENTRY_SUM = 46, 28, 16
"""Of an entry of a zip directory: its length without name and extras, where their lengths are, and where the checksum is."""
_LOCAL_SUM = 14
_MOST = 8
"""Kinds of items of one length that are kept in mind."""

Described = tuple[str, str, "DcpBox"]
"""Name and dtype of a tensor, and one of its boxes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _ItemTemplate:
    """Items of one kind: ``head`` are the bytes before the elements, ``tail`` those from the directory on, without checksums; ``head_sums``
    and ``tail_sums`` say where these are, ``crc`` where in the tail that of the elements is, if they are a whole record. Other positions
    count from the start of the item."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    directory: int
    head_sums: tuple[int, ...]
    tail_sums: tuple[int, ...]
    head: bytes
    tail: bytes
    crc: int | None

    def crc_in(self, cached: Held) -> int | None:
        """The checksum of the elements of an item of this kind, if it says one."""
        at, data = cached[1]
        return None if self.crc is None else _SUM.unpack_from(data, self.directory - at + self.crc)[0] or None

    def fits(self, cached: Held, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether what was read of an item is of this kind, and the elements are as described."""
        if (self.dtype, self.shape) != (dtype, shape):
            return False
        first, last = cached
        head, tail = first[1][: self.start], last[1][self.directory - last[0] :]
        return _without(head, self.head_sums) == self.head and _without(tail, self.tail_sums) == self.tail


class Places:
    """Looks into items, and remembers what kinds of them there are."""

    def __init__(self, backend: Backend, sizes: Mapping[str, int]) -> None:
        self._backend = backend
        self._sizes = sizes
        self._kinds: dict[int, list[_ItemTemplate]] = {}

    def find(self, wanted: Sequence[Described]) -> list[tuple[int, int | None]]:
        """Where in their files the bytes of boxes begin, and their CRC-32 if the items say it."""
        places: list[tuple[int, int | None]] = []
        for first in range(0, len(wanted), AT_ONCE):
            batch = wanted[first : first + AT_ONCE]
            ranges = [ranges_of(box.item, self._sizes, 0, self._backend.url) for _, _, box in batch]
            data = iter(read_ranges(self._backend, [r for of_item in ranges for r in of_item]))
            for described, of_item in zip(batch, ranges, strict=True):
                start = described[2].item.offset
                parts = [(r.offset - start, next(data)) for r in of_item]
                place, crc = self._place(described, (parts[0], parts[-1]))
                places.append((start + place, crc))
        return places

    def _place(self, described: Described, cached: Held) -> tuple[int, int | None]:
        name, dtype, box = described
        kinds = self._kinds.setdefault(box.item.length, [])
        for kind in kinds:
            if kind.fits(cached, dtype, box.shape):
                return kind.start, kind.crc_in(cached)
        archive = archive_of(self._backend, box.item, cached)
        place, crc = box_place(archive, name, dtype, box)
        start = place - box.item.offset
        kind_found = _kind(archive, cached, box.item, dtype, box.shape, start)
        if kind_found is not None and len(kinds) < _MOST:
            kinds.append(kind_found)
        return start, crc


def _kind(archive: Archive, cached: Held, item: DcpItem, dtype: str, shape: tuple[int, ...], start: int) -> _ItemTemplate | None:
    """What items like this one have in common; None if its beginning or its directory were not read whole."""
    first, last = cached
    records = archive.records
    directory = max(r.limit for r in records)
    if start > len(first[1]) or directory < last[0]:
        return None
    head, tail = first[1][:start], last[1][directory - last[0] :]
    head_sums = tuple(r.header + _LOCAL_SUM for r in records if r.header < start)
    sums = _sums(tail, len(records))
    candidates = [r for r in records if r.header <= start < r.limit and r.size == math.prod(shape) * dtypes.dtype(dtype).itemsize]
    return _ItemTemplate(
        dtype=dtype,
        shape=shape,
        start=start,
        directory=directory,
        head_sums=head_sums,
        tail_sums=tuple(sums.values()),
        head=_without(head, head_sums),
        tail=_without(tail, tuple(sums.values())),
        crc=sums[candidates[0].name.encode()] if candidates else None,
    )


def _sums(directory: bytes, count: int) -> dict[bytes, int]:
    """Where the checksums of the entries are, by the names of their records."""
    sums, at = {}, 0
    for _ in range(count):
        sizes = _SIZES.unpack_from(directory, at + _ENTRY_SIZES)
        sums[directory[at + _ENTRY : at + _ENTRY + sizes[0]]] = at + _ENTRY_SUM
        at += _ENTRY + sum(sizes)
    return sums


def _without(data: bytes, sums: Sequence[int]) -> bytes:
    """The bytes without checksums of 4 bytes."""
    parts = [data[a + 4 : b] for a, b in zip((-4, *sums), (*sums, len(data)), strict=True)]
    return b"".join(parts)
