"""A checkpoint exists if and only if its commit record does, and this is the only place that writes one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from ckpt.catalog import Contents
from ckpt.errors import CkptError, ConflictError, CorruptError, FormatError, NotFoundError, StorageError

from .catalog import read_index, read_record
from .clearing import check_no_link, check_there, clear, confirm
from .commit import COMMIT_PATH, INLINE_LIMIT, CommitRecord, IndexFile, inlined, new_id, now, writer_name
from .index import Kept, decode_files, encode_index
from .paths import FILES, RANK_ROWS, SPANS, data_prefix, id_of, index_path

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

__all__ = ["Kept", "commit_copy", "committed_id", "new_id", "previous_files", "read_record", "remove_checkpoint", "set_tags", "write_index"]


def write_index(
    backend: Backend,
    contents: Contents,
    *,
    id: str,
    world_size: int,
    previous: bytes | None,
    features: tuple[str, ...] = (),
    kept: Kept | None = None,
    metrics: Mapping[str, float] | None = None,
    shared: bool = False,
    listed: list[str] | None = None,
) -> CommitRecord:
    """Write the index of save ``id`` and commit it: the last act of a save, done by one rank, when all data files are durable.

    ``features`` are the extensions that it takes to read the checkpoint: ``commit.CODED`` if any of its chunks is coded, ``commit.APART``
    if the contents have ``rows``.
    ``kept``: see ``encode_index``. ``metrics``: what the job says of this checkpoint.
    ``previous`` is the commit record that this one replaces, as ``read_record`` gave it before the save; None if there was none.
    ``shared``: others may do the same at the same time. Index files then appear whole, are taken as they are, and are never removed.
    The record is published if all files are there, and stays if they are still there then (``clearing``). ``listed`` takes the paths of
    everything that was there then, if that was looked at.
    If this raises, the save is not committed and its index files are removed. One case is left open: the storage failed while it published
    the record, and may have it or not. Then the index files stay, and a caller MUST NOT remove data files of the save before
    ``committed_id`` has shown that it is not the committed one.

    Raises:
        ConflictError: the commit record is not ``previous``: somebody else saved here. Nothing of theirs is touched. Or the root is a
            symbolic link.
        ConsistencyError, StateError: the contents cannot be an index.
        StorageError: the storage failed, or does not have all data files.
    """
    check_no_link(backend)
    kept = Kept() if kept is None else kept
    files = encode_index(contents, kept)
    record = _record(files, kept.tensor_bytes + contents.rows_bytes, id, world_size, features, metrics or {})
    small = {name: data for name, data in files.items() if name != RANK_ROWS}  # of which readers take single rows
    record = replace(record, inline=inlined(small, min(INLINE_LIMIT, backend.io_hints.coalesce_gap)))
    made: list[str] = []
    try:
        for name, data in files.items():
            if shared:
                _put(backend, record.index[name].path, data)
            else:
                _write(backend, record.index[name].path, data, made)
        sizes = {f.path: f.size for f in contents.files} | {f.path: f.size for f in record.index.values()}
        check_there(backend, id, sizes)
    except BaseException:
        _remove(backend, made)
        raise
    there = _publish(backend, record.to_bytes(), previous, made, id=id, sizes=sizes)
    if listed is not None:
        listed += there or ()
    return record


def commit_copy(backend: Backend, record: bytes, sizes: Mapping[str, int], previous: bytes | None = None) -> None:
    """Commit a checkpoint that was copied file by file: the last act of a copy, when all files are there and durable. ``sizes`` are theirs,
    by path. ``previous`` is the commit record that it replaces; None: none is there.

    Raises:
        ConflictError: another commit record is there by now. It stays. Or the root is a symbolic link.
        StorageError: files are missing, and nothing is committed. Or the storage failed; it may have the record or not.
    """
    check_no_link(backend)
    id = CommitRecord.from_bytes(record, _where(backend)).id
    check_there(backend, id, sizes)
    _publish(backend, record, previous, (), id=id, sizes=sizes)


def previous_files(backend: Backend, previous: bytes | None = None) -> tuple[str, ...]:
    """Paths of all index and data files that a commit record reaches, and of its spans, to be removed once it is replaced.

    The record is ``previous``, by default the present one; it is not among the paths. No record: no files. If its index is damaged, the
    data files that bear its id are listed instead.

    Raises:
        CorruptError, FormatError: the record itself cannot be read.
    """
    data = read_record(backend) if previous is None else previous
    if data is None:
        return ()
    record = CommitRecord.from_bytes(data, _where(backend))
    index = (*(f.path for f in record.index.values()), *_spans_path(backend, record.id))
    try:
        files = decode_files(read_index(backend, record, FILES), record.index[FILES].path)
    except CorruptError:
        return (*index, *(e.path for e in backend.list_prefix(data_prefix(record.id))))
    return (*index, *(f.path for f in files))


def _spans_path(backend: Backend, id: str) -> tuple[str, ...]:
    path = index_path(id, SPANS)
    try:
        backend.size(path)
    except NotFoundError:
        return ()
    return (path,)


def set_tags(backend: Backend, tags: Collection[str]) -> CommitRecord:
    """Give a committed checkpoint these tags in place of those that it has.

    Raises:
        NotFoundError: there is no commit record.
        ConflictError: somebody else changed it meanwhile, or the root is a symbolic link.
        CorruptError, FormatError: it cannot be read.
    """
    check_no_link(backend)
    data = read_record(backend)
    if data is None:
        raise NotFoundError("there is no checkpoint", where=backend.url, hint="`ckpt ls` shows what is there")
    record = replace(CommitRecord.from_bytes(data, _where(backend)), tags=tuple(sorted(set(tags))))
    backend.put_if(COMMIT_PATH, record.to_bytes(), expected=data)
    return record


def remove_checkpoint(backend: Backend, within: str = "", *, id: str | None = None, tags: Collection[str] = ()) -> bool:
    """Remove a checkpoint: first the commit record, so that it does not exist any more, then its files and those of older saves.

    It is in the directory ``within`` (empty, or ending in a slash), which is no link. Stopped anywhere, it leaves a whole checkpoint or
    orphans. Files that are not of this format stay, and so do those of a save that began later. An absent checkpoint is no error. With
    ``id`` and ``tags``, those that it had when somebody decided, nothing is removed if it has others now. Whether it was removed.

    Raises:
        StorageError: the storage failed, or a link is on the way: nothing is removed beyond one.
    """
    data = read_record(backend, within)
    last = None
    if data is not None:
        with suppress(CorruptError, FormatError):  # then whoever removes it knows
            record = CommitRecord.from_bytes(data, _where(backend, within))
            last = record.id
            if id is not None and (record.id != id or set(record.tags) != set(tags)):
                return False
    backend.delete(within + COMMIT_PATH)
    saves: dict[str, list[str]] = {}
    for entry in backend.list_prefix(within):
        save = id_of(entry.path.removeprefix(within))
        if save is not None and (last is None or save <= last):
            saves.setdefault(save, []).append(entry.path)
    for save, paths in saves.items():
        if save == last:
            for path in paths:
                backend.delete(path)
        else:
            clear(backend, save, within, paths, partial(committed_id, backend, within))
    return True


def committed_id(backend: Backend, within: str = "") -> str | None:
    """The id of the save that is committed here, or in the directory ``within`` (empty, or ending in a slash); None if none is.

    Raises:
        CorruptError, FormatError: the record cannot be read.
        StorageError: the storage cannot say.
    """
    data = read_record(backend, within)
    return None if data is None else CommitRecord.from_bytes(data, _where(backend, within)).id


def _where(backend: Backend, within: str = "") -> str:
    return f"{backend.url.rstrip('/')}/{within}{COMMIT_PATH}"


def _record(
    files: Mapping[str, bytes], tensor_bytes: int, id: str, world_size: int, features: tuple[str, ...], metrics: Mapping[str, float]
) -> CommitRecord:
    index = {n: IndexFile(path=index_path(id, n), size=len(d), digest=xxhash.xxh3_128_hexdigest(d)) for n, d in files.items()}
    return CommitRecord(
        id=id,
        created=now(),
        writer=writer_name(),
        world_size=world_size,
        features=features,
        index=index,
        tensor_bytes=tensor_bytes,
        metrics=dict(metrics),
    )


def _write(backend: Backend, path: str, data: bytes, made: list[str]) -> None:
    made.append(path)
    try:
        with backend.create(path, len(data)) as writer:
            writer.write(0, [data])
            writer.commit()
    except ConflictError:
        made.remove(path)  # somebody else's
        raise


def _put(backend: Backend, path: str, data: bytes) -> None:
    """Make a file that others may make too."""
    try:
        backend.put_if(path, data, expected=None)
    except ConflictError:
        there = backend.read(path)
        if there != data:  # by another version of a library
            backend.put_if(path, data, expected=there)


def _publish(
    backend: Backend, data: bytes, previous: bytes | None, made: Sequence[str], *, id: str, sizes: Mapping[str, int]
) -> list[str] | None:
    """Commit; gives what ``confirm`` does."""
    try:
        backend.put_if(COMMIT_PATH, data, expected=previous)
    except BaseException as err:
        holds = _holds(backend, data)
        if not (holds and isinstance(err, StorageError) and _published_again(backend, data)):
            if holds is False:
                _remove(backend, made)
            raise
    try:
        return confirm(backend, id, sizes, previous)
    except StorageError:
        if _holds(backend, data) is False:
            _remove(backend, made)
        raise


def _published_again(backend: Backend, data: bytes) -> bool:
    """Whether a record that is there, but perhaps not for good, was made durable: an answer was lost, or a sync failed after a rename."""
    try:
        backend.put_if(COMMIT_PATH, data, expected=data)
    except StorageError:
        return False
    return True


def _holds(backend: Backend, data: bytes) -> bool | None:
    """Whether the commit record is ``data``; None if the storage cannot say."""
    try:
        return read_record(backend) == data
    except CkptError:
        return None


def _remove(backend: Backend, paths: Sequence[str]) -> None:
    for path in paths:
        with suppress(CkptError):  # the error that led here matters more; what stays is an orphan
            backend.delete(path)
