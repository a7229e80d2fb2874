"""``ckpt plan``: the table, the JSON document, the rules of meshes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import cli


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = str(tmp_path_factory.mktemp("plan") / "step-1")
    model: dict[str, torch.Tensor] = {"embed_tokens.weight": torch.ones(64, 8), "norm.weight": torch.ones(8)}
    for i in range(4):
        model |= {
            f"layers.{i}.wq.weight": torch.ones(8, 8),
            f"layers.{i}.wo.weight": torch.ones(8, 8),
            f"layers.{i}.gate": torch.ones(4, 4),
        }
    ckpt.save(where, {"model": model, "step": 1})
    return where


def document(url: str, *arguments: str) -> Any:
    result = CliRunner().invoke(cli, ["plan", "--json", url, *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_each_rank_has_its_share(url: str) -> None:
    found = document(url, "--layout", "pp=2,tp=2")
    assert found["mesh"] == {"pp": 2, "tp": 2} and [one["rank"] for one in found["ranks"]] == [0, 1, 2, 3]
    two_layers = 2 * (2 * 8 * 4 + 16) * 4
    assert [one["state_bytes"] for one in found["ranks"]] == [two_layers + 64 * 4 * 4] * 2 + [two_layers + 8 * 4] * 2
    assert found["replicated"] == [f"model.layers.{i}.gate" for i in range(4)]
    cut = document(url, "--layout", "pp=2,tp=2", "--cut", "*.gate=1")
    assert cut["replicated"] == [] and cut["ranks"][0]["state_bytes"] == found["ranks"][0]["state_bytes"] - 2 * 8 * 4


def test_replicas_fsdp_and_parts(url: str) -> None:
    whole = 4 * (512 + 8 + 4 * 144)
    assert [one["state_bytes"] for one in document(url, "--layout", "dp=3")["ranks"]] == [whole] * 3
    assert sum(one["state_bytes"] for one in document(url, "--layout", "4")["ranks"]) == whole
    only = document(url, "--layout", "1", "--only", "*.wq.weight")
    assert only["ranks"][0]["tensors"] == 4 and only["ranks"][0]["bytes_read"] == only["ranks"][0]["bytes_needed"] == 4 * 256
    assert [one["rank"] for one in document(url, "--layout", "8", "--ranks", "4")["ranks"]] == [0, 2, 4, 6]


def test_the_table(url: str) -> None:
    result = CliRunner().invoke(cli, ["plan", url, "--layout", "tp=2"])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].split() == ["RANK", "STATE", "READ", "REQUESTS", "FILES", "MEMORY"]
    assert "2 of 2 ranks: " in result.stdout and "about " in result.stdout
    assert "no rule of tp cuts 4 tensors, such as model.layers.0.gate" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--layout", "cp=2"], 2, "no rule for a mesh dimension"),
        (["--layout", "tp"], 2, "not a mesh such as"),
        (["--layout", "tp=0"], 2, "at least one rank"),
        (["--layout", "2", "--cut", "x"], 2, "no GLOB=DIM"),
        (["--layout", "2", "--cut", "*.gate=0"], 2, "cuts are those of tp"),
        (["--layout", "tp=2", "--cut", "*.gat=0"], 21, "no tensor matches '*.gat'"),
        (["--layout", "tp=2", "--cut", "*.gate=7"], 2, "has a dimension 7"),
        (["--layout", "2", "--only", "*.nothing"], 21, "nothing is selected"),
        ([], 2, "--layout"),
    ],
)
def test_what_is_refused(url: str, arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["plan", url, *arguments], "ckpt")
    assert exit.value.code == code and text in capsys.readouterr().err
    with pytest.raises(SystemExit) as missing:
        cli.main(["plan", str(tmp_path / "none"), "--layout", "2"], "ckpt")
    assert missing.value.code == 10
