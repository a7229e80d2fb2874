"""Adapters of PEFT merged into their base, against the formula in torch; other kinds and those of other models are refused by name."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import ckpt
from ckpt import settings
from ckpt.cli.main import cli
from ckpt.converters import buffered
from ckpt.converters.lora import merge
from ckpt.errors import FormatError, MismatchError, NamesError, NotFoundError, ShapeError

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "fan_in_fan_out": False, "use_rslora": False}
SHAPES = {
    "model.q.weight": (20, 12),
    "model.k.weight": (8, 12),
    "model.norm.weight": (12,),
    "embed.weight": (30, 12),
    "head.weight": (30, 12),
}


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def base_model(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: random(shape, i, dtype) for i, (name, shape) in enumerate(SHAPES.items())}


def write_base(tmp_path: Path, dtype: torch.dtype = torch.float32) -> str:
    (tmp_path / "base").mkdir(exist_ok=True)
    save_file(base_model(dtype), tmp_path / "base" / "model.safetensors")
    return str(tmp_path / "base")


def pair(module: str, rank: int = 3) -> dict[str, torch.Tensor]:
    rows, columns = SHAPES[f"{module}.weight"]
    start = f"base_model.model.{module}"
    return {f"{start}.lora_A.weight": random((rank, columns), 50), f"{start}.lora_B.weight": random((rows, rank), 51)}


def write_adapter(tmp_path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> str:
    folder = tmp_path / f"adapter-{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return str(folder)


def merged(base: str, adapter: str, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    merge(base, adapter, out, **options)
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_products_are_added(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_base(tmp_path, dtype)
    tensors = pair("model.q")
    adapter = write_adapter(tmp_path, tensors)
    a, b = tensors.values()
    wide = torch.promote_types(dtype, torch.float32)
    expected = base_model(dtype) | {"model.q.weight": ((b @ a).to(wide) * 2.0 + base_model(dtype)["model.q.weight"].to(wide)).to(dtype)}
    got = merged(base, adapter, tmp_path / "out")
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == dtype
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-6) if name == "model.q.weight" else None
        assert name == "model.q.weight" or torch.equal(got[name], tensor)
    monkeypatch.setattr(settings, "LEAST_MEMORY", 1)
    monkeypatch.setattr(buffered, "LEAST", 500)
    again = merged(base, adapter, tmp_path / "small", memory=1500)  # rows in many windows
    torch.testing.assert_close(again["model.q.weight"], expected["model.q.weight"], rtol=1e-6, atol=1e-6)


def test_scales_patterns_and_transposed_weights(tmp_path: Path) -> None:
    base, whole = write_base(tmp_path), base_model()
    tensors = pair("model.q", 5) | pair("model.k")
    config = {"use_rslora": True, "rank_pattern": {"q": 5}, "alpha_pattern": {"model.k": 1}}
    got = merged(base, write_adapter(tmp_path, tensors, **config), tmp_path / "out")
    for module, scale in (("model.q", 6 / math.sqrt(5)), ("model.k", 1 / math.sqrt(3))):
        a, b = (tensors[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
        torch.testing.assert_close(got[f"{module}.weight"], whole[f"{module}.weight"] + b @ a * scale)
    a, b = random((3, 20), 7), random((12, 3), 8)  # of a layer that stores [in, out]
    names = ("base_model.model.model.q.lora_A.weight", "base_model.model.model.q.lora_B.weight")
    got = merged(base, write_adapter(tmp_path, dict(zip(names, (a, b), strict=True)), fan_in_fan_out=True), tmp_path / "conv")
    torch.testing.assert_close(got["model.q.weight"], whole["model.q.weight"] + (b @ a).T * 2)


def test_embeddings_and_modules_that_were_trained_as_a_whole(tmp_path: Path) -> None:
    base, whole = write_base(tmp_path), base_model()
    a, b, head, other = random((3, 30), 1), random((12, 3), 2), random((30, 12), 3), random((30, 12), 4)
    tensors = {
        "base_model.model.embed.lora_embedding_A": a,
        "base_model.model.embed.lora_embedding_B": b,
        "base_model.model.embed.base_layer.weight": other,
        "base_model.model.head.weight": head,
    }
    report = merge(base, write_adapter(tmp_path, tensors), tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    torch.testing.assert_close(got["embed.weight"], other + (b @ a).T * 2)
    assert torch.equal(got["head.weight"], head) and torch.equal(got["model.q.weight"], whole["model.q.weight"])
    assert (report.updated, report.replaced) == (1, 1)


def test_a_native_base_under_a_key(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "native", {"policy": base_model(), "step": 3})
    tensors = pair("model.q")
    adapter = write_adapter(tmp_path, tensors)
    merge(tmp_path / "native", adapter, tmp_path / "out", to="native")
    view, (a, b) = ckpt.open(tmp_path / "out"), tensors.values()
    torch.testing.assert_close(view["policy.model.q.weight"].read(), base_model()["model.q.weight"] + b @ a * 2)
    assert view.state()["step"] == 3 and ckpt.verify(tmp_path / "out").ok


@pytest.mark.parametrize(
    ("tensors", "config", "error", "message"),
    [
        (pair("model.q"), {"peft_type": "LOHA"}, FormatError, "of the kind LOHA"),
        (pair("model.q"), {"use_dora": True}, FormatError, "use_dora, which is more"),
        (pair("model.q"), {"r": 4}, ShapeError, "has rank 4 for model.q, and its tensors have 3"),
        (pair("model.q"), {"lora_alpha": None}, FormatError, "lora_alpha None"),
        ({k: v for k, v in pair("model.q").items() if "_A" in k}, {}, NamesError, "and not base_model.model.model.q.lora_B.weight"),
        ({k: v for k, v in pair("model.q").items() if "_B" in k}, {}, NamesError, "the base has no model.q.lora_B.weight"),
        ({k.replace(".q.", ".x."): v for k, v in pair("model.q").items()}, {}, NamesError, "the base has no model.x.weight"),
        ({k.replace(".q.", ".k."): v for k, v in pair("model.q").items()}, {}, ShapeError, r"do not fit model.k.weight \[8, 12\]"),
        (pair("model.q") | {"base_model.model.head.weight": torch.ones(3)}, {}, ShapeError, "does not fit head.weight"),
        ({k: v * torch.inf for k, v in pair("model.q").items()}, {}, MismatchError, r"model.q.weight\[0, 0\] with the adapter is"),
    ],
)
def test_adapters_that_do_not_fit(
    tmp_path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], error: type[Exception], message: str
) -> None:
    base, adapter = write_base(tmp_path), write_adapter(tmp_path, tensors, **config)
    with pytest.raises(error, match=message):
        merge(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists() or os.listdir(tmp_path / "out") == []


def test_no_adapter(tmp_path: Path) -> None:
    base = write_base(tmp_path)
    with pytest.raises(NotFoundError, match="there is no adapter_config.json"):
        merge(base, base, tmp_path / "out")


def test_the_command(tmp_path: Path) -> None:
    base, adapter = write_base(tmp_path), write_adapter(tmp_path, pair("model.q"))

    def run(*words: object) -> Any:
        return CliRunner().invoke(cli, ["lora", "merge", "--no-config", base, adapter, str(tmp_path / "out"), *map(str, words)])

    assert run("--dry-run").stdout.startswith("would write 5 tensors") and not (tmp_path / "out").exists()
    document = json.loads(run("--json").stdout)
    assert (document["updated"], document["replaced"], document["written"]["finished"], document["dry_run"]) == (1, 0, True, False)
    assert run().exit_code == 33
