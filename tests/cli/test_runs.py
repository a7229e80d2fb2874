"""Listing the steps of a run: what counts as a checkpoint, as an orphan, and as neither."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ckpt.formats.native.commit import CommitRecord
from ckpt.formats.native.paths import step_number
from ckpt.runs.step_listing import UNFINISHED, list_steps
from tests.cli.checkpoints import flip, sample, write_checkpoint

TINY = {"w": np.arange(6, dtype=np.float32).reshape(3, 2)}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("step-00001000", 1000),
        ("step_100", 100),
        ("100", 100),
        ("global_step12", 12),
        ("iter_0000400", 400),
        ("checkpoint-500", 500),
        ("epoch=1-step=30", 30),
        ("ckpt-5", 5),
        ("weights-ckpt5", 5),
        ("iteration_5", 5),
        ("Step-5", 5),
        ("timestep7", None),
        ("llama-3", None),
        ("run-2024", None),
        ("v2", None),
        ("final", None),
        ("step-", None),
        ("step-10-broken", None),
    ],
)
def test_step_numbers(name: str, number: int | None) -> None:
    assert step_number(name) == number


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_run_is_listed_by_step(tmp_path: Path, scheme: str) -> None:
    root = str(tmp_path) if scheme == "file" else f"inprocess://{tmp_path.name}"
    for name, ranks in (("step-10", 1), ("step-9", 3), ("final", 2)):
        write_checkpoint(f"{root}/{name}", sample(), ranks=ranks)
    steps = list_steps(root)
    assert [(s.number, s.url, s.world_size) for s in steps] == [
        (None, f"{root}/final", 2),
        (9, f"{root}/step-9", 3),
        (10, f"{root}/step-10", 1),
    ]
    assert {s.tensor_bytes for s in steps} == {sum(a.nbytes for a in sample().values())}
    assert all(s.committed and not s.damaged and s.reason is None and s.created for s in steps)


def test_what_did_not_finish_is_listed_with_the_reason(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path / "step-1"), TINY)
    write_checkpoint(str(tmp_path / "step-2"), TINY, commit=False)
    write_checkpoint(str(tmp_path / "step-3"), TINY)
    (tmp_path / "step-3" / "checkpoint.json").unlink()
    steps = list_steps(str(tmp_path))
    assert [(s.number, s.committed, s.reason) for s in steps] == [(1, True, None), (2, False, UNFINISHED), (3, False, UNFINISHED)]


def test_other_directories_and_files_are_left_out(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path / "step-1"), TINY)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.txt").write_text("x")
    (tmp_path / "dataset" / "data").mkdir(parents=True)
    (tmp_path / "dataset" / "data" / "train-00000.safetensors").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    assert [s.number for s in list_steps(str(tmp_path))] == [1]


def test_a_damaged_record_is_listed_not_raised(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path / "step-1"), TINY)
    write_checkpoint(str(tmp_path / "step-2"), TINY)
    flip(tmp_path / "step-1" / "checkpoint.json", 40)
    (tmp_path / "step-2" / "checkpoint.json").write_text(json.dumps({"format": "something else"}))
    first, second = list_steps(str(tmp_path))
    assert (first.committed, first.damaged) == (second.committed, second.damaged) == (False, True)
    assert "damaged" in (first.reason or "")
    assert "something else" in (second.reason or "")


def test_a_record_of_a_later_version_is_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ckpt.formats.native.commit.VERSION", 2)
        write_checkpoint(str(tmp_path / "step-1"), TINY)
        assert CommitRecord.from_bytes((tmp_path / "step-1" / "checkpoint.json").read_bytes(), "").world_size == 2
    (step,) = list_steps(str(tmp_path))
    assert (step.committed, step.damaged) == (False, True)
    assert "version 2" in (step.reason or "")


def test_a_checkpoint_lists_itself(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path / "step-7"), TINY)
    write_checkpoint(str(tmp_path / "step-7" / "step-8"), TINY)
    (step,) = list_steps(str(tmp_path / "step-7"))
    assert (step.number, step.url, step.committed) == (7, str(tmp_path / "step-7"), True)


def test_an_absent_or_empty_root_has_no_steps(tmp_path: Path) -> None:
    assert list_steps(str(tmp_path)) == []
    assert list_steps(str(tmp_path / "nothing")) == []
