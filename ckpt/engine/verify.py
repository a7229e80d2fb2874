"""verify: everything in a checkpoint that is not as its digests say. No torch.

A problem never ends the check. First the structure (index, tiling, files, headers), then every byte of every chunk.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ckpt import settings, units
from ckpt.catalog import Catalog, Extent, TensorEntry
from ckpt.concurrency import imap_unordered
from ckpt.errors import CkptError, ConflictError, CorruptError, FormatError
from ckpt.formats.external import ExternalCatalog
from ckpt.formats.native.catalog import NativeCatalog, read_index_file, replacement
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend
from ckpt.net.channel import Row
from ckpt.net.divided_work import DividedWork
from ckpt.plan.machines import bytes_of, runs
from ckpt.plan.reads import group_ranges
from ckpt.telemetry.progress import ProgressCallback, check_progress
from ckpt.text import url_text

from .digest_reader import ChunkDigest, ChunkName, DigestReader
from .structure import FAILURES, UNREAD, Problem, check_index, check_native_files, check_state, check_tiling, file_of

# The chunks of a checkpoint that verify reads, where they lie, and what is said of one that is wrong.


@dataclass(frozen=True, slots=True)
class ChunkToVerify:
    """``others`` are chunks that lie in the same bytes, whose checksum is one."""

    entry: TensorEntry
    number: int
    extent: Extent
    others: int = 0

    @property
    def end(self) -> int:
        return self.extent.offset + self.extent.length

    @property
    def name(self) -> ChunkName:
        return ChunkName(self.entry.name, self.entry.grid.box(self.number), self.extent)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements: more than those that are stored if it is coded."""
        return self.entry.grid.box(self.number).numel * self.entry.dtype.itemsize

    @property
    def read_bytes(self) -> int:
        """Bytes that are read to check it: those that are stored, and those of its anchor."""
        anchored = self.extent.anchor
        return self.extent.length + (0 if anchored is None else anchored.extent.length)

    def problem(self, kind: str, message: str) -> Problem:
        if self.others:
            message += f"; in this chunk or one of {self.others:,} others, which lie in the same storage"
        return Problem(kind=kind, file=self.extent.path, tensor=self.entry.name, box=self.entry.grid.box(self.number), message=message)


def stored_chunks(catalog: Catalog, broken: frozenset[int], problems: list[Problem]) -> Iterator[ChunkToVerify]:
    """Every chunk whose bytes can be found, those in ``broken`` files left out; what cannot be found goes to ``problems``."""
    for entry in catalog.tensors.values():
        if entry.alias is not None:
            continue
        numbers = [n for n in range(len(entry.grid)) if entry.grid.file(n) not in broken] if broken else range(len(entry.grid))
        try:
            extents = catalog.extents(entry, numbers)
        except FAILURES:
            yield from _chunks_one_by_one(catalog, entry, numbers, problems)
        else:
            yield from map(ChunkToVerify, [entry] * len(extents), numbers, extents)


def by_storage(catalog: Catalog, chunks: list[ChunkToVerify]) -> list[ChunkToVerify]:
    """The chunks, but in place of those that lie in a storage with a checksum, that storage."""
    if not isinstance(catalog, ExternalCatalog):
        return chunks
    try:
        storages = sorted(catalog.storages(), key=lambda s: s[:2])
    except FAILURES:
        return chunks  # what cannot be found is among the problems already
    starts = [(s.path, s.offset) for s in storages]
    inside: dict[int, list[ChunkToVerify]] = {}
    left = []
    for chunk in chunks:
        # Archives of torch.save keep one CRC-32 per storage, and a storage holds many tensors. The storage is read
        # once in place of the chunks inside it; if it is wrong, the message says that it may be any of them.
        at = bisect_right(starts, (chunk.extent.path, chunk.extent.offset)) - 1
        storage = storages[at] if at >= 0 and chunk.extent.crc32 is None and chunk.extent.length else None
        if storage is not None and storage.path == chunk.extent.path and chunk.end <= storage.offset + storage.length:
            inside.setdefault(at, []).append(chunk)
        else:
            left.append(chunk)
    return left + [ChunkToVerify(members[0].entry, members[0].number, storages[at], len(members) - 1) for at, members in inside.items()]


