"""The spans of many ranks as columns, and what ranks say of themselves: read as they were given, bounded, and never believed."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from ckpt.errors import UsageError
from ckpt.formats.native.commit import CommitRecord, new_id
from ckpt.formats.native.spans import MANY, SLOWEST, decode_about, decode_groups, encode_about, encode_groups, read_spans, write_spans
from ckpt.io_backends.inprocess import InProcessBackend
from ckpt.telemetry.spans import Row, Spans, SpanTable
from tests.test_spans import signed

PHASES = ("collect", "plan", "agree", "capture", "settle", "exchange", "hash", "write", "sync")


def record_of(ranks: int) -> CommitRecord:
    return CommitRecord(id=new_id(), created="", writer="w", world_size=ranks, features=(), index={}, tensor_bytes=0, metrics={})


def rows_of(ranks: int, seed: int = 1) -> dict[int, Row]:
    """What ranks send: sums that differ, few single spans, hosts of eight ranks, a mesh, and here and there trouble."""
    chance = random.Random(seed)
    rows: dict[int, Row] = {}
    for rank in range(ranks):
        spans = Spans(ranks=ranks)
        at = time.perf_counter()
        for phase in PHASES[: None if rank % 100 else -2]:  # not all have the same
            for _ in range(20 if phase == "write" else 1):
                took = 2 * chance.random()
                spans.add(phase, at, at + took, chance.randrange(1 << 28))
                at += took
        rows[rank] = json.loads(json.dumps(spans.to_json())) | {
            "host": f"ip-10-{rank // 2048}-{rank // 8 % 256}-17.ec2.internal",
            "at": {"pp": rank // 1024, "dp": rank // 8 % 128, "tp": rank % 8},
            "blocked": chance.randrange(10**6),
            "waited": chance.randrange(10**6),
            "storage": [chance.randrange(1, 9), 0] if rank % 50 == 3 else [0, 0],
        }
    return rows


def test_what_is_read_is_what_was_given() -> None:
    backend = InProcessBackend("inprocess://columns")
    record = record_of(300)
    rows = rows_of(300)
    seconds = write_spans(backend, record.id, rows)
    tables = read_spans(backend, record)
    assert list(tables) == list(range(300))
    for rank, row in rows.items():
        whole, found = SpanTable.from_row(row), tables[rank]
        assert found.sums == whole.sums and abs(found.began - whole.began) < 2e-6 and abs(seconds[rank] - whole.seconds) < 1e-6
        assert (found.host, found.coordinates, found.blocked, found.waited) == (row["host"], row["at"], row["blocked"], row["waited"])
        assert [found.retries, found.throttled] == row["storage"]
    single = [rank for rank, table in tables.items() if table.spans]
    assert MANY < 300 and single == sorted({0, *sorted(rows, key=lambda rank: -seconds[rank])[:SLOWEST]})


def test_no_spans_are_written_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, record, rows = InProcessBackend("inprocess://many-sums"), record_of(300), rows_of(300)
    sums = sum(len(SpanTable.from_row(row).sums) for row in rows.values())
    monkeypatch.setattr("ckpt.formats.native.spans.MOST_SUMS", sums - 1)
    with pytest.raises(UsageError, match=f"{sums:,} phases of ranks; at most {sums - 1:,}"):
        write_spans(backend, record.id, rows)
    assert list(backend.list_prefix()) == []
    monkeypatch.setattr("ckpt.formats.native.spans.MOST_SUMS", sums)
    monkeypatch.setattr("ckpt.formats.native.spans.MOST_SUMS", sums)
    write_spans(backend, record.id, rows)
    assert len(read_spans(backend, record)) == 300


def test_16_384_ranks_stay_small_and_cheap() -> None:
    backend = InProcessBackend("inprocess://many")
    record = record_of(16_384)
    rows = rows_of(1024)
    began = time.thread_time()
    write_spans(backend, record.id, {rank: rows[rank % 1024] for rank in range(16_384)})
    assert time.thread_time() - began < 3.0  # 0.3 on a quiet machine
    assert backend.size(f"index-{record.id}/spans.json") < 5_000_000


ROWS = rows_of(3)


def members() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps({"groups": encode_groups(ROWS).groups, **encode_about(ROWS)}))
    return found


GROUP = members()["groups"][0]


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": [[0, 10**9]]},
        {"ranks": [[2, 1], [1, 1]]},
        {"ranks": [[-1, 3]]},
        {"ranks": [[0]]},
        {"ranks": 3},
        {"phases": ["<b>"] * 9},
        {"phases": [["write"]] * 9},
        {"phases": GROUP["phases"][:1] * 9},
        {"began": "now"},
        {"began": float("nan")},
        {"offsets": [0, 0]},
        {"count": [0] * 9},
        {"count": [1] * 8},
        {"busy": [-1] * 9},
        {"busy": [1 << 62] * 9},
        {"first": [[1.5] * 3] * 9},
        {"first": [[True] * 3] * 9},
        {"more": [["x"] * 3] * 9},
        {"more": [-(1 << 50)] * 9},
        {"bytes": [1 << 70] * 9},
    ],
    ids=str,
)
def test_groups_that_cannot_be(change: dict[str, Any]) -> None:
    assert dict(decode_groups([GROUP], 3)).keys() <= {0, 1, 2}
    with pytest.raises(ValueError, match=r"\w"):
        list(decode_groups([{**GROUP, **change}], 3))


@pytest.mark.parametrize(("groups", "ranks"), [(1, 1 << 40), (8, 1 << 20), (2, 3)])
def test_few_bytes_do_not_stand_for_very_many_ranks(groups: int, ranks: int) -> None:
    figures: dict[str, Any] = {name: [1] * len(GROUP["phases"]) for name in ("count", "bytes", "busy", "first", "more")}
    given = [{**GROUP, **figures, "ranks": [[0, ranks]], "offsets": 0} for _ in range(groups)]
    assert len(list(decode_groups([{**given[0], "ranks": [[0, 3]]}], 3))) == 3
    began = time.process_time()
    with pytest.raises(ValueError, match="ranks"):
        list(decode_groups(given, ranks))
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "change",
    [
        {"hosts": {"names": ["a\x1b[31m"], "of": 0}},
        {"hosts": {"names": ["a"], "of": 1}},
        {"hosts": {"names": ["a"], "of": [0]}},
        {"hosts": ["a", "a", "a"]},
        {"mesh": {"<b>\n": 0}},
        {"mesh": {"tp": [0, 1, "2"]}},
        {"mesh": [1]},
        {"blocked": -2},
        {"waited": [1, 2]},
        {"storage": {"0": [1]}},
        {"storage": {"0": [-1, 0]}},
        {"storage": [1]},
    ],
    ids=str,
)
def test_what_ranks_cannot_say(change: dict[str, Any]) -> None:
    assert decode_about(members(), [0, 1, 2])[2]["coordinates"] == {"pp": 0, "dp": 0, "tp": 2}
    with pytest.raises(ValueError, match=r"\w"):
        decode_about({**members(), **change}, [0, 1, 2])


@pytest.mark.parametrize(
    "change", [{"host": 5}, {"host": "a\n"}, {"host": "h" * 65}, {"at": {"tp": -1}}, {"at": 3}, {"blocked": 1.5}, {"storage": 7}]
)
def test_what_a_rank_cannot_send(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="its"):
        encode_about({0: {**ROWS[0], **change}})


def test_a_file_of_version_1_is_still_read() -> None:
    backend, record = InProcessBackend("inprocess://old"), record_of(1)
    table = SpanTable.from_row(ROWS[0])
    data = signed({"id": record.id, "version": 1, "ranks": {"0": table.to_row()}})
    with backend.create(f"index-{record.id}/spans.json", len(data)) as writer:
        writer.write(0, [data])
        writer.commit()
    assert read_spans(backend, record)[0] == table
