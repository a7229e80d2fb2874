"""Many small ranges of files at once: near ones in one read, several reads at a time. For headers and directories of foreign files."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckpt.concurrency.workers import run_tasks

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

MAX_GAP = 16 << 10
"""Bytes between two ranges that are read rather than skipped: one more call of the storage takes as long."""
MAX_READ = 4 << 20
_THREADS = 16


class Range(NamedTuple):
    """Bytes of a file."""

    path: str
    offset: int
    length: int


def read_ranges(backend: Backend, ranges: Sequence[Range]) -> list[bytes]:
    """The bytes of each range, in the order asked for.

    Raises:
        NotFoundError: a file is missing.
        CorruptError: a range reaches beyond the end of its file.
        StorageError: the storage failed.
    """
    order = sorted(range(len(ranges)), key=lambda i: ranges[i])
    groups: list[list[int]] = []
    end = 0
    for i in order:
        wanted = ranges[i]
        first = ranges[groups[-1][0]] if groups else None
        reach = wanted.offset + wanted.length
        near = first is not None and first.path == wanted.path and wanted.offset - end <= MAX_GAP
        if first is not None and near and reach - first.offset <= max(MAX_READ, end - first.offset):
            groups[-1].append(i)
            end = max(end, reach)
        else:
            groups.append([i])
            end = reach
    contents: list[bytes] = [b""] * len(ranges)

    def read(group: list[int]) -> None:
        start = ranges[group[0]].offset
        stop = max(ranges[i].offset + ranges[i].length for i in group)
        data = backend.read(ranges[group[0]].path, start, stop - start)
        for i in group:
            at = ranges[i].offset - start
            contents[i] = data[at : at + ranges[i].length]

    at, waits = 0, _waits()
    while at < len(groups) and _COUNTS and not backend.grain.calls and _waits() - waits <= at // 8:
        read(groups[at])  # one thread is the fastest as long as nothing has to be waited for
        at += 1
    run_tasks([partial(read, group) for group in groups[at:]], _THREADS, "ckpt-open")
    return contents


def _waits() -> int:
    """How often this thread has given up its core of its own accord."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if _COUNTS else 0


_COUNTS = hasattr(resource, "RUSAGE_THREAD")
