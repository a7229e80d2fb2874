"""``ckpt plan``: the table, the JSON document, the rules of meshes, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

import ckpt
from ckpt.cli.main import cli
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.spans import write_spans
from ckpt.io_backends.registry import open_backend
from tests.cli.checkpoints import sample, write_checkpoint


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


# ------------------------------------------------------------------------------------------------------------------------------------------
# ``ckpt advise``: the interval, what a failure loses and the ETTR of runs made by hand, against the published formulas written out.


def spans(phases: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """A rank's row: phase → start and end in seconds."""
    starts = [round(1e6 * start) for start, _ in phases.values()]
    ends = [round(1e6 * end) for _, end in phases.values()]
    columns = [list(range(len(phases))), [0] * len(phases), starts, [e - s for s, e in zip(starts, ends, strict=True)], [0] * len(phases)]
    return {"began": 1.7e9, "phases": list(phases), "threads": ["t"], "spans": columns, "folded": []}


def save(root: Path, step: int, *rows: dict[str, Any]) -> None:
    url = str(root / f"step-{step:08d}")
    write_checkpoint(url, sample(), ranks=4)
    backend = open_backend(url)
    write_spans(backend, NativeCatalog(backend).record.id, dict(enumerate(rows)))


def advise(*args: object) -> Result:
    return CliRunner().invoke(cli, ["advise", *map(str, args)])


def advice(*args: object) -> dict[str, Any]:
    result = advise(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def formula(blocked: float, mtbf: float) -> float:
    """Daly 2006, equation 37."""
    x = blocked / (2 * mtbf)
    return math.sqrt(2 * blocked * mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - blocked


def test_of_saves_that_block(tmp_path: Path) -> None:
    for step, seconds in ((100, 40.0), (200, 60.0), (300, 50.0)):
        save(tmp_path, step, spans({"collect": (0, 1), "write": (1, seconds)}), spans({"write": (0, 10)}))
    measured = {"root": str(tmp_path), "saves": 3, "mtbf": 21_600.0, "save_seconds": 50.0, "blocked_seconds": 50.0}
    interval = pytest.approx(formula(50, 21_600))
    assert advice(tmp_path, "--mtbf", "6h") == {**measured, "daly_seconds": interval, "interval_seconds": interval}
    assert advise(tmp_path, "--mtbf", "6h").stdout == "save every 24 min\nmeasured: a save takes 50 s and blocks training for 50 s\n"
    for step in range(400, 2400, 100):
        save(tmp_path, step, spans({"write": (0, 5.0)}))
    newest = advice(tmp_path, "--mtbf", "6h")
    assert (newest["saves"], newest["save_seconds"]) == (20, 5.0)


def test_of_saves_in_the_background(tmp_path: Path) -> None:
    """They block training for as long as was measured, and cannot come faster than they end."""
    rows = (
        {**spans({"collect": (0, 0.25), "capture": (0.5, 2.0), "write": (0.5, 300.0)}), "blocked": 1_500_000, "waited": 500_000},
        spans({"capture": (0, 1), "write": (0, 9)}),
    )
    save(tmp_path, 7, *rows)
    found = advice(tmp_path, "--mtbf", "2h")
    assert (found["blocked_seconds"], found["save_seconds"], found["interval_seconds"]) == (2.0, 300.0, 300.0)
    assert found["daly_seconds"] == pytest.approx(formula(2, 7200)) and found["daly_seconds"] < 300
    text = advise(tmp_path, "--mtbf", "2h").stdout
    assert text.startswith("save every 5 min, as often as saves end; by their cost 3 min") and "blocks training for 2 s" in text
    assert advise(tmp_path, "--mtbf", "2h", "-q").stdout == "300\n"


def test_what_cannot_be_advised(tmp_path: Path) -> None:
    assert advise(tmp_path, "--mtbf", "6h").exit_code == 10
    write_checkpoint(str(tmp_path / "step-1"), sample())
    result = advise(tmp_path, "--mtbf", "6h")
    assert result.exit_code == 10 and "the durations of this run's saves are not recorded" in result.stderr
    result = advise(tmp_path / "step-1", "--mtbf", "6h")
    assert result.exit_code == 10 and "this is one checkpoint, not a run" in result.stderr
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "hf" / "model.safetensors")
    result = advise(tmp_path / "hf", "--mtbf", "6h")
    assert result.exit_code == 10 and "only checkpoints of other formats are here" in result.stderr
    for wrong in ("soon", "0", "-3h"):
        assert advise(tmp_path, f"--mtbf={wrong}").exit_code == 2
    assert advise(tmp_path).exit_code == 2
