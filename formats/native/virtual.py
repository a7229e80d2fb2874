"""Virtual checkpoints: an index and a commit record of ours over chunks that lie in files of others (docs/format.md §11).

Invariant: nothing is read from a source that had not, when it was first looked at, the size of its import, and for chunks
without a digest the stamp.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

import pyarrow as pa

from ckpt.catalog import CatalogDefaults, Contents, Extent, SourceFile, TensorEntry
from ckpt.errors import AccessError, ConsistencyError, CorruptError, NotCommittedError, NotFoundError
from ckpt.formats.external import Routed
from ckpt.formats.external_elements import reach, strided, strides_of
from ckpt.io_backends.checks import path_problem
from ckpt.io_backends.protocol import Backend, IOHints, ObjectMeta
from ckpt.io_backends.registry import join_url, open_backend, real_url
from ckpt.text import parse_object

from .commit import VERSION, CommitRecord
from .paths import EXTENTS, SOURCES, is_digest
from .tables import INTEGERS, column, from_file, rows_from_file, rows_to_file, schema, to_file

# sources.arrow and extents.arrow: what a virtual checkpoint has in the place of data files (docs/format.md §11).

_SOURCES = schema({"root": pa.utf8(), "path": pa.utf8(), "size": pa.int64(), "stamp": pa.utf8()}, nullable=("stamp",))
_EXTENTS = schema({"offset": pa.int64(), "length": pa.int64(), "digest": pa.utf8(), "strides": INTEGERS}, nullable=("digest", "strides"))
_DIGITS = 16


def encode_extents(contents: Contents) -> dict[str, bytes]:
    """The two index files by name."""
    rows: list[Extent] = []
    for entry in _stored(contents.tensors):
        extents = contents.extents.get(entry.name, ())
        problem = _problem(entry, extents, contents.sources)
        if problem is not None:
            raise ConsistencyError(f"these contents cannot be an index: {problem}")
        rows += extents
    # One row per chunk, in the order of the tensors' names and of each grid's chunks: so a row needs neither the name of its tensor nor the
    # number of its chunk. Data files need no such table, since their headers say where chunks lie.
    columns = {name: column([getattr(e, name) for e in rows], _EXTENTS.field(name).type) for name in ("offset", "length", "digest")}
    columns["strides"] = column([strides_of(e.codec) for e in rows], INTEGERS)
    return {SOURCES: rows_to_file(contents.sources, _SOURCES), EXTENTS: to_file(columns, _EXTENTS)}


def decode_sources(data: bytes, where: str) -> tuple[SourceFile, ...]:
    """The rows of sources.arrow."""
    sources = tuple(SourceFile(**row) for row in rows_from_file(data, _SOURCES, f"{where}/{SOURCES}"))
    for source in sources:
        problem = path_problem(source.path) or _root_problem(source.root) or (None if source.size >= 0 else f"{source} cannot be")
        if problem is not None:
            _contradicts(problem, f"{where}/{SOURCES}")
    return sources


def decode_extents(data: bytes, tensors: Sequence[TensorEntry], sources: Sequence[SourceFile], where: str) -> dict[str, list[Extent]]:
    """The extents of each tensor's chunks. The paths are those of :func:`source_path`."""
    columns = from_file(data, _EXTENTS, f"{where}/{EXTENTS}")
    offsets, lengths, digests, strides = (columns[n].to_pylist() for n in _EXTENTS.names)
    if sum(t.grid.count for t in _stored(tensors)) != len(offsets):
        _contradicts(f"{len(offsets)} extents are not those of the tensors' chunks", f"{where}/{EXTENTS}")
    paths = [source_path(i, s) for i, s in enumerate(sources)]
    by_name, at = {}, 0
    for entry in _stored(tensors):
        extents = []
        for chunk, shape in enumerate(_shapes(entry)):
            # A chunk that lies with strides in a foreign file takes the bytes from its first to its last element. The stored length must be
            # exactly that, or the strides would lead out of the range that was checked against the file's size.
            steps = strides[at]
            if steps is not None and reach(shape, steps, entry.dtype.itemsize) != lengths[at]:
                _contradicts(f"chunk {entry.name}{entry.grid.box(chunk)} has strides that do not fit it", f"{where}/{EXTENTS}")
            codec = None if steps is None else strided(shape, steps, entry.dtype.itemsize)
            extents.append(Extent(paths[entry.grid.file(chunk)], offsets[at], lengths[at], digests[at], codec))
            at += 1
        problem = _problem(entry, extents, sources)
        if problem is not None:
            _contradicts(problem, f"{where}/{EXTENTS}")
        by_name[entry.name] = extents
    return by_name


