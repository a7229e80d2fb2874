"""What Ctrl-C does until a command runs: the process ends at once, without a word but ``interrupted``."""

from __future__ import annotations

import os
from types import FrameType

INTERRUPTED = 130
"""The exit code."""


def quit_at_once(signum: int, frame: FrameType | None) -> None:
    """The handler of SIGINT until a command runs."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
