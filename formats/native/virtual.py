"""Virtual checkpoints: an index and a commit record of ours over chunks that lie in files of others (docs/format.md §11).

Invariant: nothing is read from a source that had not, when it was first looked at, the size of its import, and for chunks
without a digest the stamp.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckpt.catalog import CatalogDefaults, Contents, Extent, SourceFile, TensorEntry
from ckpt.errors import AccessError, CorruptError, NotFoundError
from ckpt.formats.external.virtual_backends import ReadOnly
from ckpt.io_backends.protocol import Backend, IOHints, ObjectMeta
from ckpt.io_backends.registry import join_url, open_backend, real_url

from .commit import VERSION, CommitRecord
from .extents import source_path

_AGAIN = "bring the file back as it was, or import the checkpoint again"


class VirtualCatalog(CatalogDefaults):
    """A virtual checkpoint. Sources are looked at when something is read from them. Thread-safe."""

    def __init__(self, backend: Backend, record: CommitRecord, contents: Contents, allowed: Sequence[str] | None = None) -> None:
        """``allowed``: roots below which sources may lie; None: wherever the checkpoint points."""
        self._own = backend
        self._record = record
        self._contents = contents
        self._tensors = {t.name: t for t in contents.tensors}
        self._sources = Sources(backend.url, contents.sources, allowed)

    @property
    def url(self) -> str:
        return self._own.url

    @property
    def backend(self) -> Backend:
        return self._sources

    @property
    def format(self) -> str:
        return f"ckpt {VERSION}, virtual"

    @property
    def record(self) -> CommitRecord:
        return self._record

    @property
    def sources(self) -> tuple[SourceFile, ...]:
        return self._contents.sources

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        return self._tensors

    @property
    def world_size(self) -> int:
        return self._record.world_size

    @property
    def state(self) -> Any:
        return self._contents.state

    @property
    def ranks(self) -> Mapping[int, Mapping[str, Any]]:
        return self._contents.ranks

    def extents(self, entry: TensorEntry, chunks: Sequence[int] | Iterable[int]) -> list[Extent]:
        return self.extents_of([(entry, int(chunk)) for chunk in chunks])

    def extents_of(self, wanted: Sequence[tuple[TensorEntry, int]]) -> list[Extent]:
        """Where these chunks are."""
        extents = [self._contents.extents[entry.alias or entry.name][chunk] for entry, chunk in wanted]
        for path, digested in {(extent.path, extent.digest is not None) for extent in extents}:
            self._sources.check(path, digested=digested)
        return extents


class Sources(ReadOnly):
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

    def _find(self, path: str) -> tuple[Backend, SourceFile]:
        source = self._sources.get(path)
        if source is None:
            raise NotFoundError(f"there is no source {path!r}", where=self._url, hint="`ckpt inspect` lists them")
        self._check_allowed(source)
        return self._opened(source.root), source

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
        backend, source = self._find(path)
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

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        backend, source = self._find(path)
        return backend.read(source.path, offset, length)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        backend, source = self._find(path)
        backend.read_into(source.path, offset, buffer)

    def read_hashed(self, path: str, offset: int, buffer: memoryview, update: Callable[[memoryview], object]) -> None:
        backend, source = self._find(path)
        backend.read_hashed(source.path, offset, buffer, update)

    def evict(self, path: str, offset: int = 0, length: int | None = None) -> None:
        backend, source = self._find(path)
        backend.evict(source.path, offset, length)

    def size(self, path: str) -> int:
        return self._find(path)[1].size

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        return iter(sorted(ObjectMeta(path, s.size) for path, s in self._sources.items() if path.startswith(prefix)))

    def list_dir(self, prefix: str = "") -> list[str]:
        head = f"{prefix.rstrip('/')}/" if prefix else ""
        below = {p[len(head) :].partition("/") for p in self._sources if p.startswith(head)}
        return sorted(name + slash for name, slash, _ in below)
