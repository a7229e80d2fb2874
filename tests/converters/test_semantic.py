"""Checks of meaning: what is wrong is found and named, what is right is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt
from ckpt.converters.semantic import SemanticReport, semantic_problems
from ckpt.formats.elements import cast_bits
from ckpt.formats.registry import open_catalog
from tests.formats.megatron_files import STATE, load, unpacked


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("megatron"))


def checked(url: object, max_bytes: int | None = None) -> SemanticReport:
    return semantic_problems(open_catalog(str(url)), max_bytes=max_bytes)


def test_nothing_is_wrong(files):
    for name in ("dp2/legacy", "tp2pp2vpp2/dp_reshardable", "tp2ep2/legacy", "model_space_tp2/fully_sharded_model_space"):
        report = checked(files / name)
        assert report.ok, [str(p) for p in report.problems]
        assert report.checked["masters"] == report.checked["moments"] == report.checked["steps"] >= 27
    assert checked(files / "tp2ep2" / "legacy").checked["replicas"] > 20


def test_the_defect_of_megatron_is_found(files):
    report = checked(files / "dp2" / "fully_reshardable")
    wrong = {p.name for p in report.problems}
    assert len(wrong) == 18
    assert f"{STATE}embedding.word_embeddings.weight.master" in wrong
    assert "rounded to bfloat16 is not the weight" in str(report.problems[0])


def test_a_limit_is_said(files):
    whole = checked(files / "dp2" / "legacy")
    some = checked(files / "dp2" / "legacy", max_bytes=whole.bytes // 3)
    assert some.ok and some.skipped
    assert some.bytes <= whole.bytes // 3
    assert some.checked["masters"] < whole.checked["masters"]


def test_replicas_that_differ(files, tmp_path):
    copy = Path(shutil.copytree(files / "tp2pp2vpp2" / "legacy", tmp_path / "copy"))
    path = copy / "iter_0000003" / "mp_rank_01_000" / "model_optim_rng.pt"
    state = load(path)
    model = dict(state["model1"])
    model["decoder.layers.0.input_layernorm.weight"] = model["decoder.layers.0.input_layernorm.weight"] + torch.arange(24).bfloat16()
    torch.save({**state, "model1": model}, path)
    (problem,) = checked(copy).problems
    assert problem.name == "model.decoder.layers.2.self_attention.linear_qkv.layer_norm_weight"
    assert (problem.wrong, problem.elements) == (23, 24)


def test_steps_and_moments_of_a_checkpoint_of_our_own(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    ckpt.save(str(tmp_path / "good"), {"model": module, "optimizer": optimizer})
    assert checked(tmp_path / "good").ok
    optimizer.state[module[1].weight]["exp_avg_sq"].zero_()
    optimizer.state[module[0].bias]["step"] += 1
    ckpt.save(str(tmp_path / "bad"), {"model": module, "optimizer": optimizer})
    told = {p.name: p.what for p in checked(tmp_path / "bad").problems}
    assert told == {
        f"{STATE}1.weight.exp_avg_sq": "all zero after training steps",
        "model.0.bias": "is at step 2, and most others at 1",
    }


def test_rounding_is_that_of_torch():
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    values = torch.cat([*(torch.randn(10_000) * 10.0**e for e in range(-40, 39, 4)), special])
    for kind in (torch.bfloat16, torch.float16):
        found = cast_bits(values.numpy(), str(kind).removeprefix("torch."))
        expected = values.to(kind).view(torch.int16).numpy().view(np.uint16)
        same = (found == expected) | (torch.isnan(values).numpy())
        assert same.all()
