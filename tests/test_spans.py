"""Spans: what was recorded is what is read, nothing is lost silently, and a file that somebody made up is refused."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CorruptError, NotFoundError, StorageError, UsageError
from ckpt.formats.native import spans as kept
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.commit import CommitRecord
from ckpt.formats.native.paths import id_of
from ckpt.formats.native.spans import read_spans, write_spans
from ckpt.formats.native.writer import files_of
from ckpt.io_backends.inprocess import InProcessBackend
from ckpt.io_backends.registry import open_backend
from ckpt.telemetry.spans import LIMIT, PhaseSum, Span, Spans, SpanTable, trace_events, trace_lines
from tests.cli.checkpoints import sample, write_checkpoint

# ------------------------------------------------------------------------------------------------------------- recording


def seconds(spans: Spans, *pieces: tuple[str, float, float, int]) -> None:
    """Add pieces whose times are seconds since ``spans`` began."""
    for phase, start, end, nbytes in pieces:
        spans.add(phase, spans._zero + start, spans._zero + end, nbytes)


def table_of(*pieces: tuple[str, float, float, int], limit: int = LIMIT, began: float = 1000.0) -> SpanTable:
    spans = Spans(limit=limit)
    spans._zero, spans._began = 0.0, began
    seconds(spans, *pieces)
    return spans.table()


def test_sums_of_a_phase() -> None:
    table = table_of(("write", 1.0, 3.0, 100), ("hash", 0.5, 0.75, 7), ("write", 2.0, 5.5, 50))
    assert table.sums == {
        "write": PhaseSum(phase="write", count=2, nbytes=150, busy=5_500_000, first=1_000_000, last=5_500_000),
        "hash": PhaseSum(phase="hash", count=1, nbytes=7, busy=250_000, first=500_000, last=750_000),
    }
    assert list(table.sums) == ["write", "hash"]
    assert (table.sums["write"].seconds, table.sums["write"].wall, table.wall, table.folded_count) == (5.5, 4.5, 5.0, 0)


def test_a_block_is_timed_by_the_clock() -> None:
    spans = Spans()
    before = time.time()
    with spans.span("read", 12):
        time.sleep(0.02)
    (span,) = spans.table().spans
    assert (span.phase, span.nbytes, span.thread) == ("read", 12, 0)
    assert 0 <= span.start < 10_000_000
    assert 20_000 <= span.duration < 10_000_000
    assert abs(spans.table().began - before) < 10


def test_a_block_that_raises_counts() -> None:
    spans = Spans()
    with pytest.raises(KeyError), spans.span("read", 5):
        raise KeyError("x")
    assert spans.table().sums["read"].nbytes == 5


def test_waiting_and_leading_are_no_work() -> None:
    assert table_of(("agree", 0, 9, 0), ("write", 1, 3, 10), ("commit", 9, 12, 0), ("sync", 3, 4, 0)).seconds == 3.0


def test_off_keeps_nothing_and_asks_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock() -> float:
        raise AssertionError("the clock was asked")

    monkeypatch.setattr("time.time", clock)
    monkeypatch.setattr("time.perf_counter", clock)
    spans = Spans(on=False)
    with spans.span("write", 1):
        pass
    spans.add("write", 0.0, 1.0, 5)
    assert (spans.on, spans.to_json(), spans.table().sums) == (False, {}, {})


def test_beyond_the_limit_there_are_sums_and_they_say_so() -> None:
    pieces = [("write", float(i), i + 0.5, 10) for i in range(100)]
    whole, folded = table_of(*pieces), table_of(*pieces, limit=20)
    assert (len(folded.spans), folded.folded_count) == (15, 85)
    assert folded.sums == whole.sums
    assert folded.folded == (PhaseSum(phase="write", count=85, nbytes=850, busy=85 * 500_000, first=15_000_000, last=99_500_000),)


def test_phases_that_come_late_are_kept_too() -> None:
    table = table_of(*[("write", 0, 1, 1)] * 5000, *[("sync", 1, 2, 1)] * 3, ("commit", 2, 3, 0))
    assert Counter(s.phase for s in table.spans) == {"write": LIMIT - 64, "sync": 3, "commit": 1}
    table = table_of(*[("write", 0, 1, 1)] * 5000, *[(f"p{i % 30}", 0, 1, 1) for i in range(900)])
    assert Counter(s.phase for s in table.spans) == {"write": LIMIT - 64, **{f"p{i}": 3 if i < 4 else 2 for i in range(30)}}


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5])
def test_tiny_limits(limit: int) -> None:
    table = table_of(*[("write", 0, 1, 1)] * 9, ("sync", 0, 1, 1), limit=limit)
    assert (len(table.spans) <= limit, len(table.spans) + table.folded_count) == (True, 10)


@pytest.mark.parametrize("limit", [-1, 65_537])
def test_wrong_limits(limit: int) -> None:
    with pytest.raises(UsageError, match="limit"):
        Spans(limit=limit)


def test_what_all_ranks_send_stays_small() -> None:
    assert [Spans(ranks=n).limit for n in (1, 64, 256, 16_384, 10**6)] == [4096, 4096, 1024, 64, 64]


def test_threads_at_once_lose_nothing() -> None:
    spans, together = Spans(limit=100), threading.Barrier(4)

    def work(number: int) -> None:
        together.wait()
        for _ in range(500):
            with spans.span(f"p{number}", number):
                pass

    threads = [threading.Thread(target=work, args=(n,), name=f"worker-{n}") for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table = SpanTable.from_row(json.loads(json.dumps(spans.to_json())))
    assert {p: (s.count, s.nbytes) for p, s in table.sums.items()} == {f"p{n}": (500, 500 * n) for n in range(4)}
    assert len(table.spans) <= 100
    assert all(table.threads[s.thread] == f"worker-{s.phase[1]}" for s in table.spans)


def test_a_pool_that_is_made_again_uses_the_same_tracks() -> None:
    spans = Spans()

    def run(name: str) -> None:
        thread = threading.Thread(target=lambda: spans.add("write", 0, 1), name=name)
        thread.start()
        thread.join()

    for name in ("pool-0", "pool-1", "pool-0", "other\x1b[31m", "pool-1"):
        run(name)
    assert spans.table().threads == ("pool-0", "pool-1", "other?[31m")
    assert [s.thread for s in spans.table().spans] == [0, 1, 0, 2, 1]


@pytest.mark.alone
def test_recording_is_cheap() -> None:
    """Not a benchmark: a save has thousands of spans, so tens of microseconds each would still be nothing; a millisecond would not."""

    def cost(spans: Spans) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(2000):
                with spans.span("write", 1):
                    pass
            times.append((time.perf_counter() - began) / 2000)
        return min(times)

    assert cost(Spans()) < 1e-4
    assert cost(Spans(on=False)) < 1e-5


# ------------------------------------------------------------------------------------------------------------------ rows

TIMES = st.integers(-(10**6), 10**12)
PIECES = st.lists(
    st.tuples(st.sampled_from(["collect", "write", "hash", "sync", "commit"]), TIMES, st.integers(0, 10**9), st.integers(0, 1 << 40)),
    max_size=40,
)


@given(PIECES, st.integers(0, 30))
def test_a_row_is_read_back_whole(pieces: list[tuple[str, int, int, int]], limit: int) -> None:
    spans = Spans(limit=limit)
    seconds(spans, *[(p, start / 1e6, (start + length) / 1e6, n) for p, start, length, n in pieces])
    table = spans.table()
    assert SpanTable.from_row(json.loads(json.dumps(spans.to_json()))) == table
    assert SpanTable.from_row(table.summed().to_row()).sums == table.sums
    assert table.summed().spans == ()
    whole = table_of(*[(p, start / 1e6, (start + length) / 1e6, n) for p, start, length, n in pieces])
    assert table_of(*[(p, start / 1e6, (start + length) / 1e6, n) for p, start, length, n in pieces], limit=limit).sums == whole.sums
    assert {p: (s.first, s.last) for p, s in whole.sums.items()} == {
        p: (min(s.start for s in whole.spans if s.phase == p), max(s.start + s.duration for s in whole.spans if s.phase == p))
        for p in whole.sums
    }
    assert sum(s.nbytes for s in table.sums.values()) == sum(n for *_, n in pieces)
    assert sum(s.count for s in table.sums.values()) == len(pieces)


ROW = {
    "began": 5.5,
    "phases": ["write", "sync"],
    "threads": ["MainThread"],
    "spans": [[0, 1], [0, 0], [-3, 10], [4, 5], [6, 7]],
    "folded": [[0, 2, 3, 4, 5, 6]],
}


def test_a_row_as_specified() -> None:
    table = SpanTable.from_row(ROW)
    assert table.spans == (Span("write", 0, -3, 4, 6), Span("sync", 0, 10, 5, 7))
    assert table.folded == (PhaseSum(phase="write", count=2, nbytes=3, busy=4, first=5, last=6),)
    assert (table.began, table.threads) == (5.5, ("MainThread",))


WRONG: list[tuple[str, Any]] = [
    *(("began", value) for value in (None, "5", -1, True, float("nan"), float("inf"), 1e30)),
    *(("phases", value) for value in (None, {}, ["write"], ["write", "write"], ["write", 3], ["write", "a b"], ["write", "\x1b[1m"])),
    ("phases", ["write", "sync", "Upper"]),
    ("phases", ["write", "sync", *(f"p{i}" for i in range(63))]),
    *(("threads", value) for value in (None, [], [1], ["a\nb"], ["x" * 65], ["a", "b", "c"])),
    *(("spans", value) for value in (None, [], [[]] * 4, [[], [], [], [], 3], [[0, 1], [0, 0], [-3, 10], [4, 5], [6]])),
    *(("spans", [[0], [0], [3], [4], [bad]]) for bad in (-1, 1 << 63, 1.0, True, "6", None, [6])),
    *(("spans", [[0], [0], [bad], [4], [6]]) for bad in (1 << 54, -(1 << 54), 0.5)),
    *(("spans", [[bad], [0], [3], [4], [6]]) for bad in (-1, 2)),
    *(("spans", [[0], [bad], [3], [4], [6]]) for bad in (-1, 1)),
    ("spans", [[0], [0], [3], [-4], [6]]),
    ("spans", [[0] * 65_537] * 5),
    *(("folded", value) for value in (None, [3], [[0, 2, 3, 4, 5]], [[0, 2, 3, 4, 6, 5]], [[0, 0, 3, 4, 5, 6]], [[2, 2, 3, 4, 5, 6]])),
    ("folded", [[0, 2, 3, 4, 5, 6], [0, 2, 3, 4, 5, 6]]),
    ("folded", [[0, 2, -3, 4, 5, 6]]),
]


@pytest.mark.parametrize(("member", "value"), WRONG, ids=lambda v: str(v)[:30])
def test_a_row_that_cannot_be(member: str, value: object) -> None:
    with pytest.raises(CorruptError, match="not the spans of a rank"):
        SpanTable.from_row({**ROW, member: value})


@pytest.mark.parametrize("row", [None, [], "x", 3, {}])
def test_something_that_is_no_row(row: object) -> None:
    with pytest.raises(CorruptError, match="not the spans of a rank"):
        SpanTable.from_row(row, "here")


# ------------------------------------------------------------------------------------------------------------------ file


@pytest.fixture
def backend() -> InProcessBackend:
    InProcessBackend.reset()
    write_checkpoint("inprocess://s", sample(), ranks=3)
    found = open_backend("inprocess://s")
    assert isinstance(found, InProcessBackend)
    return found


def record_of(backend: InProcessBackend) -> CommitRecord:
    return NativeCatalog(backend).record


def replace_file(backend: InProcessBackend, data: bytes) -> None:
    path = f"index-{record_of(backend).id}/spans.json"
    backend.delete(path)
    with backend.create(path, len(data)) as writer:
        writer.write(0, [data])
        writer.commit()


def signed(members: dict[str, Any]) -> bytes:
    """A file with the right digest, made without the code under test."""
    text = json.dumps({"digest": "0" * 32, **members}, separators=(",", ":")).encode()
    return text.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(text).encode(), 1)


def test_the_file(backend: InProcessBackend) -> None:
    tables = {rank: table_of(("write", 0, 1 + rank, 10), ("sync", 2, 3, 0), began=rank) for rank in range(3)}
    record = record_of(backend)
    write_spans(backend, record.id, {rank: table.to_row() for rank, table in tables.items()})
    assert read_spans(backend, record) == tables
    path = f"index-{record.id}/spans.json"
    data = backend.read(path)
    members = json.loads(data)
    assert members["digest"] == xxhash.xxh3_128_hexdigest(data.replace(members["digest"].encode(), b"0" * 32))
    assert (members["id"], members["version"], set(members["ranks"])) == (record.id, 2, {"0", "1", "2"})
    assert id_of(path) == record.id
    assert path in files_of(backend, record.to_bytes())
    assert NativeCatalog(backend).record == record


def test_ranks_that_kept_nothing_are_left_out(backend: InProcessBackend) -> None:
    record = record_of(backend)
    write_spans(backend, record.id, {0: {}, 1: {}, 2: {}})
    with pytest.raises(NotFoundError, match="no spans"):
        read_spans(backend, record)
    assert not any(path.endswith("spans.json") for path in files_of(backend, record.to_bytes()))
    write_spans(backend, record.id, {0: {}, 1: ROW, 2: {}})
    assert list(read_spans(backend, record)) == [1]


def test_a_wrong_row_or_a_second_file_is_not_written(backend: InProcessBackend) -> None:
    record = record_of(backend)
    with pytest.raises(CorruptError, match="rank 1"):
        write_spans(backend, record.id, {0: ROW, 1: {**ROW, "began": -1}})
    write_spans(backend, record.id, {0: ROW})
    with pytest.raises(StorageError):
        write_spans(backend, record.id, {1: ROW})
    assert list(read_spans(backend, record)) == [0]


def test_every_flipped_byte_is_found(backend: InProcessBackend) -> None:
    record = record_of(backend)
    write_spans(backend, record.id, {0: ROW, 2: ROW})
    data = backend.read(f"index-{record.id}/spans.json")
    for at in range(len(data)):
        replace_file(backend, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CorruptError, match="file of spans"):
            read_spans(backend, record)
    for size in (0, 1, 11, 43, len(data) - 1):
        replace_file(backend, data[:size])
        with pytest.raises(CorruptError, match="file of spans"):
            read_spans(backend, record)
    assert len(NativeCatalog(backend).tensors) == len(sample())


@pytest.mark.parametrize(
    "change",
    [
        {"id": "f" * 16},
        {"version": 3},
        {"version": "1"},
        {"ranks": {}},
        {"ranks": [ROW]},
        {"ranks": None},
        {"ranks": {"3": ROW}},
        {"ranks": {"-1": ROW}},
        {"ranks": {"01": ROW}},
        {"ranks": {"²": ROW}},
        {"ranks": {"9" * 5000: ROW}},
        {"ranks": {"x": ROW}},
        {"ranks": {"0": {**ROW, "began": None}}},
        {"ranks": {"0": 7}},
    ],
    ids=str,
)
def test_a_file_that_somebody_made_up(backend: InProcessBackend, change: dict[str, Any]) -> None:
    record = record_of(backend)
    right = {"id": record.id, "version": 1, "ranks": {"0": ROW}}
    replace_file(backend, signed(right))
    assert read_spans(backend, record) == {0: SpanTable.from_row(ROW)}
    replace_file(backend, signed({**right, **change}))
    with pytest.raises(CorruptError, match="spans"):
        read_spans(backend, record)


@pytest.mark.parametrize("rest", [b"[" * 100_000, b'"\xff"}', b'"x":' + b"9" * 5000 + b"}", b"}", b""])
def test_a_file_that_is_not_json(backend: InProcessBackend, rest: bytes) -> None:
    text = b'{"digest":"' + b"0" * 32 + b'",' + rest
    replace_file(backend, text.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(text).encode(), 1))
    with pytest.raises(CorruptError, match="file of spans"):
        read_spans(backend, record_of(backend))


def test_a_file_too_long_is_not_read(backend: InProcessBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of(backend)
    monkeypatch.setattr(kept, "SIZE_LIMIT", 100)
    with pytest.raises(UsageError, match="at most 100"):
        write_spans(backend, record.id, {0: ROW})
    replace_file(backend, b" " * 101)
    with pytest.raises(CorruptError, match="101 bytes"):
        read_spans(backend, record)


def test_a_record_with_an_id_that_leads_elsewhere(backend: InProcessBackend) -> None:
    record = replace(record_of(backend), id="../x")
    with pytest.raises(CorruptError, match="cannot have the id"):
        read_spans(backend, record)


def test_of_many_ranks_the_slowest_and_the_leader_are_kept_whole(backend: InProcessBackend) -> None:
    ranks = list(range(100))
    random.Random(3).shuffle(ranks)
    pace = dict(enumerate(ranks))
    tables = {r: table_of(("write", 0, pace[r] / 10, 5), ("agree", pace[r] / 10, 11, 0), ("write", 20, 21, 1)) for r in range(100)}
    record = replace(record_of(backend), world_size=100)
    write_spans(backend, record.id, {r: t.to_row() for r, t in tables.items()})
    found = read_spans(backend, record)
    assert {r: t.sums for r, t in found.items()} == {r: t.sums for r, t in tables.items()}
    whole = {0} | {r for r in range(100) if pace[r] >= 92}
    assert {r for r, t in found.items() if t.spans} == whole
    assert {r: t for r, t in found.items() if r in whole} == {r: t for r, t in tables.items() if r in whole}
    assert all(t.folded_count == 3 for r, t in found.items() if r not in whole)


SUMS = [[0, 1, 5, 2_000_000, 0, 2_000_000]]


@pytest.mark.parametrize(
    "change",
    [
        *({"sums": value} for value in (None, [], [[0, 1, 5, 1, 0]], [[0, 1, 5, 1.0, 0, 1]], SUMS * 2, [3])),
        *({"sums": [[*SUMS[0][:at], bad, *SUMS[0][at + 1 :]]]} for at, bad in ((0, 1), (0, -1), (1, 0), (2, -1), (2, 1 << 63))),
        *({"sums": [[*SUMS[0][:at], -1, *SUMS[0][at + 1 :]]]} for at in (3, 5)),
        {"phases": ["Write"]},
        {"phases": [3]},
        {"began": -1},
    ],
    ids=str,
)
def test_the_sums_of_one_of_many_ranks_cannot_be(backend: InProcessBackend, change: dict[str, object]) -> None:
    row = {**table_of(("write", 0, 2, 5)).to_row(), "sums": SUMS}
    with pytest.raises(CorruptError, match="rank 7"):
        write_spans(backend, record_of(backend).id, {r: row | (change if r == 7 else {}) for r in range(100)})
    write_spans(backend, record_of(backend).id, dict.fromkeys(range(100), row))


def test_ranks_send_the_sums_that_a_leader_of_many_keeps(backend: InProcessBackend) -> None:
    """Those that were folded, and phases that do not count as work, among them."""
    rows, tables = {}, {}
    for rank in range(100):
        spans = Spans(limit=8)
        for i in range(40):
            began = spans._zero + i + rank / 1000
            spans.add(("write", "agree", "hash")[i % 3], began, began + (1 + rank if i % 3 != 1 else 200 - rank) / 1e3, i)
        rows[rank], tables[rank] = json.loads(json.dumps(spans.to_json())), spans.table()
    record = replace(record_of(backend), world_size=100)
    write_spans(backend, record.id, rows)
    found = read_spans(backend, record)
    assert {r: t.sums for r, t in found.items()} == {r: t.sums for r, t in tables.items()}
    assert {r for r, t in found.items() if t.spans} == {0, *range(92, 100)}


# ----------------------------------------------------------------------------------------------------------------- trace


def complete(tables: dict[int, SpanTable]) -> list[dict[str, Any]]:
    return [e for e in trace_events(tables) if e["ph"] == "X"]


def test_ranks_stand_side_by_side_in_a_trace() -> None:
    tables = {0: table_of(("write", 1, 2, 8), began=100.0), 3: table_of(("sync", 0.5, 1.5, 9), began=100.25)}
    assert complete(tables) == [
        {"ph": "X", "cat": "ckpt", "name": "write", "pid": 0, "tid": 1, "ts": 250_000, "dur": 1_000_000, "args": {"bytes": 8}},
        {"ph": "X", "cat": "ckpt", "name": "sync", "pid": 3, "tid": 1, "ts": 0, "dur": 1_000_000, "args": {"bytes": 9}},
    ]
    names = {(e["pid"], e["tid"], e["name"]): e["args"] for e in trace_events(tables) if e["ph"] == "M"}
    assert names[3, 0, "process_name"] == {"name": "rank 3"}
    assert names[3, 0, "process_sort_index"] == {"sort_index": 3}
    assert names[3, 1, "thread_name"] == {"name": "MainThread"}


def test_sums_have_tracks_of_their_own() -> None:
    table = table_of(*[("write", float(i), i + 0.5, 10) for i in range(1000)], limit=0)
    (event,) = complete({0: table})
    assert (event["ts"], event["dur"], event["args"]) == (0, 999_500_000, {"bytes": 10_000, "spans": 1000, "busy_seconds": 500.0})
    assert [e["args"]["name"] for e in trace_events({0: table}) if e["name"] == "thread_name"] == ["write: sum of 1,000"]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=14))
def test_spans_on_a_track_are_nested_or_apart(pieces: list[tuple[int, int]]) -> None:
    table = SpanTable(began=0, threads=("t",), spans=tuple(Span("write", 0, a, n, 0) for a, n in pieces), folded=())
    events = complete({0: table})
    first = min((a for a, _ in pieces), default=0)
    assert sorted((e["ts"] + first, e["dur"]) for e in events) == sorted(pieces)
    for track in {e["tid"] for e in events}:
        on_it = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == track]
        for i, (a, b) in enumerate(on_it):
            for c, d in on_it[i + 1 :]:
                assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)


def test_nested_blocks_stay_on_one_track() -> None:
    spans = Spans()
    for _ in range(300):
        with spans.span("outer"), spans.span("middle"):
            for _ in range(2):
                with spans.span("inner"):
                    pass
    assert {e["tid"] for e in complete({0: spans.table()})} == {1}


def test_a_trace_of_made_up_spans_ends() -> None:
    """Spans that overlap in every way, and as many threads as spans."""
    overlapping = tuple(Span("write", 0, i, 20_000, 0) for i in range(20_000))
    scattered = tuple(Span("write", i, 0, 1, 0) for i in range(20_000))
    tables = {
        0: SpanTable(began=0, threads=("t",), spans=overlapping, folded=()),
        1: SpanTable(began=0, threads=("t",) * 20_000, spans=scattered, folded=()),
    }
    began = time.process_time()
    assert len(complete(tables)) == 40_000
    assert time.process_time() - began < 60


def test_a_trace_file_is_json_of_the_documented_members() -> None:
    tables = {r: table_of(("write", 0, 1, 5), ("sync", 1, 2, 0), ("write", 1, 2, 1), limit=2 + r) for r in range(3)}
    text = "".join(trace_lines(tables))
    document = json.loads(text)
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    assert document["traceEvents"] == json.loads(json.dumps(list(trace_events(tables))))
    for event in document["traceEvents"]:
        assert event["ph"] in {"X", "M"}
        assert all(type(event[k]) is int and event[k] >= 0 for k in ("pid", "tid", *(("ts", "dur") if event["ph"] == "X" else ())))
        assert isinstance(event["name"], str)
        assert isinstance(event["args"], dict)
    busy = Counter(e["pid"] for e in document["traceEvents"] if e["ph"] == "X")
    assert busy == {0: 3, 1: 3, 2: 3}
    assert json.loads("".join(trace_lines({}))) == {"displayTimeUnit": "ms", "traceEvents": []}
