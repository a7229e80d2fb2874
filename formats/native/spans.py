"""The spans of a save, kept beside its index (docs/format.md §1). The checkpoint does not need them: a fault here harms nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import xxhash

from ckpt.errors import CorruptError, NotFoundError, UsageError
from ckpt.reread import read_checked
from ckpt.text.json_reader import parse_object
from ckpt.tracing.spans import UNNEEDED, Row, SpanTable

from .paths import DIGEST_DIGITS, SPANS, id_of, index_path
from .span_columns import MOST_SUMS, About, SpanGroups, decode_about, decode_groups, encode_about, encode_groups

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

    from .commit import CommitRecord

VERSION = 2
MANY = 64
"""Ranks of which all single spans are kept. Of more ranks only sums are, but for the leader and the slowest."""
SLOWEST = 8
_WRONG = (ValueError, TypeError, KeyError)
SIZE_LIMIT = 256 << 20
"""Bytes of the whole file that are written or read; 100,000 ranks take less."""

_NOTHING = About(coordinates={})

_HEAD = b'{"digest":"'
_ZEROS = b"0" * DIGEST_DIGITS
_DATA = len(_HEAD) + DIGEST_DIGITS


def write_spans(backend: Backend, id: str, rows: Mapping[int, Row]) -> dict[int, float]:
    """Keep what ``Spans.to_json`` gave on each rank (counted from 0, the leader first) with save ``id``, once that is committed. Gives how
    many seconds each of these was busy.

    Empty rows are left out; without any other nothing is written.
    """
    path = index_path(id, SPANS)
    rows = {rank: rows[rank] for rank in sorted(rows) if rows[rank]}
    if not rows:
        return {}
    kept, columns = _thinned(rows)
    try:
        about = encode_about(rows)
    except _WRONG as err:
        raise CorruptError(f"these are not the spans of a rank: {err}", where=path, hint=UNNEEDED) from err
    members = {"id": id, "version": VERSION, "ranks": {str(rank): row for rank, row in kept.items()}, "groups": columns.groups, **about}
    sums = sum(count * max(1, len(group["phases"])) for group in columns.groups for _, count in group["ranks"])
    if sums > MOST_SUMS:
        raise UsageError(f"the spans of {len(rows):,} ranks have {sums:,} phases of ranks; at most {MOST_SUMS:,} are kept", where=path)
    data = _encode(members)
    if len(data) > SIZE_LIMIT:
        raise UsageError(f"the spans of {len(rows):,} ranks take {len(data):,} bytes; at most {SIZE_LIMIT:,} are kept", where=path)
    with backend.create(path, len(data)) as writer:
        writer.write(0, [data])
        writer.commit()
    return columns.seconds


def read_spans(backend: Backend, record: CommitRecord) -> dict[int, SpanTable]:
    """The spans of the ranks that sent any, by rank."""
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


def _thinned(rows: Mapping[int, Row]) -> tuple[dict[int, Row], SpanGroups]:
    """The rows that are kept whole, and columns of the others."""
    # Of many ranks, the single spans of few are looked at: the leader does this while its call goes on.
    columns = SpanGroups(groups=[], seconds={})
    if len(rows) > MANY:
        with_sums = {rank: row if "sums" in row else _summed(row, rank) for rank, row in rows.items()}
        columns = _columns(with_sums)
        detailed = {*sorted(columns.seconds, key=lambda rank: (-columns.seconds[rank], rank))[:SLOWEST], next(iter(rows))}
    else:
        detailed = set(rows)
    kept = {}
    for rank in sorted(detailed):
        table = SpanTable.from_row(rows[rank], f"rank {rank}")
        kept[rank] = table.to_row()
        columns.seconds[rank] = table.seconds
    return kept, columns


def _columns(rows: Mapping[int, Row]) -> SpanGroups:
    """SpanGroups of all; the rank whose row is none is named."""
    try:
        return encode_groups(rows)
    except _WRONG as err:
        for rank, row in rows.items() if len(rows) > 1 else ():
            _columns({rank: row})
        raise CorruptError(f"these are not the spans of a rank: {err}", where=f"rank {next(iter(rows))}", hint=UNNEEDED) from err


def _summed(row: Row, rank: int) -> Row:
    summed = SpanTable.from_row(row, f"rank {rank}").summed().to_row()
    return {**summed, "sums": summed["folded"]}


def _encode(members: Mapping[str, Any]) -> bytes:
    rest = b'",' + json.dumps(members, separators=(",", ":"), allow_nan=False).encode()[1:] + b"\n"
    return _HEAD + xxhash.xxh3_128_hexdigest(_HEAD + _ZEROS + rest).encode() + rest


def _decode(data: bytes, record: CommitRecord, where: str) -> dict[int, SpanTable]:
    digest = xxhash.xxh3_128_hexdigest(data[: len(_HEAD)] + _ZEROS + data[_DATA:]).encode()
    if not data.startswith(_HEAD) or data[len(_HEAD) : _DATA] != digest:
        _damaged("its digest is wrong", where)
    members = _parse(data, where)
    if members.get("id") != record.id or members.get("version") not in (1, VERSION):
        _damaged(f"it is of save {members.get('id')!r}, version {members.get('version')!r}", where)
    ranks = members.get("ranks")
    if not isinstance(ranks, dict) or not (ranks or members.get("groups")):
        _damaged("it has no ranks", where)
    if any(isinstance(row, dict) and isinstance(row.get("spans"), str) for row in ranks.values()):
        _damaged("the spans of a rank are no columns", where)  # ranks send them so, but they are not kept so
    tables = {_rank(text, record.world_size, where): SpanTable.from_row(row, where) for text, row in ranks.items()}
    try:
        for rank, table in decode_groups(members.get("groups", []), record.world_size):
            tables.setdefault(rank, table)  # a row says more
        abouts = decode_about(members, sorted(tables))
    except (ValueError, OverflowError) as err:
        _damaged(f"{err}", where)
    return {rank: _with_about(tables[rank], abouts[rank]) for rank in sorted(tables)}


def _with_about(table: SpanTable, about: About) -> SpanTable:
    if about == _NOTHING:
        return table
    retries, throttled = about.storage or (0, 0)
    return replace(
        table,
        host=about.host,
        coordinates=about.coordinates,
        blocked=about.blocked,
        waited=about.waited,
        retries=retries,
        throttled=throttled,
    )


def _parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        return parse_object(data)
    except ValueError as err:
        _damaged(str(err), where)


def _rank(text: str, ranks: int, where: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or str(int(text)) != text or int(text) >= ranks:
        _damaged(f"{text[:20]!r} is no rank of {ranks}", where)
    return int(text)


def _damaged(what: str, where: str) -> NoReturn:
    raise CorruptError(f"the file of spans is damaged: {what}", where=where, hint=UNNEEDED)
