"""``ckpt completion``, and what shells get from it; logging by ``-v``; commands without torch."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckpt.cli.main import COMMANDS, cli
from ckpt.text import close_names, did_you_mean
from tests.cli.checkpoints import sample, write_checkpoint
from tests.cli.terminal import START, environment


def completions(words: str, *, script: str = "from ckpt.cli.start import main; main()") -> subprocess.CompletedProcess[str]:
    """What bash is offered after these words; the last one may be empty."""
    env = environment(_CKPT_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(len(words.split(" ")) - 1))
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("ckpt ", {f"plain,{name}" for name in COMMANDS}),
        ("ckpt ins", {"plain,inspect"}),
        ("ckpt inspect --fi", {"plain,--files"}),
        ("ckpt convert --to to", {"plain,torch", "plain,torch_dist"}),
        ("ckpt convert --convention h", {"plain,huggingface"}),
        ("ckpt verify ru", {"file,ru"}),
        ("ckpt completion z", {"plain,zsh"}),
    ],
)
def test_what_a_shell_completes(words: str, offered: set[str]) -> None:
    assert set(completions(words).stdout.split("\n")) - {""} == offered


def test_completion_loads_nothing_heavy() -> None:
    script = "import atexit, sys; atexit.register(lambda: print('MODULES', *sys.modules)); from ckpt.cli.start import main; main()"
    for name in COMMANDS:
        loaded = set(completions(f"ckpt {name} --", script=script).stdout.partition("MODULES ")[2].split())
        assert "click" in loaded and not loaded & {"torch", "numpy", "pyarrow", "fsspec", "botocore", "rich"}, name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell: str) -> None:
    script = CliRunner().invoke(cli, ["completion", shell]).stdout
    assert f"_CKPT_COMPLETE={shell}_complete" in script
    assert json.loads(CliRunner().invoke(cli, ["completion", "--json", shell]).stdout)["script"] == script.removesuffix("\n")


def test_bash_takes_the_script(tmp_path: Path) -> None:
    """bash itself reads it and completes a command with it."""
    (tmp_path / "ckpt").write_text(f"#!{sys.executable}\nfrom ckpt.cli.start import main\nmain()\n")
    (tmp_path / "ckpt").chmod(0o755)
    code = 'eval "$(ckpt completion bash)"; COMP_WORDS=(ckpt insp); COMP_CWORD=1; _ckpt_completion ckpt; echo "${COMPREPLY[@]}"'
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run(["bash", "--norc", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "inspect\n"


# ------------------------------------------------------------------------------------------------------------- logging


@pytest.mark.parametrize(("option", "logged"), [([], False), (["-v"], True), (["-q"], False)])
def test_verbose_logs_what_happens(tmp_path: Path, option: list[str], logged: bool) -> None:
    write_checkpoint(str(tmp_path / "step-1"), sample())
    write_checkpoint(str(tmp_path / "elsewhere" / "x"), sample())
    write_checkpoint(str(tmp_path / "step-2"), sample())
    (tmp_path / "step-0").symlink_to(tmp_path / "elsewhere" / "x")
    result = CliRunner().invoke(cli, ["gc", *option, "--keep", "latest=1", "--yes", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert ("info: the link" in result.stderr) == logged
    assert logging.getLogger("ckpt").level == logging.NOTSET and len(logging.getLogger("ckpt").handlers) == 0


def test_verbose_before_the_command() -> None:
    for args in (["-v", "completion", "bash"], ["completion", "-vv", "bash"]):
        assert CliRunner().invoke(cli, args).exit_code == 0


# ------------------------------------------------------------------------------------------------------- without torch


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python that has all that this one has, but torch."""
    packages = tmp_path_factory.mktemp("packages")
    for folder in sys.path:
        for entry in Path(folder or ".").glob("*") if Path(folder or ".").name == "site-packages" else ():
            if entry.name.partition("-")[0] not in ("torch", "torchgen", "functorch") and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    (packages / "ckpt").unlink(missing_ok=True)
    (packages / "ckpt").symlink_to(Path(__file__).parents[2] / "ckpt")
    return environment(PYTHONPATH=str(packages))


def run_without_torch(env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-S", *START[1:], *args], env=env, cwd="/", capture_output=True, text=True, check=False)


def test_commands_that_need_torch_say_so_first(tmp_path: Path, without_torch: dict[str, str]) -> None:
    write_checkpoint(str(tmp_path / "step-1"), sample(), state={"model": {"w": {"$tensor": "model.wq.weight"}}})
    done = run_without_torch(without_torch, "convert", "--to", "torch", str(tmp_path / "nothing"), str(tmp_path / "made"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: `ckpt convert` needs PyTorch, which is not installed\n  try: pip install torch\n"
    assert not (tmp_path / "made").exists()
    for args in (["verify"], ["inspect"], ["ls"], ["import", str(tmp_path / "step-1")]):
        done = run_without_torch(without_torch, *args, str(tmp_path / ("virtual" if args[0] == "import" else "step-1")))
        assert done.returncode == 0, done.stderr
    done = run_without_torch(without_torch, "cp", str(tmp_path / "virtual"), str(tmp_path / "copy"))
    assert done.returncode == 2 and "error: `ckpt cp` of a virtual checkpoint needs PyTorch" in done.stderr
    assert not (tmp_path / "copy").exists()


# ---------------------------------------------------------- What somebody meant who made a typing error: commands, options, choices, steps.


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
        (("list", "x"), "error: no command 'list'\n  try: did you mean ls?\n"),
        (("lora", "list"), "error: no command 'list'\n  try: ckpt lora --help\n"),
        (("plan", "--layout", "0", "x"), "error: 'fsdp=0' is not a mesh such as pp=4,dp=8,tp=8\n"),
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
    assert (f"`ckpt ls {tmp_path}/run` lists the steps of this run" in stderr) == (wrong == "step-101")
    assert f"name the directory of the checkpoint: {tmp_path}/run/final" in run(command, tmp_path / "run/final/checkpoint.json")[1]


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


# ------------------------------------------------------------------------------------------------------------------------------------------
# Commands in a shell that has the variables of a job: they say whom they wait for, and ``--no-distributed`` does without. Elements of an
# array job, which wait for nobody.

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
