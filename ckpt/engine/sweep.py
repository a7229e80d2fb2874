"""Reads chunks that targets want parts of, file by file: what one file takes to plan is forgotten before the next.

A load that gathers what very many ranks wrote copies tens of millions of chunks. But models have few ways to cut a tensor: jobs that want
the same boxes of tensors cut alike are a *cohort*, which wants the same chunks in the same files, and what a chunk gives is worked out once
for all of them. Offsets, lengths and digests are columns. Objects for a single chunk exist only while it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt.adapters.memory import raw_view, reads_otherwise
from ckpt.catalog import Catalog, DataFile, Extent, TensorEntry
from ckpt.formats.native.header_rows import Rows, Stretches
from ckpt.geometry import Box, IntArray
from ckpt.plan.join import Copy

from .copying import Stored, copy_box
from .exact import Job
from .fetch import Chunk, Fetch, damaged

MAX_CODED = 64 << 20
"""Bytes of a coded chunk, before coding."""
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

    def extents_in(self, file: int, entries: Sequence[TensorEntry], box: Box, known: Rows) -> Stretches | None: ...

    def extents_of(self, wanted: Sequence[tuple[TensorEntry, int]]) -> list[Extent]: ...

    def drop(self, file: int) -> None: ...


class Part(NamedTuple):
    """What one chunk gives one part of each target of a cohort: where it lies in the chunk and in the part's memory."""

    copy: Copy
    number: int
    """Of the part."""
    source: tuple[slice, ...]
    into: tuple[slice, ...]


@dataclass(eq=False)
class Cohort:
    """Jobs that want the same boxes, ``wanted``, of tensors of one dtype and shape that share a grid; with each the number of a part."""

    jobs: list[Job]
    wanted: Sequence[tuple[int, Box]]
    left_out: Collection[int]
    files: IntArray = field(init=False)
    """Of its chunks, increasing."""
    chunks: IntArray = field(init=False)

    def __post_init__(self) -> None:
        grid = self.jobs[0].entry.grid
        empty = np.zeros(0, dtype=np.int64)
        chunks = np.unique(np.concatenate([empty, *(grid.overlapping(box) for _, box in self.wanted)]))
        if self.left_out:
            chunks = chunks[~np.isin(chunks, np.fromiter(self.left_out, dtype=np.int64))]
        files = np.broadcast_to(grid.files.astype(np.int64), len(chunks)) if len(grid.files) == 1 else grid.files[chunks].astype(np.int64)
        order = np.argsort(files, kind="stable")
        self.files, self.chunks = files[order], chunks[order]

    @cached_property
    def entries(self) -> list[TensorEntry]:
        return [job.entry for job in self.jobs]

    def in_file(self, file: int) -> list[int]:
        """Its chunks there."""
        first, last = np.searchsorted(self.files, (file, file + 1))
        found: list[int] = self.chunks[first:last].tolist()
        return found

    def parts(self, chunk: int) -> list[Part]:
        """What a chunk gives each of its jobs."""
        stored = self.jobs[0].entry.grid.box(chunk)
        found = []
        for number, box in self.wanted:
            if (common := stored.intersect(box)) is not None:
                held = self.jobs[0].target.parts[number].box
                slices = common.relative_to(stored.offset).slices, common.relative_to(held.offset).slices
                found.append(Part(Copy(chunk=chunk, chunk_box=stored, box=common), number, *slices))
        return found

    @cached_property
    def memories(self) -> list[list[npt.NDArray[Any] | None]]:
        """For each job its parts as arrays of raw elements; None where elements have to be converted, or are not in plain host memory."""
        return [[_array(job, part.memory) for part in job.target.parts] for job in self.jobs]


def _array(job: Job, memory: Any) -> npt.NDArray[Any] | None:
    if not memory.is_cpu or job.entry.dtype != job.target.info.dtype or reads_otherwise(memory):
        return None
    raw: npt.NDArray[Any] = raw_view(memory.detach()).numpy()
    return raw


