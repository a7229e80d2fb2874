"""What ranks have of their own, where it lies apart from the index that every reader opens: saved, loaded, listed, verified, copied."""

from __future__ import annotations

import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import xxhash
from torch.distributed import HashStore

import ckpt
from ckpt import settings
from ckpt.catalog import Catalog
from ckpt.engine.copy import copy_checkpoint
from ckpt.engine.load.fill import LoadOptions
from ckpt.engine.load.load import load_state
from ckpt.engine.save import save as save_module
from ckpt.engine.save.options import SaveOptions
from ckpt.engine.save.save import save_state
from ckpt.engine.verify import verify
from ckpt.errors import CorruptError, FormatError, StateError
from ckpt.formats.native import commit, datafile
from ckpt.formats.native.ranks import decode_ranks, encode_row
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.posix_backend import PosixBackend
from ckpt.net.channel import ControlChannel
from ckpt.net.group import Group
from ckpt.net.store import group_store
from ckpt.plan import ownership
from ckpt.plan.match import Selection

RANKS = 5
OPTIONS = SaveOptions(layout=None, timeout=30, check_replicas=True, threads=1)


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_module, "APART", 0)


def state(rank: int) -> dict[str, Any]:
    own = {"noise": torch.arange(rank + 2.0), "at": 10 * rank, "twice": None, "large": torch.full((40, 3), float(rank))}
    own["twice"] = own["noise"]
    return {"w": torch.arange(6.0), "step": 7, "rng": ckpt.PerRank(own), "also": ckpt.PerRank(f"rank {rank}")}


def save(url: str, ranks: int = RANKS, **options: Any) -> None:
    if ranks == 1:
        ckpt.save(url, state(0), **options)
        return
    store = HashStore()
    with ThreadPoolExecutor(ranks) as pool:
        groups = [Group(rank, tuple(range(ranks)), group_store(store, "apart", rank)) for rank in range(ranks)]
        for done in [pool.submit(save_state, url, state(g.rank), g, OPTIONS) for g in groups]:
            done.result()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("apart") / "c"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "APART", 0)
        save(str(path))
    return path


def record(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "checkpoint.json").read_bytes())
    return found


def rewritten(path: Path, rows: dict[int, bytes]) -> None:
    """Give a checkpoint other rows, with all digests right, by the specification alone."""
    found = record(path)
    table = {
        "rank": pa.array(sorted(rows), pa.int32()),
        "length": pa.array([len(rows[r]) for r in sorted(rows)], pa.int64()),
        "digest": pa.array([xxhash.xxh3_64_intdigest(rows[r]) for r in sorted(rows)], pa.uint64()),
    }
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.table(table).schema) as writer:
        writer.write_table(pa.table(table))
    for name, data in (("ranks.arrow", sink.getvalue().to_pybytes()), ("ranks.jsonl", b"".join(rows[r] for r in sorted(rows)))):
        (path / found["index"][name]["path"]).write_bytes(data)
        found["index"][name] |= {"size": len(data), "digest": xxhash.xxh3_128_hexdigest(data)}
    text = json.dumps({**found, "digest": "0" * 32}).encode()
    (path / "checkpoint.json").write_bytes(text.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(text).encode()))


def rows_of(path: Path) -> dict[int, bytes]:
    index = record(path)["index"]
    table = pa.ipc.open_file(path / index["ranks.arrow"]["path"]).read_all().to_pydict()
    data = (path / index["ranks.jsonl"]["path"]).read_bytes()
    found, at = {}, 0
    for rank, length, digest in zip(table["rank"], table["length"], table["digest"], strict=True):
        found[rank] = data[at : at + length]
        assert xxhash.xxh3_64_intdigest(found[rank]) == digest
        at += length
    assert at == len(data)
    return found


