"""What a terminal gets: no control character of a checkpoint's writer, and quiet when the user presses Ctrl-C."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import CkptError
from tests.cli.terminal import START, on_a_terminal

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
