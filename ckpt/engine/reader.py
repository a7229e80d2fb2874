"""Reads stored chunks into the memory of tensors: planned ranges, in parallel, verified on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import xxhash

from ckpt.adapters.memory import RAW, raw_view, reads_otherwise, writable_bytes
from ckpt.adapters.tensors import LocalTensor, torch_dtype
from ckpt.catalog import Catalog, Extent, TensorEntry
from ckpt.errors import CorruptError
from ckpt.geometry import Box, find_fault, row_major_strides
from ckpt.plan.coalesce import Part, Read, coalesce, parts_of
from ckpt.plan.join import Copy, join
from ckpt.plan.match import common_box

from .writer import run_all

Verify = Literal["full", "partial", "off"]
"""``full``: every chunk that is touched is read whole and checked. ``partial``: only what is needed is read; chunks that are needed whole
are checked. ``off``: nothing is checked."""

MAX_READ = 4 << 20
"""Small neighbouring ranges are read together up to this many bytes: so few that they are still in the cache when they are hashed and
copied. Larger ranges are read on their own, straight into the tensor where they are contiguous there."""
MAX_GAP = 32 << 10
"""Bytes between two ranges that are read rather than skipped."""
ALIGN = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Load ``entry`` into ``target``."""

    target: LocalTensor
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class _Step:
    """One copy of one job: from a chunk to a box of the target."""

    job: Job
    copy: Copy
    extent: Extent


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadPlan:
    """What to read and where to put it. ``padding`` is filled with zeros first; ``filled`` is all memory that is written."""

    steps: Sequence[_Step]
    parts: Sequence[Part]
    reads: Sequence[Read]
    padding: Sequence[torch.Tensor]
    filled: Sequence[torch.Tensor]


