"""What a removal asks of the storage grows with the steps that go, and with their files not at all where many go in one request."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import ckpt
from ckpt.errors import StorageError
from ckpt.formats.native.commit import CommitRecord, new_id
from ckpt.io_backends.faulty import FaultyProcess
from ckpt.io_backends.protocol import DELETES, Backend
from ckpt.io_backends.registry import open_backend, wrap_backends
from ckpt.policies import EverySteps
from ckpt.runs.removal import infos, remove_steps
from ckpt.runs.step_listing import KnownSteps, list_steps
from ckpt.runs.tiers import Tiers
from tests.distributed.ranks import Ranks
from tests.removal.killing import KINDS, killed

FROZEN = torch.arange(3000)


def run_of(root: Path, steps: int) -> None:
    """Each step has a file of its own, and refers to files of the first one and of the one before."""
    state = {"frozen": FROZEN, "x": torch.zeros(2)}
    for name in ("seen", "step-0"):  # what has not changed since the save before may be referred to
        ckpt.save((root if name == "step-0" else root.parent) / name, state, reuse=True)
    for n in range(1, steps):
        ckpt.save(root / f"step-{n}", {**state, "x": torch.full((2,), float(n))}, reuse=root / f"step-{n - 1}")


def asked(root: Path, steps: int) -> int:
    """How often the storage was asked while all steps but the newest, and what that refers to, were removed."""
    run_of(root, steps)
    listed = list_steps(root)
    facts = infos(listed)
    assert len(facts[0].users) == steps - 1
    process = FaultyProcess()
    with wrap_backends(process.wrap):
        known = KnownSteps(str(root)).list
        gone = remove_steps(str(root), listed[1:-1][::-1], {i.step: i.users for i in facts}, relist=known)
    assert len(gone) == steps - 2
    assert [s.number for s in list_steps(root)] == [0, steps - 1]
    loaded = {"frozen": torch.zeros(3000, dtype=torch.int64), "x": torch.zeros(2)}
    ckpt.load(root / f"step-{steps - 1}", loaded)
    assert torch.equal(loaded["frozen"], torch.arange(3000))
    return process.operations


def test_steps_that_another_job_removes_too_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for n in range(8):
        ckpt.save(tmp_path / f"step-{n}", {"x": torch.zeros(2)})
    steps = list_steps(str(tmp_path))
    assert len(remove_steps(str(tmp_path), steps[:7], {})) == 7
    caplog.clear()
    for late in (steps[:6], steps[6:7]):
        assert remove_steps(str(tmp_path), late, {}) == []
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith(f"{tmp_path}: step-0, step-1, step-2, step-3, step-4 and 1 more: replaced, removed, tagged or referred to")


def test_steps_that_go_cost_what_they_are(tmp_path: Path) -> None:
    few, many = asked(tmp_path / "few", 6), asked(tmp_path / "many", 22)
    assert many / 20 < 1.2 * few / 4


def test_the_run_is_listed_for_many_files_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one file each go together in one batch, and so do few of many files."""
    monkeypatch.setattr("ckpt.runs.removal._BATCH", 20)
    run_of(tmp_path / "run", 8)
    going = list_steps(tmp_path / "run")[6:0:-1]
    relists: list[int] = []

    def relist() -> list[ckpt.Step]:
        relists.append(1)
        return list_steps(tmp_path / "run")

    assert len(remove_steps(str(tmp_path / "run"), going, {}, relist=relist)) == 6
    assert len(relists) == 2 * 2  # three steps of nine files in each batch


