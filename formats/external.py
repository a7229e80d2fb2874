"""What catalogs of other people's formats have in common, and the backends that they see files through. No digests: what is read from them
cannot be compared with anything."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import numpy as np

from ckpt import settings
from ckpt.catalog import CatalogDefaults, Extent, Grid, Replica, TensorEntry
from ckpt.concurrency import COUNTS_WAITS, map_tasks, run_tasks, waits_so_far
from ckpt.errors import AccessError, CorruptError, FormatError, NotFoundError, UsageError
from ckpt.io_backends.checks import path_problem, read_checked
from ckpt.io_backends.protocol import Backend, IOHints, ObjectMeta, Writer
from ckpt.io_backends.registry import open_backend
from ckpt.plan.reads import RangeGroup, group_ranges
from ckpt.text import parse_json

# Backends that other ones are seen through, all of them only read: one file of a directory, one file more that is in memory.


class ReadOnly(Backend):
    """A storage that refuses every change, and shows the files of ``inner``; ``why`` says what it is."""

    why: str
    inner: Backend

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def io_hints(self) -> IOHints:
        return self.inner.io_hints

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        return self.inner.list_prefix(prefix)

    def list_dir(self, prefix: str = "") -> list[str]:
        return self.inner.list_dir(prefix)

    def create(self, path: str, size: int) -> Writer:
        self._refuse(path)

    def put_if(self, path: str, data: bytes, *, expected: bytes | None) -> None:
        self._refuse(path)

    def delete(self, path: str) -> None:
        self._refuse(path)

    def prepare(self) -> None:
        self._refuse("")

    def _refuse(self, path: str) -> NoReturn:
        raise AccessError(f"{self.why}: {path}", where=self.url, hint="write to a separate URL")


_M = TypeVar("_M", bound=Callable[..., Any])


def routed(method: _M) -> _M:
    """The method of the storage in which a file lies."""
    name: str = method.__name__

    def of_route(self: Routed, path: str = "", *args: Any, **more: Any) -> Any:
        backend, inner = self.route(path)
        return getattr(backend, name)(inner, *args, **more)

    return cast(_M, of_route)


class Routed(ReadOnly):
    """A storage whose files lie in other ones: ``route`` says in which, and what a path is called there."""

    @abstractmethod
    def route(self, path: str) -> tuple[Backend, str]: ...

    read = routed(Backend.read)
    read_into = routed(Backend.read_into)
    read_hashed = routed(Backend.read_hashed)
    read_whole = routed(Backend.read_whole)
    read_start = routed(Backend.read_start)
    evict = routed(Backend.evict)
    size = routed(Backend.size)
    version_token = routed(Backend.version_token)


class SingleFile(Routed):
    """The file ``name`` in the directory that ``parent`` is. ``file_url`` is what the user gave.

    Other files of the directory are not listed, but can be read: an index names them.
    """

    def __init__(self, parent: Backend, name: str, file_url: str) -> None:
        self.inner = parent  # paths count from there
        self.name = name
        self.file_url = file_url

    def route(self, path: str) -> tuple[Backend, str]:
        return self.inner, path

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        return iter([ObjectMeta(self.name, self.size(self.name))] if self.name.startswith(prefix) else [])

    def list_dir(self, prefix: str = "") -> list[str]:
        return [] if prefix else [self.name]

    def _refuse(self, path: str) -> NoReturn:
        raise UsageError("a file of another format is only read", where=self.file_url, hint="save to a directory")


def open_single(url: str) -> SingleFile | None:
    """The file at ``url``; None if no file is there."""
    head, slash, name = url.rpartition("/")
    if not name or name in (".", "..") or url.endswith("://" + name):
        return None
    parent = open_backend((head or "/") if slash else ".")
    try:
        parent.size(name)
    except NotFoundError:
        return None
    return SingleFile(parent, name, url)


def candidates(backend: Backend, names: Sequence[str], suffixes: tuple[str, ...]) -> list[str]:
    """The names that may be files of a format: those that end like its files, and a single file whatever it is called."""
    return [*names] if isinstance(backend, SingleFile) else [name for name in names if name.endswith(suffixes)]


class WithFile(ReadOnly):
    """A storage with one file more: what ``inner`` has, and at ``path`` these bytes, which are not listed."""

    why = "a checkpoint that is repaired while it is read is not written to"

    def __init__(self, inner: Backend, path: str, data: bytes) -> None:
        self.inner = inner
        self._path = path
        self._data = data

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if path != self._path:
            return self.inner.read(path, offset, length)
        stop = len(self._data) if length is None else offset + length
        if not 0 <= offset <= stop <= len(self._data):
            raise CorruptError(f"bytes {offset} to {stop} of {len(self._data)}", where=f"{self.url}/{path}")
        return self._data[offset:stop]

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        if path != self._path:
            self.inner.read_into(path, offset, buffer)
            return
        out = buffer.cast("B")
        out[:] = self.read(path, offset, len(out))

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        if path != self._path:
            self.inner.evict(path, offset, length)

    def size(self, path: str) -> int:
        return len(self._data) if path == self._path else self.inner.size(path)

    def version_token(self, path: str) -> str | None:
        """What tells versions of a file apart: see ``Backend.version_token``."""
        return "in memory" if path == self._path else self.inner.version_token(path)


ChunkRequests = Sequence[tuple[TensorEntry, int]]
"""Pairs of a tensor and a chunk's number."""


