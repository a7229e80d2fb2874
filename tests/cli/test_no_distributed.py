"""Commands in a shell that has the variables of a job: they say whom they wait for, and ``--no-distributed`` does without. Elements of an
array job, which wait for nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    monkeypatch.setattr("ckpt.cli.dividing._WAITED", 0.01)
    waiting = CliRunner().invoke(cli, arguments, env=JOB)
    text = " ".join((waiting.stdout + waiting.stderr).split())
    assert waiting.exit_code != 0 and "`--no-distributed` runs the command in one process" in str(waiting.exception) + text
    assert "waiting for the other 3 processes at 127.0.0.1:9: the environment makes this one 1 of 4" in text


def test_each_element_of_an_array_verifies_its_part(tmp_path: Path) -> None:
    """All bytes are read by one of them, damage fails one of them, and what does not divide is refused."""
    url = str(tmp_path / "a")
    write_checkpoint(url, sample(), ranks=2)

    def verify(*options: str) -> tuple[int, dict[str, Any]]:
        ended = CliRunner().invoke(cli, ["verify", "--json", url, *options], env=JOB)
        return ended.exit_code, json.loads(ended.stdout)

    whole = verify("--no-distributed")[1]
    parts = [verify("--part", f"{i}/2") for i in range(2)]
    assert [(code, fields["part"], fields["ok"]) for code, fields in parts] == [(0, [i, 2], True) for i in range(2)]
    assert sum(fields["bytes"] for _, fields in parts) == whole["bytes"] and all(f["bytes"] for _, f in parts)
    path = max(Path(url).glob("data/*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert sorted(verify("--part", f"{i}/2")[0] for i in range(2)) == [0, 20]
    text = CliRunner().invoke(cli, ["verify", url, "--part", "0/2"]).stdout
    assert text.startswith("part 0 of 2: ok")
    for arguments, words in (
        (["cp", url, str(tmp_path / "b"), "--part", "0/2"], "no part alone can know"),
        (["verify", url, "--part", "0/2", "--semantic"], "--semantic reads whole tensors"),
        (["verify", url, "--part", "0/2", "--no-distributed"], "exclude each other"),
        *((["verify", url, "--part", wrong], "is not a part") for wrong in ("2/2", "1", "-1/2", "a/b", "0/0")),
    ):
        refused = CliRunner().invoke(cli, arguments)
        assert refused.exit_code == 2 and words in str(refused.exception) + refused.output, arguments
