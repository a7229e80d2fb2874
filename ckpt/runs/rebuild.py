"""Makes the lost or damaged index of a checkpoint again, from what its data files say of themselves (docs/format.md §9). No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckpt.catalog import Contents
from ckpt.errors import CorruptError, FormatError, NotFoundError, UsageError
from ckpt.formats.native.catalog import read_index_file
from ckpt.formats.native.commit import (
    ALIASES,
    ANCHORS,
    APART,
    COMMIT_PATH,
    ELSEWHERE,
    LABELS,
    REFERENCED,
    VALUES,
    VIRTUAL,
    CommitRecord,
    is_ours,
    read_record,
)
from ckpt.formats.native.index import IndexCache, decode_files, decode_index, encode_index
from ckpt.formats.native.paths import FILES, GRIDS, INDEX_LIMIT, STATE, TENSORS, id_of, index_path, is_reference, split_url
from ckpt.formats.native.rebuild import Rebuilt, rebuild
from ckpt.formats.native.writer import CheckpointJournal, write_index
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend

# What comes from where
#
#   each data file's header     name, dtype, box, place and digest of every chunk in it: the tables of tensors, grids and files
#   index files whose digest    stay as they are. If the three tables are among them, aliases and padding are kept with them; if state.json
#   the commit record confirms  is, the values are
#   the commit record           number of ranks, metrics, tags; and the bytes of all tensors, which shows that no data file is missing
#
# Headers alone are read, and none of the chunks' bytes: `ckpt verify` compares these afterwards. The new index has the id of the data files
# and replaces the old one file by file, the record last. So a rebuild that is killed is begun again by the same command.

_TABLES = (TENSORS, GRIDS, FILES)


@dataclass(frozen=True, kw_only=True, slots=True)
class RebuildReport:
    """What was rebuilt, or with ``dry_run`` would be. ``rebuilt`` is False if the index is whole: then nothing is done."""

    url: str
    id: str
    rebuilt: bool
    files: int
    tensors: int
    bytes: int
    """Of all tensors, before coding."""
    lost: tuple[str, ...]
    """What could not be recovered, now or by an earlier rebuild: ``values``, ``aliases and padding``, ``metrics and tags``, and ``what lies
    in other checkpoints`` if nothing that is left says whether the save referred to those beside it, and it may have."""
    dry_run: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Index:
    """What is left of an index: its record, if it can be read, and the files that the record confirms, or repeats (``inline``)."""

    record_bytes: bytes | None
    record: CommitRecord | None
    files: Mapping[str, bytes]
    is_whole: bool = False


def rebuild_checkpoint(url: str, *, id: str | None = None, dry_run: bool = False) -> RebuildReport:
    """Make the index of the checkpoint at ``url`` again. The data files stay as they are.

    Args:
        id: of the save: the first part of the names in ``data/``. It is needed where no commit record says it; then nobody knows whether
            that save was ever whole. A tensor's last rows that are in no data file are not missed, unless they were coded.
        dry_run: only tell what would be done.
    """
    backend = open_backend(url)
    index = _left(backend)
    chosen = _chosen(backend, index, id)
    if index.record is not None and VIRTUAL in index.record.features:
        hint = "import it again: `ckpt import`"
        raise FormatError("a virtual checkpoint has no data files to rebuild its index from", where=url, hint=hint)
    refers = None if index.is_whole else _refers(backend, index, chosen)
    if refers:
        raise FormatError(
            "a checkpoint that refers to data files of others cannot be rebuilt: its own files do not say which",
            where=url,
            hint="restore the index from a copy; the checkpoints that it refers to are whole by themselves",
        )
    lost: tuple[str, ...] = ()
    if index.is_whole:
        features = () if index.record is None else index.record.features
        rebuilt = Rebuilt(contents=decode_index(index.files, "the index", anchored=ANCHORS in features), features=())
    else:
        rebuilt, lost = _rebuilt(backend, index, chosen)
        if refers is None and _may_refer(backend):
            lost = (*lost, ELSEWHERE)
    if index.record is not None:  # the values of an earlier rebuild are whole, but they are none
        lost = tuple(dict.fromkeys((*lost, *index.record.lost)))
    if not index.is_whole and not dry_run:
        _write(backend, index, rebuilt, lost, chosen)
    return RebuildReport(
        url=url,
        id=chosen,
        rebuilt=not index.is_whole,
        files=len(rebuilt.contents.files),
        tensors=sum(t.alias is None for t in rebuilt.contents.tensors),
        bytes=_tensor_bytes(rebuilt.contents),
        lost=lost,
        dry_run=dry_run,
    )


def _left(backend: Backend) -> _Index:
    data = read_record(backend)
    if data is None:
        return _Index(record_bytes=None, record=None, files={})
    try:
        record = CommitRecord.from_bytes(data, f"{backend.url.rstrip('/')}/{COMMIT_PATH}")
    except CorruptError:  # of a later version: FormatError
        return _Index(record_bytes=data, record=None, files={})
    files: dict[str, bytes | None] = {}
    is_whole = True
    for name in record.index:
        try:
            files[name] = read_index_file(backend, record, name)
        except CorruptError:
            files[name], is_whole = record.repeated(name), False
    there = {name: content for name, content in files.items() if content is not None}
    return _Index(record_bytes=data, record=record, files=there, is_whole=is_whole)


def _chosen(backend: Backend, index: _Index, id: str | None) -> str:
    if index.record is not None:
        if id not in (None, index.record.id):
            raise UsageError(f"save {index.record.id} is committed here, not {id}", where=backend.url, hint="leave --id out")
        return index.record.id
    saves = sorted({save for e in backend.list_prefix("data/") if (save := id_of(e.path)) is not None})
    if not saves:
        raise NotFoundError(
            "there are no data files of a checkpoint", where=backend.url, hint="check the URL; `ckpt ls` shows what is there"
        )
    if id is None and (len(saves) > 1 or index.record_bytes is None):
        what = (
            "the commit record is damaged"
            if index.record_bytes is not None
            else "there is no commit record: this save may never have finished"
        )
        raise UsageError(f"{what}; there are data files of {', '.join(saves)}", where=backend.url, hint=f"name the save: --id {saves[-1]}")
    if id is not None and id not in saves:
        raise NotFoundError(f"there are no data files of save {id}", where=backend.url, hint=f"there are some of {', '.join(saves)}")
    return saves[-1] if id is None else id


def _refers(backend: Backend, index: _Index, id: str) -> bool | None:
    """Whether the save has chunks in data files of others, which would be missing; None if nothing that is left of its index says it."""
    if index.record is not None:
        return REFERENCED in index.record.features
    try:
        rows = decode_files(backend.read_whole(index_path(id, FILES), INDEX_LIMIT), backend.url)
    except (NotFoundError, CorruptError):
        return None
    return any(is_reference(file.path) for file in rows)


def _may_refer(backend: Backend) -> bool:
    """Whether there is a checkpoint beside this one that others may refer to. Its own files do not say whether it did."""
    try:
        run, own = split_url(backend)
    except UsageError:
        return False
    here = open_backend(run)
    for entry in here.list_dir(""):
        data = read_record(here, entry) if entry.endswith("/") and entry.rstrip("/") != own else None
        if data is None:
            continue
        try:
            if CommitRecord.from_bytes(data, here.url).reusable:
                return True
        except (CorruptError, FormatError):
            if is_ours(data):
                return True
    return False


def _rebuilt(backend: Backend, index: _Index, id: str) -> tuple[Rebuilt, tuple[str, ...]]:
    """The new index, and what it lacks."""
    of_nothing = encode_index(Contents(tensors=(), files=()))
    where = f"{backend.url.rstrip('/')}/index-{id}"
    known = () if index.record is None else index.record.features
    lost: tuple[str, ...] = (LABELS,) if index.record is None else ()
    if _has_tables(index):
        tables = {name: index.files[name] for name in _TABLES}
        contents = decode_index({**of_nothing, **tables}, where, anchored=ANCHORS in known)
        rebuilt = Rebuilt(contents=contents, features=known)
    else:
        rebuilt, lost = rebuild(backend, id), (ALIASES, *lost)
    contents = rebuilt.contents
    # The last rows of a tensor, and whole tensors, leave no trace where their data file is gone.
    nbytes = _tensor_bytes(contents)
    if index.record is not None and nbytes != index.record.tensor_bytes:
        raise CorruptError(
            f"the data files have {nbytes:,} bytes of tensors, the commit record says {index.record.tensor_bytes:,}",
            where=backend.url,
            hint=f"restore the missing data files, or move {COMMIT_PATH} away and take what is left: `ckpt rebuild --id {index.record.id}`",
        )
    if STATE in index.files:
        values = decode_index({**of_nothing, STATE: index.files[STATE]}, where)
        contents = replace(contents, state=values.state, ranks=values.ranks)
    if STATE not in index.files or APART in known:
        lost = (VALUES, *lost)
    return replace(rebuilt, contents=contents), lost


def _write(backend: Backend, index: _Index, rebuilt: Rebuilt, lost: tuple[str, ...], id: str) -> None:
    backend.prepare()
    record = index.record
    ranks = len({file.rank for file in rebuilt.contents.files})
    journal = CheckpointJournal(backend, id=id, previous=index.record_bytes, resumable=True)
    # Index files that stay, stay byte for byte: only so does the record confirm them for the next attempt, if this one is killed.
    cache = IndexCache(state=index.files.get(STATE))
    if _has_tables(index):
        cache.tables = {name: index.files[name] for name in (TENSORS, GRIDS)}
        cache.tensor_bytes = _tensor_bytes(rebuilt.contents)
    write_index(
        journal,
        rebuilt.contents,
        world_size=ranks if record is None else record.world_size,
        features=rebuilt.features,
        cache=cache,
        metrics=None if record is None else record.metrics,
        tags=() if record is None else record.tags,
        lost=lost,
        reusable=record is None or record.reusable,
    )


def _has_tables(index: _Index) -> bool:
    """Whether the tables that are left say all: with ``APART``, tensors of ranks are in files of their own."""
    return {*_TABLES} <= index.files.keys() and (index.record is None or APART not in index.record.features)


def _tensor_bytes(contents: Contents) -> int:
    """Of all tensors, before coding."""
    return sum(t.nbytes for t in contents.tensors if t.alias is None)
