"""Moves the bytes of a conversion: window by window, the next one read while the last one is written. Memory: two windows.

A window is an image of a range of a file, so that it is written as it lies, and every tensor in it is read to its place.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import torch
import xxhash

from ckpt.adapters.tensors import torch_dtype
from ckpt.catalog import Catalog
from ckpt.engine.reader import Reader
from ckpt.errors import CkptError, CorruptError
from ckpt.io_backends.protocol import Backend, Writer
from ckpt.workers import Pending

from .choosing import Chosen, seams_of
from .reading import Part, read_views
from .target import OutFile, Planned
from .windows import Segment, Window, windows

PAGE = 4096
BLOCK = 1 << 20
"""Bytes that are hashed and then written while they are still in the cache."""
CODED = 2 * (64 << 20)
"""Bytes that a thread needs to read one coded chunk: as it is stored, and decoded."""
LEAST = 8 << 20
"""Bytes of the smallest window."""
USEFUL = 128 << 20
"""Bytes of a window that keep a file system busy: memory that is touched for the first time costs as much as copying into it."""
Progress = Callable[[int, int], None]


class _Digest(Protocol):
    def update(self, data: memoryview, /) -> None: ...

    def intdigest(self) -> int: ...


class _Crc:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def intdigest(self) -> int:
        return self._value


_DIGESTS: dict[str, Callable[[], _Digest]] = {"xxh3": xxhash.xxh3_64, "crc32": _Crc}


class Stream:
    """Writes files of one plan. ``written`` and ``reader.bytes_read`` count bytes; ``done(number)`` is called when a file is durable.

    ``verify``: read every file again, and compare.
    """

    def __init__(
        self, chosen: Chosen, planned: Planned, backend: Backend, *, memory: int, threads: int, verify: bool, done: Callable[[int], None]
    ) -> None:
        coded = _is_coded(chosen.catalog)
        threads = max(1, min(threads, memory // 2 // CODED)) if coded else threads
        self.catalog = chosen.catalog
        self.tensors = chosen.tensors if planned.tensors is None else planned.tensors
        self.planned = planned
        self.backend = backend
        self.verify = verify
        self.reader = Reader(catalog=chosen.catalog, verify="full", threads=threads, beat=lambda: None)
        self.window = min(_useful(chosen.catalog.backend, backend), max(LEAST, (memory - (threads * CODED if coded else 0)) // 2))
        self.written = 0
        self._done = done
        self._file: _Open | None = None
        self._seams: dict[str, list[int]] = {}

    def write(self, numbers: Sequence[int], progress: Progress | None) -> None:
        """Write the files of these numbers.

        Raises:
            CorruptError: the source is damaged, or what was written is not what is read again.
            StorageError: the storage failed. No file that is not durable is left.
        """
        total = sum(self.planned.files[n].size for n in numbers)
        longest = max((self.planned.files[n].size for n in numbers), default=0)
        buffers = [_buffer(min(self.window, longest) + PAGE) for _ in range(2)] if numbers else []
        turn, last = 0, Pending(lambda: None, "ckpt-convert")
        try:
            for number, window, ends in self._windows(numbers):
                self._read(self.planned.files[number], window, buffers[turn])
                last.result()
                if progress is not None:
                    progress(self.written, total)
                last = Pending(partial(self._put, number, window, buffers[turn], ends), "ckpt-convert")
                turn = 1 - turn
            last.result()
        except BaseException:
            last.wait()
            if self._file is not None:
                with suppress(CkptError):
                    self._file.writer.abort()
            raise
        if progress is not None:
            progress(total, total)

    def _windows(self, numbers: Sequence[int]) -> Iterator[tuple[int, Window, bool]]:
        """Number of a file, window, and whether it is the file's last."""
        for number in numbers:
            items = self.planned.files[number].items
            held: Window | None = None
            for window in windows(items, [self._seams_of(i.name) for i in items], self.window):
                if held is not None:
                    yield number, held, False
                held = window
            yield number, held or Window((), 0, 0), True

    def _seams_of(self, name: str) -> list[int]:
        if name not in self._seams:
            self._seams = {name: seams_of(self.catalog, self.tensors[name].view)}
        return self._seams[name]

    def _read(self, file: OutFile, window: Window, buffer: torch.Tensor) -> None:
        base = window.start // PAGE * PAGE
        parts = []
        for segment in window.segments:
            wanted = self.tensors[file.items[segment.item].name]
            raw = buffer[segment.start - base : segment.start - base + segment.length]
            parts.append(Part(wanted.view, segment.box, raw.view(torch_dtype(wanted.dtype)).view(segment.box.shape)))
        read_views(self.reader, parts)

    def _put(self, number: int, window: Window, buffer: torch.Tensor, ends: bool) -> None:  # noqa: FBT001  called by place
        file = self.planned.files[number]
        if self._file is None:
            self._file = _Open(file, self.backend.create(file.path, file.size), self.planned.digest or ("xxh3" if self.verify else None))
        base = window.start // PAGE * PAGE
        data = buffer.numpy().data
        for run in _runs(window.segments):
            self._file.put(run, data[run[0].start - base : run[-1].start + run[-1].length - base])
            self.written += sum(s.length for s in run)
        if ends:
            opened, self._file = self._file, None
            try:
                opened.end()
            except BaseException:
                self._file = opened
                raise
            if self.verify:
                self._compare(opened)
            self._done(number)

    def _compare(self, opened: _Open) -> None:
        for item, digest in zip(opened.file.items, opened.digests, strict=True):
            again = _DIGESTS[opened.kind or "xxh3"]()
            for at in range(item.offset, item.offset + item.length, BLOCK):
                again.update(memoryview(self.backend.read(opened.file.path, at, min(BLOCK, item.offset + item.length - at))))
            if again.intdigest() != digest:
                self.backend.delete(opened.file.path)
                raise CorruptError(
                    f"{item.name}{item.box} is not what was written when it is read again",
                    where=f"{self.backend.url.rstrip('/')}/{opened.file.path}",
                    hint="the storage or the memory of this machine is faulty: convert elsewhere",
                )


