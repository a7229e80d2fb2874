"""A checkpoint exists if and only if its commit record does: writing the index and the record, changing tags."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import xxhash

from ckpt.catalog import Contents
from ckpt.errors import ConflictError, NotFoundError
from ckpt.formats.journal import CheckpointJournal, publish
from ckpt.plan.values import part_in

from .catalog import read_record
from .clearing import check_no_link
from .commit import COMMIT_PATH, INLINE_LIMIT, PART_LIMIT, Branches, CommitRecord, IndexFile, inlined, new_id, now, writer_name
from .index import IndexCache, encode_index
from .paths import RANK_ROWS, index_path, is_reference

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


log = logging.getLogger("ckpt")

__all__ = ["CheckpointJournal", "IndexCache", "committed_id", "new_id", "read_record", "set_tags", "write_index"]


def write_index(
    journal: CheckpointJournal,
    contents: Contents,
    *,
    world_size: int,
    features: tuple[str, ...] = (),
    cache: IndexCache | None = None,
    metrics: Mapping[str, float] | None = None,
    tags: tuple[str, ...] = (),
    lost: tuple[str, ...] = (),
    listed: list[str] | None = None,
    reusable: bool = False,
    branches: Branches = (),
) -> CommitRecord:
    """Write the index of the journal's save and commit it: the last act of a save, done by one rank, when all data files are durable.

    ``features`` are the extensions that it takes to read the checkpoint: ``commit.CODED`` if any of its chunks is coded, ``commit.APART``
    if the contents have ``rows``.
    ``kept``: see ``encode_index``. ``metrics``, ``tags``: what the job says of this checkpoint. ``lost``: what is not in
    it any more (``CommitRecord.lost``). ``reusable``, ``branches``: see there. ``listed`` takes what
    ``CheckpointJournal.commit`` gives. If this raises, the save is not committed, and its index files are removed unless the
    journal is resumable; the case that ``CheckpointJournal.commit`` leaves open is open here, too.
    """
    check_no_link(journal.backend)
    cache = IndexCache() if cache is None else cache
    if cache.state is None or contents.state is not None:  # else the contents leave the state to the cache
        cache.part = part_in(contents.state)
    files = encode_index(contents, cache)
    small = {name: data for name, data in files.items() if name != RANK_ROWS}  # of which readers take single rows
    record = CommitRecord(
        id=journal.id,
        created=now(),
        writer=writer_name(),
        world_size=world_size,
        features=features,
        index={n: IndexFile(path=index_path(journal.id, n), size=len(d), digest=xxhash.xxh3_128_hexdigest(d)) for n, d in files.items()},
        tensor_bytes=cache.tensor_bytes + contents.rows_bytes,
        metrics=dict(metrics or {}),
        tags=tags,
        lost=lost,
        reusable=reusable,
        branches=branches,
        inline=inlined(small, min(INLINE_LIMIT, journal.backend.io_hints.coalesce_gap)),
        part=None if cache.part is None else cache.part.text()[:PART_LIMIT],
    )
    try:
        for name, data in files.items():
            if journal.resumable:  # other processes may make it too
                publish(journal.backend, record.index[name].path, data, replace=True)
            else:
                journal.write(record.index[name].path, data)
    except BaseException:
        journal.discard()
        raise
    sizes = {f.path: f.size for f in contents.files if not is_reference(f.path)} | {f.path: f.size for f in record.index.values()}
    there = journal.commit(record.to_bytes(), sizes)
    if listed is not None:
        listed += there or ()
    return record


def set_tags(backend: Backend, tags: Collection[str], *, id: str | None = None, instead_of: Collection[str] = ()) -> CommitRecord:
    """Give a committed checkpoint these tags in place of those that it has. With ``id`` and ``instead_of``, those that it had when somebody
    decided, nothing is changed if it has others now: a tag of somebody else would be lost."""
    check_no_link(backend)
    data = read_record(backend)
    if data is None:
        raise NotFoundError("there is no checkpoint", where=backend.url, hint="`ckpt ls` shows what is there")
    record = CommitRecord.from_bytes(data, _where(backend))
    if id is not None and (record.id != id or set(record.tags) != set(instead_of)):
        raise ConflictError("the checkpoint was replaced or tagged meanwhile", where=backend.url, hint="look at its tags, and try again")
    tagged = replace(record, tags=tuple(sorted(set(tags))))
    backend.put_if(COMMIT_PATH, tagged.to_bytes(), expected=data)
    return tagged


def committed_id(backend: Backend, within: str = "") -> str | None:
    """The id of the save that is committed here, or in the directory ``within`` (empty, or ending in a slash); None if none is."""
    data = read_record(backend, within)
    return None if data is None else CommitRecord.from_bytes(data, _where(backend, within)).id


def _where(backend: Backend, within: str = "") -> str:
    return f"{backend.url.rstrip('/')}/{within}{COMMIT_PATH}"
