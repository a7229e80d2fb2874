"""A copy is the same files, byte for byte, or nothing that counts; whatever it meets, and wherever it is cut off."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckpt import settings
from ckpt.concurrency import Rounds, imap_unordered, map_tasks, patience
from ckpt.engine.copy import copy_checkpoint
from ckpt.errors import ConflictError, CorruptError, FormatError, NotCommittedError, NotFoundError, StorageError, UsageError
from ckpt.formats.native.writer import set_tags
from ckpt.io_backends import Fault, FaultyProcess, InProcessBackend, SimulatedCrash, join_url, open_backend, wrap_backends
from ckpt.io_backends.conformance.reading import everything
from tests.cli.checkpoints import data_files, flip, sample, stored, write_checkpoint
from tests.formats import oracle
from tests.io_backends.bucket import buckets
from tests.pairwise import pairwise

PLACES = ["posix", "memory", "fsspec"]


@pytest.fixture(autouse=True)
def _storages() -> Iterator[None]:
    InProcessBackend.reset()
    with buckets():
        yield


def place(kind: str, tmp_path: Path, name: str) -> str:
    return {"posix": str(tmp_path / name), "memory": f"inprocess://m/{name}", "fsspec": f"testbucket://b/{name}"}[kind]


def files(url: str) -> dict[str, bytes]:
    return everything(open_backend(url))


@pytest.fixture
def source(tmp_path: Path) -> str:
    url = str(tmp_path / "source")
    write_checkpoint(url, sample(), ranks=3, aliases={"tied": "model.norm"}, state={"w": {"$tensor": "model.wq.weight"}})
    set_tags(open_backend(url), ["release"])
    return url


BUFFERS = {"whole files": 16 << 20, "small runs": 40, "long chunks": 7}


@pytest.fixture(params=BUFFERS.values(), ids=BUFFERS.keys())
def buffer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(settings, "HASH_BUFFER", request.param)
    return int(request.param)


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("of", PLACES)
def test_every_byte_arrives(tmp_path: Path, source: str, of: str, to: str, buffer: int) -> None:
    first, second = place(of, tmp_path, "first"), place(to, tmp_path, "second")
    told: list[tuple[int, int]] = []
    copy_checkpoint(source, first)
    report = copy_checkpoint(first, second, threads=3, progress=lambda done, total: told.append((done, total)))
    expected = files(source)
    assert files(second) == expected
    size = sum(map(len, expected.values())) - len(expected["checkpoint.json"])
    assert (report.files, report.bytes, report.copied_files, report.copied_bytes) == (len(expected) - 1, size, len(expected) - 1, size)
    assert report.committed
    assert told[-1] == (size, size)
    assert told == sorted(told)


# ---- damage


@pytest.mark.parametrize("where", ["header", "chunk", "index"])
def test_a_damaged_source_is_never_copied(tmp_path: Path, source: str, where: str, buffer: int) -> None:
    path = data_files(Path(source))[1]
    if where == "header":
        flip(path, 100)
    elif where == "chunk":
        flip(path, stored(path)["model.norm[3:5]" if "model.norm[3:5]" in stored(path) else next(iter(stored(path)))][0])
    else:
        flip(next(Path(source).glob("index-*/grids.arrow")), 20)
    with pytest.raises(CorruptError):
        copy_checkpoint(source, str(tmp_path / "copy"))
    assert not (tmp_path / "copy" / "checkpoint.json").exists()
    assert not (tmp_path / "copy" / "data" / path.name).exists()


def test_a_source_that_is_no_checkpoint(tmp_path: Path, source: str) -> None:
    with pytest.raises(NotFoundError):
        copy_checkpoint(str(tmp_path / "no"), str(tmp_path / "copy"))
    (Path(source) / "checkpoint.json").unlink()
    with pytest.raises(NotCommittedError):
        copy_checkpoint(source, str(tmp_path / "copy"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.bin").write_bytes(b"x")
    with pytest.raises(FormatError):
        copy_checkpoint(str(tmp_path / "other"), str(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()


# ---- going on


KINDS = ["crash", "error"]
CUT_OFF = pairwise([*BUFFERS.values()], PLACES, KINDS, ids=[[*BUFFERS], PLACES, KINDS])


@pytest.mark.parametrize(("buffer", "to", "kind"), CUT_OFF, indirect=["buffer"])
def test_a_copy_that_was_cut_off_goes_on(tmp_path: Path, source: str, to: str, kind: str, buffer: int) -> None:
    """At every operation: nothing is committed before the last, and the second attempt ends with the same files as if nothing had been."""
    expected = files(source)
    count = FaultyProcess()
    with wrap_backends(count.wrap):
        copy_checkpoint(source, place(to, tmp_path, "counted"), threads=1)
    steps = range(0, count.log.index("put_if checkpoint.json") + 1, 2 if buffer > 1000 else 7)
    kept = 0
    for at in steps:
        target = place(to, tmp_path, f"copy{at}")
        process = FaultyProcess(Fault(at=at, kind=kind, lose_unsynced=kind == "crash"))  # type: ignore[arg-type]
        with wrap_backends(process.wrap), pytest.raises((SimulatedCrash, StorageError, CorruptError)):
            copy_checkpoint(source, target, threads=1)
        left = files(target)
        assert "checkpoint.json" not in left
        report = copy_checkpoint(source, target)
        assert files(target) == expected
        kept += report.files - report.copied_files
        assert report.committed
    assert kept > len(steps)


def test_the_right_size_is_not_enough(tmp_path: Path, source: str, buffer: int) -> None:
    target = tmp_path / "copy"
    copy_checkpoint(source, str(target))
    (target / "checkpoint.json").unlink()
    for path in data_files(target)[:2]:
        flip(path, path.stat().st_size - 1)
    flip(next(target.glob("index-*/state.json")), 0)
    report = copy_checkpoint(source, str(target))
    assert report.copied_files == 3
    assert files(str(target)) == files(source)


def test_the_same_checkpoint_is_there_already(tmp_path: Path, source: str) -> None:
    target = str(tmp_path / "copy")
    copy_checkpoint(source, target)
    set_tags(open_backend(target), ["mine"])
    before = files(target)
    report = copy_checkpoint(source, target)
    assert (report.copied_files, report.committed) == (0, False)
    assert files(target) == before


def test_what_a_committed_copy_lost_comes_back_but_damage_is_not_touched(tmp_path: Path, source: str) -> None:
    target = tmp_path / "copy"
    copy_checkpoint(source, str(target))
    data_files(target)[0].unlink()
    assert copy_checkpoint(source, str(target)).copied_files == 1
    assert files(str(target)) == files(source)
    damaged = data_files(target)[1]
    whole = damaged.read_bytes()
    for wrong in (whole[:-1] + b"\x55", whole[:-1], b""):
        damaged.write_bytes(wrong)
        before = files(str(target))
        with pytest.raises(CorruptError, match=damaged.name):
            copy_checkpoint(source, str(target))
        assert files(str(target)) == before


# ---- others at the target


def test_another_checkpoint_is_never_replaced(tmp_path: Path, source: str) -> None:
    target = str(tmp_path / "other")
    write_checkpoint(target, {"x": np.ones(3)})
    before = files(target)
    with pytest.raises(ConflictError, match="another checkpoint"):
        copy_checkpoint(source, target)
    assert files(target) == before


def test_losing_against_a_save_that_commits_meanwhile(tmp_path: Path, source: str) -> None:
    target = str(tmp_path / "other")
    with pytest.raises(ConflictError):
        copy_checkpoint(source, target, progress=_once(lambda: write_checkpoint(target, {"x": np.ones(3)})))
    assert oracle.read(target).keys() == {"x"}
    assert len(files(target)) == 1 + 4 + 2


def test_what_is_removed_meanwhile_is_not_committed(tmp_path: Path, source: str) -> None:
    target = tmp_path / "copy"
    with pytest.raises(StorageError, match="not there"):
        copy_checkpoint(source, str(target), progress=_once(lambda: next(target.glob("index-*/tensors.arrow")).unlink()))
    assert not (target / "checkpoint.json").exists()


def _once(act):
    """A progress callback that acts when it is called first."""
    calls = iter([act])
    return lambda done, total: next(calls, lambda: None)()


def test_refuses_itself_and_runs(tmp_path: Path, source: str) -> None:
    with pytest.raises(UsageError, match="same place"):
        copy_checkpoint(source, f"file://{source}/")
    copy_checkpoint(source, join_url(str(tmp_path), "run", "step-00000007"))
    with pytest.raises(UsageError, match="is a run"):
        copy_checkpoint(source, str(tmp_path / "run"))


# ---- cost


def test_a_fresh_copy_asks_for_nothing_needless(tmp_path: Path, source: str) -> None:
    count = FaultyProcess()
    with wrap_backends(count.wrap):
        copy_checkpoint(source, str(tmp_path / "copy"), threads=1)
    kinds = [operation.partition(" ")[0] for operation in count.log]
    assert "delete" not in kinds
    assert kinds.count("read_into") == 3  # the data files, once each
    assert kinds.count("list_prefix") == 5  # what is there; data and index, before and after the commit


def test_memory_is_bounded_by_the_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "HASH_BUFFER", 1 << 20)
    monkeypatch.setattr(settings, "PIECE", 1 << 20)
    write_checkpoint(str(tmp_path / "s"), {"w": np.arange(8 << 20, dtype=np.int32), "v": np.ones((64, 4096))}, ranks=1)
    tracemalloc.start()
    try:
        copy_checkpoint(str(tmp_path / "s"), str(tmp_path / "t"), threads=3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 << 20
    assert files(str(tmp_path / "t")) == files(str(tmp_path / "s"))


def test_jobs_are_taken_as_threads_come_free() -> None:
    begun: list[int] = []

    def job(n: int) -> int:
        begun.append(n)
        if n == 3:
            raise ValueError("job 3")
        return n

    taken: list[int] = []

    def jobs():
        for n in range(100):
            taken.append(n)
            yield lambda n=n: job(n)

    with pytest.raises(ValueError, match="job 3"):
        list(imap_unordered(jobs(), 2, "test"))
    assert len(taken) < 20
    assert not [t for t in threading.enumerate() if t.name.startswith("test")]
    assert sorted(imap_unordered((lambda n=n: n for n in range(50)), 4, "test")) == list(range(50))
    before = patience.set(7.0)
    try:
        assert list(imap_unordered([patience.get] * 3, 2, "test")) == [7.0] * 3
    finally:
        patience.reset(before)


def test_tasks_that_get_fewer_threads_are_all_done(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def limited(self: threading.Thread) -> None:
        start(self) if self.name == "test-1" else _raise(RuntimeError("can't start new thread"))

    monkeypatch.setattr(threading.Thread, "start", limited)
    assert map_tasks(lambda n: n * n, range(20), 4, "test") == [n * n for n in range(20)]
    assert not [t for t in threading.enumerate() if t.name.startswith("test")]


def test_who_asks_after_a_thread_could_not_be_started_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    rounds = Rounds(done.set, "test-rounds")
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", lambda self: _raise(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError):
            rounds.ask()
    assert rounds.wait(0)
    rounds.ask()
    assert rounds.wait(30) and done.is_set()


def _raise(error: Exception) -> None:
    raise error
