"""Ctrl-C: until a command runs, the process ends at once; while one runs, the command may say how to resume it."""

from __future__ import annotations

import os
import signal
import threading
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
    """Around the work of a command: after Ctrl-C the user reads ``hint`` below ``interrupted``."""
    try:
        yield
    except KeyboardInterrupt as err:
        raise Interrupted(hint) from err


@contextmanager
def nothing_begun() -> Iterator[None]:
    """Around imports of large libraries, before a command does anything: Ctrl-C ends the process at once.

    An interrupt in the middle of such an import surfaces as whatever error their code makes of it, with a long traceback, or is lost.
    """
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if default:
        signal.signal(signal.SIGINT, _quit_before_work)
    try:
        yield
    finally:
        if default:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _quit_before_work(signum: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n  try: nothing was begun; run the command again\n")
    os._exit(INTERRUPTED)


def quit_at_once(signum: int, frame: FrameType | None) -> None:
    """The handler of SIGINT until a command runs."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
