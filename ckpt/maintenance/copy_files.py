"""Data files on their way from one storage to another: read in jobs that may run at once, each byte compared with its digest.

A file of up to ``BUFFER`` bytes is one read. Of a larger one the header is read first, then runs of neighbouring chunks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import xxhash

from ckpt.catalog import DataFile
from ckpt.errors import CorruptError, NotFoundError, StorageError
from ckpt.formats.native.datafiles.header import Header, StoredChunk, parse_header
from ckpt.io_backends.protocol import Backend, Writer
from ckpt.plan.reads import group_sorted
from ckpt.reread import READS, read_checked

BUFFER = 16 << 20
"""Bytes read at once, and held per thread. Longer chunks are hashed piece by piece, shorter neighbours are read together."""

Job = Callable[[], int]
"""Gives the bytes that it has done."""

Take = Callable[[int, memoryview], None]
"""Gets bytes and their offset in the file. Those of a long chunk come before its digest was compared, and again if it did not
fit."""

_buffers = threading.local()


@dataclass(frozen=True, slots=True)
class _ChunkRun:
    """Chunks that lie one after another."""

    chunks: tuple[StoredChunk, ...]

    @property
    def start(self) -> int:
        return self.chunks[0].offset

    @property
    def stop(self) -> int:
        return max(chunk.offset + chunk.length for chunk in self.chunks)


class FileCopy:
    """One data file that is copied. It is committed at the target by the last of its jobs, and then added to ``made``."""

    def __init__(self, source: Backend, target: Backend, file: DataFile, made: list[str]) -> None:
        self._source = source
        self._target = target
        self._file = file
        self._made = made
        self._lock = threading.Lock()
        self._writer: Writer | None = None
        self._left = 0
        self._taken: set[int] = set()
        """Offsets of what was written."""
        self._spoiled = False
        """Something of it was read wrong, and cannot be written anew by itself."""

    def jobs(self) -> Iterator[Job]:
        """Raises CorruptError, here or in a job, if the file is not as the index says."""
        jobs = _checked(self._source, self._file, self._take)
        self._left = len(jobs)
        for job in jobs:
            yield partial(self._run, job)

    def _run(self, job: Job) -> int:
        count = job()
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._finish()
        return count

    def _take(self, offset: int, data: memoryview) -> None:
        with self._lock:
            if self._writer is None:
                self._writer = self._target.create(self._file.path, self._file.size)
            again = offset in self._taken
            self._taken.add(offset)
        try:
            self._writer.write(offset, [data])
        except StorageError:
            if not again:
                raise
            self._spoiled = True  # an object store may have it in a part that was sent: the whole file is sent again

    def _finish(self) -> None:
        for _ in range(READS):
            if not self._spoiled:
                break
            self.abort()
            self._writer, self._spoiled = None, False
            self._taken.clear()
            for job in _checked(self._source, self._file, self._take):
                job()
        if self._spoiled:
            where = f"{self._source.url.rstrip('/')}/{self._file.path}"
            hint = "the network, a cache or the memory of a machine flips bits: copy on another machine"
            raise StorageError(f"something of it was read wrong each of {READS} times", where=where, hint=hint)
        assert self._writer is not None
        self._writer.commit()
        self._made.append(self._file.path)

    def abort(self) -> None:
        """Leave nothing of the file at the target, unless it is committed. No job may run any more."""
        if self._writer is not None:
            self._writer.abort()


class FileCheck:
    """One data file that is at the target already. After its jobs ``damaged`` says whether it has to be copied again."""

    def __init__(self, target: Backend, file: DataFile) -> None:
        self._target = target
        self.file = file
        self.damaged = False

    def jobs(self) -> Iterator[Job]:
        try:
            jobs = _checked(self._target, self.file, lambda offset, data: None)
        except (CorruptError, NotFoundError):
            self.damaged = True
            return
        for job in jobs:
            yield partial(self._run, job)

    def _run(self, job: Job) -> int:
        if not self.damaged:  # else nobody needs to know more
            try:
                return job()
            except (CorruptError, NotFoundError):
                self.damaged = True
        return 0


def _checked(backend: Backend, file: DataFile, take: Take) -> list[Job]:
    """Jobs that read all of ``file``, raise CorruptError for bytes that are not as they should be, and give them to ``take``."""
    where = f"{backend.url.rstrip('/')}/{file.path}"
    if file.size <= BUFFER:
        whole = partial(_whole, backend, file, where, take)
        return [partial(read_checked, backend, file.path, whole, length=file.size)]

    def read_header() -> tuple[bytes, Header]:
        data = backend.read(file.path, 0, file.header)
        return data, parse_header(data, file, where)

    data, header = read_checked(backend, file.path, read_header, length=file.header)
    runs = _runs(header.chunks.values())

    def head() -> int:
        take(0, memoryview(data))
        return len(data)

    return [head, *(partial(_read_run, backend, file, where, run, take) for run in runs)]


def _read_run(backend: Backend, file: DataFile, where: str, run: _ChunkRun, take: Take) -> int:
    read = partial(_run_once, backend, file, where, run, take)
    return read_checked(backend, file.path, read, offset=run.start, length=run.stop - run.start)


def _whole(backend: Backend, file: DataFile, where: str, take: Take) -> int:
    data = _buffer(file.size)
    backend.read_into(file.path, 0, data)
    for chunk in parse_header(bytes(data[: file.header]), file, where).chunks.values():
        _compare(chunk, xxhash.xxh3_64_hexdigest(data[chunk.offset : chunk.offset + chunk.length]), where)
    take(0, data)
    return file.size


def _runs(chunks: Iterable[StoredChunk]) -> list[_ChunkRun]:
    """Runs of at most ``BUFFER`` bytes; a longer chunk is alone."""
    order = sorted(chunks, key=lambda c: (c.offset, -c.length))
    starts, stops = [c.offset for c in order], [c.offset + c.length for c in order]
    runs: list[_ChunkRun] = []
    for first, last, stop in group_sorted(starts, stops, max_bytes=BUFFER):
        members = tuple(order[first:last])
        runs += [_ChunkRun(members)] if stop - starts[first] <= BUFFER else [_ChunkRun((chunk,)) for chunk in members]
    return runs


def _run_once(backend: Backend, file: DataFile, where: str, run: _ChunkRun, take: Take) -> int:
    if run.stop - run.start > BUFFER:
        return _read_long(backend, file, where, run.chunks[0], take)
    data = _buffer(run.stop - run.start)
    backend.read_into(file.path, run.start, data)
    for chunk in run.chunks:
        at = chunk.offset - run.start
        _compare(chunk, xxhash.xxh3_64_hexdigest(data[at : at + chunk.length]), where)
    take(run.start, data)
    return len(data)


def _read_long(backend: Backend, file: DataFile, where: str, chunk: StoredChunk, take: Take) -> int:
    digest = xxhash.xxh3_64()
    stop = chunk.offset + chunk.length
    for at in range(chunk.offset, stop, BUFFER):
        data = _buffer(min(BUFFER, stop - at))
        backend.read_into(file.path, at, data)
        digest.update(data)
        take(at, data)
    _compare(chunk, digest.hexdigest(), where)
    return chunk.length


def _compare(chunk: StoredChunk, digest: str, where: str) -> None:
    if digest != chunk.digest:
        raise CorruptError(
            f"{chunk.length} bytes from {chunk.offset} changed after they were written: XXH3-64 is {digest}, should be {chunk.digest}",
            where=where,
            hint="`ckpt verify` names the tensors; copy another step",
        )


def _buffer(size: int) -> memoryview:
    """Room for ``size`` bytes, at most ``BUFFER``; the same for all jobs of a thread."""
    held: bytearray | None = getattr(_buffers, "held", None)
    if held is None or len(held) < size:
        held = _buffers.held = bytearray(size)
    return memoryview(held)[:size]
