"""The spans of a save, kept beside its index (docs/format.md §1). The checkpoint does not need them: a fault here harms nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import xxhash

from ckpt.errors import CorruptError, NotFoundError, UsageError
from ckpt.reread import read_checked
from ckpt.spans import UNNEEDED, Row, SpanTable

from .paths import DIGEST_DIGITS, SPANS, id_of, index_path

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

    from .commit import CommitRecord

VERSION = 1
MANY = 64
"""Ranks of which all single spans are kept. Of more ranks only sums are, but for the leader and the slowest."""
SLOWEST = 8
SIZE_LIMIT = 256 << 20
"""Bytes of the whole file that are written or read; 100,000 ranks take less."""

_HEAD = b'{"digest":"'
_ZEROS = b"0" * DIGEST_DIGITS
_DATA = len(_HEAD) + DIGEST_DIGITS


def write_spans(backend: Backend, id: str, rows: Mapping[int, Row]) -> dict[int, float]:
    """Keep what ``Spans.to_json`` gave on each rank (counted from 0, the leader first) with save ``id``, once that is committed. Gives how
    many seconds each of these was busy.

    Empty rows are left out; without any other nothing is written.

    Raises:
        CorruptError: a row is none.
        UsageError: more ranks than fit.
        StorageError: the storage failed, or has spans of this save already.
    """
    path = index_path(id, SPANS)
    tables = {rank: SpanTable.from_row(rows[rank], f"rank {rank}") for rank in sorted(rows) if rows[rank]}
    if not tables:
        return {}
    data = _encode(id, _thinned(tables))
    if len(data) > SIZE_LIMIT:
        raise UsageError(f"the spans of {len(tables):,} ranks take {len(data):,} bytes; at most {SIZE_LIMIT:,} are kept", where=path)
    with backend.create(path, len(data)) as writer:
        writer.write(0, [data])
        writer.commit()
    return {rank: table.seconds for rank, table in tables.items()}


def read_spans(backend: Backend, record: CommitRecord) -> dict[int, SpanTable]:
    """The spans of the ranks that sent any, by rank.

    Raises:
        NotFoundError: none were kept.
        CorruptError: the file is damaged, or of another save.
    """
    path = index_path(record.id, SPANS)
    where = f"{backend.url.rstrip('/')}/{path}"

    def read() -> dict[int, SpanTable]:
        return _decode(backend.read_whole(path, SIZE_LIMIT), record, where)

    if id_of(path) is None:
        _damaged(f"a save cannot have the id {record.id!r}", where)
    try:
        return read_checked(backend, path, read)
    except NotFoundError as err:
        hint = "they are written just after the commit, and not where they were switched off or the file could not be written"
        raise NotFoundError("no spans were kept with this checkpoint", where=where, hint=hint) from err


def _thinned(tables: Mapping[int, SpanTable]) -> dict[int, SpanTable]:
    if len(tables) <= MANY:
        return dict(tables)
    slowest = sorted(tables, key=lambda rank: (-tables[rank].seconds, rank))[:SLOWEST]
    whole = {min(tables), *slowest}
    return {rank: table if rank in whole else table.summed() for rank, table in tables.items()}


def _encode(id: str, tables: Mapping[int, SpanTable]) -> bytes:
    members = {"id": id, "version": VERSION, "ranks": {str(rank): table.to_row() for rank, table in tables.items()}}
    rest = b'",' + json.dumps(members, separators=(",", ":"), allow_nan=False).encode()[1:] + b"\n"
    return _HEAD + xxhash.xxh3_128_hexdigest(_HEAD + _ZEROS + rest).encode() + rest


def _decode(data: bytes, record: CommitRecord, where: str) -> dict[int, SpanTable]:
    digest = xxhash.xxh3_128_hexdigest(data[: len(_HEAD)] + _ZEROS + data[_DATA:]).encode()
    if not data.startswith(_HEAD) or data[len(_HEAD) : _DATA] != digest:
        _damaged("its digest is wrong", where)
    members = _parse(data, where)
    if members.get("id") != record.id or members.get("version") != VERSION:
        _damaged(f"it is of save {members.get('id')!r}, version {members.get('version')!r}", where)
    ranks = members.get("ranks")
    if not isinstance(ranks, dict) or not ranks:
        _damaged("it has no ranks", where)
    return {_rank(text, record.world_size, where): SpanTable.from_row(row, where) for text, row in ranks.items()}


def _parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        members = json.loads(data.decode())
    except (ValueError, RecursionError) as err:
        _damaged(f"it is not JSON ({err})", where)
    if not isinstance(members, dict):
        _damaged("it is not a JSON object", where)
    return members


def _rank(text: str, ranks: int, where: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or str(int(text)) != text or int(text) >= ranks:
        _damaged(f"{text[:20]!r} is no rank of {ranks}", where)
    return int(text)


def _damaged(what: str, where: str) -> NoReturn:
    raise CorruptError(f"the file of spans is damaged: {what}", where=where, hint=UNNEEDED)
