"""Commands in a shell that has the variables of a job: they say whom they wait for, and ``--no-distributed`` does without."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ckpt.cli.main import cli
from tests.cli.checkpoints import sample, write_checkpoint

JOB = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "CKPT_TIMEOUT": "1"}
"""What a shell has that was started from a training job."""


@pytest.mark.parametrize("command", [["verify"], ["cp", "TARGET"], ["convert", "TARGET", "--to=native"]])
def test_alone_in_the_shell_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    write_checkpoint(str(tmp_path / "a"), sample(), ranks=1)
    arguments = [command[0], str(tmp_path / "a"), *([str(tmp_path / "b"), *command[2:]] if command[1:] else [])]
    alone = CliRunner().invoke(cli, [*arguments, "--no-distributed"], env=JOB)
    assert alone.exit_code == 0, alone.output
    if command[1:]:
        assert (tmp_path / "b" / "checkpoint.json").exists()
        return
    monkeypatch.setattr("ckpt.cli.console.dividing._WAITED", 0.01)
    waiting = CliRunner().invoke(cli, arguments, env=JOB)
    text = " ".join((waiting.stdout + waiting.stderr).split())
    assert waiting.exit_code != 0 and "`--no-distributed` runs the command in one process" in str(waiting.exception) + text
    assert "waiting for the other 3 processes at 127.0.0.1:9: the environment makes this one 1 of 4" in text
