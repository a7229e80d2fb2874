"""What somebody meant who made a typing error: commands, options, choices, steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ckpt.cli.main import cli
from ckpt.text import close_names, did_you_mean
from tests.cli.checkpoints import sample, write_checkpoint


def run(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli, [str(arg) for arg in args])
    return result.exit_code, result.stderr


def test_close_names() -> None:
    names = ["model.wq.weight", "model.wk.weight", "optimizer.step", "Model.W"]
    assert close_names("model.wq.wieght", names)[0] == "model.wq.weight"
    assert close_names("model.w", names, 1) == ["Model.W"]
    assert close_names("zzz", names) == []
    assert did_you_mean("inspct", ["inspect", "import"]) == "did you mean inspect?"
    assert did_you_mean("zzz", names) is None


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("inspct", "x"), "error: no command 'inspct'\n  try: did you mean inspect?\n"),
        (("xyz",), "error: no command 'xyz'\n  try: ckpt --help\n"),
        (("ls", "--jsn", "x"), "error: No such option '--jsn'. Did you mean '--json'?\n  try: ckpt ls --help\n"),
        (("completion", "bsh"), "'bsh' is not one of bash, zsh, fish; did you mean bash?"),
    ],
)
def test_words_of_the_command_line(args: tuple[str, ...], said: str) -> None:
    code, stderr = run(*args)
    assert code == 2 and said in stderr


@pytest.mark.parametrize("command", ["inspect", "verify", "ls"])
@pytest.mark.parametrize(("wrong", "right"), [("step-100", "step-00000100"), ("finl", "final"), ("step-101", None), ("other", None)])
def test_a_checkpoint_that_is_not_there(tmp_path: Path, command: str, wrong: str, right: str | None) -> None:
    for name in ("step-00000100", "step-00000200", "final"):
        (tmp_path / "run" / name).mkdir(parents=True)
    code, stderr = run(command, tmp_path / "run" / wrong)
    assert code == 10
    assert (f"  try: did you mean {tmp_path}/run/{right}?" in stderr) == (right is not None)
    assert ("did you mean" in stderr) == (right is not None)


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(str(tmp_path / "final"), sample())
    monkeypatch.chdir(tmp_path)
    assert "did you mean final?" in run("inspect", "finl")[1]
    assert run("inspect", "inprocess://nothing")[0] == 10


def test_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path / "step-1"), sample())
    code, stderr = run("inspect", tmp_path / "step-1", "model.wq.wieght")
    assert code == 21 and "did you mean model.wq.weight?" in stderr
    assert "the first of 5 are" in run("inspect", tmp_path / "step-1", "zzz*")[1]
