"""Adapters that are extracted: merged again they give the tuned model; what they lack is what the singular values say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.cli.main import cli
from ckpt.converters.lora import extract, merge
from ckpt.errors import ConflictError, MismatchError, NamesError, ShapeError
from ckpt.io_backends.faulty import Fault, FaultyProcess, SimulatedCrash
from ckpt.io_backends.registry import wrap_backends
from tests.converters.test_lora import base_model, random


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def tuned_model(rank: int) -> dict[str, torch.Tensor]:
    tensors = base_model()
    tensors["model.q.weight"] += random((20, rank), 60) @ random((rank, 12), 61)
    tensors["model.norm.weight"] += 1
    tensors["embed.weight"] += random((30, 12), 62)
    return tensors


def test_a_difference_of_that_rank_comes_back(tmp_path: Path) -> None:
    """Products within float32 rounding; what is stored whole, and what is equal, bit for bit."""
    base, tensors = write(tmp_path / "base", base_model()), tuned_model(3)
    report = extract(base, write(tmp_path / "tuned", tensors), tmp_path / "adapter", rank=3)
    assert set(report.errors) == {"model.q.weight"} and set(report.whole) == {"model.norm.weight", "embed.weight"}
    assert report.error < 1e-5
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, tensor in tensors.items():
        if name == "model.q.weight":
            torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(merged[name], tensor), name


def test_the_error_is_that_of_the_singular_values_left_out(tmp_path: Path) -> None:
    """Eckart and Young, with numpy in float64; a native checkpoint as the tuned model."""
    tensors = base_model()
    tensors["model.q.weight"] = tensors["model.q.weight"] + random((20, 12), 70)
    ckpt.save(tmp_path / "tuned", {"net": tensors, "step": 3})
    report = extract(write(tmp_path / "base", base_model()), tmp_path / "tuned", tmp_path / "adapter", rank=4)
    difference = (tensors["model.q.weight"] - base_model()["model.q.weight"]).double().numpy()
    values = np.linalg.svd(difference, compute_uv=False)
    assert report.error == pytest.approx(np.sqrt((values[4:] ** 2).sum() / (values**2).sum()), rel=1e-4)
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name: list(t.shape) for name, t in factors.items()} == {
        "base_model.model.model.q.lora_A.weight": [4, 12],
        "base_model.model.model.q.lora_B.weight": [20, 4],
    }
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 4, ["model.q"])


def test_a_rank_beyond_the_shape(tmp_path: Path) -> None:
    base, tensors = write(tmp_path / "base", base_model()), tuned_model(3)
    extract(base, write(tmp_path / "tuned", tensors), tmp_path / "adapter", rank=64)
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")["model.q.weight"]
    torch.testing.assert_close(merged, tensors["model.q.weight"], rtol=1e-5, atol=1e-5)


def test_equal_values_in_other_bits_are_no_difference(tmp_path: Path) -> None:
    """Another dtype, or another sign of zero; and float64, of which float32 sees no difference."""
    first = base_model()
    first["head.weight"], first["model.norm.weight"] = first["head.weight"].bfloat16(), torch.zeros_like(first["model.norm.weight"])
    first["model.q.weight"] = torch.ones(20, 12, dtype=torch.float64)
    second = first | {"head.weight": first["head.weight"].float(), "model.norm.weight": -first["model.norm.weight"]}
    base = write(tmp_path / "base", first)
    with pytest.raises(MismatchError, match="same"):
        extract(base, write(tmp_path / "alike", second), tmp_path / "adapter", rank=2)
    second["model.q.weight"] = second["model.q.weight"] + 1e-10
    report = extract(base, write(tmp_path / "tuned", second), tmp_path / "adapter", rank=1)
    assert set(report.errors) == {"model.q.weight"} and not report.whole and report.error < 1e-3


def test_what_is_refused(tmp_path: Path) -> None:
    base = write(tmp_path / "base", base_model())
    less = write(tmp_path / "less", {n: t for n, t in base_model().items() if n != "head.weight"})
    wide = write(tmp_path / "wide", base_model() | {"head.weight": torch.ones(31, 12)})
    nan = write(tmp_path / "nan", base_model() | {"model.q.weight": torch.full((20, 12), float("nan"))})
    for tuned, error, text in [
        (less, NamesError, "head.weight"),
        (wide, ShapeError, r"\[31, 12\]"),
        (nan, MismatchError, "NaN"),
        (base, MismatchError, "same"),
    ]:
        with pytest.raises(error, match=text):
            extract(base, tuned, tmp_path / "out", rank=2)
        assert not (tmp_path / "out").exists()
    tuned = write(tmp_path / "tuned", tuned_model(2))
    extract(base, tuned, tmp_path / "out", rank=2)
    before = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    with pytest.raises(ConflictError):
        extract(base, tuned, tmp_path / "out", rank=1)
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == before


def test_killed_at_any_operation_and_run_again(tmp_path: Path) -> None:
    """Before or after each operation on the storage, whether or not bytes are lost that were not durable: the same call goes through."""
    base, tuned = write(tmp_path / "base", base_model()), write(tmp_path / "tuned", tuned_model(3))
    extract(base, tuned, tmp_path / "made", rank=2)
    made = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    counted = FaultyProcess()
    with wrap_backends(counted.wrap):
        extract(base, tuned, tmp_path / "counted", rank=2)
    first = next(n for n, what in enumerate(counted.log) if what.startswith("prepare"))
    left = set()
    for at, after in itertools.product(range(first, counted.operations), (False, True)):
        folder = tmp_path / f"{at}-{after}"
        process = FaultyProcess(Fault(at=at, kind="crash", after=after, lose_unsynced=at % 2 == 1))
        with wrap_backends(process.wrap), pytest.raises(SimulatedCrash):
            extract(base, tuned, folder, rank=2)
        left |= (there := {path.name for path in folder.iterdir()} if folder.exists() else set())
        if there != made.keys():  # else it was killed after the end
            extract(base, tuned, folder, rank=2)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == made, (counted.log[at], after)
    assert left == {*made, "convert.json"}


def test_the_command(tmp_path: Path) -> None:
    base, tuned = write(tmp_path / "base", base_model()), write(tmp_path / "tuned", tuned_model(3))
    result = CliRunner().invoke(cli, ["lora", "extract", base, tuned, str(tmp_path / "a"), "--rank", "2"])
    assert result.exit_code == 0, result.output
    assert "1 product of rank 2, 2 tensors stored whole" in result.stdout and "of the difference" in result.stdout
    for arguments, text in ((["--rank", "2", "--overwrite"], "No such option '--overwrite'"), ([], "Missing option '--rank'")):
        failed = CliRunner().invoke(cli, ["lora", "extract", base, tuned, str(tmp_path / "b"), *arguments])
        assert failed.exit_code == 2 and text in failed.stderr
