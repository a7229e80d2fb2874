"""What is made of a checkpoint that refers to others: conversions, averages and deltas of it have every byte themselves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckpt

SHAPE = (40, 25)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Step 2 refers to step 1 for all but ``c``."""
    torch.manual_seed(0)
    state = {name: torch.randn(SHAPE) for name in "abc"}
    ckpt.save(tmp_path / "run" / "step-1", {"model": state}, reuse=True)
    state["c"] += 1
    report = ckpt.save(tmp_path / "run" / "step-2", {"model": state}, reuse=tmp_path / "run" / "step-1")
    assert report.reused_bytes == 2 * 4 * SHAPE[0] * SHAPE[1]
    return tmp_path / "run"


def tensors(url: Path) -> dict[str, torch.Tensor]:
    view = ckpt.open(url)
    return {name.removeprefix("model."): torch.as_tensor(view[name][...]).clone() for name in view}


@pytest.mark.parametrize("to", ["native", "hf", "dcp"])
def test_convert(run: Path, tmp_path: Path, to: str) -> None:
    expected = tensors(run / "step-2")
    ckpt.convert(run / "step-2", tmp_path / "made", to=to)
    shutil.rmtree(run)
    made = tensors(tmp_path / "made")
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in expected)


def test_merge(run: Path, tmp_path: Path) -> None:
    a, b = tensors(run / "step-1"), tensors(run / "step-2")
    ckpt.merge(tmp_path / "made", [run / "step-1", run / "step-2"], weights=[0.25, 0.75])
    shutil.rmtree(run)
    made = tensors(tmp_path / "made")
    assert all(torch.equal(made[name], 0.25 * a[name] + 0.75 * b[name]) for name in a)


def test_export_of_a_state_that_refers(run: Path, tmp_path: Path) -> None:
    """A state that was loaded from it is exported, whole and as a delta."""
    state = {"model": {name: torch.zeros(SHAPE) for name in "abc"}}
    ckpt.load(run / "step-2", state)
    expected = tensors(run / "step-2")
    ckpt.export(tmp_path / "hf", state["model"])
    shutil.rmtree(run)
    made = tensors(tmp_path / "hf")
    assert all(torch.equal(made[name], expected[name]) for name in expected)