def test_what_is_stored_is_what_the_specification_says(saved: Path) -> None:
    found = record(saved)
    assert found["features"] == ["ranks"]
    stored = json.loads((saved / found["index"]["state.json"]["path"]).read_bytes())
    assert stored["ranks"] == {}
    assert stored["state"]["rng"] == {"$per_rank": True}
    rows = {rank: json.loads(row) for rank, row in rows_of(saved).items()}
    assert list(rows) == list(range(RANKS))
    for rank, row in rows.items():
        assert row["values"]["also"] == f"rank {rank}"
        assert row["values"]["rng"]["large"] == {"$tensor": f"rng.large@rank{rank}"}
        assert row["tensors"][f"rng.large@rank{rank}"] == {"dtype": "float32", "shape": [40, 3]}
    names = pa.ipc.open_file(saved / found["index"]["tensors.arrow"]["path"]).read_all().to_pydict()["name"]
    assert names == ["w"]
    own = sum(4 * math.prod(t["shape"]) for row in rows.values() for t in row["tensors"].values())
    assert found["tensor_bytes"] == 24 + own


def test_readers_see_what_they_see_of_any_checkpoint(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same state saved with everything in the tables."""
    monkeypatch.setattr(save_module, "APART", 1000)
    save(str(tmp_path / "plain"))
    assert record(tmp_path / "plain")["features"] == []

    def seen(catalog: Catalog) -> tuple[object, ...]:
        tensors = {n: (e.dtype, e.shape, e.rank, e.alias, e.grid.all_boxes()[1].tolist()) for n, e in catalog.tensors.items()}
        return tensors, list(catalog.tensors), {r: dict(v) for r, v in catalog.ranks.items()}, catalog.state, catalog.world_size

    apart, plain = open_catalog(str(saved)), open_catalog(str(tmp_path / "plain"))
    assert seen(apart) == seen(plain)
    view, other = ckpt.open(str(saved)), ckpt.open(str(tmp_path / "plain"))
    assert view.per_rank("rng", 3)["at"] == other.per_rank("rng", 3)["at"] == 30
    assert torch.equal(view["rng.large@rank2"][:], other["rng.large@rank2"][:])
    assert set(view) == set(other)
    assert verify(str(saved)).ok


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_state_comes_back(tmp_path: Path, codec: str | None) -> None:
    save(str(tmp_path / "c"), ranks=1, codec=codec)
    target = {"w": torch.zeros(6), "step": 0, "rng": ckpt.PerRank(None), "also": ckpt.PerRank("")}
    ckpt.load(str(tmp_path / "c"), target)
    own = target["rng"].value  # type: ignore[union-attr]
    assert own["at"] == 0
    assert torch.equal(own["noise"], torch.arange(2.0))
    assert own["noise"] is own["twice"]
    assert target["step"] == 7
    assert torch.equal(target["w"], torch.arange(6.0))  # type: ignore[arg-type]


def test_an_own_tensor_of_several_chunks_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "CHUNK", 96)
    monkeypatch.setattr(datafile, "CODED_CHUNKS", 3)
    ownership._assignment.cache_clear()
    save(str(tmp_path / "c"), ranks=1, codec="zstd")
    (row,) = rows_of(tmp_path / "c").values()
    ownership._assignment.cache_clear()
    assert len({*json.loads(row)["tensors"]["rng.large@rank0"]["files"]}) > 1
    assert torch.equal(ckpt.open(str(tmp_path / "c"))["rng.large@rank0"][:], torch.zeros(40, 3))
    assert verify(str(tmp_path / "c")).ok


def test_a_rank_reads_its_own_row_alone(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, int | None]] = []
    read = PosixBackend.read

    def counted(self: PosixBackend, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if path.endswith("ranks.jsonl"):
            reads.append((offset, length))
        return read(self, path, offset, length)

    monkeypatch.setattr(PosixBackend, "read", counted)
    whole: list[str] = []
    read_whole = PosixBackend.read_whole

    def noted(self: PosixBackend, path: str, most: int) -> bytes:
        whole.append(path)
        return read_whole(self, path, most)

    monkeypatch.setattr(PosixBackend, "read_whole", noted)
    store = HashStore()
    targets = [{"w": torch.zeros(6), "step": 0, "rng": ckpt.PerRank(None), "also": ckpt.PerRank("")} for _ in range(RANKS)]
    options = LoadOptions(layout=None, selection=Selection(), strict=True, cast=False, verify="full", timeout=30, threads=1)
    with ThreadPoolExecutor(RANKS) as pool:
        groups = [Group(rank, tuple(range(RANKS)), group_store(store, "load", rank)) for rank in range(RANKS)]
        for done in [pool.submit(load_state, str(saved), targets[g.rank], g, options) for g in groups]:
            done.result()
    assert [t["also"].value for t in targets] == [f"rank {r}" for r in range(RANKS)]  # type: ignore[union-attr]
    assert [t["rng"].value["at"] for t in targets] == [10 * r for r in range(RANKS)]  # type: ignore[union-attr]
    rows = rows_of(saved)
    starts = [sum(len(rows[r]) for r in range(rank)) for rank in range(RANKS)]
    assert sorted(set(reads)) == [(starts[r], len(rows[r])) for r in range(RANKS)]
    assert len(reads) == RANKS
    assert not any(path.endswith("ranks.jsonl") for path in whole)


def test_other_numbers_of_ranks_see_the_values_of_all(saved: Path) -> None:
    target = {"w": torch.zeros(6), "also": ckpt.PerRank("", reshard=lambda values, rank, world: ", ".join(values))}
    ckpt.load(str(saved), target, only=["w", "also"])
    assert target["also"].value == ", ".join(f"rank {r}" for r in range(RANKS))  # type: ignore[union-attr]


def test_a_copy_has_the_rows_too(saved: Path, tmp_path: Path) -> None:
    copy_checkpoint(str(saved), str(tmp_path / "copy"))
    shutil.copytree(saved, tmp_path / "moved")
    assert verify(str(tmp_path / "copy")).ok
    assert rows_of(tmp_path / "copy") == rows_of(saved)


def test_software_that_does_not_know_it_refuses(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "FEATURES", frozenset({"codecs", "extents"}))
    with pytest.raises(FormatError, match="'ranks'"):
        open_catalog(str(saved))


def test_damage_is_found_by_who_reads_it(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "c")
    rows = rows_of(saved)
    file = tmp_path / "c" / record(saved)["index"]["ranks.jsonl"]["path"]
    data = bytearray(file.read_bytes())
    data[len(rows[0]) + 9] ^= 1
    file.write_bytes(data)
    catalog = open_catalog(str(tmp_path / "c"))
    assert catalog.ranks[0]["also"] == "rank 0"
    with pytest.raises(CorruptError, match="digest"):
        catalog.ranks[1]
    with pytest.raises(CorruptError):
        list(catalog.tensors)
    report = verify(str(tmp_path / "c"))
    assert [p.file for p in report.problems] == [record(saved)["index"]["ranks.jsonl"]["path"]]
    file.unlink()
    with pytest.raises(CorruptError, match="missing"):
        open_catalog(str(tmp_path / "c")).ranks[0]


def changed(row: bytes, **members: Any) -> bytes:
    return json.dumps({**json.loads(row), **members}).encode()


def adding(row: bytes, name: str = "x", **members: Any) -> bytes:
    """One tensor more, of two numbers unless ``members`` say otherwise."""
    return changed(row, tensors=json.loads(row)["tensors"] | {name: {"dtype": "float32", "shape": [2], **members}})


WRONG = {
    "not JSON": ("not as the format requires", lambda row: row[:-3]),
    "no values": ("not as the format requires", lambda row: changed(row, values=None)),
    "a node": ("malformed", lambda row: changed(row, values={"also": {"$what": 1, "x": 2}})),
    "a module": ("not allowed where it is", lambda row: changed(row, values={"also": {"$tensors": "w"}})),
    "of the job too": ("'w' occurs elsewhere", lambda row: adding(row, "w")),
    "of another rank": ("'rng.large@rank0' occurs elsewhere", lambda row: adding(row, "rng.large@rank0")),
    "a file": ("not as the format requires", lambda row: adding(row, files=[1])),
    "a negative file": ("the files of 'x'", lambda row: adding(row, files=[-1])),
    "no files": ("the files of 'x'", lambda row: adding(row, files=[])),
    "too many files": ("names a file for 2", lambda row: adding(row, files=[0, 0])),
    "cuts": ("do not increase", lambda row: adding(row, cuts=[[0, 1]])),
    "a size": ("not an integer", lambda row: adding(row, shape=[2.0])),
    "a shape": ("not as the format requires", lambda row: adding(row, shape="")),
    "more chunks than can be": ("have room for", lambda row: adding(row, shape=[999] * 6, cuts=[list(range(1000))] * 6)),
    "pairs": ("not as the format requires", lambda row: changed(row, values=[["also", 1]])),
    "tensor and alias": ("not as the format requires", lambda row: changed(adding(row), aliases={"x": "rng.large@rank1"})),
    "an alias": ("not as the format requires", lambda row: changed(row, aliases={"y": "nothing"})),
    "a name": ("rank 1", lambda row: adding(row, "")),
}


@pytest.mark.parametrize("what", WRONG)
def test_rows_that_cannot_be(saved: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(saved, tmp_path / "c")
    rows = rows_of(saved)
    message, change = WRONG[what]
    assert "x" in open_catalog_of(tmp_path / "c", rows | {1: adding(rows[1])})
    with pytest.raises(CorruptError, match=f"(?s)rank 1.*{message}|{message}.*rank 1" if message != "rank 1" else message):
        open_catalog_of(tmp_path / "c", rows | {1: change(rows[1])})


def open_catalog_of(path: Path, rows: dict[int, bytes]) -> list[object]:
    """Names and values, with these rows."""
    rewritten(path, rows)
    catalog = open_catalog(str(path))
    return [*catalog.ranks.values(), *catalog.tensors]


@pytest.mark.parametrize("ranks", [{7: b"{}"}, {-1: b"{}"}], ids=str)
def test_a_table_of_ranks_that_cannot_be(saved: Path, tmp_path: Path, ranks: dict[int, bytes]) -> None:
    shutil.copytree(saved, tmp_path / "c")
    rewritten(tmp_path / "c", rows_of(saved) | ranks)
    with pytest.raises(CorruptError):
        open_catalog(str(tmp_path / "c"))


def test_lengths_that_only_add_up_by_overflow() -> None:
    columns = {"rank": [0, 1, 2], "length": [2**63 - 1, 2**63 - 1, 5], "digest": [0, 0, 0]}
    types = (pa.int32(), pa.int64(), pa.uint64())
    table = pa.table({n: pa.array(v, t) for (n, v), t in zip(columns.items(), types, strict=True)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(CorruptError, match="length"):
        decode_ranks(sink.getvalue().to_pybytes(), "here")


def test_an_unknown_dtype_says_so(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "c")
    rows = rows_of(saved)
    rewritten(tmp_path / "c", rows | {1: changed(rows[1], tensors={"x": {"dtype": "float3", "shape": [2]}})})
    with pytest.raises(FormatError, match="float3"):
        open_catalog(str(tmp_path / "c")).ranks[1]


def test_long_rows_are_asked_for_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator of random numbers is 6 KB of JSON. Each word of the leader is read by all ranks."""
    asked = []

    def say(self: ControlChannel, word: bytes) -> None:
        asked.extend(["asks"] if "asks" in json.loads(word) else [])
        said(self, word)

    said = ControlChannel.say
    monkeypatch.setattr(ControlChannel, "say", say)
    store = HashStore()
    groups = [Group(rank, tuple(range(RANKS)), group_store(store, "long", rank)) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as pool:
        states = [{"w": torch.arange(6.0), "rng": ckpt.PerRank(f"{rank}" * 6000)} for rank in range(RANKS)]
        for done in [pool.submit(save_state, f"{tmp_path}/c", states[g.rank], g, OPTIONS) for g in groups]:
            done.result()
    assert len(asked) < RANKS - 1
    catalog = open_catalog(f"{tmp_path}/c")
    assert {rank: values["rng"] for rank, values in catalog.ranks.items()} == {rank: f"{rank}" * 6000 for rank in range(RANKS)}


def test_a_rank_refuses_a_value_that_no_reader_takes() -> None:
    with pytest.raises(StateError, match="the value a"):
        encode_row(b"{}", {"a": {"$what": 1, "x": 2}})
