"""The spans of a save, kept beside its index (docs/format.md §1). The checkpoint does not need them: a fault here harms nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt.errors import CorruptError, NotFoundError, UsageError
from ckpt.io_backends.checks import read_checked
from ckpt.telemetry.spans import BYTES, LEADING, MICROS, UNNEEDED, WAITING, PhaseSum, Row, SpanTable, are_phases, began_of
from ckpt.text import number_of, parse_json, parse_object

from .paths import DIGEST_DIGITS, SPANS, id_of, index_path

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

    from .commit import CommitRecord


# The spans of very many ranks as columns: sums per phase, in a third of the bytes and a tenth of the time that a row for each takes.
#
# Ranks that have the same phases are a *group*. Of a group each figure of each phase is a column, in the order of its ranks; a column whose
# values are all equal is one number. ``more`` is what a phase's last end lies behind its first start and its busy time: of a phase that is
# one span it is 0. What else is known of a rank, such as its host, are columns over all ranks of the file.

Ints = npt.NDArray[np.int64]

_FIGURES = ("count", "bytes", "busy", "first", "more")
_HOST = 64
MOST_SUMS = 1 << 22
"""Phases of all ranks that are read: a column of one number stands for any number of ranks."""
_DIMENSIONS, _NAME = 16, 64


@dataclass(frozen=True, kw_only=True)
class SpanGroups:
    """Groups as JSON, and how many seconds each rank was busy."""

    groups: list[dict[str, Any]]
    seconds: dict[int, float]


def encode_groups(rows: Mapping[int, Row]) -> SpanGroups:
    """Rows as ``Spans.to_json`` gives them, by rank."""
    by_phases: dict[tuple[str, ...], list[int]] = {}
    for rank, row in rows.items():
        by_phases.setdefault(tuple(row["phases"]), []).append(rank)
    groups: list[dict[str, Any]] = []
    seconds: dict[int, float] = {}
    for phases, ranks in by_phases.items():
        if not all(isinstance(p, str) for p in phases) or not are_phases(phases):
            raise ValueError("its phases are not names")
        sums = _sorted_sums([rows[rank]["sums"] for rank in ranks], len(phases))
        began = [began_of(rows[rank]) for rank in ranks]
        first, busy = sums[:, :, 4], sums[:, :, 3]
        columns = (sums[:, :, 1], sums[:, :, 2], busy, first, sums[:, :, 5] - first - busy)
        groups.append(
            {
                "ranks": _runs(ranks),
                "phases": list(phases),
                "began": began[0],
                "offsets": _column(np.round(1e6 * (np.array(began) - began[0])).astype(np.int64)),
                **{name: [_column(values[:, p]) for p in range(len(phases))] for name, values in zip(_FIGURES, columns, strict=True)},
            }
        )
        working = [p for p, phase in enumerate(phases) if phase not in WAITING | LEADING]
        seconds |= dict(zip(ranks, (busy[:, working].sum(axis=1) / 1e6).tolist(), strict=True))
    return SpanGroups(groups=groups, seconds=seconds)


def _sorted_sums(sums: list[Any], phases: int) -> Ints:
    """Rank × phase × (number, count, bytes, busy, first, last)."""
    rows = np.array(sums) if phases else np.zeros((len(sums), 0, 6), dtype=np.int64)
    if rows.dtype != np.int64 or rows.shape != (len(sums), phases, 6):
        raise ValueError("a sum is not a row of six numbers, or a phase has none")
    order = np.argsort(rows[:, :, 0], axis=1)
    rows = np.take_along_axis(rows, order[:, :, None], axis=1)
    if not (rows[:, :, 0] == np.arange(phases)).all():
        raise ValueError("a phase has no sum, or two")
    _check(rows[:, :, 1], rows[:, :, 2], rows[:, :, 3], rows[:, :, 4], rows[:, :, 5])
    return rows


def _check(count: Ints, nbytes: Ints, busy: Ints, first: Ints, last: Ints) -> None:
    bounds = ((count, 1, BYTES - 1), (nbytes, 0, BYTES), (busy, 0, BYTES), (first, -MICROS, MICROS), (last, -MICROS, 2 * MICROS))
    if any(values.size and not (low <= values.min() and values.max() <= high) for values, low, high in bounds) or (last < first).any():
        raise ValueError("a sum cannot be")


def _column(values: Ints) -> int | list[int]:
    return int(values[0]) if len(values) and (values == values[0]).all() else values.tolist()


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    """Ranks that rise, as first rank and count of neighbours."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([rank, 1])
    return runs


