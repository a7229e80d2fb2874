"""Orphans are cleared away while a save goes on after all: then that save fails, or its checkpoint is whole. Never neither."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import xxhash
from click.testing import CliRunner

import ckpt
from ckpt import convert
from ckpt.cli.main import cli
from ckpt.converters.importer import import_checkpoint
from ckpt.engine.copy import Transfer, copy_checkpoint
from ckpt.engine.verify import verify
from ckpt.errors import CkptError, ConflictError, NotCommittedError, NotFoundError, StorageError
from ckpt.formats.native.clearing import clear
from ckpt.formats.native.commit import began, moment_of
from ckpt.formats.native.writer import committed_id, set_tags
from ckpt.io_backends import InProcessBackend, open_backend, posix_files
from ckpt.io_backends.conformance.reading import everything, put
from ckpt.io_backends.faulty import Fault, FaultyBackend, FaultyProcess, SimulatedCrash
from ckpt.io_backends.posix_backend import PosixBackend
from ckpt.io_backends.registry import wrap_backends
from ckpt.policies import Latest
from ckpt.runs.orphans import find_orphans, remove_orphans
from ckpt.runs.step_listing import list_steps
from tests.cli.checkpoints import write_checkpoint
from tests.failures.states import state, stored

T = TypeVar("T")

FAR = 400 * 86_400.0
"""Seconds that the clock of a machine that clears away is ahead."""
OLD, NEW = 1, 2


class Stopping(FaultyProcess):
    """Calls ``hooks[n]`` before operation ``n``, once each; what they do themselves is not counted."""

    def __init__(self, hooks: dict[int, Callable[[], object]]) -> None:
        super().__init__()
        self.hooks = dict(hooks)
        self._turn = threading.RLock()

    def operate(self, what: str, effect: Callable[[], T], half: Callable[[], None] | None = None) -> T:
        with self._turn:
            hook = self.hooks.pop(self.operations, None)
        if hook is not None:
            hook()
        return super().operate(what, effect, half)


class Clearing:
    """A ``ckpt gc`` elsewhere, for which every file is old; it stops before its operation ``at`` until it is released."""

    def __init__(self, root: str, at: int) -> None:
        self._stopped, self._go = threading.Event(), threading.Event()
        self._process = Stopping({at: self._stop})
        self._backend = FaultyBackend(open_backend(root), process=self._process)
        self._pool = ThreadPoolExecutor(1)

    def _stop(self) -> None:
        self._stopped.set()
        assert self._go.wait(20)

    def _run(self) -> None:
        try:
            remove_orphans(self._backend, find_orphans(self._backend, older_than=3600, now=time.time() + FAR))
        finally:
            self._stopped.set()

    def start(self) -> None:
        self._end = self._pool.submit(self._run)
        assert self._stopped.wait(20)

    def release(self) -> None:
        self._go.set()
        self._end.result(20)
        self._pool.shutdown()

    @property
    def operations(self) -> int:
        return self._process.operations


def found(url: str) -> int | None:
    try:
        return stored(url)
    except (NotFoundError, NotCommittedError):
        return None


def prepared(root: str, replacing: bool) -> str:
    InProcessBackend.reset()
    if replacing:
        ckpt.save(f"{root}/step-1", state(OLD))
    return f"{root}/step-1"


@pytest.mark.parametrize("replacing", [False, True], ids=["new", "replacing"])
def test_a_save_that_is_cleared_away_at_any_moment_fails_or_is_whole(replacing: bool, pytestconfig: pytest.Config) -> None:
    """The clearing begins before one operation of the save, stops before any of its own, and goes on before a later one of the save: by
    default every second one, turn by turn, so that all pairs of the three are there."""
    turns = 1 if pytestconfig.getoption("--slow") else 2
    root = "inprocess://clearing/run"
    url = prepared(root, replacing)
    counted, cleared = FaultyProcess(), Clearing(root, 10**6)
    with wrap_backends(counted.wrap):
        ckpt.save(url, state(NEW), job=ckpt.Job(threads=1))
    publish, last = counted.log.index("put_if checkpoint.json"), len(counted.log)
    url = prepared(root, replacing)
    with pytest.raises(StorageError), wrap_backends(Stopping({publish - 2: cleared.start}).wrap):
        ckpt.save(url, state(NEW), job=ckpt.Job(threads=1))
    cleared.release()
    assert cleared.operations >= 12
    failed = whole = 0
    for number, first in enumerate((publish - 7, publish - 2, publish)):
        for at in range(cleared.operations + 1):
            for second in (publish - 1, publish, publish + 1, publish + 2, publish + 3, last)[(number + at) % turns :: turns]:
                if second <= first:
                    continue
                url, clearing = prepared(root, replacing), Clearing(root, at)
                process = Stopping({first: clearing.start, second: clearing.release})
                error: CkptError | None = None
                try:
                    with wrap_backends(process.wrap):
                        ckpt.save(url, state(NEW), job=ckpt.Job(threads=1))
                except StorageError as err:
                    error = err
                clearing.release()
                where = f"cleared from operation {first} ({counted.log[first]}) on, stopped at its {at}, and again from {second}"
                assert found(url) == (NEW if error is None else OLD if replacing else None), f"{where}: {error}"
                failed, whole = failed + (error is not None), whole + (error is None)
    assert failed > 20 and whole > 20
    print(f"{failed} saves failed, {whole} were whole")


@pytest.mark.parametrize("meanwhile", ["gc", "tag"])
def test_a_commit_that_is_taken_back_gives_way_to_what_was_there(meanwhile: str) -> None:
    """Also if a ``ckpt gc`` takes the checkpoint before it for an orphan meanwhile, or somebody tags the new one."""
    root = "inprocess://clearing/run"
    url = prepared(root, replacing=True)
    counted, clearing = FaultyProcess(), Clearing(root, 15)
    with wrap_backends(counted.wrap):
        ckpt.save(url, state(NEW), job=ckpt.Job(threads=1))
    publish = counted.log.index("put_if checkpoint.json")
    url = prepared(root, replacing=True)

    def gc() -> None:
        backend = open_backend(root)
        found = find_orphans(backend, older_than=3600, now=time.time())
        assert {d.id: d.removable for d in found}[first] is False
        remove_orphans(backend, found)

    first = committed_id(open_backend(url))
    then = {publish + 1: gc} if meanwhile == "gc" else {publish + 5: lambda: set_tags(open_backend(url), ["mine"])}
    process = Stopping({publish: clearing.start, **then})
    with pytest.raises(StorageError), wrap_backends(process.wrap):
        ckpt.save(url, state(NEW), job=ckpt.Job(threads=1))
    assert not process.hooks
    clearing.release()
    assert stored(url) == OLD and not list_steps(url)[0].tags


def test_a_clearing_leaves_the_mark_of_another_that_may_go_on() -> None:
    """It finds the save committed and removes nothing; the other may be about to remove a file, which the save has to see."""
    url = prepared("inprocess://clearing/run", replacing=True)
    backend, id = open_backend(url), str(committed_id(open_backend(url)))
    put(backend, f"index-{id}/clearing", b"")
    assert not clear(backend, id, "", [f"data/{id}-00000.safetensors"], lambda: id)
    assert backend.size(f"index-{id}/clearing") == 0 and stored(url) == OLD
    assert not clear(backend, "0" * 16, "", [], lambda: "0" * 16) and "clearing" not in str(list(backend.list_prefix(f"index-{'0' * 16}")))


def test_without_room_for_a_mark_the_record_is_looked_at_before_each_file() -> None:
    url = prepared("inprocess://clearing/run", replacing=True)
    backend, id = open_backend(url), str(committed_id(open_backend(url)))
    full = FaultyBackend(backend, Fault(at=0, kind="no_space"))
    answers = iter([None, id, id, id])  # it is committed since
    assert not clear(full, id, "", [e.path for e in backend.list_prefix() if "/" in e.path][:2], lambda: next(answers))
    assert stored(url) == OLD


def test_two_clearings_at_once_both_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one ends, and with the last file the directory goes, when this one has just put its mark there."""
    id = "0" * 16
    paths = [f"data/{id}-0000{n}.safetensors" for n in range(3)] + [f"index-{id}/state.json"]
    backend = PosixBackend(str(tmp_path))
    for path in (*paths, "data/other"):
        put(backend, path, b"orphan")
    sync = posix_files.sync_directories
    others: list[bool] = []

    def meanwhile(directory: str, root: str, made: list[str]) -> None:
        if not others:
            others.append(False)
            others[0] = clear(backend, id, "", paths, lambda: None)
        sync(directory, root, made)

    monkeypatch.setattr(posix_files, "sync_directories", meanwhile)
    assert clear(backend, id, "", paths, lambda: None) and others == [True]
    assert everything(backend) == {"data/other": b"orphan"}


