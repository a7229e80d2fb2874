"""Files beside checkpoints: they come with the commit and go with the checkpoint, on any storage."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import NoSpaceError
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.runs.removal import remove_at
from ckpt.runs.sidecars import Sidecars


def files(text: str) -> Callable[[str], object]:
    def write(folder: str) -> None:
        os.mkdir(f"{folder}/other")
        for name in ("config.json", "other/adapter.bin"):
            Path(folder, name).write_text(text)

    return write


def done(error: Exception | None = None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error) if error is not None else future.set_result(None)
    return future


@pytest.mark.parametrize("remote", [False, True])
def test_they_come_and_go_with_the_checkpoint(tmp_path: Path, remote: bool) -> None:
    root = f"inprocess://{uuid.uuid4().hex}" if remote else str(tmp_path / "run")
    backend, sidecars = open_backend(root), Sidecars(root)

    def beside(step: str) -> set[str]:
        return {entry.path for entry in backend.list_prefix(f"{step}/") if entry.path.endswith(("config.json", "adapter.bin"))}

    for step in ("step-00000001", "step-00000002"):
        ckpt.save(join_url(root, step), {"w": torch.ones(2)})
        sidecars.put(step, files("one"), done())
    sidecars.put("step-00000002", files("again"), None)  # the same step once more
    sidecars.put("step-00000003", files("failed"), done(OSError("the save failed")))
    sidecars.wait()
    assert [len(beside(step)) for step in ("step-00000001", "step-00000002", "step-00000003")] == [2, 2, 0]
    assert backend.read("step-00000002/config.json") == b"again"
    remove_at(join_url(root, "step-00000001"))
    assert beside("step-00000001")
    sidecars.put("step-00000002", files("more"), done())
    sidecars.wait()
    assert sorted(backend.list_dir()) == ["step-00000002/"] and len(beside("step-00000002")) == 2


def test_a_folder_that_a_killed_process_left_goes_and_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / ".sidecars-abc").mkdir()
    (tmp_path / "step-00000007").mkdir()
    for name in ("config.json", "mine.txt"):
        (tmp_path / "step-00000007" / name).write_text("mine")
    sidecars = Sidecars(str(tmp_path))
    sidecars.put("step-00000008", files("x"), done())
    sidecars.wait()
    assert not (tmp_path / ".sidecars-abc").exists()
    assert sorted(path.name for path in (tmp_path / "step-00000007").iterdir()) == ["config.json", "mine.txt"]
    with pytest.raises(ValueError, match="no configuration"):
        sidecars.put("step-00000009", lambda folder: (_ for _ in ()).throw(ValueError("no configuration")), done())
    assert not list(tmp_path.glob(".sidecars-*"))


def test_after_a_failure_the_next_ones_come_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecars = Sidecars(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        sidecars.put("step-00000001", files("one"), done())
        with pytest.raises(NoSpaceError, match="step-00000001/config.json"):
            sidecars.wait()
        sidecars.put("step-00000001", files("one"), done())
        assert sidecars._pending is not None and sidecars._pending.wait()
    ckpt.save(tmp_path / "step-00000002", {"w": torch.ones(2)})
    with pytest.raises(NoSpaceError):
        sidecars.put("step-00000002", files("two"), done())
    sidecars.wait()
    assert (tmp_path / "step-00000002" / "config.json").read_text() == "two"