# ---------------------------------------------------------------------------------------------------------------- reading


def decode_groups(groups: object, world_size: int) -> Iterator[tuple[int, SpanTable]]:
    """What ``encode_groups`` gave. Nothing in it is believed."""
    if not isinstance(groups, list) or len(groups) > world_size:
        raise ValueError("its groups are not an array")
    left, sums = world_size, MOST_SUMS  # no rank is in two groups
    for group in groups:
        if not isinstance(group, dict):
            raise ValueError("a group is not an object")
        ranks, phases = _ranks(group.get("ranks"), world_size, min(left, sums)), group.get("phases")
        if not isinstance(phases, list) or len(phases) > _NAME or not all(isinstance(p, str) for p in phases):
            raise ValueError("its phases are not names")
        if not are_phases(tuple(phases)):
            raise ValueError("its phases are not names")
        left, sums = left - len(ranks), sums - len(ranks) * max(1, len(phases))
        if sums < 0:
            raise ValueError(f"it has more than {MOST_SUMS:,} phases of ranks")
        began = began_of(group)
        offsets = _numbers(group.get("offsets"), len(ranks), -MICROS, MICROS)
        columns = {name: _matrix(group.get(name), len(phases), len(ranks)) for name in _FIGURES}
        first, busy, more = columns["first"], columns["busy"], columns["more"]
        for values in (first, busy, more):
            if values.size and max(int(values.max()), -int(values.min())) > 2 * MICROS:
                raise ValueError("a sum cannot be")
        last = first + busy + more
        _check(columns["count"], columns["bytes"], busy, first, last)
        table = zip(*(columns[name].T.tolist() for name in ("count", "bytes", "busy", "first")), last.T.tolist(), strict=True)
        for rank, offset, (counts, sizes, busies, firsts, lasts) in zip(ranks, offsets.tolist(), table, strict=True):
            folded = tuple(
                PhaseSum(phase=phase, count=counts[p], nbytes=sizes[p], busy=busies[p], first=firsts[p], last=lasts[p])
                for p, phase in enumerate(phases)
            )
            yield rank, SpanTable(began=max(0.0, began + offset / 1e6), threads=(), spans=(), folded=folded)


def _ranks(runs: object, world_size: int, most: int) -> list[int]:
    if not isinstance(runs, list) or not all(isinstance(run, list) and len(run) == 2 and {*map(type, run)} == {int} for run in runs):
        raise ValueError("the ranks of a group are not runs")
    ranks: list[int] = []
    for first, count in runs:
        if not (ranks[-1] if ranks else -1) < first or not 0 < count <= world_size - first:
            raise ValueError(f"a group has a rank that is none of {world_size:,}")
        if len(ranks) + count > most:
            raise ValueError("its groups have more ranks than there can be")
        ranks += range(first, first + count)
    return ranks


def _matrix(columns: object, phases: int, ranks: int) -> Ints:
    if not isinstance(columns, list) or len(columns) != phases:
        raise ValueError("a figure has not a column for each phase")
    arrays = [_numbers(column, ranks, -BYTES, BYTES) for column in columns]
    return np.stack(arrays) if arrays else np.zeros((0, ranks), dtype=np.int64)


def _numbers(column: object, count: int, low: int, high: int) -> Ints:
    if type(column) is int and low <= column <= high:
        return np.full(count, column, dtype=np.int64)
    array = np.array(column) if isinstance(column, list) and len(column) == count and {*map(type, column)} <= {int} else None
    if array is None or array.dtype != np.int64 or array.ndim != 1 or not (low <= array.min() and array.max() <= high):
        raise ValueError(f"a column is not {count:,} numbers")
    return array


# ------------------------------------------------------------------------------------------------- what else is known of ranks


_ABOUT = frozenset({"hosts", "mesh", "blocked", "waited", "storage"})
"""Members that are such columns, or say which ranks the storage gave trouble."""


