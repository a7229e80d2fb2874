"""Ctrl-C: until a command runs, the process ends at once; while one runs, the command may say how to resume it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""The exit code."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a command that can say which files remain. ``hint`` names them and the next step."""

    def __init__(self, hint: str) -> None:
        super().__init__()
        self.hint = hint


@contextmanager
def when_interrupted(hint: str) -> Iterator[None]:
    """Around the work of a command: after Ctrl-C the user reads ``hint`` below ``interrupted``.

    Raises:
        Interrupted: Ctrl-C was pressed in the block.
    """
    try:
        yield
    except KeyboardInterrupt as err:
        raise Interrupted(hint) from err


def quit_at_once(signum: int, frame: FrameType | None) -> None:
    """The handler of SIGINT until a command runs."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
