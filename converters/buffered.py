"""What has to be put together, cast or decoded on its way into a file: window by window, the next one read while the last one is written.
Memory: two windows.

A window is an image of a range of a file, so that it is written as it lies, and every tensor in it is read to its place.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ckpt.catalog import Catalog
from ckpt.concurrency import Pending, run_tasks
from ckpt.engine.load.reader import Reader, TensorLoad
from ckpt.formats.native.codecs import CHUNK_LIMIT
from ckpt.formats.native.commit import CODED as ENCODED
from ckpt.formats.native.commit import VIRTUAL
from ckpt.io_backends.protocol import Backend
from ckpt.plan.layout.geometry import Box
from ckpt.plan.reads import group_sorted
from ckpt.plan.views import LogicalTensor, ViewPiece
from ckpt.state.tensors import raw_view, torch_dtype

from .selection import Computed, OutputSet, seams_of
from .target import PAGE, FileItem, FileSegment, slabs, windows

# Boxes of views, read into memory: any part of a tensor that is made of stored ones, in any order of axes, cast if it has to be.


class ViewBox(NamedTuple):
    """``box`` of ``view`` belongs into ``memory``, of the shape of the box. Another dtype than the stored one is converted to."""

    view: LogicalTensor
    box: Box
    memory: torch.Tensor


def read_views(reader: Reader, parts: Iterable[ViewBox]) -> None:
    """Fill the memory of all parts, in one go: near ranges together, in parallel, compared with the digests that there are.

    Filling of views becomes zeros.
    """
    reader.load([job for part in parts for job in _jobs(reader.catalog, part)])


def _jobs(catalog: Catalog, part: ViewBox) -> Iterator[TensorLoad]:
    pieces = list(part.view.overlapping(part.box)) if part.box.numel else []
    if sum(p.box.numel for p in pieces) < part.box.numel:
        raw_view(part.memory).zero_()
    for piece in pieces:
        entry = catalog.tensors[piece.source]
        memory = part.memory[piece.box.relative_to(part.box.offset).slices]
        yield TensorLoad.of_box(entry, piece.part, in_stored_order(piece, memory))


def in_stored_order(piece: ViewPiece, memory: torch.Tensor) -> torch.Tensor:
    """The memory of a piece with the axes of the stored tensor: a view of shape ``piece.part.shape``."""
    axes = {axis: i for i, axis in enumerate(piece.axes) if axis is not None}
    kept = memory[tuple(0 if axis is None else slice(None) for axis in piece.axes)]
    places = {i: n for n, i in enumerate(sorted(axes.values()))}
    ordered = kept.permute([places[axes[a]] for a in sorted(axes)])
    for axis in range(len(piece.part.shape)):
        if axis not in axes:
            ordered = ordered.unsqueeze(axis)
    return ordered


# Memory for windows and operands, in whole pages.


def page_memory(size: int) -> torch.Tensor:
    """Memory that begins at a page, which the system gets back as soon as nobody has it."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # touching it for the first time then costs little
    return torch.frombuffer(memory, dtype=torch.uint8)


# Fills boxes of computed tensors: reads the boxes of their operands from all sources, then lets the formula put them together.
# Memory: what the caller gives, for operands.

# Boxes are taken in batches whose operands fit the memory together:
#
#     boxes       | a[0:9] | b | c[0:4] |  d[0:64]                     |
#     batches     |------- 1 -----------|----- 2 -----|----- 3 --------|      a box whose operands do not fit is cut along its rows
#     sources     0: read_views   1: read_views   2: read_views               each a single plan, read by several threads
#     then        formula(operands) -> memory of the box                     several boxes at a time
#
# A chunk has one digest, so part of a chunk costs reading all of it. Boxes end where chunks of source 0 end; only a box that is cut here
# reads chunks twice, and that takes more than a dozen operands at the default memory.


_BATCH = 128 << 20
"""Bytes of operands from which on another batch begins: enough for all threads, and new memory costs time."""
_ALIGNED = 64
"""Operands begin at multiples of so many bytes."""


class ComputedBox(NamedTuple):
    """``box`` of the tensor ``name`` belongs into ``memory``, which is contiguous and has the shape of the box."""

    name: str
    computed: Computed
    box: Box
    memory: torch.Tensor

    @property
    def operand_bytes(self) -> int:
        """Memory that the operands take."""
        boxes = self.computed.formula.boxes(self.box)
        return sum(_padded(box.numel * o.dtype.itemsize) for box, o in zip(boxes, self.computed.operands, strict=True))


