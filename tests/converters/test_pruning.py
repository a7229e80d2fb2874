"""What belongs to optimizers, also to those whose groups do not say which parameters are theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt import convert

WEIGHT, MOMENT = torch.randn(6, 5), torch.randn(6, 5)


@pytest.fixture(params=["param_groups", "groups"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    optimizer = {"state": {"model.w": {"exp_avg": MOMENT}}, request.param: [{"lr": 1.0, "wd_mult": 0.0}]}
    ckpt.save(str(tmp_path / "source"), {"model": {"w": WEIGHT}, "optimizer": optimizer, "step": 7})
    return str(tmp_path / "source")


def test_without_optimizer(source: str, tmp_path: Path) -> None:
    report = convert(source, str(tmp_path / "made"), to="native", optimizer=False)
    view = ckpt.open(str(tmp_path / "made"))
    assert list(view) == ["model.w"] and view.state().keys() == {"model", "step"}
    assert report.left_out == ("optimizer.state.model.w.exp_avg",)


def test_moments_keep_their_dtype(source: str, tmp_path: Path) -> None:
    convert(source, str(tmp_path / "made"), to="native", dtype="bfloat16")
    view = ckpt.open(str(tmp_path / "made"))
    assert torch.equal(view["model.w"].read(), WEIGHT.bfloat16())
    assert torch.equal(view["optimizer.state.model.w.exp_avg"].read(), MOMENT)


def test_the_model_is_the_only_part_with_tensors(source: str, tmp_path: Path) -> None:
    convert(source, str(tmp_path / "made"), to="hf")
    found = load_file(tmp_path / "made" / "model.safetensors")
    assert found.keys() == {"w"} and torch.equal(found["w"], WEIGHT)