def source_path(number: int, source: SourceFile) -> str:
    """What the source of this number is called as a path of a virtual checkpoint: with its own name at the end, for messages."""
    return f"sources/{number}/{source.path.rpartition('/')[2]}"


def _stored(tensors: Sequence[TensorEntry]) -> list[TensorEntry]:
    return sorted((t for t in tensors if t.alias is None), key=lambda t: t.name)


def _shapes(entry: TensorEntry) -> Sequence[Sequence[int]]:
    """Those of its chunks."""
    if entry.grid.single:
        return [entry.shape]
    shapes: list[list[int]] = entry.grid.all_boxes()[1].tolist()
    return shapes


def _problem(entry: TensorEntry, extents: Sequence[Extent], sources: Sequence[SourceFile]) -> str | None:
    if len(extents) != entry.grid.count:
        return f"tensor {entry.name!r} has {entry.grid.count} chunks and {len(extents)} extents"
    for i, (extent, shape) in enumerate(zip(extents, _shapes(entry), strict=True)):
        source = sources[entry.grid.file(i)]
        steps = strides_of(extent.codec)
        size = entry.dtype.itemsize
        needed = math.prod(shape) * size if steps is None else reach(shape, steps, size)
        bad = extent.length != needed or extent.offset < 0 or extent.offset + extent.length > source.size
        if bad or (extent.codec is not None and steps is None) or not (extent.digest is None or is_digest(extent.digest, _DIGITS)):
            return f"chunk {entry.name}{entry.grid.box(i)} cannot be {extent.length} bytes from {extent.offset} of {source.path}"
    return None


def _root_problem(root: str) -> str | None:
    """Why a root cannot be followed: relative ones lead wherever the reader happens to be, chained URLs to more than they show."""
    if "\0" in root or "::" in root or not (root.startswith("/") or "://" in root):
        return f"the root {root!r} of a source is neither an absolute path nor a plain URL"
    if any(part == ".." for part in root.split("/")):
        return f"the root {root!r} of a source leads upwards"
    return None


def _contradicts(what: str, where: str) -> NoReturn:
    raise CorruptError(f"the index contradicts itself: {what}", where=where, hint="import the checkpoint again")


_AGAIN = "bring the file back as it was, or import the checkpoint again"


class VirtualCatalog(CatalogDefaults):
    """A virtual checkpoint. Sources are looked at when something is read from them. Thread-safe."""

    def __init__(self, backend: Backend, record: CommitRecord, contents: Contents, allowed: Sequence[str] | None = None) -> None:
        """``allowed``: roots below which sources may lie; None: wherever the checkpoint points."""
        self._extents = contents.extents
        self.url = backend.url
        self.backend = Sources(backend.url, contents.sources, allowed)
        self.format = f"ckpt {VERSION}, virtual"
        self.record: CommitRecord = record
        self.sources = contents.sources
        self.tensors: Mapping[str, TensorEntry] = {t.name: t for t in contents.tensors}
        self.world_size = record.world_size
        self.state = contents.state
        self.ranks = contents.ranks

    def extents(self, entry: TensorEntry, chunks: Sequence[int] | Iterable[int]) -> list[Extent]:
        return self.extents_of([(entry, int(chunk)) for chunk in chunks])

    def extents_of(self, wanted: Sequence[tuple[TensorEntry, int]]) -> list[Extent]:
        """Where these chunks are."""
        extents = [self._extents[entry.alias or entry.name][chunk] for entry, chunk in wanted]
        for path, digested in {(extent.path, extent.digest is not None) for extent in extents}:
            self.backend.check(path, digested=digested)
        return extents


