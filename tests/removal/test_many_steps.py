"""What a removal asks of the storage grows with the steps that go, and with their files not at all where many go in one request."""

from __future__ import annotations

import threading
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
from ckpt.runs.removal import infos, remove_steps
from ckpt.runs.step_listing import KnownSteps, list_steps

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
