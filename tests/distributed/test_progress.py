"""``progress=`` of saves and loads: what two ranks are told, and that nothing which a callback does can harm them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import UsageError
from ckpt.telemetry import progress
from tests.distributed.ranks import Ranks

MIB = 1 << 20


def state(fill: float) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {"own": ckpt.PerRank(torch.full((MIB * (rank + 1),), fill)), "step": 1}


def watched(folder: str) -> dict[str, Any]:
    progress.INTERVAL = 0.001
    calls: dict[str, list[tuple[int, int]]] = {"save": [], "async": [], "load": [], "loop": []}
    threads = set()

    def into(name: str) -> Any:
        def call(done: int, total: int) -> None:
            threads.add(threading.current_thread().name)
            calls[name].append((done, total))

        return call

    ckpt.save(f"{folder}/a", state(1.0), progress=into("save"))
    ckpt.save_async(f"{folder}/b", state(2.0), progress=into("async")).result()
    loaded = {"w": torch.zeros(MIB), "step": 0}
    ckpt.save(f"{folder}/c", {"w": torch.ones(MIB), "step": 3})
    ckpt.load(f"{folder}/c", loaded, progress=into("load"))
    with ckpt.Checkpointer(f"{folder}/run", progress=into("loop")) as c:
        c.save(1, state(3.0)).result()

    def broken(done: int, total: int) -> None:
        raise RuntimeError("a callback that raises")

    def hanging(done: int, total: int) -> None:
        time.sleep(30)

    progress._PATIENCE = 0.05
    ckpt.save(f"{folder}/d", state(4.0), progress=broken)
    ckpt.save(f"{folder}/e", state(5.0), progress=hanging)
    ckpt.save(f"{folder}/f", state(6.0), progress=True)  # no terminal, so no bar
    return {"calls": calls, "loaded": [loaded["w"].sum().item(), loaded["step"]], "threads": sorted(threads)}


def test_what_each_of_two_ranks_is_told(ranks: Ranks, tmp_path: Path) -> None:
    for rank, seen in enumerate(ranks.run(2, watched, str(tmp_path))):
        totals = {"save": 4 * MIB * (rank + 1), "async": 4 * MIB * (rank + 1), "load": 4 * MIB, "loop": 4 * MIB * (rank + 1)}
        for name, calls in seen["calls"].items():
            assert calls[-1] == (totals[name], totals[name]), name
            assert {total for _, total in calls} == {totals[name]}
            assert [done for done, _ in calls] == sorted({done for done, _ in calls})
        assert seen["loaded"] == [MIB, 3]
        assert "ckpt-callback" in seen["threads"] or len(seen["calls"]["save"]) == 1
    for name in "abcdef":
        assert ckpt.open(str(tmp_path / name)).url.endswith(name)


def test_a_save_that_fails_is_never_reported_as_done(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    with pytest.raises(ckpt.CkptError):
        ckpt.save(str(tmp_path / "a"), {"x": object()}, progress=lambda done, total: calls.append((done, total)))
    assert calls == []
    with pytest.raises(UsageError, match="progress="):
        ckpt.save(str(tmp_path / "a"), {}, progress=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="progress="):  # at once: not at the first save, on one rank while the others begin it
        ckpt.Checkpointer(str(tmp_path), progress=3)  # type: ignore[arg-type]
    before = set(threading.enumerate())
    with progress.reported(None, lambda: (0, 1)):
        assert set(threading.enumerate()) <= before  # who does not ask has no thread


def test_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert progress.callback_of(progress=True, leads=True, title="save x") is None
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert progress.callback_of(progress=True, leads=False, title="save x") is None
    bar = progress.callback_of(progress=True, leads=True, title="save x")
    assert bar is not None
    bar(1, 4)
    bar(4, 4)
    text = capsys.readouterr().err
    assert "save x" in text and " 25 %" in text and text.endswith("100 %\n")
