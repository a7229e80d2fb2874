"""How a new object is cut into parts, and parts that are gathered in memory. No requests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ckpt.io_backends.written_ranges import WrittenRanges

PART = 16 << 20
"""Bytes of a part: enough that the request around them costs little, and one that is lost is soon sent again."""
SINGLE = 64 << 20
"""Bytes of an object that is one request where there is room to gather it. As parts it would be six: a store takes so many requests a
second, and a job of thousands of ranks sends all of theirs at once."""
LONG_PART = 64 << 20
MANY_PARTS, MOST_PARTS = 1000, 10_000
"""Parts grow up to ``LONG_PART`` rather than be more than the first of these, and further rather than be more than the second, which no
store takes."""
_MIB = 1 << 20


def part_size(size: int, least: int = PART) -> int:
    """Bytes of each part but the last of an object of ``size`` bytes: whole MiB, all alike (some stores insist)."""
    wanted = max(least, min(LONG_PART, -(-size // MANY_PARTS)), -(-size // MOST_PARTS))
    return -(-wanted // _MIB) * _MIB


class PartRange(NamedTuple):
    """Where some bytes go: into part ``number``, from its byte ``at`` on."""

    number: int
    at: int
    view: memoryview


class Gathered:
    """A part that is gathered from writes that do not cover it."""

    def __init__(self, size: int) -> None:
        self.memory = np.empty(size, dtype=np.uint8).data  # a bytearray would be filled with zeros first
        self.written = WrittenRanges(size)

    @property
    def whole(self) -> bool:
        return self.written.count == len(self.memory)
