"""A run with a checkpoint that was rebuilt without its values: a job goes on from it only if it misses nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import cli
from ckpt.errors import CorruptError, NamesError
from ckpt.formats.native.rebuild import rebuild_checkpoint

LOST = ("values", "aliases and padding", "metrics and tags")


class Job:
    """A model, an optimizer with options, and a plain value."""

    def __init__(self, lr: float) -> None:
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.counters = {"seen": 0}
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 4)).sum().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "counters": self.counters}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def lose_values(step: Path) -> None:
    """Damage the commit record, which repeats the values, and rebuild."""
    (step / "checkpoint.json").write_bytes(b"{")
    assert rebuild_checkpoint(str(step)).lost == LOST


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 2 and 4, whose values are equal to their number; 4 is rebuilt without them."""
    job = Job(lr=0.5)
    with ckpt.Checkpointer(tmp_path) as c:
        for n in (2, 4):
            job.counters["seen"] = n
            with torch.no_grad():
                job.model.weight.fill_(n)
            c.save(n, job.state())
            c.wait()
    lose_values(tmp_path / "step-00000004")
    return tmp_path


@pytest.mark.parametrize("options", [{}, {"strict": False}])
def test_the_older_whole_one_is_loaded(root: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    job = Job(lr=0.1)
    with ckpt.Checkpointer(root) as c:
        assert c.restore(job.state(), **options) == 2
    assert job.counters == {"seen": 2} and job.optimizer.param_groups[0]["lr"] == 0.5 and bool((job.model.weight == 2).all())
    assert "step-00000004 is passed over" in caplog.text and "values, aliases and padding" in caplog.text


def test_asked_for_by_its_step_it_gives_what_is_left(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(lr=0.1)
    with ckpt.Checkpointer(root) as c:
        with pytest.raises(CorruptError, match="nothing in the state was changed") as raised:
            c.restore(job.state(), step=4)
        assert "strict=False" in str(raised.value.hint) and job.counters == {"seen": 0}
        assert c.restore(job.state(), step=4, strict=False) == 4
    assert job.counters == {"seen": 0} and job.optimizer.param_groups[0]["lr"] == 0.1 and bool((job.model.weight == 4).all())
    assert "optimizer.param_groups of model.bias" in caplog.text and "could not recover" in caplog.text


def test_alone_it_is_an_error_that_says_how_to_take_it(root: Path) -> None:
    lose_values(root / "step-00000002")
    job = Job(lr=0.1)
    with ckpt.Checkpointer(root) as c, pytest.raises(CorruptError, match="could not recover") as raised:
        c.restore(job.state(), strict=False)
    assert "step=2, strict=False" in str(raised.value.hint) and not bool((job.model.weight == 4).all())


def test_what_misses_nothing_is_loaded(tmp_path: Path) -> None:
    """A state of tensors alone."""
    with ckpt.Checkpointer(tmp_path) as c:
        for n in (2, 4):
            c.save(n, {"w": torch.full((3,), float(n))})
            c.wait()
        lose_values(tmp_path / "step-00000004")
        state = {"w": torch.zeros(3)}
        assert c.restore(state) == 4 and state["w"].tolist() == [4.0] * 3


def test_another_state_is_no_reason_to_go_back_further(root: Path) -> None:
    with ckpt.Checkpointer(root) as c, pytest.raises(NamesError):
        c.restore({"other": torch.zeros(3)})


def test_what_is_lost_stays_known(root: Path) -> None:
    """A second rebuild finds whole values that are none; conversions, tags and listings go on saying so."""
    step = root / "step-00000004"
    next(step.glob("index-*/grids.arrow")).unlink()
    assert rebuild_checkpoint(str(step)).lost == ("aliases and padding", "values", "metrics and tags")
    report = rebuild_checkpoint(str(step))
    assert not report.rebuilt and set(report.lost) == set(LOST)
    run("tag", str(step), "kept")
    run("convert", "--to", "native", str(step), str(root / "step-00000006"))
    steps = json.loads(run("ls", "--json", str(root)))["steps"]
    assert [set(s["lost"]) for s in steps] == [set(), set(LOST), set(LOST)]
    assert "could not recover" in run("inspect", str(step))