def cohorts_of(wanted: Iterable[tuple[Job, Sequence[tuple[int, Box]]]], left_out: Mapping[int, Collection[int]]) -> list[Cohort]:
    """Divide jobs, with the boxes that each wants for which of its parts."""
    found: dict[tuple[object, ...], Cohort] = {}
    for job, boxes in wanted:
        target, entry = job
        skipped = left_out.get(id(target), ())
        held = tuple(part.box for part in target.parts)
        key = (id(entry.grid), entry.dtype, entry.shape, tuple(boxes), held, id(skipped) if skipped else 0)
        if key in found:
            found[key].jobs.append(job)
        else:
            found[key] = Cohort([job], boxes, skipped)
    return list(found.values())


class Shelf(NamedTuple):
    """One chunk of each tensor of a cohort, in one file."""

    cohort: Cohort
    parts: Sequence[Part]


class Other(NamedTuple):
    """A chunk that goes by itself: coded, long, or under a key that had to be looked for."""

    job: Job
    parts: Sequence[Part]
    extent: Extent


@dataclass(frozen=True, eq=False)
class FilePlan:
    """What to read of one file: chunks as columns, in the order of their bytes, each of job ``jobs[i]`` of shelf ``places[i]``; and
    ``others``."""

    path: str
    shelves: Sequence[Shelf]
    places: IntArray
    jobs: IntArray
    offsets: IntArray
    lengths: IntArray
    digests: npt.NDArray[np.bytes_]
    others: Sequence[Other]
    needed: int
    """Bytes of targets."""

    def __len__(self) -> int:
        """How many chunks, of one tensor each."""
        return len(self.offsets) + len(self.others)


