"""Reads chunks that targets want parts of, file by file: what one file takes to plan is forgotten before the next.

A load that gathers what very many ranks wrote copies tens of millions of chunks. But models have few ways to cut a tensor: jobs that want
the same boxes of tensors cut alike are a *cohort*, which wants the same chunks in the same files, and what a chunk gives is worked out once
for all of them. Offsets, lengths and digests are columns. Objects for a single chunk exist only while it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from operator import sub
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ckpt.catalog import DataFile, Extent, TensorEntry
from ckpt.engine.digest_reader import ChunkName, DigestReader
from ckpt.formats.native.header import Alike, Known, Sought, Stretches
from ckpt.plan.layout.geometry import Box, IntArray
from ckpt.plan.reads import Bounds, Copy, common_boxes, group_sorted
from ckpt.state.tensors import raw_view, reads_otherwise

from .whole_chunks import Stored, TensorLoad, copy_box

AHEAD = 256
"""Files that are looked up before anything is read, so that a damaged header leaves the state as it was. With more of them, each is looked
up when it is its turn."""


class ByFile(Protocol):
    """A catalog that finds many chunks of one file at once: see ``NativeCatalog``."""

    @property
    def files(self) -> Sequence[DataFile]: ...

    @property
    def coded(self) -> bool:
        """Whether chunks may be coded."""

    def extents_in(self, file: int, sought: Sought, known: Known) -> Stretches: ...

    def extents_of(self, wanted: Sequence[tuple[TensorEntry, int]]) -> list[Extent]: ...

    def drop(self, file: int) -> None: ...


class ChunkPart(NamedTuple):
    """What one chunk gives one part of each target of a cohort: where it lies in the chunk and in the part's memory."""

    copy: Copy
    number: int
    """Of the part."""
    source: tuple[slice, ...]
    into: tuple[slice, ...]


@dataclass(eq=False)
class Cohort:
    """Jobs that want the same boxes, ``wanted``, of tensors of one dtype and shape that share a grid; with each the number of a part."""

    jobs: list[TensorLoad]
    wanted: Sequence[tuple[int, Box]]
    left_out: Collection[int]
    files: IntArray = field(init=False)
    """Of its chunks, increasing."""
    chunks: IntArray = field(init=False)

    def __post_init__(self) -> None:
        grid = self.jobs[0].entry.grid
        empty = np.zeros(0, dtype=np.int64)
        # Chunks sorted by file, as two parallel columns: a million chunks cost 16 MB here, and would cost several hundred as objects.
        chunks = np.unique(np.concatenate([empty, *(grid.overlapping(box) for _, box in self.wanted)]))
        if self.left_out:
            chunks = chunks[~np.isin(chunks, np.fromiter(self.left_out, dtype=np.int64))]
        files = np.broadcast_to(grid.files.astype(np.int64), len(chunks)) if len(grid.files) == 1 else grid.files[chunks].astype(np.int64)
        order = np.argsort(files, kind="stable")
        self.files, self.chunks = files[order], chunks[order]

    @cached_property
    def entries(self) -> list[TensorEntry]:
        return [job.entry for job in self.jobs]

    def by_file(self) -> Iterator[tuple[int, list[int]]]:
        """Each file, with its chunks there."""
        files, starts = np.unique(self.files, return_index=True)
        chunks, edges = self.chunks.tolist(), [*starts.tolist(), len(self.chunks)]
        return ((file, chunks[first:last]) for file, (first, last) in zip(files.tolist(), pairwise(edges), strict=True))

    @cached_property
    def _bounds(self) -> list[Bounds]:
        """The wanted boxes, each by the number of its part."""
        return [(number, box.offset, box.end) for number, box in self.wanted]

    @cached_property
    def _origins(self) -> list[tuple[int, ...]]:
        """Where the memory of each part begins."""
        return [part.box.offset for part in self.jobs[0].target.parts]

    def parts(self, chunk: int) -> list[ChunkPart]:
        """What a chunk gives each of its jobs. There are as many of these as ranks that saved, so this makes few objects."""
        # The innermost loop of a load that gathers what thousands of ranks wrote.
        stored, origins = self.jobs[0].entry.grid.box(chunk), self._origins
        low, parts = stored.offset, []
        for (number, start, stop), box in common_boxes(stored, self._bounds):
            origin = origins[number]
            source = tuple(map(slice, map(sub, start, low), map(sub, stop, low)))
            into = tuple(map(slice, map(sub, start, origin), map(sub, stop, origin)))
            parts.append(ChunkPart(Copy(chunk=chunk, chunk_box=stored, box=box), number, source, into))
        return parts

    @property
    def itemsize(self) -> int:
        return self.jobs[0].entry.dtype.itemsize

    @cached_property
    def memories(self) -> list[list[npt.NDArray[Any] | None]]:
        """For each job its parts as arrays of raw elements; None where elements have to be converted, or are not in plain host memory."""
        return [[_array(job, part.memory) for part in job.target.parts] for job in self.jobs]


