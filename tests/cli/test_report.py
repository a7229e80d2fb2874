"""``ckpt report`` as a command: what it writes where, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ckpt.cli.main import cli
from tests.observe.saves import row, save


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "step-7", {rank: row(("write", 0, 1 + rank, 5)) for rank in range(4)})


def report(*args: object) -> Result:
    return CliRunner().invoke(cli, ["report", *[str(arg) for arg in args]])


def test_a_report_is_written(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    result = report(saved, "-o", out)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"{out}: 1 save, {out.stat().st_size / 1024:.0f} KiB; open it in a browser\n"
    assert out.read_text().startswith("<!DOCTYPE html>\n<html lang=")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "step-7"]
    assert report("-q", saved, "-o", out).output == ""


def test_json(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    none = save(tmp_path / "step-8", None)
    found = json.loads(report("--json", saved, none, "-o", out).stdout)
    assert found == {
        "path": str(out),
        "bytes": out.stat().st_size,
        "saves": 1,
        "detail": str(saved),
        "notes": [f"{none}: no spans were kept with this checkpoint"],
    }
    assert report("--json", saved, "-o", "-").exit_code == 2


def test_to_stdout(saved: Path, tmp_path: Path) -> None:
    report(saved, "-o", tmp_path / "r.html")
    assert report(saved, "-o", "-").stdout == (tmp_path / "r.html").read_text()


def test_a_pipe_whose_reader_has_gone(saved: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from ckpt.cli.main import cli; cli.main(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, "report", str(saved), "-o", "-"], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("out", "hint"),
    [
        ("no/r.html", "name a file in an existing directory"),
        (".", "this is a directory: name a file in it"),
        ("/sys/r.html", "name a file in a directory in which you may write"),
        ("x" * 300, "name a file that can be written"),
    ],
)
def test_a_place_that_cannot_be_written(saved: Path, tmp_path: Path, out: str, hint: str) -> None:
    result = report("--json", saved, "-o", tmp_path / out)
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["type"], error["where"], error["hint"]) == (30, "StorageError", str(tmp_path / out), hint)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-7"]


@pytest.mark.parametrize(
    "options", [["--price", "much"], ["--price", "nan"], ["--price", "-1"], ["--mesh", "pp"], ["--mesh", "pp=0"], ["--mesh", "pp=3"]]
)
def test_options_that_do_not_fit(saved: Path, tmp_path: Path, options: list[str]) -> None:
    result = report(saved, "-o", tmp_path / "r.html", *options)
    assert result.exit_code == 2 and ("where: --mesh" in result.stderr) == (options in (["--mesh", "pp"], ["--mesh", "pp=0"]))
    assert not (tmp_path / "r.html").exists()


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("x")
    for url, code in (("b", 12), ("c", 10)):
        assert report(tmp_path / url, "-o", tmp_path / "r.html").exit_code == code
    assert not (tmp_path / "r.html").exists()


def test_a_run_beside_another(saved: Path, tmp_path: Path) -> None:
    result = report(tmp_path, saved, "-o", tmp_path / "r.html")
    assert result.exit_code == 2
    assert "a run and a checkpoint" in result.stderr and str(saved) in result.stderr
