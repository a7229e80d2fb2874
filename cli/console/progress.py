"""Progress of something long, on stderr: a bar on a terminal, otherwise a line every ten seconds; nothing if quiet."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