@dataclass(eq=False)
class Reader:
    """Loads tensors from one catalog. ``bytes_needed``, ``bytes_read`` and ``bytes_unverified`` count after :meth:`run`."""

    catalog: Catalog
    verify: Verify
    threads: int
    beat: Callable[[], None]
    bytes_needed: int = 0
    bytes_read: int = 0
    bytes_unverified: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _scratch: threading.local = field(default_factory=threading.local)
    _tiled: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)

    def run(self, plan: ReadPlan) -> None:
        """Fill every target.

        Raises:
            CorruptError: bytes are not what the digests say.
            StorageError: the storage failed.
        """
        for memory in plan.padding:
            (memory if reads_otherwise(memory) else raw_view(memory)).zero_()
        with ThreadPoolExecutor(self.threads, thread_name_prefix="ckpt-read") as pool:
            run_all(pool, [partial(self.read, read, plan.parts, plan.steps) for read in plan.reads])
        for memory in plan.filled:
            if not memory.is_inference():
                torch.autograd.graph.increment_version(memory)  # autograd did not see the bytes change

    # ---- the plan

    def plan(self, jobs: Sequence[Job]) -> ReadPlan:
        """What to read for these jobs. Changes nothing.

        Raises:
            CorruptError: a file is missing or truncated, or a header does not fit the index.
        """
        steps: list[_Step] = []
        padding: list[torch.Tensor] = []
        for job in jobs:
            steps += self.steps(job, padding)
            self.beat()
        parts = [part for i, step in enumerate(steps) for part in self.parts(i, step)]
        reads = coalesce(parts, max_gap=MAX_GAP if self.verify != "full" else 0, max_length=MAX_READ)
        filled = [held.memory for job in jobs for held in job.target.parts]
        return ReadPlan(steps=steps, parts=parts, reads=reads, padding=padding, filled=filled)

    def steps(self, job: Job, padding: list[torch.Tensor]) -> list[_Step]:
        """What to copy for one tensor; memory with padding beyond the stored tensor is added to ``padding``."""
        info, entry = job.target.info, job.entry
        self._check_tiling(entry)
        stored = common_box(info, entry)
        copies: list[Copy] = []
        for held in job.target.parts:
            box: Box | None = held.box
            if not stored.contains(held.box):
                padding.append(held.memory)
                box = held.box.intersect(stored)
            if box is not None:
                copies += join(entry.grid, box)
        return [_Step(job, c, e) for c, e in zip(copies, self.catalog.extents(entry, [c.chunk for c in copies]), strict=True)]

    def _check_tiling(self, entry: TensorEntry) -> None:
        """Boxes tile because a save made sure of it; an index that was tampered with would leave memory as it was."""
        key = (id(entry.grid), entry.shape)
        if entry.grid.boxes is None or key in self._tiled:
            return
        fault = find_fault(entry.shape, *entry.grid.boxes)
        if fault is not None:
            raise CorruptError(
                f"the index gives {fault.times} chunks for {fault.box} of tensor {entry.name}, not one",
                where=self.catalog.url,
                hint="run `ckpt verify` to see what else is damaged, and load another step",
            )
        self._tiled.add(key)

    def parts(self, number: int, step: _Step) -> list[Part]:
        itemsize = step.job.entry.dtype.itemsize
        self.bytes_needed += step.copy.box.numel * itemsize
        return parts_of(number, step.copy, step.extent, itemsize, whole_chunks=self.verify == "full", max_gap=MAX_GAP)

    # ---- one read

    def read(self, read: Read, parts: Sequence[Part], steps: Sequence[_Step]) -> None:
        mine = [parts[i] for i in read.parts]
        target = self._straight(mine, read, steps)
        if target is not None:
            self.catalog.backend.read_into(read.path, read.offset, target)
            self._check(steps[mine[0].copy], target)
        else:
            self._scatter(read, mine, steps)
        with self._lock:
            self.bytes_read += read.length
        self.beat()

    def _straight(self, mine: Sequence[Part], read: Read, steps: Sequence[_Step]) -> memoryview | None:
        """The target's own memory, where the range can be read into it as it is."""
        if len(mine) > 1:
            return None
        step = steps[mine[0].copy]
        if step.job.entry.dtype != step.job.target.info.dtype or read.length != mine[0].box.numel * step.job.entry.dtype.itemsize:
            return None
        return writable_bytes(step.job.target.view(mine[0].box))

    def _scatter(self, read: Read, mine: Sequence[Part], steps: Sequence[_Step]) -> None:
        # Offsets keep their alignment in the file, so that every chunk is aligned to its item size in the buffer too.
        shift = read.offset % ALIGN
        buffer = self._buffer(shift + read.length)
        self.catalog.backend.read_into(read.path, read.offset, buffer.numpy().data[shift : shift + read.length])
        checked: set[int] = set()
        for part in mine:
            step = steps[part.copy]
            at = shift + part.offset - read.offset
            if part.offset not in checked:
                checked.add(part.offset)
                self._check(step, buffer.numpy().data[at : at + part.length])
            copy_out(buffer, at, part, step)

    def _check(self, step: _Step, data: memoryview) -> None:
        extent = step.extent
        if self.verify == "off" or extent.digest is None or len(data) != extent.length:
            with self._lock:
                self.bytes_unverified += len(data)
            return
        found = xxhash.xxh3_64_hexdigest(data)
        if found != extent.digest:
            raise CorruptError(
                f"chunk {step.copy.chunk_box} of tensor {step.job.entry.name} is damaged: digest {found}, should be {extent.digest}",
                where=f"{self.catalog.url}/{extent.path}, bytes {extent.offset} to {extent.offset + extent.length}",
                hint="run `ckpt verify` to see what else is damaged, and load another step",
            )

    def _buffer(self, size: int) -> torch.Tensor:
        """This thread's scratch memory, reused."""
        buffer: torch.Tensor | None = getattr(self._scratch, "buffer", None)
        if buffer is None or buffer.numel() < size:
            buffer = self._scratch.buffer = torch.empty(max(size, 1 << 20), dtype=torch.uint8)
        return buffer


def copy_out(buffer: torch.Tensor, at: int, part: Part, step: _Step) -> None:
    """Copy the box of ``part`` from the bytes at ``at`` to the target, converting the dtype if it differs."""
    entry, target = step.job.entry, step.job.target
    size = entry.dtype.itemsize
    strides = row_major_strides(step.copy.chunk_box.shape)
    inside = part.box.relative_to(step.copy.chunk_box.offset)
    element = sum(o * s for o, s in zip(inside.offset, strides, strict=True)) - (part.offset - step.extent.offset) // size
    whole = buffer[at : at + part.length]
    memory = target.view(Box(part.box.offset, part.box.shape))
    same = entry.dtype == target.info.dtype and not reads_otherwise(memory)
    typed = whole.view(RAW[size] if same else torch_dtype(entry.dtype))
    source = torch.as_strided(typed, part.box.shape, strides, typed.storage_offset() + element)
    (raw_view(memory) if same else memory).copy_(source)
