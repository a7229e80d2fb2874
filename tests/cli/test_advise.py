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


def expected(blocked: float, took: float, load: float, mtbf: float) -> dict[str, float]:
    """Young 1974; Daly 2006, equation 37; ByteCheckpoint, appendix C."""
    young = math.sqrt(2 * blocked * mtbf)
    x = blocked / (2 * mtbf)
    daly = young * (1 + math.sqrt(x) / 3 + x / 9) - blocked
    interval = max(daly, took)
    wasted = 0.5 * (interval + took) + load
    return {
        "young_seconds": young,
        "daly_seconds": daly,
        "interval_seconds": interval,
        "wasted_seconds": wasted,
        "ettr": interval / (interval + wasted),
        "lost": blocked / (interval + blocked) + wasted / mtbf,
    }


def test_of_saves_that_block(tmp_path: Path) -> None:
    for step, seconds in ((100, 40.0), (200, 60.0), (300, 50.0)):
        save(tmp_path, step, spans({"collect": (0, 1), "write": (1, seconds)}), spans({"write": (0, 10)}))
    found = document(tmp_path, "--mtbf", "6h")
    assert (found["saves"], found["source"], found["ranks"], found["mtbf"]) == (3, "spans", 4, 21_600)
    assert (found["save_seconds"], found["blocked_seconds"], found["load_seconds"], found["load_measured"]) == (50, 50, 50, False)
    assert {name: found[name] for name in expected(1, 1, 1, 1)} == pytest.approx(expected(50, 50, 50, 21_600))
    assert document(tmp_path, "--mtbf", "6h", "--last", "1")["save_seconds"] == 50.0
    more = document(tmp_path, "--mtbf", "6h", "--ranks", 1024, "--load", "90s")
    assert (more["mtbf"], more["load_seconds"], more["load_measured"]) == (21_600 * 4 / 1024, 90, True)
    assert {name: more[name] for name in expected(1, 1, 1, 1)} == pytest.approx(expected(50, 50, 90, 21_600 * 4 / 1024) | {"lost": 1.0})


def test_of_saves_in_the_background(tmp_path: Path) -> None:
    """They block training until all is captured, as far as spans tell, and cannot come faster than they end."""
    save(
        tmp_path,
        7,
        spans({"collect": (0, 0.25), "capture": (0.5, 2.0), "write": (0.5, 300.0)}),
        spans({"capture": (0, 1), "write": (0, 9)}),
    )
    found = document(tmp_path, "--mtbf", "2h")
    assert (found["blocked_seconds"], found["save_seconds"], found["interval_seconds"]) == (2.0, 300.0, 300.0)
    assert found["daly_seconds"] == pytest.approx(expected(2, 300, 300, 7200)["daly_seconds"]) and found["daly_seconds"] < 300
    text = advise(tmp_path, "--mtbf", "2h").stdout
    assert (
        "save every 5 min\n" in text and "blocks training for 2 s (without waits" in text and "how long a step takes is not known" in text
    )
    assert "not measured: taken to be as long as a save" in text and "ETTR" in text
    assert advise(tmp_path, "--mtbf", "2h", "-q").stdout == "300\n"


def test_of_events(tmp_path: Path) -> None:
    """They count before spans: they know for how long training stood still, and what loads took."""
    save(tmp_path, 7, spans({"write": (0, 300.0)}))
    lines = [{"kind": "save.durable", "seconds": 30.0 + n, "blocked": 0.5 + n, "step": n} for n in range(5)]
    lines += [{"kind": "restore", "seconds": 44.0}, {"kind": "restore", "seconds": 999.0, "error": "CorruptError"}, {"kind": "save.begun"}]
    file = tmp_path / "events.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "save.dur')
    found = document(tmp_path, "--mtbf", "1d")
    assert (found["source"], found["saves"], found["load_seconds"], found["load_measured"]) == ("events", 5, 44, True)
    assert {name: found[name] for name in expected(1, 1, 1, 1)} == pytest.approx(expected(2.5, 32, 44, 86_400))
    file.rename(tmp_path / "other")
    assert document(tmp_path, "--mtbf", "1d", "--events", tmp_path / "other") == found
    (tmp_path / "other").write_text("nonsense\n")
    result = advise(tmp_path, "--mtbf", "1d", "--events", tmp_path / "other")
    assert result.exit_code == 20 and "line 1 is no event" in result.stderr


def test_steps_of_training_come_from_the_times_of_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import datetime, timedelta, timezone

    from ckpt.observe.intervals import step_seconds

    start = datetime(2025, 1, 1, tzinfo=timezone.utc)
    commits = [(100, start), (300, start + timedelta(seconds=500)), (200, start + timedelta(seconds=200)), (301, start)]
    assert step_seconds(commits) == 2.5  # 2 and 3; a clock that went back tells nothing
    assert step_seconds(commits[:1]) is None
    resumed = [*commits[1:3], (100, start), (400, start + timedelta(hours=3)), (500, start + timedelta(hours=9))]
    assert step_seconds(resumed) == 2.5  # the job stood still before steps 400 and 500


def test_never_more_often_than_every_step(tmp_path: Path) -> None:
    from ckpt.observe.intervals import MeasuredSave, advise

    cheap = [MeasuredSave(seconds=0.01, blocked=0.0001)]
    assert advise(cheap, None, 3600, step=30.0).interval == 30.0
    assert advise(cheap, None, 3600).interval == pytest.approx(math.sqrt(2 * 0.0001 * 3600), rel=0.01)


def test_that_every_step_pays_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.observe.intervals.step_seconds", lambda commits: 300.0)
    save(tmp_path, 10, spans({"write": (0, 0.01)}))
    text = advise(tmp_path, "--mtbf", "1h").stdout
    assert text.startswith("save every 5 min, every 1 step\nthat is every step; by their cost alone it would be 8.48 s\n")


def test_what_cannot_be_advised(tmp_path: Path) -> None:
    assert advise(tmp_path, "--mtbf", "6h").exit_code == 10
    write_checkpoint(str(tmp_path / "step-1"), sample())
    result = advise(tmp_path, "--mtbf", "6h")
    assert result.exit_code == 10 and "the durations of this run's saves are not recorded" in result.stderr
    for wrong in ("soon", "0", "-3h"):
        assert advise(tmp_path, f"--mtbf={wrong}").exit_code == 2
    assert advise(tmp_path).exit_code == 2