class Sources(Routed):
    """The sources of a virtual checkpoint as one storage to read from."""

    why = "the sources of a virtual checkpoint are only read"

    def __init__(self, url: str, sources: Sequence[SourceFile], allowed: Sequence[str] | None) -> None:
        self._url = url
        self._sources = {source_path(i, s): s for i, s in enumerate(sources)}
        self._allowed = None if allowed is None else tuple(map(real_url, allowed))
        self._backends: dict[str, Backend] = {}
        self._checked: set[tuple[str, bool]] = set()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._url

    def route(self, path: str) -> tuple[Backend, str]:
        source = self._find(path)
        self._check_allowed(source)
        return self._opened(source.root), source.path

    def _find(self, path: str) -> SourceFile:
        source = self._sources.get(path)
        if source is None:
            raise NotFoundError(f"there is no source {path!r}", where=self._url, hint="`ckpt inspect` lists them")
        return source

    def _check_allowed(self, source: SourceFile) -> None:
        if self._allowed is None:
            return
        place = real_url(join_url(real_url(source.root), source.path))
        if not any(place == root or place.startswith(f"{root.rstrip('/')}/") for root in self._allowed):
            raise AccessError(
                f"this virtual checkpoint points at {source.path} below {source.root}, which is not among the sources that may be read",
                where=self._url,
                hint="if you trust it, name that root in sources= or CKPT_SOURCES",
            )

    def _opened(self, root: str) -> Backend:
        with self._lock:
            if root not in self._backends:
                self._backends[root] = open_backend(root)
            return self._backends[root]

    def check(self, path: str, *, digested: bool) -> None:
        """That the source is the file that was imported; looked at once. What has a digest says so itself, also if the file was touched."""
        if (path, digested) in self._checked:
            return
        (backend, _), source = self.route(path), self._find(path)
        try:
            size = backend.size(source.path)
        except NotFoundError as err:
            raise CorruptError(f"{source.path}, which was imported, is not there any more", where=source.root, hint=_AGAIN) from err
        if size != source.size:
            raise CorruptError(f"{source.path} has {size} bytes; when it was imported it had {source.size}", where=source.root, hint=_AGAIN)
        stamp = None if digested else backend.version_token(source.path)
        if not digested and source.stamp is not None and stamp != source.stamp:
            message = f"{source.path} changed after it was imported: now it has {stamp}, then {source.stamp}"
            raise CorruptError(message, where=source.root, hint=_AGAIN)
        self._checked.add((path, digested))

    # ---- the storage port (io_backends/protocol.py)

    @property
    def io_hints(self) -> IOHints:
        """That of the source which wants the most calls at once."""
        for source in self._sources.values():
            self._check_allowed(source)
        hints = [self._opened(root).io_hints for root in {s.root: None for s in self._sources.values()}]
        return max(hints, key=lambda h: h.concurrency, default=IOHints())

    def size(self, path: str) -> int:
        self.route(path)  # checks that it may be read
        return self._find(path).size

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        return iter(sorted(ObjectMeta(path, s.size) for path, s in self._sources.items() if path.startswith(prefix)))

    def list_dir(self, prefix: str = "") -> list[str]:
        head = f"{prefix.rstrip('/')}/" if prefix else ""
        below = {p[len(head) :].partition("/") for p in self._sources if p.startswith(head)}
        return sorted(name + slash for name, slash, _ in below)


# What a run of several jobs waits for while a step is not committed (docs/format.md §17).

GENERATION_PATH = "joint.json"
"""Beside the steps: the members of the run, and which restart they have in common."""
GENERATION_LIMIT = 1 << 20
"""Bytes of it that are read."""
MARKS = "members"
"""Directory of a joint step that says which members have saved it."""


def unfinished_step(backend: Backend, prefix: str, url: str) -> str | None:
    """Which members have saved the step at ``url``, below ``prefix`` of ``backend``, that has no commit record, and who is awaited; None if
    no member has marked it."""
    latest = max(backend.list_dir(f"{prefix}{MARKS}"), default="").rstrip("/")
    names = backend.list_dir(f"{prefix}{MARKS}/{latest}") if latest else []
    saved = sorted({name.partition("-")[0] for name in names if name.count("-") == 3 and not name.startswith(".")})
    if not saved:
        return None
    by = f"saved by {', '.join(saved)}"
    generation, joined = _members(url.rstrip("/").rpartition("/")[0])
    if not joined:
        return f"{by}: the other members are awaited"
    if generation != latest:
        return f"{by} before the members restarted: it will not be committed"
    awaited = [name for name in joined if name not in saved]
    return f"{by}; awaited: {', '.join(awaited)}" if awaited else f"{by}: all members; none of them has committed it"


def unfinished_run(url: str) -> NotCommittedError | None:
    """That the run of several jobs at ``url`` has no step, and which members have begun; None if there is no such run."""
    joined = _members(url)[1]
    if not joined:
        return None
    states = ", ".join(f"{name} ({'restored' if there else 'awaited'})" for name, there in joined.items())
    return NotCommittedError(
        f"this is a run of several jobs whose members have committed no step: {states}",
        where=url,
        hint="a step exists once all members have saved it; `ckpt ls` shows which have",
    )


def _members(run: str) -> tuple[str, dict[str, bool]]:
    """The generation of a run, and of each of its members whether it takes part; none if nobody can say."""
    backend = open_backend(run)
    backend.evict(GENERATION_PATH)
    try:
        values = parse_object(backend.read_whole(GENERATION_PATH, GENERATION_LIMIT))
        return str(values["id"]), {str(name): name in values["joined"] for name in values["members"]}
    except (NotFoundError, ValueError, KeyError, TypeError):  # who restores says that it is damaged
        return "", {}
