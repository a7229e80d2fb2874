"""``ckpt merge`` as a command: what it says, which weights it takes, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import ckpt
from ckpt.cli.main import cli


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["merge", *map(str, args)])


@pytest.fixture
def steps(tmp_path: Path) -> list[str]:
    urls = [str(tmp_path / "run" / f"step-{i}") for i in range(3)]
    for i, url in enumerate(urls):
        ckpt.save(url, {"w": torch.full((2,), float(i)), "step": i})
    return urls


def value(url: Path) -> float:
    return float(ckpt.open(url)["w"].read()[0])


def test_what_it_says(tmp_path: Path, steps: list[str]) -> None:
    out = tmp_path / "out"
    planned = run(out, *steps, "--dry-run")
    assert planned.stdout.startswith("would write 1 tensor, 8 B in 1 file") and not out.exists()
    done = run(out, *steps, "--weights", "1/2,0.3,1/5")
    first, *rows = done.stdout.splitlines()
    assert first.startswith(f"ok: {out}: 1 tensor, 8 B in 1 file")
    assert rows == [f"  {weight} x {url}" for weight, url in zip(("0.5", "0.3", "0.2"), steps, strict=True)]
    assert done.stderr == f"tensors: 1 averaged, 0 equal in all, 0 copied; step, options and other values come from {steps[0]}\n"
    assert value(out) == pytest.approx(0.7)


def test_the_newest_of_a_run(tmp_path: Path, steps: list[str]) -> None:
    """Their values come from the newest one."""
    done = run(tmp_path / "out", "--last", 2, tmp_path / "run", "--json")
    document = json.loads(done.stdout)
    assert (document["sources"], document["weights"], document["values_from"]) == (steps[1:], [0.5, 0.5], steps[2])
    assert (document["averaged"], document["dry_run"], document["written"]["finished"]) == (1, False, True)
    assert value(tmp_path / "out") == 1.5 and ckpt.open(tmp_path / "out").state()["step"] == 2
    assert run("-q", tmp_path / "quiet", *steps, "--values-from", 2).stdout == ""
    assert ckpt.open(tmp_path / "quiet").state()["step"] == 1


def test_exit_codes(tmp_path: Path, steps: list[str]) -> None:
    out = tmp_path / "out"
    ckpt.save(tmp_path / "nan", {"w": torch.tensor([1.0, float("nan")]), "step": 0})
    ckpt.save(tmp_path / "other", {"v": torch.ones(2)})
    for arguments, code in (
        ((*steps, "--weights", "0.5,0.3,0.1"), 2),
        ((*steps, "--weights", "1/0,1,1"), 2),
        ((*steps, "--weights", "a,b"), 2),
        ((*steps, "--last", "2"), 2),
        ((*steps, "--values-from", "4"), 2),
        ((*steps, "--schedule", "step"), 2),
        ((tmp_path / "run", "--last", "4"), 10),
        ((steps[0], tmp_path / "other"), 21),
        ((steps[0], tmp_path / "nan"), 22),
    ):
        result = run(out, *arguments)
        assert result.exit_code == code, result.stderr
        assert not out.exists() or not any(out.iterdir())
    assert run(out, steps[0], tmp_path / "nan", "--allow-nan").exit_code == 0
    assert run(tmp_path / "more", *steps, "--weights", "1,1,1", "--any-sum").exit_code == 0
    assert value(tmp_path / "more") == 3
