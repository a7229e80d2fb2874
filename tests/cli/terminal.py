"""Runs the command on a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

START = [sys.executable, "-c", "from ckpt.cli.start import main; main()"]
ROOT = Path(__file__).parents[2]


def open_terminal(columns: int = 80) -> tuple[int, int]:
    """Both ends of a terminal that is so wide."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    return leader, follower


def environment(**changes: str) -> dict[str, str]:
    """That of this process without what would change colours or widths."""
    return {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")} | {"TERM": "xterm"} | changes


def read_all(leader: int) -> str:
    """What is written to the terminal until its last user closes it; closes this end too."""
    chunks = []
    while True:
        try:
            chunk = os.read(leader, 1 << 16)
        except OSError:  # Linux: the other side is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(leader)
    return b"".join(chunks).decode().replace("\r\n", "\n")


def on_a_terminal(*args: str, columns: int = 80, code: int | None = 0, **changes: str) -> str:
    """Everything that the command prints when stdout and stderr are a terminal; ``code`` is the exit code that it must have."""
    leader, follower = open_terminal(columns)
    process = subprocess.Popen([*START, *args], cwd=ROOT, stdout=follower, stderr=follower, close_fds=True, env=environment(**changes))
    os.close(follower)
    text = read_all(leader)
    assert process.wait(60) == code or code is None, text
    return text