class Computing:
    """Computes boxes with operands from the catalogs of ``readers``, in at most ``memory`` bytes, or as many as one row of a box needs."""

    def __init__(self, readers: Sequence[Reader], *, memory: int) -> None:
        self._readers = readers
        self._memory = memory
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def fill(self, boxes: Sequence[ComputedBox]) -> None:
        """Compute all of these boxes."""
        batch, used = list[ComputedBox](), 0
        for part in (part for box in boxes for part in self._parts(box)):
            if batch and used + part.operand_bytes > min(self._memory, _BATCH):
                self._compute(batch, used)
                batch, used = [], 0
            batch.append(part)
            used += part.operand_bytes
        if batch:
            self._compute(batch, used)

    def _parts(self, whole: ComputedBox) -> Iterator[ComputedBox]:
        """The box, or parts of it that are contiguous in it and small enough for the memory."""
        if whole.operand_bytes <= self._memory:
            yield whole
            return
        itemsize = whole.memory.element_size()
        most = max(itemsize, whole.box.numel * itemsize * self._memory // whole.operand_bytes)
        flat, at = whole.memory.reshape(-1), 0
        for box in slabs(whole.box, itemsize, (), most):
            yield whole._replace(box=box, memory=flat[at : at + box.numel].view(box.shape))
            at += box.numel

    def _compute(self, batch: Sequence[ComputedBox], needed: int) -> None:
        if len(self._scratch) < needed:
            self._scratch = page_memory(needed)
        at, operands = 0, list[list[torch.Tensor]]()
        views: list[list[ViewBox]] = [[] for _ in self._readers]
        for part in batch:
            operands.append([])
            for box, one in zip(part.computed.formula.boxes(part.box), part.computed.operands, strict=True):
                length = math.prod(box.shape) * one.dtype.itemsize
                memory = self._scratch[at : at + length].view(torch_dtype(one.dtype)).view(box.shape)
                at += _padded(length)
                operands[-1].append(memory)
                views[one.source].append(ViewBox(one.view, box, memory))
        for reader, parts in zip(self._readers, views, strict=True):
            read_views(reader, parts)
        tasks = [
            partial(part.computed.formula.compute, part.name, part.box, read, part.memory)
            for part, read in zip(batch, operands, strict=True)
        ]
        run_tasks(tasks, min(self._readers[0].threads, os.cpu_count() or 1), "ckpt-compute")


def _padded(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED


# Two buffers take turns. While one window is read, cast and put in order, the window before it is written:
#
#     read     | window 0 -> A | window 1 -> B | window 2 -> A | ...
#     write                    | A  (0)        | B  (1)        | A  (2)
#                                              ^ window 2 may use A only once window 0 is written: ``last.result()``
#
# So memory is two windows, and what encoded chunks need beside them: CODED bytes for each thread that decodes. Where something is computed
# (:class:`Computing`), half of the memory is for its operands. A buffer keeps the place that a byte has within its page in the file, so
# that direct I/O can write from it.


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
        self.readers = [Reader(catalog=catalog, verify="full", threads=threads) for catalog in chosen.catalogs]
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
        return sum(reader.fetch.read for reader in self.readers)

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
                placed = [segment._replace(item=numbers[segment.item]) for segment in window]
                last = Pending(partial(_give, put, placed, buffer), "ckpt-convert")
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

    def _read(self, items: Sequence[FileItem], window: Sequence[FileSegment], buffer: torch.Tensor) -> None:
        base = window[0].start // PAGE * PAGE
        stored, computed = list[ViewBox](), list[ComputedBox]()
        for segment in window:
            wanted = self.chosen.tensors[items[segment.item].name]
            raw = buffer[segment.start - base : segment.start - base + segment.length]
            memory = raw.view(torch_dtype(wanted.dtype)).view(segment.box.shape)
            if wanted.computed is None:
                stored.append(ViewBox(wanted.view, segment.box, memory))
            else:
                computed.append(ComputedBox(wanted.name, wanted.computed, segment.box, memory))
        read_views(self.readers[0], stored)
        self._computing.fill(computed)


def _give(put: Put, segments: Sequence[FileSegment], buffer: torch.Tensor) -> None:
    base = segments[0].start // PAGE * PAGE
    data = buffer.numpy().data
    starts = [segment.start for segment in segments]
    for first, last, stop in group_sorted(starts, [segment.start + segment.length for segment in segments]):
        put(segments[first:last], data[starts[first] - base : stop - base])
