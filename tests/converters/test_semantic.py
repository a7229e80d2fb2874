"""``ckpt verify --semantic``: what real checkpoints are, and what was broken on purpose."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.converters.semantic import SemanticReport, check_semantic, rounded
from ckpt.formats.external_elements import cast_bits
from ckpt.formats.registry import open_catalog
from tests.cli.running import run
from tests.formats.megatron_files import STATE, load
from tests.formats.reading import FIXTURES

PREFIX = "optimizer.state.model."


def checked(tmp_path: Path, change: Any) -> SemanticReport:
    """A checkpoint of ours with what DeepSpeed's ZeRO-1 has, after ``change``."""
    view = ckpt.open(str(FIXTURES / "deepspeed/zero1"))
    state = {name: view[name].read() for name in view}
    change(state)
    ckpt.save(str(tmp_path / "c"), state)
    return check_semantic(open_catalog(str(tmp_path / "c")))


def test_a_weight_that_is_not_its_master(tmp_path: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        state[f"{PREFIX}fc1.weight.master"][20:] = state[f"{PREFIX}fc1.weight.master"][20:].roll(1)
        state["model.emb.weight"][32, 15] += 1

    report = checked(tmp_path, change)
    first, second = report.problems
    assert (first.tensor, str(first.box)) == (f"{PREFIX}emb.weight.master", "[32:33,15:16]")
    assert first.message == "the weight model.emb.weight is not its master, cast to bfloat16, in 1 of 528 elements"
    assert second.tensor == f"{PREFIX}fc1.weight.master" and second.box.offset == (20, 0)


def test_steps_that_differ(tmp_path: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        state[f"{PREFIX}norm.bias.step"] = torch.tensor(2.0)

    (problem,) = checked(tmp_path, change).problems
    assert problem.tensor == f"{PREFIX}norm.bias.step" and problem.message.endswith("steps: 6 at 3, 1 at 2")


def test_moments_that_were_never_kept(tmp_path: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        for name in [n for n in state if n.endswith(".exp_avg")]:
            state[name].zero_()
        state[f"{PREFIX}norm.bias.exp_avg_sq"].zero_()  # one alone may be

    (problem,) = checked(tmp_path, change).problems
    assert (problem.tensor, problem.message) == ("optimizer.state.*.exp_avg", "zero for all 7 parameters, after steps were made")


def test_zero_moments_before_any_step(tmp_path: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        for name in [n for n in state if n.endswith((".exp_avg", ".exp_avg_sq", ".step"))]:
            state[name].zero_()

    assert checked(tmp_path, change).problems == ()


def test_moments_that_cannot_be(tmp_path: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        state[f"{PREFIX}fc1.bias.exp_avg"][[4, 9]] = torch.inf
        state[f"{PREFIX}fc2.weight.exp_avg_sq"][3, 2] = -1e-9

    found = {p.tensor: (p.message, p.box.offset) for p in checked(tmp_path, change).problems}
    assert found == {
        f"{PREFIX}fc1.bias.exp_avg": ("2 elements are not finite", (4,)),
        f"{PREFIX}fc2.weight.exp_avg_sq": ("1 elements of a mean of squares are negative", (3, 2)),
    }


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_master_that_is_not_finite_nor_its_weight(tmp_path: Path, value: float) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        state[f"{PREFIX}fc1.bias.master"][3] = state["model.fc1.bias"][3] = value

    (problem,) = checked(tmp_path, change).problems
    assert (problem.tensor, problem.message) == (f"{PREFIX}fc1.bias.master", "1 elements are not finite")
    assert problem.box is not None and problem.box.offset == (3,)


def test_an_optimizer_of_torch(tmp_path: Path) -> None:
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    ckpt.save(str(tmp_path), {"model": model, "optimizer": optimizer})
    report = check_semantic(open_catalog(str(tmp_path)))
    assert (report.masters, report.moments, report.steps, report.problems) == (0, 4, 2, ())


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_rounding_is_that_of_torch(name: str) -> None:
    raw = np.random.default_rng(3).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    halves = np.concatenate([np.arange(0x3F80_0000, 0x3F84_0000, 0x4000, dtype=np.uint32), raw, np.array([0x7F7F_FFFF, 1], np.uint32)])
    tensor = torch.from_numpy(halves.view(np.float32).copy())
    expected = tensor.to(getattr(torch, name)).double().numpy()
    np.testing.assert_array_equal(rounded(halves, "float32", name), expected)


def test_the_command(tmp_path: Path) -> None:
    fits = run("verify", "--semantic", FIXTURES / "deepspeed/zero1")
    assert fits.exit_code == 0 and "fits: 7 masters, 14 moments, 7 steps" in fits.stdout

    def change(state: dict[str, torch.Tensor]) -> None:
        state["model.fc1.bias"][1] += 1

    checked(tmp_path, change)
    assert run("verify", tmp_path / "c").exit_code == 0
    result = run("verify", "--semantic", tmp_path / "c")
    assert result.exit_code == 22 and "semantic: the weight model.fc1.bias" in result.stdout and "1 misfit" in result.stdout
    document = json.loads(run("verify", "--semantic", "--json", tmp_path / "c").stdout)
    assert (document["ok"], document["semantic"]["ok"], document["semantic"]["problems"][0]["kind"]) == (True, False, "semantic")
    assert json.loads(run("verify", "--json", tmp_path / "c").stdout)["semantic"] is None


# ---------------------- Checks of meaning on Megatron checkpoints: the known defect and copies that differ are found, what is right is not.


def checked_megatron(url: object) -> SemanticReport:
    return check_semantic(open_catalog(str(url)))


def test_the_defect_of_megatron_is_found(megatron_files):
    report = checked_megatron(megatron_files / "dp2" / "fully_reshardable")
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
    (problem,) = checked_megatron(copy).problems
    assert problem.tensor == "model.decoder.layers.2.self_attention.linear_qkv.layer_norm_weight"
    assert "23 of 24 elements differ" in problem.message


def test_rounding_of_megatron_is_that_of_torch():
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    values = torch.cat([*(torch.randn(10_000) * 10.0**e for e in range(-40, 39, 4)), special])
    for kind in (torch.bfloat16, torch.float16):
        found = cast_bits(values.numpy(), str(kind).removeprefix("torch."))
        expected = values.to(kind).view(torch.int16).numpy().view(np.uint16)
        same = (found == expected) | (torch.isnan(values).numpy())
        assert same.all()