@dataclass(eq=False)
class Sweep:
    """Looks up and reads what ``cohorts`` want. Rows of up to ``most`` bytes are read together."""

    catalog: ByFile
    cohorts: Sequence[Cohort]
    fetch: Fetch
    most: int
    _known: Rows = field(default_factory=dict)

    @cached_property
    def files(self) -> list[int]:
        none = np.zeros(0, dtype=np.int64)
        found: list[int] = np.unique(np.concatenate([none, *(cohort.files for cohort in self.cohorts)])).tolist()
        return found

    @property
    def ahead(self) -> bool:
        return len(self.files) <= AHEAD

    def look_up(self, file: int) -> FilePlan:
        """Raises:
        CorruptError: the file is missing or has another size, or its header is damaged or does not fit the index.
        """
        shelves: list[Shelf] = []
        others: list[Other] = []
        columns: list[Stretches] = []
        needed = 0
        for cohort in self.cohorts:
            for chunk in cohort.in_file(file):
                parts = cohort.parts(chunk)
                if not parts:
                    continue
                itemsize = cohort.entries[0].dtype.itemsize
                needed += len(cohort.jobs) * itemsize * sum(part.copy.box.numel for part in parts)
                box = parts[0].copy.chunk_box
                stored = self.catalog.extents_in(file, cohort.entries, box, self._known) if box.numel * itemsize <= self.most else None
                if stored is not None:
                    columns.append(stored)
                    shelves.append(Shelf(cohort, parts))
                else:
                    extents = self.catalog.extents_of([(entry, chunk) for entry in cohort.entries])
                    others += [Other(job, parts, extent) for job, extent in zip(cohort.jobs, extents, strict=True)]
        if not self.ahead:
            self.catalog.drop(file)
        self.fetch.beat()
        offsets, lengths, digests = (np.concatenate(c) for c in zip(*columns, strict=True)) if columns else _NO_COLUMNS
        counts = [len(shelf.cohort.jobs) for shelf in shelves]
        places = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        jobs = np.concatenate([_NO_COLUMNS.offsets, *map(np.arange, counts)])
        order = np.lexsort((-lengths, offsets))
        path = self.catalog.files[file].path
        return FilePlan(path, shelves, places[order], jobs[order], offsets[order], lengths[order], digests[order], others, needed)

    def tasks(self, plan: FilePlan) -> Iterator[Callable[[], None]]:
        """What to run to read the rows, in any order and on any threads."""
        return (partial(self._read, plan, *run) for run in self.runs(plan))

    def runs(self, plan: FilePlan) -> list[tuple[int, int, int]]:
        """Rows that are read together, since their bytes follow one another: the first, one past the last, and where their bytes end."""
        if not len(plan.offsets):
            return []
        reached = np.maximum.accumulate(plan.offsets + plan.lengths)
        starts = np.append(0, np.flatnonzero(plan.offsets[1:] > reached[:-1]) + 1)
        ends = np.append(starts[1:], len(reached))
        stops = reached[ends - 1]
        if (stops - plan.offsets[starts] <= self.most).all():
            return list(zip(starts.tolist(), ends.tolist(), stops.tolist(), strict=True))
        return [
            run for first, end in zip(starts.tolist(), ends.tolist(), strict=True) for run in self._cut(plan.offsets, reached, first, end)
        ]

    def _cut(self, offsets: IntArray, reached: IntArray, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """A run cut so that each part has at most ``most`` bytes, or a single row."""
        while first < end:
            last = max(first + 1, first + int(np.searchsorted(reached[first:end], offsets[first] + self.most, side="right")))
            yield first, last, int(reached[last - 1])
            first = last

    def _read(self, plan: FilePlan, first: int, last: int, stop: int) -> None:
        """Read neighbours, check all, then put each in its places."""
        start = int(plan.offsets[first])
        data = self.fetch.scratch(stop - start)[: stop - start]
        spans = list(zip((plan.offsets[first:last] - start).tolist(), plan.lengths[first:last].tolist(), strict=True))
        self.fetch.checked(Extent(plan.path, start, stop - start, None), partial(self._checked, plan, first, spans, data))
        with self.fetch.span("copy", stop - start):
            rows = zip(spans, plan.places[first:last].tolist(), plan.jobs[first:last].tolist(), strict=True)
            for (at, length), place, job in rows:
                _place(data[at : at + length], plan.shelves[place], job)

    def _checked(self, plan: FilePlan, first: int, spans: Sequence[tuple[int, int]], data: npt.NDArray[np.uint8]) -> None:
        start = int(plan.offsets[first])
        self.fetch.fill(plan.path, start, data.data)
        verified, last, memory = 0, (-1, 0), data.data
        digests = plan.digests[first : first + len(spans)].astype(str).tolist()
        with self.fetch.span("verify", len(data)):
            for i, span in enumerate(spans):
                if span == last:
                    continue
                at, length = last = span
                if (found := _digest(memory[at : at + length])) != digests[i]:
                    raise self._damaged(plan, first + i, found)
                verified += length
        self.fetch.compared(verified)

    def _damaged(self, plan: FilePlan, i: int, found: str) -> Exception:
        shelf, digest = plan.shelves[int(plan.places[i])], plan.digests[i].decode()
        extent = Extent(plan.path, int(plan.offsets[i]), int(plan.lengths[i]), digest)
        chunk = Chunk(shelf.cohort.entries[int(plan.jobs[i])].name, shelf.parts[0].copy.chunk_box, extent)
        return damaged(chunk, f"digest {found}, should be {digest}", self.fetch.catalog.url)


def _place(data: npt.NDArray[np.uint8], shelf: Shelf, number: int) -> None:
    """Copy what the target of job ``number`` wants of a chunk."""
    cohort, parts = shelf
    memories = cohort.memories[number]
    for copy, part, source, into in parts:
        memory = memories[part]
        if memory is None:
            job = cohort.jobs[number]
            copy_box(Stored(data, 0, copy.chunk_box, job.entry.dtype), copy.box, job.target)
        else:
            memory[into] = data.view(memory.dtype).reshape(copy.chunk_box.shape)[source]


def by_file(catalog: Catalog) -> ByFile | None:
    """The catalog, if it finds chunks of one file at once."""
    return cast(ByFile, catalog) if hasattr(catalog, "extents_in") else None


_NO_COLUMNS = Stretches(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype="S16"))
_digest = xxhash.xxh3_64_hexdigest
