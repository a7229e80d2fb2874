"""Native checkpoints as catalogs. Nothing is given that the chain of digests has not been followed to: record, index, headers."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from ckpt import settings
from ckpt.catalog import Anchored, CatalogDefaults, Contents, DataFile, Extent, Format, TensorEntry, identity
from ckpt.concurrency import map_tasks
from ckpt.dtypes import DType
from ckpt.errors import CkptError, ConflictError, CorruptError, NotCommittedError, NotFoundError, StorageError, UsageError
from ckpt.io_backends.checks import read_checked
from ckpt.io_backends.registry import open_backend
from ckpt.plan.layout.geometry import Box

from .codecs import CHUNK_LIMIT, CODECS, WITHOUT_ANCHOR, is_known, unknown_codec
from .commit import ANCHORS, CODED, COMMIT_PATH, REFERENCED, VERSION, VIRTUAL, CommitRecord, read_record
from .datafile import box_text, chunk_key, coded_key
from .header import Header, Known, Sought, StoredChunk, Stretches, find_alike, parse_header
from .index import decode_index
from .paths import INDEX_LIMIT, RANK_ROWS, TENSORS, RunBackend, has_orphans, is_reference, owner_of
from .ranks import RankParts, TensorsOfRanks, ValuesOfRanks
from .tables import find_excess, too_little_memory
from .virtual import VirtualCatalog

if TYPE_CHECKING:
    from ckpt.catalog import Catalog
    from ckpt.io_backends.protocol import Backend

_REPLACED_TRIES = 3
_STALE = 1.1
"""Seconds after which FUSE looks a name up again."""


class NativeCatalog(CatalogDefaults):
    """A committed native checkpoint; ``record`` is its commit record if that was read just now.

    Opening reads and verifies record and index; headers are read when they are asked for. Thread-safe.
    """

    def __init__(self, backend: Backend, record: bytes | None = None, *, opened: tuple[CommitRecord, Contents] | None = None) -> None:
        record_read, self._contents = _open(backend, record) if opened is None else opened
        self.record: CommitRecord = record_read
        self.files: tuple[DataFile, ...] = self._contents.files
        self.backend: Backend = RunBackend(backend) if REFERENCED in record_read.features else backend
        self.url = self.backend.url
        self.format = f"ckpt {VERSION}"
        self.world_size = record_read.world_size
        self.coded = CODED in record_read.features
        self.state = self._contents.state
        self.tensors: Mapping[str, TensorEntry] = {t.name: t for t in self._contents.tensors}
        self.ranks = self._contents.ranks
        if self._contents.rank_rows is not None:
            parts = RankParts(
                backend,
                record_read,
                self._contents.rank_rows,
                files=self._contents.files,
                of_job=self.tensors,
                read_all=partial(read_index_file, backend, record_read, RANK_ROWS),
            )
            self.tensors, self.ranks = TensorsOfRanks(parts), ValuesOfRanks(parts)
        self._headers: dict[int, Header] = {}
        self._locks = tuple(threading.Lock() for _ in self._contents.files)

    def header(self, file: int) -> Header:
        """The verified header of data file number ``file`` of ``files``; read once."""
        with self._locks[file]:
            header = self._headers.get(file)
            if header is None:
                row = self._contents.files[file]
                header = self._headers[file] = read_checked(self.backend, row.path, partial(self._read_header, row), length=row.header)
            return header

    def _read_header(self, file: DataFile) -> Header:
        where = _join(self.url, file.path)
        lost = "restore this file from a copy, or load another checkpoint"
        try:
            data, size = self.backend.read_start(file.path, file.header)
        except NotFoundError as err:
            refers = f", which {owner_of(file.path)} should have: this checkpoint refers to it" if is_reference(file.path) else ""
            raise CorruptError(f"the data file {file.path} is missing{refers}", where=where, hint=lost) from err
        if size != file.size:
            raise CorruptError(f"the data file {file.path} has {size} bytes, in the index {file.size}", where=where, hint=lost)
        return parse_header(data, file, where)

    def extents(self, entry: TensorEntry, chunks: Sequence[int] | Iterable[int]) -> list[Extent]:
        """Where the bytes of these chunks of ``entry`` are, in the order asked for."""
        numbers = np.fromiter(chunks, dtype=np.int64)
        if len(numbers) == 1:  # by far the most common case: no arrays for it
            return self.extents_of([(entry, int(numbers[0]))])
        offsets, shapes = entry.grid.boxes_of(numbers)
        files = entry.grid.files[numbers if len(entry.grid.files) > 1 else np.zeros_like(numbers)]
        return [
            self._extent(entry, n, Box(tuple(o), tuple(s)), f)
            for n, o, s, f in zip(numbers.tolist(), offsets.tolist(), shapes.tolist(), files.tolist(), strict=True)
        ]

    def extents_of(self, wanted: Sequence[tuple[TensorEntry, int]]) -> list[Extent]:
        """Where one chunk each of many tensors is, in the order asked for. Errors as for :meth:`extents`."""
        # The loop of every load into the saved layout. Its fast path takes one chunk per tensor, stored under the bare name, with the dtype
        # and shape of the entry; tensors that follow each other mostly share a grid and a file, so the header is looked up once for all of
        # them. Everything else takes ``_extent``, which knows all kinds of keys.
        extents = []
        chunks: Mapping[str, StoredChunk] = {}
        last, path = None, ""
        for entry, number in wanted:
            grid = entry.grid
            if grid.single and grid is not last:  # neighbours often share a grid
                file = int(grid.files[0])
                last, path, chunks = grid, self.files[file].path, self.header(file).chunks
            name = entry.name if entry.alias is None else entry.alias
            stored = chunks.get(name) if grid is last and "]" not in name else None
            if stored is not None and stored[0] == entry.dtype.safetensors and stored[1] == entry.shape:
                extents.append(Extent(path, stored[2], stored[3], stored[4]))
            else:
                extents.append(self._extent(entry, number, grid.box(number), grid.file(number)))
        return extents

    def extents_in(self, file: int, sought: Sought, known: Known) -> Stretches:
        """Where chunks of many tensors are in data file number ``file``: see ``find_alike``. Errors as for :meth:`header`."""
        return find_alike(self.header(file), sought, known)

    def drop(self, file: int) -> None:
        """Forget a header: whoever reads very many files keeps none."""
        with self._locks[file]:
            self._headers.pop(file, None)

    def drop_state(self) -> None:
        """Forget the state: whoever only checks chunks needs the memory for them."""
        self.state, self._contents = None, replace(self._contents, state=None)

    def _extent(self, entry: TensorEntry, number: int, box: Box, file: int) -> Extent:
        extent = self._stored(entry, box, file)
        if extent.codec not in WITHOUT_ANCHOR:
            return extent
        return extent._replace(anchor=self._anchor(entry, number, box, self.header(file), extent))

    def _anchor(self, entry: TensorEntry, number: int, box: Box, header: Header, extent: Extent) -> Anchored:
        """What it takes to decode a chunk that is stored as a difference, besides its own bytes."""
        row = -1 if entry.grid.anchors is None else int(entry.grid.anchors[number])
        digest = header.strong_digests.get(coded_key(entry.alias or entry.name, box, entry.shape, str(extent.codec)))
        if row < 0 or digest is None:
            lacks = "no file has its anchor" if row < 0 else "it has no digest of what it is decoded to"
            raise CorruptError(
                f"chunk {entry.name}{box} is a difference from an anchor, and {lacks}",
                where=_join(self.url, extent.path),
                hint="restore the index from a copy, or load another checkpoint",
            )
        anchor = self._stored(entry, box, row)
        if anchor.codec in WITHOUT_ANCHOR:  # the writer's promise: one read and one XOR give the chunk
            raise CorruptError(
                f"the anchor of chunk {entry.name}{box} is a difference itself",
                where=_join(self.url, anchor.path),
                hint="load another checkpoint, and report this as an error of the software that wrote it",
            )
        return Anchored(anchor, digest)

    def _stored(self, entry: TensorEntry, box: Box, file: int) -> Extent:
        """Where a file has a chunk, coded or not."""
        path = self.files[file].path
        name = entry.name if entry.alias is None else entry.alias
        chunks = self.header(file).chunks
        # Three attempts: the plain key; the key of each codec, since the index does not say which chunks are encoded;
        # and, for the message, a key with a codec that this software does not know.
        stored = chunks.get(chunk_key(name, box, entry.shape, entry.dtype))
        wanted = entry.dtype.safetensors, entry.dtype.stored_shape(box.shape)
        if stored is not None and stored[:2] == wanted:
            return Extent(path, stored.offset, stored.length, stored.digest)
        for codec in CODECS if stored is None and self.coded else ():
            coded = chunks.get(coded_key(name, box, entry.shape, codec))
            if coded is not None and coded[:2] == ("U8", (coded.length,)):
                _check_coded(name, box, entry.dtype, coded, _join(self.url, path))
                return Extent(path, coded.offset, coded.length, coded.digest, codec)
        if stored is None and self.coded:
            prefix = f"{name}{box_text(box, entry.shape)}#"
            for key in chunks:
                if key.startswith(prefix) and (other := key.removeprefix(prefix)) not in CODECS:
                    if is_known(other):  # from now on: another distribution has it
                        return self._stored(entry, box, file)
                    raise unknown_codec(other, f"chunk {name}{box}", _join(self.url, path))
        difference = "is not in its data file" if stored is None else f"is {stored.dtype} {list(stored.shape)} in its data file"
        raise CorruptError(
            f"chunk {name}{box} {difference}; in the index {wanted[0]} {list(wanted[1])}",
            where=_join(self.url, path),
            hint="index and data files are of different saves: restore them together, or rebuild the index: `ckpt rebuild`",
        )


def _check_coded(name: str, box: Box, dtype: DType, coded: StoredChunk, where: str) -> None:
    """Raise CorruptError if a coded chunk has a size that none can have: memory is asked for by it."""
    size = box.numel * dtype.itemsize
    if not 0 < coded.length <= size or (size > CHUNK_LIMIT and box.numel > 1):
        raise CorruptError(
            f"chunk {name}{box} of {size} bytes is listed as coded in {coded.length} bytes",
            where=where,
            hint="run `ckpt verify` to see what else is damaged, and load another step",
        )


def _join(url: str, path: str) -> str:
    return f"{url.rstrip('/')}/{path}"


# ------------------------------------------------------------------------------------------------------------- opening


def read_index_file(backend: Backend, record: CommitRecord, name: str) -> bytes:
    """One index file, verified."""
    file = record.index[name]
    where = _join(backend.url, file.path)
    hint = "restore this file from a copy, or rebuild the index from the data files: `ckpt rebuild`"

    def read() -> bytes:
        try:
            data = backend.read_whole(file.path, INDEX_LIMIT)
        except NotFoundError as err:
            raise CorruptError(f"the index file {file.path} is missing", where=where, hint=hint) from err
        if len(data) != file.size:
            message = f"the index file {file.path} has {len(data)} bytes, the commit record lists {file.size}"
            raise CorruptError(message, where=where, hint=hint)
        digest = xxhash.xxh3_128_hexdigest(data)
        if digest != file.digest:
            raise CorruptError(f"the index file {file.path} is damaged: its digest is {digest}, not {file.digest}", where=where, hint=hint)
        return data

    return read_checked(backend, file.path, read)


def read_index(backend: Backend, record: CommitRecord, name: str) -> bytes:
    """One index file, verified: what the record repeats of it, which is no request, or the file. Raises what ``read_index_file`` does."""
    repeated = record.repeated(name)
    return read_index_file(backend, record, name) if repeated is None else repeated


Reading = Callable[["Backend", CommitRecord, str], bytes]


def _open(backend: Backend, data: bytes | None, read: Reading = read_index) -> tuple[CommitRecord, Contents]:
    """Record and index. Whoever replaces a checkpoint deletes the old index, so a fault counts only if the record is still the same."""
    data = _present_record(backend) if data is None else data
    # Opening reads several files, and a save may replace the checkpoint in between. A missing or damaged index file
    # is an error only if the commit record is still the one that was read first; otherwise everything is read again.
    for _ in range(_REPLACED_TRIES):
        record = CommitRecord.from_bytes(data, _join(backend.url, COMMIT_PATH))
        if record.generation is not None:
            raise joint_step(backend.url, record)
        try:
            return record, _contents(backend, record, read)
        except CkptError as err:
            fault, before, data = err, data, _record_after(backend, err, data)
            if data == before:
                break
    raise fault


def _record_after(backend: Backend, err: CkptError, before: bytes) -> bytes:
    """The record after a fault."""
    # If a file is gone, network file systems may know the old one by its name for a second.
    backend.evict(COMMIT_PATH)
    data = _present_record(backend)
    gone = isinstance(err.__cause__, NotFoundError) or getattr(err, "errno", None) == errno.ESTALE
    if data == before and gone and isinstance(err, CorruptError | StorageError):
        time.sleep(_STALE)
        data = _present_record(backend)
    return data


def _contents(backend: Backend, record: CommitRecord, read: Reading) -> Contents:
    names = [n for n in record.index if n != RANK_ROWS]  # which few read all of
    # What the record repeats is no request, and where reads take no time, threads do.
    requests = sum(n not in record.inline for n in names) if backend.io_hints.concurrency > 1 else 1
    files = dict(zip(names, map_tasks(partial(read, backend, record), names, max(1, requests), "ckpt-index"), strict=True))
    where = _join(backend.url, record.index[TENSORS].path.rpartition("/")[0])
    try:
        contents = decode_index(files, where, anchored=ANCHORS in record.features)
        excess = None if contents.sources else find_excess(contents.tensors, contents.files)
    except MemoryError as err:
        raise too_little_memory(sum(map(len, files.values())), where) from err
    if excess is None and any(is_reference(f.path) for f in contents.files) != (REFERENCED in record.features):
        excess = f"it has {'the' if REFERENCED in record.features else 'not the'} feature {REFERENCED}, unlike its data files"
    if excess is not None:
        raise CorruptError(
            f"the index cannot be: {excess}", where=where, hint="restore the index from a copy, or rebuild it: `ckpt rebuild`"
        )
    return contents


def _present_record(backend: Backend) -> bytes:
    data = read_record(backend)
    if data is not None:
        return data
    if has_orphans(backend):
        raise not_committed(backend.url)
    raise NotFoundError("there is no checkpoint", where=backend.url, hint="check the URL; `ckpt ls` lists the checkpoints there")


def joint_step(url: str, record: CommitRecord) -> CkptError:
    """That what is here is the step of a run of several jobs, which has no tensors."""
    if record.given_up is not None:
        return NotCommittedError(f"this step was given up: {record.given_up}", where=url, hint="load an earlier step")
    run = url.rstrip("/").rpartition("/")[0]
    return UsageError(
        f"this is a step of several jobs: {', '.join(record.members)}",
        where=url,
        hint=f"name the checkpoint of one: {', '.join(_join(run, m.path) for m in record.members.values())}",
    )


def not_committed(url: str) -> NotCommittedError:
    return NotCommittedError(
        f"there are files of a save, but no {COMMIT_PATH}: the save did not finish",
        where=url,
        hint="load an earlier step; what is here cannot be trusted, and the next save to this URL removes it",
    )


def open_native(
    backend: Backend, record: bytes | None = None, sources: Sequence[str] | None = None, read: Reading = read_index
) -> NativeCatalog | VirtualCatalog:
    """The checkpoint here, whose chunks are in its own files or in those of others. ``record`` and errors are as for the catalogs;
    ``sources`` says where the files of others may lie; ``read`` gives an index file by its name, verified."""
    opened = _open(backend, record, read)
    return (
        VirtualCatalog(backend, *opened, settings.sources(sources))
        if VIRTUAL in opened[0].features
        else NativeCatalog(backend, opened=opened)
    )


# Whoever replaces a checkpoint removes the old files: a reader that still needs them finds them missing, and nothing is damaged.


@contextmanager
def replacement_noticed(catalog: Catalog) -> Iterator[None]:
    """What the block raises because files of the checkpoint are not there, or not what they were, becomes ConflictError if another save has
    replaced the checkpoint since it was opened, or somebody has removed it."""
    try:
        yield
    except (CorruptError, NotFoundError, StorageError) as err:
        replaced = replacement(catalog)
        if replaced is None:
            raise
        raise replaced from err


def replacement(catalog: Catalog) -> ConflictError | None:
    """That a checkpoint was replaced or removed since it was opened; None if it is still there, or nobody can tell."""
    opened = identity(catalog)
    if not opened:
        return None
    backend = open_backend(catalog.url)
    try:
        # Past the caches of this machine: a network file system may show the old record for seconds after it was replaced.
        backend.evict(COMMIT_PATH)
        data = read_record(backend)
        if data is not None and CommitRecord.from_bytes(data, catalog.url).id == opened:
            return None
    except CkptError:  # then the first error says more
        return None
    what = "removed" if data is None else "replaced by another save"
    return ConflictError(f"the checkpoint was {what} while it was read", where=catalog.url, hint="open it again; nothing is damaged")


FORMAT = Format(name="ckpt", recognises=lambda backend, names: COMMIT_PATH in names, open=open_native)
"""This format, for ckpt.formats.registry."""
