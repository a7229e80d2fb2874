"""``ckpt advise``: the interval, what a failure loses and the ETTR of runs made by hand, against the published formulas written out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ckpt.cli.main import cli
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.spans import write_spans
from ckpt.io_backends.registry import open_backend
from tests.cli.checkpoints import sample, write_checkpoint


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


def document(*args: object) -> dict[str, Any]:
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
    assert document(tmp_path, "--mtbf", "6h") == {**measured, "daly_seconds": interval, "interval_seconds": interval}
    assert advise(tmp_path, "--mtbf", "6h").stdout == "save every 24 min\nmeasured: a save takes 50 s and blocks training for 50 s\n"
    for step in range(400, 2400, 100):
        save(tmp_path, step, spans({"write": (0, 5.0)}))
    newest = document(tmp_path, "--mtbf", "6h")
    assert (newest["saves"], newest["save_seconds"]) == (20, 5.0)


def test_of_saves_in_the_background(tmp_path: Path) -> None:
    """They block training for as long as was measured, and cannot come faster than they end."""
    rows = (
        {**spans({"collect": (0, 0.25), "capture": (0.5, 2.0), "write": (0.5, 300.0)}), "blocked": 1_500_000, "waited": 500_000},
        spans({"capture": (0, 1), "write": (0, 9)}),
    )
    save(tmp_path, 7, *rows)
    found = document(tmp_path, "--mtbf", "2h")
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
    for wrong in ("soon", "0", "-3h"):
        assert advise(tmp_path, f"--mtbf={wrong}").exit_code == 2
    assert advise(tmp_path).exit_code == 2