class ExternalFile(NamedTuple):
    """A file with tensors: ``path`` relative to the backend, ``size`` in bytes, the ``rank`` that wrote it where its name says so."""

    path: str
    size: int
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class ExternalContents:
    """What a checkpoint of another format has, but for the places of bytes. ``state`` is None where tensors are all that it has.

    ``opaque`` says, by path in the state, which objects are kept as mappings because their class is not known here; ``notes`` say what of
    the files is left out.
    """

    tensors: Iterable[TensorEntry]
    files: Sequence[ExternalFile]
    world_size: int = 1
    state: Any = None
    ranks: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    opaque: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


class ExternalCatalog(CatalogDefaults):
    """A checkpoint of another format (``ckpt.catalog.Catalog``). Everything but the places of bytes is known when it is made.

    ``locate`` gives the extents of chunks, in the order asked for; ``replicas()`` gives the boxes that are stored more than once, besides
    the copies that are read; ``storages()`` those runs of bytes with a checksum that chunks are only parts of.
    """

    def __init__(
        self,
        contents: ExternalContents,
        *,
        backend: Backend,
        format: str,
        locate: Callable[[ChunkRequests], list[Extent]],
        replicas: Callable[[], list[Replica]] = list,
        storages: Callable[[], list[Extent]] = list,
    ) -> None:
        self.backend = backend.inner if isinstance(backend, SingleFile) else backend
        self.format = format
        self.tensors: Mapping[str, TensorEntry] = {t.name: t for t in sorted(contents.tensors, key=lambda t: t.name)}
        self.files: tuple[ExternalFile, ...] = tuple(contents.files)
        self.url = backend.file_url if isinstance(backend, SingleFile) else backend.url
        self.world_size = contents.world_size
        self.state = {name: {"$tensor": name} for name in self.tensors} if contents.state is None else contents.state
        self.ranks = contents.ranks
        self.opaque = contents.opaque
        self._replicas = replicas
        self.storages = storages
        self.notes = tuple(contents.notes)
        self._locate = locate
        self._sizes = {f.path: f.size for f in self.files}

    def replicas(self) -> list[Replica]:
        return self._replicas()

    def extents(self, entry: TensorEntry, chunks: Sequence[int] | Iterable[int]) -> list[Extent]:
        """Where the bytes of these chunks are; see ``Catalog.extents``."""
        return self.extents_of([(entry, int(n)) for n in chunks])

    def extents_of(self, wanted: ChunkRequests) -> list[Extent]:
        """The same for one chunk each of many tensors."""
        if not wanted:
            return []
        first = self.files[wanted[0][0].grid.file(wanted[0][1])].path  # of many files this is a guess, and evicting only a hint
        located = read_checked(self.backend, first, lambda: self._locate(wanted))
        for (entry, number), extent in zip(wanted, located, strict=True):
            if extent.offset + extent.length > self._sizes[extent.path]:
                raise CorruptError(
                    f"chunk {entry.name}{entry.grid.box(number)} should end at byte {extent.offset + extent.length:,} of a file of "
                    f"{self._sizes[extent.path]:,} bytes",
                    where=f"{self.backend.url.rstrip('/')}/{extent.path}",
                    hint="the file was cut off: copy it again",
                )
        return located