@pytest.mark.parametrize("how", ["cp", "convert", "import", "publish"])
def test_all_that_commits_looks_once_more(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is not committed is cleared away before each operation in turn, by somebody whose clock is ahead."""
    source, root = str(tmp_path / "source" / "step-00000001"), str(tmp_path / "root")
    ckpt.save(source, state(NEW))
    monkeypatch.setattr("ckpt.formats.native.commit.secrets.randbelow", lambda n: 5)
    url = f"{root}/step-00000001"

    def act() -> object:
        if how == "cp":
            return copy_checkpoint(source, url, threads=1)
        if how == "convert":
            return convert(source, url, to="native", threads=1)
        if how == "import":
            return import_checkpoint(source, url)
        with ckpt.Checkpointer(root, local=str(tmp_path / "source"), publish_timeout=0.01, job=ckpt.Job(threads=1), keep=Latest(1)) as c:
            return c.restore(state(0))

    def clear() -> None:
        backend = PosixBackend(root)
        remove_orphans(backend, find_orphans(backend, older_than=3600, now=time.time() + FAR))

    counted = FaultyProcess()
    with wrap_backends(lambda b: counted.wrap(b) if b.url.startswith(root) else b):
        act()
    failed = 0
    for at in range(0, len(counted.log), 1 if how == "cp" else 2):
        shutil.rmtree(root, ignore_errors=True)  # a save that failed leaves no empty directory
        error: CkptError | None = None
        process = Stopping({at: clear})
        try:
            with wrap_backends(lambda b, process=process: process.wrap(b) if b.url.startswith(root) else b):  # type: ignore[misc]
                act()
        except CkptError as err:
            error = err
        failed += error is not None
        committed = [s for s in list_steps(root) if s.committed]
        assert bool(committed) or error is not None, f"{how}, cleared before {counted.log[at]}: nothing is there, and nothing was said"
        assert all(verify(s.url).ok for s in committed), f"{how}, cleared before {counted.log[at]}"
    assert failed or how == "publish", "a publish is tried again, the others raise"


@pytest.mark.parametrize("first", ["whole", "at its commit"])
def test_two_copies_of_one_checkpoint_to_one_place(tmp_path: Path, first: str) -> None:
    """The second finds a half file, which the first finishes meanwhile: then nothing of it goes, or the first is not committed. The second
    is killed when it has written the end of its file, before the rest."""
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    ckpt.save(source, {"x": torch.arange(100_000)})
    (data,) = (tmp_path / "source").glob("data/*")
    half = tmp_path / "target" / "data" / data.name
    half.parent.mkdir(parents=True)
    half.write_bytes(data.read_bytes()[:100])
    told: list[CkptError | None] = []

    def copy() -> None:
        try:
            copy_checkpoint(source, target, threads=1)
            told.append(None)
        except CkptError as err:
            told.append(err)

    def second() -> None:
        run = Transfer(source, target)
        room = run._make_room

        def meanwhile(bad: set[str]) -> None:
            if first == "whole":
                copy()
            room(bad)
            half.parent.mkdir(exist_ok=True)
            half.write_bytes(bytes(data.stat().st_size))
            raise SimulatedCrash

        run._make_room = meanwhile  # type: ignore[method-assign]
        with pytest.raises(ConflictError if first == "whole" else SimulatedCrash):
            run.copy(run.sizes, 1, None)

    if first == "whole":
        second()
    else:
        counted = FaultyProcess()
        with wrap_backends(lambda b: counted.wrap(b) if b.url == target else b):
            copy_checkpoint(source, str(target), threads=1)
        shutil.rmtree(target)
        half.parent.mkdir(parents=True)
        half.write_bytes(data.read_bytes()[:100])
        publish = counted.log.index("put_if checkpoint.json")
        process = Stopping({publish: lambda: (half.write_bytes(half.read_bytes()[:100]), second())})
        with wrap_backends(lambda b: process.wrap(b) if b.url == target else b):
            copy()
    committed = [s for s in list_steps(target) if s.committed]
    assert bool(committed) == (told == [None]) and all(verify(s.url).ok for s in committed), told
    copy_checkpoint(source, target)
    assert verify(target).ok


def test_what_a_killed_clearing_left_does_not_keep_a_copy_from_going_on(tmp_path: Path) -> None:
    ckpt.save(str(tmp_path / "source"), state(NEW))
    count = FaultyProcess()
    with wrap_backends(count.wrap):
        copy_checkpoint(str(tmp_path / "source"), str(tmp_path / "counted"), threads=1)
    target = str(tmp_path / "run" / "step-1")
    with pytest.raises(SimulatedCrash), wrap_backends(FaultyProcess(Fault(at=count.operations - 6, kind="crash")).wrap):
        copy_checkpoint(str(tmp_path / "source"), target, threads=1)
    backend = open_backend(str(tmp_path / "run"))
    found = find_orphans(backend, older_than=0, now=time.time())
    with pytest.raises(SimulatedCrash):
        remove_orphans(FaultyBackend(backend, Fault(at=4, kind="crash")), found)
    assert list((tmp_path / "run").glob("step-1/index-*/clearing"))
    copy_checkpoint(str(tmp_path / "source"), target)
    assert stored(target) == NEW and not list((tmp_path / "run").glob("step-1/index-*/clearing"))


# ---- whose clock counts


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def ahead(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """This machine's clock is wrong by so much; the storage's is not."""
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + seconds)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(seconds * 1e9))


@pytest.mark.parametrize("named", [False, True], ids=["nameless", "named"])
def test_gc_asks_the_storage_what_time_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    """Also where files cannot be made without a name, and it leaves none behind."""
    if named:
        monkeypatch.setattr("ckpt.io_backends.posix_files._NAMELESS", 0)
    write_checkpoint(str(tmp_path / "step-1"), {"x": np.ones(9)}, commit=False)
    before = everything(open_backend(str(tmp_path)))
    for seconds in (FAR, -FAR):
        with monkeypatch.context() as patch:
            ahead(patch, seconds)
            told = json.loads(run("gc", tmp_path, "--yes", "--json").stdout)["orphans"]
        assert [(d["outcome"], "touched" in d["reasons"][0]) for d in told] == [("kept", True)]
        assert everything(open_backend(str(tmp_path))) == before


def test_orphans_of_a_clock_that_was_ahead_go_when_their_files_are_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        ahead(patch, FAR)
        write_checkpoint(str(tmp_path / "step-1"), {"x": np.ones(9)}, commit=False)
    for file in (tmp_path / "step-1").rglob("*"):
        os.utime(file, (time.time() - 2 * 86_400,) * 2)
    (found,) = find_orphans(open_backend(str(tmp_path)), older_than=86_400, now=time.time())
    assert (began(found.id or "") or 0) > time.time() + FAR / 2
    assert found.removable and found.reason == "nobody touched it for 2 d"


def test_gc_tells_of_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(str(tmp_path / "step-1"), {"x": np.ones(9)}, commit=False)

    def refused(directory: str) -> float:
        raise PermissionError(13, "Permission denied", directory)

    monkeypatch.setattr("ckpt.io_backends.posix_files.clock", refused)
    assert "touched" in run("gc", tmp_path).stdout


# ---- what is nobody's orphan


def test_only_files_of_our_names_go(tmp_path: Path) -> None:
    backend = open_backend(str(tmp_path))
    theirs = ["index-0123456789abcdef/thesis.tex", "foo/index-0123456789abcdef/my-notes.txt", "foo/index-0123456789abcdef/state.json/x"]
    ours = ["foo/index-0123456789abcdee/state.json", "foo/index-0123456789abcdee/spans.json", "foo/data/0123456789abcdee-00000.safetensors"]
    for path in (*theirs, *ours):
        put(backend, path, b"x")
    assert [s.url for s in list_steps(str(tmp_path))] == [str(tmp_path / "foo")]
    assert run("gc", tmp_path, "--older-than", "0", "--yes").exit_code == 0
    assert sorted(everything(backend)) == sorted(theirs) and list_steps(str(tmp_path)) == []


@pytest.mark.parametrize("created", ["yesterday", "2026-13-40T99:00:00Z", "", "9999-12-31T23:59:59.999-23:59", 5])
def test_a_record_whose_time_is_none_is_damaged_and_gc_goes_on(tmp_path: Path, created: object) -> None:
    for n in (1, 2, 3):
        ckpt.save(str(tmp_path / f"step-{n}"), {"x": torch.ones(3)})
    record = tmp_path / "step-1" / "checkpoint.json"
    data = json.dumps(json.loads(record.read_bytes()) | {"created": created, "digest": "0" * 32}).encode()
    record.write_bytes(data.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(data).encode()))
    told = run("gc", tmp_path, "--keep", "latest=1", "--yes", "--json")
    assert told.exit_code == 0, told.output
    assert [(s["step"], s["outcome"]) for s in json.loads(told.stdout)["steps"]] == [(1, "kept"), (2, "removed"), (3, "kept")]
    (damaged, *_) = list_steps(str(tmp_path))
    assert (damaged.damaged and "not a time" in str(damaged.reason)) or created == 5


@pytest.mark.parametrize("created", ["2026-11-22T10:00:00Z", "2026-11-22T10:00:00.1234567+00:00", "2026-11-22T10:00:00"])
def test_times_that_others_write(created: str) -> None:
    found = moment_of(created)
    assert found is not None and found.replace(microsecond=0).isoformat() == "2026-11-22T10:00:00+00:00"
