"""Checks of meaning on Megatron checkpoints: the known defect and copies that differ are found, what is right is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

from ckpt.converters.semantic import SemanticReport, check_semantic
from ckpt.formats.external_elements import cast_bits
from ckpt.formats.registry import open_catalog
from tests.formats.megatron_files import STATE, load


def checked(url: object) -> SemanticReport:
    return check_semantic(open_catalog(str(url)))


def test_the_defect_of_megatron_is_found(megatron_files):
    report = checked(megatron_files / "dp2" / "fully_reshardable")
    wrong = {p.tensor for p in report.problems}
    assert len(wrong) >= 12
    assert f"{STATE}embedding.word_embeddings.weight.master" in wrong
    assert "is not its master, cast to bfloat16" in str(report.problems[0])


def test_replicas_that_differ(megatron_files, tmp_path):
    copy = Path(shutil.copytree(megatron_files / "tp2pp2vpp2" / "legacy", tmp_path / "copy"))
    path = copy / "iter_0000003" / "mp_rank_01_000" / "model_optim_rng.pt"
    state = load(path)
    model = dict(state["model1"])
    model["decoder.layers.0.input_layernorm.weight"] = model["decoder.layers.0.input_layernorm.weight"] + torch.arange(24).bfloat16()
    torch.save({**state, "model1": model}, path)
    (problem,) = checked(copy).problems
    assert problem.tensor == "model.decoder.layers.2.self_attention.linear_qkv.layer_norm_weight"
    assert "23 of 24 elements differ" in problem.message


def test_rounding_is_that_of_torch():
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    values = torch.cat([*(torch.randn(10_000) * 10.0**e for e in range(-40, 39, 4)), special])
    for kind in (torch.bfloat16, torch.float16):
        found = cast_bits(values.numpy(), str(kind).removeprefix("torch."))
        expected = values.to(kind).view(torch.int16).numpy().view(np.uint16)
        same = (found == expected) | (torch.isnan(values).numpy())
        assert same.all()