def test_files_of_a_step_go_many_at_once(tmp_path: Path) -> None:
    """As many as would take minutes one after another: 16,384 of 20 ms each take 10 s."""
    ckpt.save(tmp_path / "step-1", {"x": torch.zeros(2)})
    (step,) = list_steps(tmp_path)
    files = [tmp_path / "step-1" / "data" / f"{step.id}-{rank:05d}.safetensors" for rank in range(1, 4 * DELETES + 1)]
    for file in files:
        file.write_bytes(b"")
    together = threading.Barrier(DELETES)

    class Slow:
        """Deletes of data files end when as many are going on as should be."""

        def __init__(self, inner: Backend) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def delete(self, path: str) -> None:
            if "/data/" in path and not path.endswith("-00000.safetensors"):
                together.wait(60)
            self._inner.delete(path)

        def delete_many(self, paths: Collection[str]) -> None:
            Backend.delete_many(cast(Backend, self), sorted(paths, key=lambda path: "/data/" not in path))

    with wrap_backends(lambda inner: cast(Backend, Slow(inner))):
        assert remove_steps(str(tmp_path), [step], {})
    assert not (tmp_path / "step-1").exists()


def test_a_record_that_comes_back_brings_what_it_refers_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 1 to 3 go together, and step 9 refers to step 2 when their records are hidden: so step 2 stays, and step 1, which it uses."""
    root = tmp_path / "run"
    run_of(root, 4)
    listed = list_steps(root)
    going, facts = listed[3:0:-1], [i for i in infos(listed) if i.step]
    referrers = {i.step: i.users for i in facts} | {1: (2,), 2: (), 3: ()}
    relists: list[int] = []

    def relist() -> list[ckpt.Step]:
        relists.append(1)
        steps = list_steps(root)
        if len(relists) == 2:
            assert [s.number for s in steps if s.committed] == [0]
            late = next(s for s in listed if s.number == 3)
            steps.append(replace(late, number=9, url=f"{root}/step-9", sources=(f"{root}/step-2",)))
        return steps

    gone = remove_steps(str(root), going, referrers, relist=relist)
    assert [s.number for s in gone] == [3] and len(relists) == 2
    assert [s.number for s in list_steps(root) if s.committed] == [0, 1, 2]
    ckpt.load(root / "step-2", {"frozen": torch.zeros(3000, dtype=torch.int64), "x": torch.zeros(2)})


def test_a_record_that_cannot_come_back_keeps_no_other_from_it(tmp_path: Path) -> None:
    """Nobody can say what refers to the steps any more, and one of them has no place to come back to."""
    root = tmp_path / "run"
    run_of(root, 4)
    going = list_steps(root)[3:0:-1]
    relists: list[int] = []

    def relist() -> list[ckpt.Step]:
        relists.append(1)
        if len(relists) == 1:
            return list_steps(root)
        (root / "step-3").rename(tmp_path / "aside")
        (root / "step-3").write_bytes(b"")
        raise StorageError("gone")

    with pytest.raises(StorageError):
        remove_steps(str(root), going, {1: (2,), 2: (3,), 3: ()}, relist=relist)
    assert len(relists) == 2
    assert [s.number for s in list_steps(root) if s.committed] == [0, 1, 2]


def test_what_somebody_else_has_removed_and_saved_again_stays(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "step-1", {"x": torch.zeros(2)})
    (step,) = list_steps(tmp_path)
    record = tmp_path / "step-1" / "checkpoint.json"
    there = CommitRecord.from_bytes(record.read_bytes(), "")
    newer = replace(there, id=new_id(there.id)).to_bytes()
    record.unlink()
    files = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    assert remove_steps(str(tmp_path), [step], {}) == []  # another removal is at its files, or a save
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == files
    open_backend(str(tmp_path / "step-1")).put_if("checkpoint.json", newer, expected=None)
    assert remove_steps(str(tmp_path), [step], {}) == [] and record.read_bytes() == newer


# ------------------------------------------------------------------------------------------------------------------------------------------
# Which of two saves of one step is later follows from the record at the root, not from the clocks of the machines that saved.

DAY = 86_400


def state_of(version: int) -> dict[str, Any]:
    return {"w": torch.full((50,), float(version)), "version": version}


def saved(root: Path, local: Path, n: int, version: int, *, restore: bool) -> None:
    with ckpt.Checkpointer(str(root), local=str(local), save=EverySteps(1), job=ckpt.Job(timeout=5)) as c:
        if restore:
            c.restore(state_of(0))
        c.save(n, state_of(version))


def version_at(url: Path) -> int:
    return int(ckpt.open(str(url)).state()["version"])


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose step 100 was saved and published by a machine whose clock is 400 days ahead."""
    now = time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now() + 400 * DAY * 10**9)
        saved(tmp_path / "root", tmp_path / "node-a", 100, 1, restore=False)
    return tmp_path / "root"


