"""A stored chunk, as messages name it, and the one error for a chunk that is damaged."""

from __future__ import annotations

from typing import NamedTuple

from ckpt.catalog import Extent
from ckpt.errors import CorruptError
from ckpt.layout.geometry import Box


class ChunkName(NamedTuple):
    """A stored chunk, as messages name it. ``box`` is None where ``tensor`` is a key of a file that says all."""

    tensor: str
    box: Box | None
    extent: Extent


def has_digest(extent: Extent, *, crc32: bool = True) -> bool:
    """Whether there is something to compare the bytes with."""
    return extent.digest is not None or (crc32 and extent.crc32 is not None)


def damaged(chunk: ChunkName, difference: str, url: str) -> CorruptError:
    """The error for a chunk that is not what its digest says."""
    tensor, box, extent = chunk
    return CorruptError(
        f"chunk {tensor} is damaged: {difference}" if box is None else f"chunk {box} of tensor {tensor} is damaged: {difference}",
        where=f"{url.rstrip('/')}/{extent.path}, bytes {extent.offset} to {extent.offset + extent.length}",
        hint="run `ckpt verify` to see what else is damaged, and use another step",
    )


def digest_difference(computed: str, expected: str) -> str | None:
    return None if computed == expected else f"its XXH3-64 digest is {computed}, should be {expected}"


def crc_difference(computed: int, expected: int) -> str | None:
    return None if computed == expected else f"its CRC-32 is {computed:08x}, should be {expected:08x}"
