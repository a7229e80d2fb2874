"""Reads stored chunks into the memory of tensors: planned ranges, in parallel, verified on the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from ckpt import settings
from ckpt.catalog import Catalog, Extent, TensorEntry
from ckpt.concurrency import COUNTS_WAITS, run_tasks
from ckpt.engine.digest_reader import PAGE, PROBE, ChunkDigest, ChunkName, DigestReader, Verify
from ckpt.errors import CorruptError
from ckpt.formats.native.codecs import CHUNK_LIMIT
from ckpt.plan.reads import CacheBlock, Copy, Part, RangeGroup, group_ranges, overlapping_chunks, parts_of, pieces
from ckpt.state.tensors import raw_view, reads_otherwise, writable_bytes
from ckpt.telemetry.spans import Spans

from .whole_chunks import Stored, TensorLoad, WholeChunks, copy_box, find_whole_chunks, note_writes, tasks_of, wanted_boxes

if TYPE_CHECKING:
    import torch

    from .chunk_scan import ByFile, ChunkScan, FilePlan
    from .read_exchange import ReadExchange

__all__ = ["ReadPlan", "Reader", "TensorLoad", "Verify"]


MANY = 64
"""Of more chunks than this, those of one file are looked up together."""


@dataclass(frozen=True, slots=True)
class CopyStep:
    """One copy of one job: from a chunk to a box of the target."""

    job: TensorLoad
    copy: Copy
    extent: Extent

    @property
    def chunk(self) -> ChunkName:
        return ChunkName(self.job.entry.name, self.copy.chunk_box, self.extent)

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk's elements."""
        return self.copy.chunk_box.numel * self.job.entry.dtype.itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadPlan:
    """What to read and where to put it. ``exact`` are chunks that fill their targets; the others go by ``steps``, ``parts`` and ``reads``.

    ``padding`` is filled with zeros before.
    """

    exact: WholeChunks
    steps: Sequence[CopyStep]
    parts: Sequence[Part]
    reads: Sequence[RangeGroup]
    padding: Sequence[torch.Tensor]
    coded: int
    """The most scratch memory that one coded chunk takes, in bytes."""
    scan: ChunkScan | None = None
    """What goes file by file; ``files`` were looked up already, if they are few."""
    files: Sequence[FilePlan] = ()