def encode_about(rows: Mapping[int, Row]) -> dict[str, Any]:
    """Columns over the ranks in rising order; what no rank says is left out."""
    for row in rows.values():
        host, at = row.get("host"), row.get("at", {})
        if host is not None and not _is_name(host, _HOST):
            raise ValueError("its host is not a name")
        if not isinstance(at, dict) or not all(_is_name(name, _NAME) and type(n) is int and 0 <= n < MICROS for name, n in at.items()):
            raise ValueError("its coordinates are none")
        for name in ("blocked", "waited"):
            if row.get(name) is not None and not (type(row[name]) is int and 0 <= row[name] <= MICROS):
                raise ValueError(f"its {name} is not a time")
        if row.get("storage") is not None and _tally(row["storage"]) is None:
            raise ValueError("its storage's trouble is not two numbers")
    about: dict[str, Any] = {}
    hosts = [row.get("host") or "" for row in rows.values()]
    names = list(dict.fromkeys(hosts))
    if names != [""]:
        numbers = {name: i for i, name in enumerate(names)}
        about["hosts"] = {"names": names, "of": [numbers[host] for host in hosts]}
    meshes = [row.get("at", {}) for row in rows.values()]
    dimensions = list(dict.fromkeys(name for at in meshes for name in at))[:_DIMENSIONS]
    if dimensions:
        about["mesh"] = {name: [at.get(name, -1) for at in meshes] for name in dimensions}
    for name in ("blocked", "waited"):
        values = [-1 if row.get(name) is None else row[name] for row in rows.values()]
        if {*values} != {-1}:
            about[name] = _column(np.array(values, dtype=np.int64))
    trouble = {str(rank): row["storage"] for rank, row in rows.items() if any(row.get("storage") or ())}
    return about | ({"storage": trouble} if trouble else {})


