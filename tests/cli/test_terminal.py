"""What a terminal gets: no control character of a checkpoint's writer, and quiet when the user presses Ctrl-C."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt
from ckpt.errors import CkptError
from tests.cli.checkpoints import write_checkpoint
from tests.cli.terminal import START, environment, on_a_terminal, open_terminal, read_all

ESCAPES = "\x1b]0;owned\x07", "\x1b[2J", "\x9b31m", "\u202egnp.exe", "a\nok: forged", "\r", "\u2028", "\x7f"
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
OURS = re.compile("\x1b\\[(0|1|31|32)m")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps whose names, keys and values hold what a terminal would obey; the second has other values."""
    root = tmp_path_factory.mktemp("hostile")
    for step in (1, 2):
        state = {f"{evil}{i}": torch.full((3,), float(step)) for i, evil in enumerate(ESCAPES)}
        ckpt.save(str(root / f"step-{step}"), {**state, "values": {evil: f"{evil}{step}" for evil in ESCAPES}})
    return root


def shown_by(*args: str) -> str:
    """All that the command writes to a terminal."""
    term = "dumb" if args[0] in ("verify", "diff") else "xterm"  # their progress bars move the cursor themselves
    return on_a_terminal(*args, columns=300, code=None, TERM=term)


@pytest.mark.parametrize(
    "args",
    [
        ("inspect", "{}/step-1"),
        ("inspect", "-q", "{}/step-1"),
        ("inspect", "--state", "{}/step-1"),
        ("inspect", "--json", "{}/step-1"),
        ("inspect", "{}/step-1", "no\x1b]0;x\x07ne"),
        ("verify", "{}/step-1"),
        ("diff", "{}/step-1", "{}/step-2"),
        ("diff", "--json", "{}/step-1", "{}/step-2"),
        ("ls", "{}/\x1b]0;x\x07"),
    ],
    ids=lambda args: " ".join(args[:2]).replace("{}/", ""),
)
def test_nothing_reaches_the_terminal_that_it_would_obey(hostile: Path, args: tuple[str, ...]) -> None:
    shown = shown_by(*(arg.format(hostile) for arg in args))
    assert shown.strip()
    assert FORBIDDEN.findall(OURS.sub("", shown)) == []
    assert "\nok: forged" not in shown


def test_json_gives_the_names_as_they_are(hostile: Path) -> None:
    done = subprocess.run([*START, "inspect", "--json", str(hostile / "step-1")], capture_output=True, check=True)
    assert FORBIDDEN.search(done.stdout.decode()) is None
    assert {t["name"] for t in json.loads(done.stdout)["tensors"]} == {f"{evil}{i}" for i, evil in enumerate(ESCAPES)}


def test_a_damaged_checkpoint_is_named_printably(hostile: Path, tmp_path: Path) -> None:
    """The writer's name of a version that is not known goes into a hint."""
    record = json.loads((hostile / "step-1" / "checkpoint.json").read_text()) | {"version": 99, "writer": "\x1b[31mred", "digest": "0" * 32}
    import xxhash

    raw = json.dumps(record).encode()
    (tmp_path / "checkpoint.json").write_bytes(raw.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(raw).encode()))
    shown = shown_by("inspect", str(tmp_path))
    assert "\\x1b[31mred" in shown
    assert "\x1b" not in shown


def test_errors_and_logs_are_printable(caplog: pytest.LogCaptureFixture) -> None:
    assert str(CkptError("tensor \x1b[2J\nsecond line", where="a\x07", hint="\u202e")) == (
        "tensor \\x1b[2J\nsecond line\n  where: a\\x07\n  try: \\u202e"
    )
    logging.getLogger("ckpt").warning("tensor %s of %d", "\x1b[2J", 3)
    assert caplog.messages == ["tensor \\x1b[2J of 3"]


INTERRUPTING = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a script was started deaf to it
sys.meta_path.insert(0, Interrupt())
from ckpt.cli.start import main
sys.argv[1:] = ["inspect", {checkpoint!r}]
main()
"""


@pytest.mark.parametrize("module", ["ckpt.cli.main", "click", "ckpt.cli.inspect", "numpy", "pyarrow", "ckpt.formats.registry"])
def test_ctrl_c_is_quiet_from_the_first_import(hostile: Path, module: str) -> None:
    code = INTERRUPTING.format(module=module, checkpoint=str(hostile / "step-1"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (130, "interrupted", "")


# --------------------------------------- Ctrl-C in the middle of a command: what it says, the exit code, and that the same command resumes.

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