@pytest.mark.parametrize("restore", [True, False], ids=["restored", "begun anew"])
def test_a_later_save_of_a_step_replaces_the_one_at_the_root(ahead: Path, tmp_path: Path, restore: bool) -> None:
    saved(ahead, tmp_path / "node-b", 100, 2, restore=restore)
    assert version_at(ahead / "step-00000100") == 2 == version_at(tmp_path / "node-b" / "step-00000100")
    with ckpt.Checkpointer(str(ahead), local=str(tmp_path / "node-b")) as c:
        state = state_of(0)
        assert c.restore(state) == 100 and state["version"] == 2
        assert c.restored_from is not None and c.restored_from.url == f"{tmp_path}/node-b/step-00000100"
        assert c.unpublished == ()


def test_a_local_checkpoint_that_gives_way_is_named(ahead: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As nodes saved that did not look at the root."""
    ckpt.save(f"{tmp_path}/node-b/step-00000100", state_of(2))
    with ckpt.Checkpointer(str(ahead), local=str(tmp_path / "node-b")) as c:
        state = state_of(0)
        assert c.restore(state) == 100 and state["version"] == 1
    passed = [r.getMessage() for r in caplog.records if "was saved later" in r.getMessage()]
    assert len(passed) == 1 and f"{tmp_path}/node-b/step-00000100" in passed[0] and str(ahead) in passed[0]


def test_a_root_that_does_not_answer_is_not_waited_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ckpt.runs.tiers.LOOK", 0.2)
    asked, ended, answered = list[str](), list[str](), threading.Event()

    def silent(backend: Any) -> Any:
        if backend.url.startswith(str(tmp_path / "root")):
            asked.append(backend.url)
            answered.wait(60)
            ended.append(backend.url)
            raise StorageError("no answer", where=backend.url)
        return backend

    tiers = Tiers(str(tmp_path / "root"), local=str(tmp_path / "local"))
    with wrap_backends(silent):
        assert [tiers.earlier(n) for n in (1, 2, 3)] == [None] * 3
        assert not ended
    answered.set()
    assert len(asked) == 1 and "cannot be seen" in caplog.text
    ckpt.save(str(tmp_path / "root" / "step-00000007"), state_of(1))
    (step,) = tiers.steps()
    assert tiers.earlier(8) == step.id
    shutil.rmtree(tmp_path / "root")
    assert tiers.earlier(8) == step.id


def test_ids_of_one_job_go_on_rising_after_such_a_root(ahead: Path, tmp_path: Path) -> None:
    saved(ahead, tmp_path / "node-b", 101, 3, restore=True)
    first, second = (s.id for s in ckpt.list_steps(str(ahead)))
    assert str(first) < str(second)


# ------------------------------------------------------------------------------------------------------------------------------------------
# SIGKILL within the writes and commits of everything that changes a storage: the old is there or the new, whole, and the same goes on.

FEW, MANY = 2, 24
"""Kills of each kind."""


def kill(ranks: Ranks, tmp_path: Path, kind: str, kills: int, seed: int) -> dict[str, int]:
    (found,) = ranks.run(1, killed, kind, str(tmp_path), kills, seed, process_group=False, timeout=60 + 10 * kills)
    assert found["kills"] == kills and found["within a commit"] > 0, found
    return dict(found)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_while_it_writes_or_commits(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    kill(ranks, tmp_path, kind, FEW, seed=21)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_many_times_while_it_writes_or_commits(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    print(f"{kind}: {kill(ranks, tmp_path, kind, MANY, seed=22 + [*KINDS].index(kind))}")
