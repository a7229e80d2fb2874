"""Ctrl-C in the middle of a command: what it says, the exit code, and that the same command resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cli.checkpoints import write_checkpoint
from tests.cli.terminal import START, environment, open_terminal, read_all

PRESSED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
from ckpt.cli.output import progress
import ckpt.cli.output as module
class Lines(module.Lines):
    def __call__(self, done, total):
        if 4 * done > total:
            os.kill(os.getpid(), signal.SIGINT)
module.Lines = Lines
from ckpt.cli.start import main
main()
"""
"""A command that gets SIGINT, as by Ctrl-C, when a quarter of its bytes are done."""


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "step-1"
    arrays = {f"w{n}": np.full((64 << 10,), n, np.float32) for n in range(32)}
    write_checkpoint(str(path), arrays, ranks=8, state={name: {"$tensor": name} for name in arrays})
    return path


def interrupted(*args: str) -> str:
    done = subprocess.run([sys.executable, "-c", PRESSED, *args], capture_output=True, text=True, env=environment(), timeout=120)
    assert (done.returncode, done.stdout) == (130, ""), done.stderr
    return done.stderr


@pytest.mark.parametrize("command", [("cp", "--threads", "1"), ("convert", "--to", "native", "--shard-size", "1MB", "--threads", "1")])
def test_the_same_command_resumes(tmp_path: Path, step: Path, command: tuple[str, ...]) -> None:
    target = tmp_path / "step-1"
    stderr = interrupted(*command, str(step), str(target))
    assert "interrupted\n  try: run the same command again to resume" in stderr
    assert not (target / "checkpoint.json").exists()
    again = subprocess.run([*START, *command, "--json", str(step), str(target)], capture_output=True, text=True, check=True)
    report = json.loads(again.stdout)
    written, files = (report["copied_files"], report["files"]) if command[0] == "cp" else (report["written_files"], len(report["files"]))
    assert 0 < written < files, "files that were complete are not written again"
    assert subprocess.run([*START, "verify", "-q", str(target)], check=False).returncode == 0


IMPORTING = """
import os, signal, sys
class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == "ckpt.converters.convert":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Pressed())
signal.signal(signal.SIGINT, signal.default_int_handler)
from ckpt.cli.start import main
main()
"""
"""A command that gets SIGINT while it imports what it needs."""


def test_ctrl_c_before_a_conversion_begins(tmp_path: Path, step: Path) -> None:
    args = ("convert", "--to", "native", str(step), str(tmp_path / "step-1"))
    done = subprocess.run([sys.executable, "-c", IMPORTING, *args], capture_output=True, text=True, env=environment(), timeout=120)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted\n  try: nothing was begun; run the command again\n"
    assert not (tmp_path / "step-1").exists()


def test_what_is_left_of_a_command_that_cannot_resume(step: Path) -> None:
    assert "interrupted\n  try: nothing was changed; the same command starts from the beginning\n" in interrupted("verify", str(step))


def test_ctrl_c_on_a_terminal(tmp_path: Path, step: Path) -> None:
    """The key itself, on a terminal whose foreground the command is; ``watch`` waits until then."""
    leader, follower = open_terminal()
    code = "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); " + START[2]
    process = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {code}", "watch", str(step.parent)],
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True, env=environment(),
    )  # fmt: skip
    os.close(follower)
    shown = b""
    while b"waiting" not in shown:
        shown += os.read(leader, 1 << 12)
    os.write(leader, b"\x03")
    assert "interrupted" in read_all(leader)
    assert process.wait(60) == 130 and process.returncode != -signal.SIGINT
