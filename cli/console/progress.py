"""Progress of something long, on stderr: a bar on a terminal, otherwise a line every ten seconds; nothing if quiet."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ckpt import units

from .output import Output

INTERVAL = 10.0
"""Seconds between two lines in a log."""

Update = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes in all."""


@contextmanager
def progress(label: str, output: Output) -> Iterator[Update]:
    """A place to report bytes to, for as long as the block runs."""
    if output.quiet or output.muted:
        yield lambda done, total: None
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bar(label) as update:
            yield update
    else:
        yield Lines(label, output.talk)


@contextmanager
def _bar(label: str) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class Lines:
    """Progress for a log: ``verify: 12 GiB of 40 GiB (30 %), 1.2 GiB/s, 23 s left``, at most one line per interval."""

    def __init__(self, label: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._label, self._say, self._clock = label, say, clock
        self._began = self._last = clock()

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if now - self._last < INTERVAL:
            return
        self._last = now
        rate = done / (now - self._began)
        left = f", {units.duration((total - done) / rate)} left" if rate > 0 else ""
        percent = 100 * done // max(total, 1)
        self._say(f"{self._label}: {units.size(done)} of {units.size(total)} ({percent} %), {units.size(rate)}/s{left}")


# Ctrl-C: until a command runs, the process ends at once; while one runs, the command may say how to resume it.

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
