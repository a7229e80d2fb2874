"""What has to be put together, cast or decoded on its way into a file: window by window, the next one read while the last one is written.
Memory: two windows.

A window is an image of a range of a file, so that it is written as it lies, and every tensor in it is read to its place.
"""

# Two buffers take turns. While one window is read, cast and put in order, the window before it is written:
#
#     read     | window 0 -> A | window 1 -> B | window 2 -> A | ...
#     write                    | A  (0)        | B  (1)        | A  (2)
#                                              ^ window 2 may use A only once window 0 is written: ``last.result()``
#
# So memory is two windows, and what encoded chunks need beside them: CODED bytes for each thread that decodes. Where something is computed
# (``computing``), half of the memory is for its operands. A buffer keeps the place that a byte has within its page in the file, so that
# direct I/O can write from it.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ckpt.adapters.tensors import torch_dtype
from ckpt.byte_source.storage import source_of
from ckpt.concurrency.workers import Pending
from ckpt.converters.select.selection import OutputSet, seams_of
from ckpt.engine.load.reader import Reader
from ckpt.formats.native.coding.codec import CHUNK_LIMIT
from ckpt.formats.native.commit import CODED as ENCODED
from ckpt.formats.native.commit import VIRTUAL
from ckpt.io_backends.protocol import Backend
from ckpt.plan.reads import group_sorted

from .computing import ComputedBox, Computing
from .page_memory import page_memory
from .passthrough import PAGE
from .view_reader import ViewBox, read_views
from .windows import FileItem, FileSegment, FileWindow, windows

CODED = 2 * CHUNK_LIMIT
"""Bytes that a thread needs to read one coded chunk: as it is stored, and decoded."""
LEAST = 8 << 20
"""Bytes of the smallest window."""
USEFUL = 128 << 20
"""Bytes of a window, most: of a tensor that is stored in columns, each window reads all chunks."""
ENOUGH = 64 << 20
"""Bytes of a window that keep a file system busy. It grows beyond them with its last tensor only: memory that is touched for the first time
costs as much as copying into it."""

Put = Callable[[Sequence[FileSegment], memoryview], None]
"""Gets segments that follow one another in a file, and their bytes."""


class WindowFiller:
    """Fills windows of files at ``backend`` with what was ``chosen``, in at most ``memory`` bytes."""

    def __init__(self, chosen: OutputSet, backend: Backend, *, memory: int, threads: int) -> None:
        records = [catalog.record for catalog in chosen.catalogs]
        coded = any(record is not None and {ENCODED, VIRTUAL} & set(record.features) for record in records)
        whole, memory = memory, memory // 2 if chosen.computes else memory
        threads = max(1, min(threads, memory // 2 // CODED)) if coded else threads
        self.chosen = chosen
        self.readers = [
            Reader(catalog=catalog, source=source_of(catalog), verify="full", threads=threads, beat=lambda: None)
            for catalog in chosen.catalogs
        ]
        self._computing = Computing(self.readers, memory=whole - memory)
        hints = (*(catalog.backend.io_hints for catalog in chosen.catalogs), backend.io_hints)
        busy = max(4 * h.concurrency * h.read_size for h in hints)  # several calls for each that a storage wants at once
        self.enough = max(ENOUGH, busy)
        self.window = min(max(USEFUL, busy), max(LEAST, (memory - (threads * CODED if coded else 0)) // 2))
        self._buffers: list[torch.Tensor] = []
        self._seams: dict[str, list[int]] = {}

    @property
    def bytes_read(self) -> int:
        """So far, of all sources."""
        return sum(reader.bytes_read for reader in self.readers)

    def fill(self, items: Mapping[int, FileItem], size: int, put: Put, on_written: Callable[[], None]) -> None:
        """Read the items of a file of ``size`` bytes, by their numbers in it, and give them to ``put``. ``on_written`` is called when
        some are written."""
        numbers, listed = list(items), list(items.values())
        last = Pending(lambda: None, "ckpt-convert")
        try:
            seams = [self._seams_of(i.name) for i in listed]
            for turn, window in enumerate(windows(listed, seams, self.window, self.enough)):
                # Reading window n + 1 into one buffer and writing window n from the other go on at once.
                # ``last.result()`` comes after the read: only then is the buffer of window n needed again, for window
                # n + 2.
                buffer = self._buffer(turn % 2, size)
                self._read(listed, window, buffer)
                last.result()
                on_written()
                placed = [segment._replace(item=numbers[segment.item]) for segment in window.segments]
                last = Pending(partial(_give, put, placed, window.start, buffer), "ckpt-convert")
        finally:
            last.wait()
        last.result()

    def _buffer(self, turn: int, size: int) -> torch.Tensor:
        """One of the two windows, long enough for a file of ``size`` bytes; made when it is needed."""
        needed = min(self.window, size) + PAGE
        if turn == len(self._buffers):
            self._buffers.append(page_memory(needed))
        elif len(self._buffers[turn]) < needed:
            self._buffers[turn] = page_memory(needed)
        return self._buffers[turn]

    def _seams_of(self, name: str) -> list[int]:
        if name not in self._seams:
            self._seams = {name: seams_of(self.chosen.catalog, self.chosen.tensors[name].view)}
        return self._seams[name]

    def _read(self, items: Sequence[FileItem], window: FileWindow, buffer: torch.Tensor) -> None:
        base = window.start // PAGE * PAGE
        stored, computed = list[ViewBox](), list[ComputedBox]()
        for segment in window.segments:
            wanted = self.chosen.tensors[items[segment.item].name]
            raw = buffer[segment.start - base : segment.start - base + segment.length]
            memory = raw.view(torch_dtype(wanted.dtype)).view(segment.box.shape)
            if wanted.computed is None:
                stored.append(ViewBox(wanted.view, segment.box, memory))
            else:
                computed.append(ComputedBox(wanted.name, wanted.computed, segment.box, memory))
        read_views(self.readers[0], stored)
        self._computing.fill(computed)


def _give(put: Put, segments: Sequence[FileSegment], start: int, buffer: torch.Tensor) -> None:
    base = start // PAGE * PAGE
    data = buffer.numpy().data
    starts = [segment.start for segment in segments]
    for first, last, stop in group_sorted(starts, [segment.start + segment.length for segment in segments]):
        put(segments[first:last], data[starts[first] - base : stop - base])
