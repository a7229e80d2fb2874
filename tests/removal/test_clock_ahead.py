"""Which of two saves of one step is later follows from the record at the root, not from the clocks of the machines that saved."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import StorageError
from ckpt.io_backends.registry import wrap_backends
from ckpt.policies import EverySteps
from ckpt.runs.tiers import Tiers

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
