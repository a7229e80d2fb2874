"""Many small ranges of files at once: near ones in one read, several reads at a time. For headers and directories of foreign files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckpt.concurrency.waits import COUNTS_WAITS, waits_so_far
from ckpt.concurrency.workers import run_tasks
from ckpt.plan.reads import RangeGroup, group_ranges
from ckpt.settings import limits

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

_THREADS = 16


class Range(NamedTuple):
    """Bytes of a file."""

    path: str
    offset: int
    length: int


def read_ranges(backend: Backend, ranges: Sequence[Range]) -> list[bytes]:
    """The bytes of each range, in the order asked for."""
    groups = group_ranges(ranges, max_bytes=limits.GROUPED_READ, max_gap=limits.GAP)
    contents: list[bytes] = [b""] * len(ranges)

    def read(group: RangeGroup) -> None:
        data = backend.read(group.path, group.offset, group.length)
        for i in group.members:
            at = ranges[i].offset - group.offset
            contents[i] = data[at : at + ranges[i].length]

    at, waits = 0, waits_so_far()
    while at < len(groups) and COUNTS_WAITS and not backend.io_hints.concurrency and waits_so_far() - waits <= at // 8:
        read(groups[at])  # one thread is the fastest as long as nothing has to be waited for
        at += 1
    run_tasks([partial(read, group) for group in groups[at:]], _THREADS, "ckpt-open")
    return contents