def _array(job: TensorLoad, memory: Any) -> npt.NDArray[Any] | None:
    if not memory.is_cpu or job.entry.dtype != job.target.info.dtype or reads_otherwise(memory):
        return None
    raw: npt.NDArray[Any] = raw_view(memory.detach()).numpy()
    return raw


def cohorts_of(wanted: Iterable[tuple[TensorLoad, Sequence[tuple[int, Box]]]], left_out: Mapping[int, Collection[int]]) -> list[Cohort]:
    """Divide jobs, with the boxes that each wants for which of its parts."""
    cohorts: dict[tuple[object, ...], Cohort] = {}
    for job, boxes in wanted:
        target, entry = job
        skipped = left_out.get(id(target), ())
        boxes_of_parts = tuple(part.box for part in target.parts)
        key = (id(entry.grid), entry.dtype, entry.shape, tuple(boxes), boxes_of_parts, id(skipped) if skipped else 0)
        if key in cohorts:
            cohorts[key].jobs.append(job)
        else:
            cohorts[key] = Cohort([job], boxes, skipped)
    return list(cohorts.values())


class CohortChunk(NamedTuple):
    """One chunk of each tensor of a cohort, in one file; it has at least one part."""

    cohort: Cohort
    parts: Sequence[ChunkPart]

    @property
    def box(self) -> Box:
        """The chunk's."""
        return self.parts[0].copy.chunk_box


class SingleChunk(NamedTuple):
    """A chunk that goes by itself: coded, long, or under a key that had to be looked for."""

    job: TensorLoad
    parts: Sequence[ChunkPart]
    extent: Extent


@dataclass(frozen=True, eq=False)
class FilePlan:
    """What to read of one file: chunks as columns, group ``i`` being those of shelf ``i``; and ``others``."""

    path: str
    cohort_chunks: Sequence[CohortChunk]
    stored: Stretches
    others: Sequence[SingleChunk]
    needed: int
    """Bytes of targets."""

    def __len__(self) -> int:
        """How many chunks, of one tensor each."""
        return len(self.stored.digests) + len(self.others)