def one_chunk_grid(shape: Sequence[int], file: int) -> Grid:
    """The grid of a tensor that lies in one piece in one file."""
    return Grid(cuts=tuple((0, n) for n in shape), files=np.array([file], dtype=np.int32))


Boxes = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Offset and shape of each."""


def grid_of(name: str, shape: Sequence[int], boxes: Boxes, files: Sequence[int], where: str) -> tuple[Grid, list[int]]:
    """The grid of the chunks of tensor ``name``, and the order that it numbers them in: regular if they are the cells of cuts, else these
    boxes. ``files`` has the row of the file of each."""
    offsets = np.array([o for o, _ in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    shapes = np.array([s for _, s in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    wanted = math.prod(shape)
    roughly = float(shapes.prod(axis=1, dtype=np.float64).sum())
    volume = int(shapes.prod(axis=1).sum()) if roughly < 2.0**62 else -1
    if volume != wanted:
        raise CorruptError(
            f"the stored parts of tensor {name} have {volume if volume >= 0 else 'too many'} elements, "
            f"the tensor {list(shape)} has {wanted}",
            where=where,
            hint="files are missing, or are of different saves: copy the checkpoint again",
        )
    rows = np.asarray(files, dtype=np.int32)
    order = np.lexsort(offsets.T[::-1]) if offsets.shape[1] else np.arange(len(offsets))
    offsets, shapes, rows = offsets[order], shapes[order], rows[order]
    if (offsets >= 0).all() and (shapes >= 0).all():
        cuts = tuple((*np.unique(offsets[:, d]).tolist(), int(n)) for d, n in enumerate(shape))
        grid = Grid(cuts=cuts, files=rows)
        if len(grid) == len(offsets) and all(np.array_equal(a, b) for a, b in zip((offsets, shapes), grid.all_boxes(), strict=True)):
            return grid, order.tolist()
    return Grid(boxes=(offsets, shapes), files=rows), order.tolist()


# The index of a Hugging Face directory: which file has which tensor. The same for safetensors and for ``.bin`` shards. And many small
# ranges of files, read at once.

_SHOWN = 5
_THREADS = 16


def find_index(names: Sequence[str], suffix: str, url: str) -> str | None:
    """The index among the ``names`` of a directory, which end in ``suffix``; None if there is none."""
    indexes = [name for name in names if name.endswith(suffix)]
    plain = [name for name in indexes if name.count(".") == suffix.count(".")]
    if len(indexes) > 1 and len(plain) != 1:
        raise FormatError(f"there are several indexes: {', '.join(indexes)}", where=url, hint=f"open one of them: {url}/{indexes[0]}")
    return next(iter(plain or indexes), None)


def read_index(backend: Backend, path: str) -> dict[str, str]:
    """Name of a tensor → file that has it, relative to the root."""
    where = f"{backend.url.rstrip('/')}/{path}"
    try:
        weight_map = parse_json(backend.read_whole(path, settings.FOREIGN_TABLE))["weight_map"]
        pairs = {str(k): v for k, v in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        hint = "get the file again, or open the shards without it"
        raise CorruptError(f"the index is damaged: {type(err).__name__}: {err}", where=where, hint=hint) from err
    for name, file in pairs.items():
        problem = path_problem(file) if isinstance(file, str) else f"{file!r:.40} is no path"
        if problem is not None:
            raise CorruptError(f"the index has {name!r} in a file that cannot be: {problem}", where=where, hint="get the file again")
    return pairs


def sizes_of(backend: Backend, paths: Sequence[str]) -> list[int]:
    """The sizes of files that a checkpoint names."""

    def size_of(path: str) -> int | None:
        try:
            return backend.size(path)
        except NotFoundError:
            return None

    sizes = map_tasks(size_of, paths, _THREADS, "ckpt-open")
    missing = [path for path, size in zip(paths, sizes, strict=True) if size is None]
    if missing:
        hint = "copy the directory again"
        raise CorruptError(f"files of the checkpoint are missing: {shown(missing)}", where=backend.url, hint=hint)
    return [size for size in sizes if size is not None]


def check_index(index: Mapping[str, str], located: Mapping[str, str], where: str) -> None:
    """Compare the index with what the files have: name → file, both."""
    if dict(index) == dict(located):
        return
    lines = [f"{n} should be in {f} and is in {located[n]}" for n, f in index.items() if n in located and located[n] != f]
    absent = [n for n in index if n not in located]
    extra = [n for n in located if n not in index]
    lines += [f"in no file: {shown(absent)}"] if absent else []
    lines += [f"not in the index: {shown(extra)}"] if extra else []
    hint = "the directory mixes two models, or its copy is not complete: copy it again, or remove the index"
    raise CorruptError(f"index and files disagree: {'; '.join(lines[:_SHOWN])}", where=where, hint=hint)


_SHARD = re.compile(r"(?:shard-\d+-)?(.*?)(\d{1,6})-of-(\d{1,6})(\D.*)", re.ASCII)
"""Names that say how many files there are. Those that begin with a shard's number may share the numbers that follow."""