def decode_about(members: Mapping[str, Any], ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Fields of ``SpanTable`` by rank. Raises ValueError with what is wrong."""
    count = len(ranks)
    hosts: list[str | None] = [None] * count
    if "hosts" in members:
        hosts = _hosts(members["hosts"], count)
    mesh = members.get("mesh", {})
    if not isinstance(mesh, dict) or len(mesh) > _DIMENSIONS or not all(_is_name(name, _NAME) for name in mesh):
        raise ValueError("its mesh has no names")
    places = {name: _numbers(column, count, -1, MICROS).tolist() for name, column in mesh.items()}
    times = {name: _numbers(members.get(name, -1), count, -1, MICROS).tolist() for name in ("blocked", "waited")}
    storage = members.get("storage", {})
    if not isinstance(storage, dict) or any(_tally(pair) is None for pair in storage.values()):
        raise ValueError("its storage's trouble is not pairs of numbers")
    about: dict[int, dict[str, Any]] = {}
    for i, rank in enumerate(ranks):
        retries, throttled = storage.get(str(rank), (0, 0))
        about[rank] = {
            "host": hosts[i],
            "coordinates": {name: column[i] for name, column in places.items() if column[i] >= 0},
            "blocked": None if times["blocked"][i] < 0 else times["blocked"][i],
            "waited": None if times["waited"][i] < 0 else times["waited"][i],
            "retries": retries,
            "throttled": throttled,
        }
    return about


def _hosts(hosts: object, count: int) -> list[str | None]:
    names = hosts.get("names") if isinstance(hosts, dict) else None
    if not isinstance(hosts, dict) or not isinstance(names, list) or not all(n == "" or _is_name(n, _HOST) for n in names):
        raise ValueError("its hosts have no names")
    return [names[number] or None for number in _numbers(hosts.get("of"), count, 0, len(names) - 1).tolist()]


def _tally(pair: object) -> tuple[int, int] | None:
    if not isinstance(pair, list) or len(pair) != 2 or not all(type(n) is int and 0 <= n < MICROS for n in pair):
        return None
    return pair[0], pair[1]


def _is_name(text: object, most: int) -> bool:
    return isinstance(text, str) and 0 < len(text) <= most and text.isprintable()


VERSION = 2
MANY = 64
"""Ranks of which all single spans are kept. Of more ranks only sums are, but for the leader and the slowest."""
SLOWEST = 8
_WRONG = (ValueError, TypeError, KeyError)
SIZE_LIMIT = 256 << 20
"""Bytes of the whole file that are written or read; 100,000 ranks take less."""

_MEMBERS = ("began", "phases", "threads", "spans", "folded")
"""What is kept of a rank's row, besides what ``encode_about`` takes."""

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
    rest = b'",' + json.dumps(members, separators=(",", ":"), allow_nan=False).encode()[1:] + b"\n"
    data = _HEAD + xxhash.xxh3_128_hexdigest(_HEAD + _ZEROS + rest).encode() + rest
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
        with_sums = dict(rows)
        for rank, row in rows.items():
            if "sums" not in row:
                summed = SpanTable.from_row(row, f"rank {rank}").summed().to_row()
                with_sums[rank] = {**summed, "sums": summed["folded"]}
        columns = _columns(with_sums)
        detailed = {*sorted(columns.seconds, key=lambda rank: (-columns.seconds[rank], rank))[:SLOWEST], next(iter(rows))}
    else:
        detailed = set(rows)
    kept = {}
    for rank in sorted(detailed):
        row = {member: rows[rank][member] for member in _MEMBERS if member in rows[rank]}
        with suppress(ValueError):  # it is refused below
            row["spans"] = parse_json(row["spans"]) if isinstance(row.get("spans"), str) else row.get("spans")
        if rank == 0 and "sums" in rows[rank]:  # this process has made it, and the numbers in it
            phases = row["phases"]
            columns.seconds[rank] = sum(busy for p, _, _, busy, *_ in rows[rank]["sums"] if phases[p] not in WAITING | LEADING) / 1e6
        else:
            columns.seconds[rank] = SpanTable.from_row(row, f"rank {rank}").seconds
        kept[rank] = row
    return kept, columns


def _columns(rows: Mapping[int, Row]) -> SpanGroups:
    """SpanGroups of all; the rank whose row is none is named."""
    try:
        return encode_groups(rows)
    except _WRONG as err:
        for rank, row in rows.items() if len(rows) > 1 else ():
            _columns({rank: row})
        raise CorruptError(f"these are not the spans of a rank: {err}", where=f"rank {next(iter(rows))}", hint=UNNEEDED) from err


def _decode(data: bytes, record: CommitRecord, where: str) -> dict[int, SpanTable]:
    digest = xxhash.xxh3_128_hexdigest(data[: len(_HEAD)] + _ZEROS + data[_DATA:]).encode()
    if not data.startswith(_HEAD) or data[len(_HEAD) : _DATA] != digest:
        _damaged("its digest is wrong", where)
    try:
        members = parse_object(data)
    except ValueError as err:
        _damaged(str(err), where)
    if members.get("id") != record.id or members.get("version") not in (1, VERSION):
        _damaged(f"it is of save {members.get('id')!r}, version {members.get('version')!r}", where)
    ranks = members.get("ranks")
    if not isinstance(ranks, dict) or not (ranks or members.get("groups")):
        _damaged("it has no ranks", where)
    if any(isinstance(row, dict) and isinstance(row.get("spans"), str) for row in ranks.values()):
        _damaged("the spans of a rank are not columns", where)  # ranks send them so, but they are not kept so
    tables = {_rank(text, record.world_size, where): SpanTable.from_row(row, where) for text, row in ranks.items()}
    try:
        for rank, table in decode_groups(members.get("groups", []), record.world_size):
            tables.setdefault(rank, table)  # a row says more
        abouts = decode_about(members, sorted(tables))
    except (ValueError, OverflowError) as err:
        _damaged(f"{err}", where)
    if not members.keys() & _ABOUT:
        return dict(sorted(tables.items()))
    return {rank: replace(tables[rank], **abouts[rank]) for rank in sorted(tables)}


def _rank(text: str, ranks: int, where: str) -> int:
    try:
        rank = number_of(text)
    except ValueError:
        rank = ranks
    if rank >= ranks:
        _damaged(f"{text[:20]!r} is not a rank of {ranks}", where)
    return rank


def _damaged(what: str, where: str) -> NoReturn:
    raise CorruptError(f"the file of spans is damaged: {what}", where=where, hint=UNNEEDED)
