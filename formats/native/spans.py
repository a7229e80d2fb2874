"""The spans of a save, kept beside its index (docs/format.md §1). The checkpoint does not need them: a fault here harms nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import xxhash

from ckpt.errors import CorruptError, NotFoundError, UsageError
from ckpt.reread import read_checked
from ckpt.spans import BYTES, LEADING, MICROS, UNNEEDED, WAITING, Row, SpanTable, are_phases, began_of

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
    kept, seconds = _thinned({rank: rows[rank] for rank in sorted(rows) if rows[rank]})
    if not kept:
        return {}
    data = _encode(id, kept)
    if len(data) > SIZE_LIMIT:
        raise UsageError(f"the spans of {len(kept):,} ranks take {len(data):,} bytes; at most {SIZE_LIMIT:,} are kept", where=path)
    with backend.create(path, len(data)) as writer:
        writer.write(0, [data])
        writer.commit()
    return seconds


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


def _thinned(rows: Mapping[int, Row]) -> tuple[dict[int, Row], dict[int, float]]:
    """The rows that are kept, and how many seconds each rank was busy. Of many ranks, the single spans of few are looked at: the leader
    does this while its call goes on."""
    seconds: dict[int, float] = {}
    kept: dict[int, Row] = {}
    if len(rows) > MANY:
        for rank, row in rows.items():
            kept[rank], seconds[rank] = _summed_row(row, f"rank {rank}")
    detailed = sorted(seconds, key=lambda rank: (-seconds[rank], rank))[:SLOWEST] if seconds else list(rows)
    for rank in {*detailed, *list(rows)[:1]}:
        table = SpanTable.from_row(rows[rank], f"rank {rank}")
        kept[rank], seconds[rank] = table.to_row(), table.seconds
    return {rank: kept[rank] for rank in rows}, seconds


def _summed_row(row: Row, where: str) -> tuple[Row, float]:
    """``SpanTable.summed`` of a row as a row, and ``SpanTable.seconds``; of a row of ``Spans.to_json`` without its single spans."""
    if "sums" not in row:
        table = SpanTable.from_row(row, where)
        return table.summed().to_row(), table.seconds
    try:
        return _sums(row)
    except (ValueError, TypeError, KeyError) as err:
        raise CorruptError(f"these are not the spans of a rank: {err}", where=where, hint=UNNEEDED) from err


def _sums(row: Row) -> tuple[Row, float]:
    phases, sums = row["phases"], row["sums"]
    if not isinstance(phases, list) or not all(isinstance(p, str) for p in phases) or not are_phases(tuple(phases)):
        raise ValueError("its phases are no names")
    if not isinstance(sums, list) or {*map(type, chain.from_iterable(sums))} - {int} or {*map(len, sums)} - {6}:
        raise ValueError("a sum is no row of six numbers")
    if {number for number, *_ in sums} != {*range(len(phases))} or len(sums) != len(phases):
        raise ValueError("a phase has no sum, or two")
    busy = 0
    for number, count, nbytes, micros, first, last in sums:
        if not (-MICROS <= first <= MICROS and first <= last <= 2 * MICROS and min(nbytes, micros) >= 0 < count < BYTES):
            raise ValueError("a sum cannot be")
        if max(nbytes, micros) > BYTES:
            raise ValueError("a sum cannot be")
        if phases[number] not in WAITING | LEADING:
            busy += micros
    names = [phases[number] for number, *_ in sums]
    folded = [[i, *rest] for i, (_, *rest) in enumerate(sums)]
    return {"began": began_of(row), "phases": names, "threads": [], "spans": [[], [], [], [], []], "folded": folded}, busy / 1e6


def _encode(id: str, rows: Mapping[int, Row]) -> bytes:
    members = {"id": id, "version": VERSION, "ranks": {str(rank): row for rank, row in rows.items()}}
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
    if any(isinstance(row, dict) and isinstance(row.get("spans"), str) for row in ranks.values()):
        _damaged("the spans of a rank are no columns", where)  # ranks send them so, but they are not kept so
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