def check_all_there(backend: Backend, paths: Sequence[str]) -> None:
    """What the names of shards say of each other, where no index says it. A file that was given alone may be one of several."""
    groups: dict[tuple[str, str, str], dict[int, str]] = {}
    for match in filter(None, map(_SHARD.fullmatch, paths)):
        groups.setdefault((match[1], match[3], match[4]), {})[int(match[2])] = match[2]
    missing = []
    for (begin, count, end), numbers in groups.items():
        first, digits = 0 if 0 in numbers else 1, max(map(len, numbers.values()))
        missing += [f"{begin}{n:0{digits}}-of-{count}{end}" for n in range(first, first + int(count)) if n not in numbers]
    if missing and not isinstance(backend, SingleFile):
        hint = "copy the directory again; to read the tensors of one file, give the file's own URL"
        raise CorruptError(f"files are missing: {shown(missing)}", where=backend.url, hint=hint)


def shown(names: Sequence[str]) -> str:
    """A few of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# Many small ranges of files at once: near ones in one read, several reads at a time. For headers and directories of foreign files.


class Range(NamedTuple):
    """Bytes of a file."""

    path: str
    offset: int
    length: int


def read_ranges(backend: Backend, ranges: Sequence[Range]) -> list[bytes]:
    """The bytes of each range, in the order asked for."""
    groups = group_ranges(ranges, max_bytes=settings.GROUPED_READ, max_gap=settings.GAP)
    contents: list[bytes] = [b""] * len(ranges)

    def read(group: RangeGroup) -> None:
        data = backend.read(group.path, group.offset, group.length)
        for i in group.members:
            at = ranges[i].offset - group.offset
            contents[i] = data[at : at + ranges[i].length]

    at, waits = 0, waits_so_far()
    while at < len(groups) and COUNTS_WAITS and not backend.io_hints.concurrency and waits_so_far() - waits <= at // 8:
        read(groups[at])  # one thread is the fastest as long as nothing has to be waited for
        at += 1
    run_tasks([partial(read, group) for group in groups[at:]], _THREADS, "ckpt-open")
    return contents
