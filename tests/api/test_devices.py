"""What GPUs need, as far as it can be tested without one: memory that is not there, what waits for a capture, the scenario of the
benchmarks. ``tests/test_cuda.py`` has the rest."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ckpt
from ckpt.engine.devices import pinned_bytes, waits_first
from ckpt.engine.save.staging import Arena
from ckpt.errors import CkptError

gpu = pytest.importorskip("benchmarks.gpu", reason="DCP of torch 2.6 has no stager to compare with", exc_type=ImportError)


def test_a_stage_that_has_no_memory_says_what_to_do() -> None:
    arena = Arena()
    assert arena.reserve(5000).numel() >= 5000
    with pytest.raises(CkptError, match=r"1,152,921,504,606,846,976 bytes(?s:.*)staging_bytes"):
        arena.reserve(1 << 60)
    assert arena.reserve(6000).numel() >= 6000


def test_memory_for_a_gpu_is_plain_where_there_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("ckpt.engine.devices._warned", False)
    caplog.set_level(logging.WARNING, "ckpt")
    one, two = pinned_bytes(1000), pinned_bytes(2000)
    assert (one.dtype, len(one), len(two)) == (np.uint8, 1000, 2000)
    one[:] = 7
    assert len(caplog.records) == (0 if torch.cuda.is_available() else 1)


def test_methods_wait_before_they_begin() -> None:
    done: list[object] = []

    class Graph:
        def replay(self, times: int = 1) -> str:
            """Doc."""
            done.append(times)
            return "replayed"

    waits_first(Graph, ("replay",), lambda: done.append("waited"))
    assert (Graph().replay(times=3), done) == ("replayed", ["waited", 3])
    assert Graph.replay.__doc__ == "Doc."


def test_a_compiled_step_waits_for_the_capture(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([("p", parameter)], lr=1.0)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for n in range(1, 4):
        parameter.grad = torch.ones(1000)
        handle = ckpt.save_async(str(tmp_path / str(n)), {"p": parameter, "o": optimizer})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about its profiler
            step()
        handle.result()
        state = {"p": torch.ones(1000)}
        ckpt.load(str(tmp_path / str(n)), state, strict=False)
        assert torch.equal(state["p"], torch.full((1000,), 1.0 - n)) and parameter.detach()[0] == -n


def test_the_scenario_of_gpus_runs_on_a_cpu(tmp_path: Path) -> None:
    rank = SimpleNamespace(number=0, groups={})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about a single process
        found = gpu.measure(rank, directory=str(tmp_path / "d"), size=100_000, repeat=1, device="cpu")  # type: ignore[arg-type]
    assert found.keys() == {*gpu.NAMES, "bytes"} and min(found.values()) > 0
    finding = gpu.finding_of(found)
    assert len(finding.rows) == len(gpu.NAMES) and len(finding.checks) == 5


def test_without_a_gpu_the_scenario_says_so() -> None:
    pool = SimpleNamespace(run=lambda task, on: [False])
    told: list[str] = []
    (finding,) = gpu.run(None, pool, None, told.append)  # type: ignore[arg-type]
    assert (finding.figures, finding.checks, list(finding.rows)) == ({}, (), [])
    assert any("needs a GPU" in line for line in finding.lines()) and "needs a GPU" in told[0]