@dataclass(eq=False)
class ChunkScan:
    """Looks up and reads what ``cohorts`` want. Rows of up to ``most`` bytes are read together."""

    catalog: ByFile
    cohorts: Sequence[Cohort]
    fetch: DigestReader
    most: int
    _known: Known = field(default_factory=Known)
    _runs: WeakKeyDictionary[Alike, list[tuple[int, int, int]]] = field(default_factory=WeakKeyDictionary)

    @cached_property
    def _wanted(self) -> dict[int, list[tuple[Cohort, list[int]]]]:
        """By file the cohorts that have chunks there, with these."""
        by_file: dict[int, list[tuple[Cohort, list[int]]]] = {}
        for cohort in self.cohorts:
            for file, chunks in cohort.by_file():
                by_file.setdefault(file, []).append((cohort, chunks))
        return by_file

    @cached_property
    def files(self) -> list[int]:
        return sorted(self._wanted)

    @property
    def ahead(self) -> bool:
        return len(self.files) <= AHEAD

    def look_up(self, file: int) -> FilePlan:
        """Raises:
        CorruptError: the file is missing or has another size, or its header is damaged or does not fit the index."""
        # Rows of at most ``most`` bytes of one file are looked up together and read in groups. What is longer, or has
        # a key that the header does not show where it was expected, goes one by one.
        small: list[CohortChunk] = []
        alone: list[CohortChunk] = []
        needed = 0
        for cohort, chunks in self._wanted[file]:
            for chunk in chunks:
                cohort_chunk = CohortChunk(cohort, cohort.parts(chunk))
                if not cohort_chunk.parts:
                    continue
                needed += len(cohort.jobs) * cohort.itemsize * sum(part.copy.box.numel for part in cohort_chunk.parts)
                (small if cohort_chunk.box.numel * cohort.itemsize <= self.most else alone).append(cohort_chunk)
        stored = self.catalog.extents_in(file, [(cohort_chunk.cohort.entries, cohort_chunk.box) for cohort_chunk in small], self._known)
        alone += [cohort_chunk for cohort_chunk, boxes in zip(small, stored.alike.boxes, strict=True) if boxes is None]
        others: list[SingleChunk] = []
        for cohort_chunk in alone:
            extents = self.catalog.extents_of([(entry, cohort_chunk.parts[0].copy.chunk) for entry in cohort_chunk.cohort.entries])
            others += [SingleChunk(job, cohort_chunk.parts, extent) for job, extent in zip(cohort_chunk.cohort.jobs, extents, strict=True)]
        if not self.ahead:
            self.catalog.drop(file)
        self.fetch.beat()
        return FilePlan(self.catalog.files[file].path, small, stored, others, needed)

    def tasks(self, plan: FilePlan) -> Iterator[Callable[[], None]]:
        """What to run to read the rows, in any order and on any threads."""
        return (partial(self._read, plan, *run) for run in self.runs(plan.stored.alike))

    def runs(self, alike: Alike) -> list[tuple[int, int, int]]:
        """Rows that are read together, since their bytes follow one another: the first, one past the last, and where their bytes end in
        the data."""
        runs = self._runs.get(alike)
        if runs is None:
            starts, stops = alike.offsets.tolist(), (alike.offsets + alike.lengths).tolist()
            runs = self._runs[alike] = list(group_sorted(starts, stops, max_bytes=self.most))
        return runs

    def _read(self, plan: FilePlan, first: int, last: int, stop: int) -> None:
        """Read neighbours, check all, then put each in its places."""
        alike = plan.stored.alike
        start = int(alike.offsets[first])
        data = self.fetch.scratch(stop - start)[: stop - start]
        extent = Extent(plan.path, plan.stored.start + start, stop - start, None)
        self.fetch.reread(extent, partial(self._compared, plan, first, last, extent, data))
        with self.fetch.span("copy", stop - start):
            offsets, lengths = (alike.offsets[first:last] - start).tolist(), alike.lengths[first:last].tolist()
            for at, length, group, job in zip(
                offsets, lengths, alike.groups[first:last].tolist(), alike.members[first:last].tolist(), strict=True
            ):
                _place(data[at : at + length], plan.cohort_chunks[group], job)

    def _compared(self, plan: FilePlan, first: int, last: int, extent: Extent, data: npt.NDArray[np.uint8]) -> None:
        # Offsets are relative to the file's data, so that files with equal tables of chunks share them: the files of
        # a job's ranks often differ in nothing but digests and where the data begins.
        alike, start = plan.stored.alike, int(plan.stored.alike.offsets[first])
        self.fetch.fill(extent.path, extent.offset, data.data)
        offsets, lengths = alike.offsets[first:last].tolist(), alike.lengths[first:last].tolist()
        digests = plan.stored.digests[first:last].astype(str).tolist()
        self.fetch.compare_rows(data.data, start, offsets, lengths, digests, lambda i: _chunk(plan, first + i))


def _chunk(plan: FilePlan, i: int) -> ChunkName:
    """The chunk in row ``i``."""
    alike, digest = plan.stored.alike, plan.stored.digests[i].decode()
    cohort_chunk = plan.cohort_chunks[int(alike.groups[i])]
    extent = Extent(plan.path, plan.stored.start + int(alike.offsets[i]), int(alike.lengths[i]), digest)
    return ChunkName(cohort_chunk.cohort.entries[int(alike.members[i])].name, cohort_chunk.box, extent)


def _place(data: npt.NDArray[np.uint8], cohort_chunk: CohortChunk, number: int) -> None:
    """Copy what the target of job ``number`` wants of a chunk."""
    cohort, parts = cohort_chunk
    memories = cohort.memories[number]
    for copy, part, source, into in parts:
        memory = memories[part]
        if memory is None:
            job = cohort.jobs[number]
            copy_box(Stored(data, 0, copy.chunk_box, job.entry.dtype), copy.box, job.target)
        else:
            memory[into] = data.view(memory.dtype).reshape(copy.chunk_box.shape)[source]