class Reader:
    """Loads tensors of one catalog. ``bytes_needed`` counts after :meth:`run`."""

    def __init__(
        self,
        catalog: Catalog,
        verify: Verify = "full",
        threads: int = 1,
        beat: Callable[[], None] = lambda: None,
        spans: Spans | None = None,
    ) -> None:
        hints = catalog.backend.io_hints
        self.catalog = catalog
        self.verify = verify
        self.threads = max(threads, hints.concurrency)
        self.beat = beat
        self.bytes_needed = 0
        self.fetch = DigestReader(catalog.backend, verify, beat=beat, spans=spans)
        self.max_gap, self.max_read = max(settings.GAP, hints.coalesce_gap), max(settings.GROUPED_READ, hints.read_size)
        self._probes = not hints.concurrency
        self._lock = threading.Lock()
        self._tiled: set[tuple[int, tuple[int, ...]]] = set()

    def load(self, jobs: Sequence[TensorLoad]) -> None:
        """Fill every target."""
        plan = self.plan(jobs)
        for memory in plan.padding:
            (memory if reads_otherwise(memory) else raw_view(memory)).zero_()
        self.run(plan)
        note_writes(job.target for job in jobs)

    def run(self, plan: ReadPlan, exchange: ReadExchange | None = None) -> None:
        """Read what is planned; with an ``exchange`` also what other ranks want, while they read for this one."""
        tasks = [] if exchange is None else exchange.tasks(self.catalog)
        tasks += tasks_of(plan.exact, self.fetch)
        tasks += [partial(self.read, read, plan.parts, plan.steps) for read in plan.reads]
        if plan.scan is not None:
            tasks += [task for file in plan.files for task in plan.scan.tasks(file)]
            tasks += [] if plan.files else [partial(self.read_file, plan.scan, file) for file in plan.scan.files]
        if exchange is None:
            run_tasks(tasks, self._threads(tasks, plan.coded), "ckpt-read")
        else:
            exchange.carry(tasks, partial(self._threads, tasks, max(plan.coded, exchange.coded)))

    def _threads(self, tasks: list[Callable[[], None]], coded: int) -> int:
        """How many threads pay, after the first few of ``tasks``, which are taken out and run here. ``coded``: scratch memory that each
        may need.

        What comes from the page cache is a copy in memory: a few cores do that as fast as many, and the other ranks of the machine need
        cores too. Storage that makes a thread wait can serve many at once.
        """
        if coded:
            return min(self.threads, max(1, settings.SCRATCH // coded))
        cores = os.cpu_count() or 1
        if not self._probes or self.threads <= cores // 2 or not COUNTS_WAITS:
            return self.threads
        while tasks and self.fetch.read < PROBE:
            tasks.pop(0)()
        return self.threads if self.fetch.waits > 1 else max(1, cores // 2)

    # ---- the plan

    def plan(self, jobs: Sequence[TensorLoad], left_out: Mapping[int, Collection[int]] | None = None) -> ReadPlan:
        """What to read for these jobs. Changes nothing. ``left_out``: by ``id`` of a target the chunks that come in another way."""
        left_out = left_out or {}
        exact, rest = find_whole_chunks([job for job in jobs if id(job.target) not in left_out], self.catalog, self.beat)
        rest += [job for job in jobs if id(job.target) in left_out]
        self.bytes_needed += sum(e[2] for e in exact.extents)
        padding: list[torch.Tensor] = []
        for job in rest:
            self.check_tiling(job.entry)
        wanted = [(job, wanted_boxes(job.target, job.entry, padding)) for job in rest]
        scan: ChunkScan | None = None
        files: list[FilePlan] = []
        steps: list[CopyStep] = []
        if rest and self.verify == "full" and sum(job.entry.grid.count for job in rest) > MANY and hasattr(self.catalog, "extents_in"):
            from .chunk_scan import ChunkScan, cohorts_of  # a load into the saved layout has none

            scan = ChunkScan(cast("ByFile", self.catalog), cohorts_of(wanted, left_out), self.fetch, self.max_read)
            files = [scan.look_up(file) for file in scan.files] if scan.ahead else []
            steps = [step for file in files for step in steps_of(file)]
            self.bytes_needed += sum(file.needed for file in files)
        else:
            for job, boxes in wanted:
                entry, skipped = job.entry, left_out.get(id(job.target), ())
                copies = [copy for _, box in boxes for copy in overlapping_chunks(entry.grid, box) if copy.chunk not in skipped]
                extents = self.catalog.extents(entry, [copy.chunk for copy in copies])
                steps += [CopyStep(job, copy, extent) for copy, extent in zip(copies, extents, strict=True)]
                self.beat()
            self.bytes_needed += sum(step.copy.box.numel * step.job.entry.dtype.itemsize for step in steps)
        coded = max((s.extent.decoding_bytes(s.nbytes) for s in steps if s.extent.codec is not None), default=0)
        if scan is not None and not files and scan.catalog.coded:
            coded = max(coded, 4 * CHUNK_LIMIT)  # a difference takes its anchor besides
        parts, reads = self.reads(steps) if steps else ([], [])
        return ReadPlan(exact=exact, steps=steps, parts=parts, reads=reads, padding=padding, coded=coded, scan=scan, files=files)

    def reads(self, steps: Sequence[CopyStep]) -> tuple[list[Part], list[RangeGroup]]:
        """What to read for these copies."""
        parts = [part for i, step in enumerate(steps) for part in self.parts(i, step)]
        return parts, group_ranges(parts, max_gap=self.max_gap if self.verify != "full" else 0, max_bytes=self.max_read)

    def read_file(self, scan: ChunkScan, number: int) -> None:
        """Look one file up, and read what is wanted of it."""
        file = scan.look_up(number)
        for task in scan.tasks(file):
            task()
        parts, reads = self.reads(steps := steps_of(file))
        for read in reads:
            self.read(read, parts, steps)
        with self._lock:
            self.bytes_needed += file.needed

    def check_tiling(self, entry: TensorEntry) -> None:
        """Cells of cuts tile. Boxes do because a save made sure of it; an index that was tampered with would leave memory as it was."""
        key = (id(entry.grid), entry.shape)
        if entry.grid.cuts is not None or key in self._tiled:
            return
        fault = entry.grid.fault(entry.shape)
        if fault is not None:
            raise CorruptError(
                f"the index gives {fault.times} chunks for {fault.box} of tensor {entry.name}, not one",
                where=self.catalog.url,
                hint="run `ckpt verify` to see what else is damaged, and load another step",
            )
        self._tiled.add(key)

    def parts(self, number: int, step: CopyStep) -> list[Part]:
        itemsize, copy = step.job.entry.dtype.itemsize, step.copy
        # What is to be compared, or decoded, is read whole although only a part of it is needed.
        if step.extent.codec is not None or (self.verify == "full" and step.extent.digest is not None):
            return parts_of(number, copy, step.extent, itemsize, whole_chunks=True, max_gap=0)
        blocks = [copy]
        if step.nbytes > settings.CHUNK:
            blocks = [replace(copy, box=p.box) for p in pieces(copy.chunk_box, copy.box, settings.CHUNK // itemsize)]
        return [p for block in blocks for p in parts_of(number, block, step.extent, itemsize, whole_chunks=False, max_gap=self.max_gap)]

    # ---- one read

    def read(self, read: RangeGroup, parts: Sequence[Part], steps: Sequence[CopyStep]) -> None:
        mine = [parts[i] for i in read.members]
        if read.length <= self.max_read and len(read.members) > 1:
            extent = Extent(read.path, read.offset, read.length, None)
            self.fetch.reread(extent, partial(self._together, read, mine, steps))
        else:
            for _, group in groupby(mine, lambda p: same_chunk(p, steps)):  # what lies in a longer part comes after it
                members = list(group)
                self.fetch.reread(steps[members[0].copy].extent, partial(self._alone, members, steps))

    def _together(self, read: RangeGroup, mine: Sequence[Part], steps: Sequence[CopyStep]) -> None:
        """Several parts at once, from the cache."""
        # Offsets keep their alignment in the file, so that chunks keep that to their item size.
        shift = read.offset % PAGE
        buffer = self.fetch.scratch(shift + read.length)
        self.fetch.fill(read.path, read.offset, buffer.data[shift : shift + read.length])
        for _, group in groupby(mine, lambda p: same_chunk(p, steps)):
            members = list(group)
            step, offset, length = steps[members[0].copy], members[0].offset, members[0].length
            at = shift + offset - read.offset
            data = buffer[at : at + length]
            self.fetch.compare(step.chunk, data.data)
            if step.extent.codec is None:
                self._place(data, offset - step.extent.offset, members, steps)
            else:
                self._decoded(data.data, members, steps)

    def _alone(self, mine: Sequence[Part], steps: Sequence[CopyStep]) -> None:
        """Parts that are the same bytes, piece by piece: straight into the target where they are contiguous there."""
        step = steps[mine[0].copy]
        if step.extent.codec is not None:
            blob = self.fetch.scratch(step.extent.length, "blob")[: step.extent.length]
            self.fetch.read_chunk(step.chunk, blob.data)
            self._decoded(blob.data, mine, steps)
        elif (target := self.straight(mine, step)) is not None:
            self.fetch.read_chunk(step.chunk, target, mine[0].offset)
        else:
            size = step.job.entry.dtype.itemsize
            buffer, check = self.fetch.scratch(self.fetch.piece), ChunkDigest(self.fetch, step.chunk)
            for piece in self.pieces_of(mine[0], step):
                data = buffer[: piece.length * size]
                self.fetch.fill(mine[0].path, step.extent.offset + piece.start * size, data.data, check)
                inside = [replace(p, box=box) for p in mine if (box := p.box.intersect(piece.box)) is not None]
                self._place(data, piece.start * size, inside, steps)
            check.end()

    def pieces_of(self, part: Part, step: CopyStep) -> Iterator[CacheBlock]:
        """The reads of a part that is copied into its places."""
        copy, all_of_it = step.copy, part.length == step.extent.length
        return pieces(copy.chunk_box, copy.chunk_box if all_of_it else part.box, self.fetch.piece // step.job.entry.dtype.itemsize)

    def straight(self, mine: Sequence[Part], step: CopyStep) -> memoryview | None:
        """The target's own memory, where the elements of the only part can be put into it as they are."""
        entry, target = step.job.entry, step.job.target
        if len(mine) > 1 or entry.dtype != target.info.dtype:
            return None
        needed = mine[0].box.numel * entry.dtype.itemsize
        if (step.nbytes if step.extent.codec is not None else mine[0].length) != needed:
            return None
        return writable_bytes(target.view(mine[0].box))

    def _decoded(self, blob: memoryview, mine: Sequence[Part], steps: Sequence[CopyStep]) -> None:
        step = steps[mine[0].copy]
        target = self.straight(mine, step)
        if target is not None:
            self.fetch.decode(step.chunk, blob, target, step.job.entry.dtype.itemsize)
            return
        out = self.fetch.scratch(step.nbytes, "decoded")[: step.nbytes]
        self.fetch.decode(step.chunk, blob, out.data, step.job.entry.dtype.itemsize)
        self._place(out, 0, mine, steps)

    def _place(self, data: npt.NDArray[np.uint8], start: int, mine: Sequence[Part], steps: Sequence[CopyStep]) -> None:
        """Copy the boxes of parts out of bytes that begin ``start`` bytes into their chunk."""
        with self.fetch.span("copy", len(data)):
            for part in mine:
                step = steps[part.copy]
                copy_box(Stored(data, start, step.copy.chunk_box, step.job.entry.dtype), part.box, step.job.target)


def steps_of(file: FilePlan) -> list[CopyStep]:
    """The copies of its chunks that go by themselves."""
    return [CopyStep(job, part.copy, extent) for job, parts, extent in file.others for part in parts]


def same_chunk(part: Part, steps: Sequence[CopyStep]) -> Hashable:
    """Equal for parts that are the same bytes of the same chunk."""
    # A virtual checkpoint may have chunks of other boxes, or whose elements lie in another order, over the same bytes.
    step = steps[part.copy]
    return part.offset, part.length, step.extent.codec, step.copy.chunk_box
