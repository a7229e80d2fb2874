"""``ckpt completion``, and what shells get from it; logging by ``-v``; commands without torch."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckpt.cli.main import COMMANDS, cli
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
