"""The items of a DCP checkpoint: each is a whole ``torch.save`` archive inside a data file.

Where its bytes are is said at the end of an item, what they are at its beginning. The end of one is beside the beginning of the next, so
items that follow one another take one small read each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ckpt.errors import CorruptError, FormatError
from ckpt.formats.external.ranges import Range, read_ranges
from ckpt.formats.pickles.stored import StoredView
from ckpt.formats.torchzip.archive import MAGIC, Archive
from ckpt.formats.torchzip.table import rows_of
from ckpt.formats.torchzip.window import FileRange

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

    from .metadata import DcpBox, DcpItem

HEAD = 1536
"""Bytes at the beginning of an item: in them are the pickle of a tensor and the header of its bytes."""
TAIL = 1024
"""Bytes at its end: the directory of its seven records."""
WHOLE = 16 << 10
"""Items of values that are shorter are read whole."""
AT_ONCE = 2048
"""Items that are read before the next ones."""

Held = tuple[tuple[int, bytes], tuple[int, bytes]]
"""Where in an item its first bytes begin, and its last ones, and these bytes; twice the same of a short item."""


def open_items(backend: Backend, items: Sequence[DcpItem], sizes: Mapping[str, int]) -> Iterator[Archive]:
    """The archives of items, in order; many are read at once, and those of up to ``WHOLE`` bytes completely."""
    for first in range(0, len(items), AT_ONCE):
        batch = items[first : first + AT_ONCE]
        ranges = [ranges_of(item, sizes, WHOLE, backend.url) for item in batch]
        data = iter(read_ranges(backend, [r for of_item in ranges for r in of_item]))
        for item, of_item in zip(batch, ranges, strict=True):
            parts = [(r.offset - item.offset, next(data)) for r in of_item]
            yield archive_of(backend, item, (parts[0], parts[-1]))


def archive_of(backend: Backend, item: DcpItem, cached: Held) -> Archive:
    """The archive that an item is, some of whose bytes were read. Errors as for :func:`open_items`."""
    window = FileRange(backend, item.path, item.offset, item.length, tail=TAIL)
    window.hold(cached)
    if not cached[0][1].startswith(MAGIC):
        raise FormatError(
            "an item is no archive of `torch.save`", where=window.where, hint="items in other serialization formats are not read"
        )
    return Archive(backend, window)


def ranges_of(item: DcpItem, sizes: Mapping[str, int], least: int, url: str) -> list[Range]:
    """What to read of an item before anything is known of it: its beginning and its end, or all of it if it has up to ``least`` bytes."""
    if item.offset + item.length > sizes[item.path]:
        raise CorruptError(
            f"an item should end at byte {item.offset + item.length:,} of a file of {sizes[item.path]:,} bytes",
            where=f"{url.rstrip('/')}/{item.path}",
            hint="the file was cut off, or is of another save: copy the checkpoint again",
        )
    if item.length <= max(least, HEAD + TAIL):
        return [Range(item.path, item.offset, item.length)]
    return [Range(item.path, item.offset, HEAD), Range(item.path, item.offset + item.length - TAIL, TAIL)]


def box_place(archive: Archive, name: str, dtype: str, box: DcpBox) -> tuple[int, int | None]:
    """Where in its file the bytes of a stored box begin, and their CRC-32 if the item says it."""
    value = archive.values.meaning(archive.load())
    if type(value) is not StoredView or (value.dtype, value.shape) != (dtype, box.shape):
        has = f"{value.dtype} {list(value.shape)}" if type(value) is StoredView else "no tensor"
        raise CorruptError(
            f"the metadata have a box {dtype} {list(box.shape)} of {name} here, and the file has {has}",
            where=archive.where,
            hint="metadata and data files are of different saves: copy the checkpoint again",
        )
    rows = rows_of(value)
    if rows is None or len(rows) != 1 or value.lazy:
        hint = "load it with torch.distributed.checkpoint, and save contiguous tensors"
        what = value.lazy or f"its strides are {list(value.strides)}"
        raise FormatError(f"tensor {name} of shape {list(box.shape)} is not stored row by row: {what}", where=archive.where, hint=hint)
    offset = rows[0].start * value.itemsize
    crc = archive.crc32(value.storage, offset, math.prod(box.shape) * value.itemsize)
    return archive.starts([value.storage])[0] + offset, crc