def _chunks_one_by_one(catalog: Catalog, entry: TensorEntry, numbers: Sequence[int], problems: list[Problem]) -> Iterator[ChunkToVerify]:
    for number in numbers:
        try:
            yield ChunkToVerify(entry, number, catalog.extents(entry, [number])[0])
        except FAILURES as err:
            file, box = file_of(err, catalog.url), entry.grid.box(number)
            kind = UNREAD if isinstance(err, FormatError) else "header"
            problems.append(Problem(kind=kind, file=file, tensor=entry.name, box=box, message=err.message))


__all__ = ["Problem", "VerifyReport", "verify"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What ``verify`` found. ``bytes`` counts the bytes that were read, of chunks and their anchors, or of storages with them; ``seconds``
    is wall time."""

    files: int
    chunks: int
    undigested: int
    """Chunks that were read but have no digest or checksum to compare with: their format does not keep any, or not of them."""
    bytes: int
    seconds: float
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        verdict = "ok" if self.ok else units.plural(len(self.problems), "problem")
        return f"{verdict}: {units.plural(self.files, 'file')}, {units.plural(self.chunks, 'chunk')}, {units.size(self.bytes)}"


@dataclass(frozen=True, slots=True)
class _Result:
    bytes: int
    problems: list[Problem]


def verify(
    url: str | os.PathLike[str], *, threads: int | None = None, progress: ProgressCallback | None = None, work: DividedWork | None = None
) -> VerifyReport:
    """Read a checkpoint whole and compare it with its digests.

    Args:
        threads: how many read and hash at once; by default one for each usable core, at least 2 and at most 16.
        progress: called from this thread with the bytes done so far and the bytes in all.
        work: divided over several processes. Each reads a part of the chunks, the first one checks the structure, and all give the report
            of all.

    Raises:
        NotFoundError, NotCommittedError, FormatError: there is no checkpoint that could be verified. What is wrong inside one is not raised
            but reported.
        ConflictError: it was replaced or removed meanwhile.
    """
    url = url_text(url)
    began = time.monotonic()
    check_progress(progress)
    threads = None if threads is None else settings.threads(threads)
    try:
        catalog = open_catalog(url, read=read_index_file)  # what the record repeats of them is not enough here
        len(catalog.tensors), [*catalog.ranks.values()]  # what lies apart is read now
    except CorruptError as err:
        problems = check_index(open_backend(url), err)
        return VerifyReport(files=0, chunks=0, undigested=0, bytes=0, seconds=time.monotonic() - began, problems=tuple(problems))
    if work is None:
        problems, broken = _check_structure(catalog)
        structure = _with_chunks(catalog, broken, problems)
        done = _read_all(catalog.backend, _jobs(structure.reads), threads, progress)
    else:
        structure = _agreed_structure(catalog, work)
        done = _read_part(catalog.backend, _jobs(structure.reads), threads, progress, work)
    if (structure.problems or done.problems) and (replaced := replacement(catalog)) is not None:
        raise replaced
    sorted_problems = sorted(done.problems, key=lambda p: (p.file or "", p.tensor or "", p.box.offset if p.box else ()))
    return VerifyReport(
        files=structure.files,
        chunks=structure.chunks,
        undigested=sum(c.extent.digest is None and c.extent.crc32 is None for c in structure.reads),
        bytes=done.bytes,
        seconds=time.monotonic() - began,
        problems=(*structure.problems, *sorted_problems),
    )


# ------------------------------------------------------------------------------------------------------------- structure


@dataclass(frozen=True, kw_only=True, slots=True)
class _Structure:
    """A checkpoint without its bytes: what is wrong with it, how many files and chunks it has, and what of them has to be read."""

    problems: tuple[Problem, ...]
    files: int
    chunks: int
    reads: list[ChunkToVerify]


def _check_structure(catalog: Catalog) -> tuple[list[Problem], frozenset[int]]:
    """What is wrong, and the files whose chunks cannot be found. A native catalog has no state afterwards."""
    problems = [*check_tiling(catalog), *check_state(catalog)]
    if not isinstance(catalog, NativeCatalog):
        return problems, frozenset()
    catalog.drop_state()
    return problems, check_native_files(catalog, problems)


def _agreed_structure(catalog: Catalog, work: DividedWork) -> _Structure:
    """The same on every process; the first one looks for what is wrong."""
    looked: list[_Structure] = []

    def look(rows: dict[int, Row]) -> Row:
        if len({row["record"] for row in rows.values()}) > 1:
            hint = "give all of them a URL on storage that they share, and verify again"
            raise ConflictError("the processes do not see the same checkpoint, or it was replaced", where=catalog.url, hint=hint)
        problems, broken = _check_structure(catalog)
        looked.append(_with_chunks(catalog, broken, problems))
        return {"broken": sorted(broken), "problems": [p.to_json() for p in looked[0].problems]}

    record = catalog.record
    structure = work.agree("structure", lambda: {"record": None if record is None else record.id}, look)
    if looked:
        return looked[0]
    mine = _with_chunks(catalog, frozenset(structure["broken"]), [])
    return replace(mine, problems=tuple(Problem.from_json(p) for p in structure["problems"]))


def _with_chunks(catalog: Catalog, broken: frozenset[int], problems: list[Problem]) -> _Structure:
    chunks = list(stored_chunks(catalog, broken, problems))
    if isinstance(catalog, NativeCatalog):
        for row in range(len(catalog.files)):
            catalog.drop(row)
    return _Structure(
        problems=tuple(problems),
        files=len(catalog.files) if isinstance(catalog, NativeCatalog) else len({c.extent.path for c in chunks}),
        chunks=len(chunks),
        reads=by_storage(catalog, chunks),
    )


# ------------------------------------------------------------------------------------------------------------- every byte


def _read_part(
    backend: Backend, jobs: list[list[ChunkToVerify]], threads: int | None, progress: ProgressCallback | None, work: DividedWork
) -> _Result:
    """What is wrong in all of them, this process and the others having read a part each."""
    sizes = [_read_bytes(job) for job in jobs]
    parts = runs(sizes, work.count)
    mine = parts[work.number]

    def read() -> Row:
        result = _read_all(backend, jobs[mine.start : mine.stop], threads, report)
        return {"bytes": result.bytes, "problems": [p.to_json() for p in result.problems]}

    def join(rows: dict[int, Row]) -> Row:
        return {"bytes": sum(row["bytes"] for row in rows.values()), "problems": [p for row in rows.values() for p in row["problems"]]}

    with work.shown(bytes_of(sizes, parts), progress) as report:
        all_parts = work.agree("read", read, join)
    return _Result(all_parts["bytes"], [Problem.from_json(p) for p in all_parts["problems"]])


def _read_all(backend: Backend, jobs: list[list[ChunkToVerify]], threads: int | None, progress: ProgressCallback | None) -> _Result:
    if not threads:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = max(min(max(cores, 2), 16), backend.io_hints.concurrency)
    total = sum(map(_read_bytes, jobs))
    verifier = _Verifier(backend)
    bytes_done, problems = 0, list[Problem]()
    for result in imap_unordered((partial(verifier.check, job) for job in jobs), threads, "ckpt-verify"):
        bytes_done += result.bytes
        problems += result.problems
        if progress is not None:
            progress(bytes_done, total)
    return _Result(bytes_done, problems)


def _jobs(chunks: list[ChunkToVerify]) -> list[list[ChunkToVerify]]:
    """Chunks that lie one after another in one file and fit the buffer together; a longer one, or one that is coded, is alone."""
    plain = [chunk for chunk in chunks if chunk.extent.codec is None]
    jobs = [[chunk] for chunk in chunks if chunk.extent.codec is not None]
    for group in group_ranges([chunk.extent for chunk in plain], max_bytes=settings.HASH_BUFFER):
        members = [plain[i] for i in group.members]
        jobs += [members] if group.length <= settings.HASH_BUFFER else [[chunk] for chunk in members]
    return sorted(jobs, key=lambda job: job[0].extent[:2])


def _end(job: Sequence[ChunkToVerify]) -> int:
    """One past the last byte of a job."""
    return max(chunk.end for chunk in job)


def _read_bytes(job: Sequence[ChunkToVerify]) -> int:
    """Bytes that are read for a job."""
    return job[0].read_bytes if len(job) == 1 else _end(job) - job[0].extent.offset


class _Wrong(CorruptError):
    """That a job found something."""

    def __init__(self, result: _Result) -> None:
        super().__init__("; ".join(map(str, result.problems)))
        self.result = result


class _Verifier:
    """Reads jobs and hashes them. Scratch memory is as long as the longest job of a thread so far."""

    def __init__(self, backend: Backend) -> None:
        self._reader = DigestReader(backend, crc32=True)

    def check(self, job: list[ChunkToVerify]) -> _Result:
        """What is wrong with the chunks of a job, read again if anything is."""

        def read() -> _Result:
            result = self._look(job)
            if result.problems:
                raise _Wrong(result)
            return result

        start = job[0].extent.offset
        try:
            return self._reader.reread(Extent(job[0].extent.path, start, _end(job) - start, None), read)
        except _Wrong as err:
            return err.result

    def _look(self, job: list[ChunkToVerify]) -> _Result:
        start, end = job[0].extent.offset, _end(job)
        if job[0].extent.codec is not None:
            return self._check_encoded(job[0])
        if end - start > settings.HASH_BUFFER:
            return self._check_long(job[0])
        buffer = self._reader.scratch(end - start).data
        try:
            if end > start:
                self._reader.fill(job[0].extent.path, start, buffer[: end - start])
        except FAILURES as err:
            return self._split(job, err)
        problems = [self._compare(c, buffer[c.extent.offset - start : c.end - start]) for c in job]
        return _Result(end - start, [p for p in problems if p is not None])

    def _split(self, job: list[ChunkToVerify], err: CkptError) -> _Result:
        """A failed read is repeated chunk by chunk, so that only the chunks that cannot be read are named."""
        if len(job) == 1:
            return _Result(0, [job[0].problem("read", err.message)])
        # One bad sector must not condemn hundreds of small tensors that were read together with it.
        results = [self._look([chunk]) for chunk in job]
        return _Result(sum(r.bytes for r in results), [p for r in results for p in r.problems])

    def _check_long(self, chunk: ChunkToVerify) -> _Result:
        digest = ChunkDigest(self._reader, chunk.name)
        try:
            self._reader.pass_over(chunk.name, digest)
        except FAILURES as err:
            return _Result(digest.length, [chunk.problem("read", err.message)])
        problem = _changed(chunk, digest.difference())
        return _Result(chunk.extent.length, [problem] if problem else [])

    def _check_encoded(self, chunk: ChunkToVerify) -> _Result:
        """Its stored bytes, and that they can be decoded to as many bytes as its elements have."""
        blob = self._reader.scratch(chunk.extent.length, "blob").data[: chunk.extent.length]
        try:
            self._reader.fill(chunk.extent.path, chunk.extent.offset, blob)
        except FAILURES as err:
            return _Result(0, [chunk.problem("read", err.message)])
        problem = self._compare(chunk, blob)
        if problem is None:
            try:
                self._reader.decode(
                    chunk.name, blob, self._reader.scratch(chunk.nbytes, "decoded").data[: chunk.nbytes], chunk.entry.dtype.itemsize
                )
            except FAILURES as err:
                problem = chunk.problem("codec", f"the chunk cannot be decoded: {err.message}")
        return _Result(chunk.read_bytes, [problem] if problem else [])

    def _compare(self, chunk: ChunkToVerify, data: memoryview) -> Problem | None:
        return _changed(chunk, self._reader.difference(chunk.extent, data))


def _changed(chunk: ChunkToVerify, difference: str | None) -> Problem | None:
    return None if difference is None else chunk.problem("digest", f"the bytes changed after they were written: {difference}")