class _Open:
    """A file while it is written."""

    def __init__(self, file: OutFile, writer: Writer, kind: str | None) -> None:
        self.file = file
        self.writer = writer
        self.kind = kind
        self.digests: list[int] = []
        self._state: dict[int, _Digest] = {}

    def put(self, run: Sequence[Segment], data: memoryview) -> None:
        """Write segments that follow one another; ``data`` are their bytes."""
        first = run[0].start
        step = max(BLOCK, self.writer.block)
        at, end = 0, step - first % step  # blocks end where pages end, for direct I/O, or where parts of an upload do
        segments = iter(run)
        segment: Segment | None = next(segments)
        hashed = 0
        while at < len(data):
            end = min(end, len(data))
            while segment is not None and hashed < end:
                stop = min(end, segment.start - first + segment.length)
                self._update(segment.item, data[hashed:stop])
                hashed = stop
                if stop == segment.start - first + segment.length:
                    segment = next(segments, None)
            self.writer.write(first + at, [data[at:end]])
            at, end = end, end + step

    def _update(self, item: int, data: memoryview) -> None:
        if self.kind is not None:
            if item not in self._state:
                self._state[item] = _DIGESTS[self.kind]()
            self._state[item].update(data)

    def end(self) -> None:
        """Write what is not tensors, and make all durable."""
        if self.kind is not None:
            empty = _DIGESTS[self.kind]().intdigest()
            self.digests = [self._state[i].intdigest() if i in self._state else empty for i in range(len(self.file.items))]
        for offset, data in self.file.ends(self.digests):
            self.writer.write(offset, [data])
        self.writer.commit()


def _runs(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Segments between which there is nothing."""
    held: list[Segment] = []
    for segment in segments:
        if held and held[-1].start + held[-1].length != segment.start:
            yield held
            held = []
        held.append(segment)
    if held:
        yield held


def _useful(*backends: Backend) -> int:
    """Bytes of a window beyond which nothing gets faster: several calls for each of those that a storage wants to have going on."""
    return max(USEFUL, *(4 * b.grain.calls * b.grain.piece for b in backends))


def _buffer(size: int) -> torch.Tensor:
    """Memory that begins at a page, which the system gets back as soon as nobody has it."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # touching it for the first time then costs little
    return torch.frombuffer(memory, dtype=torch.uint8)


def _is_coded(catalog: Catalog) -> bool:
    record = getattr(catalog, "record", None)
    return record is not None and bool({"codecs", "extents"} & set(record.features))
