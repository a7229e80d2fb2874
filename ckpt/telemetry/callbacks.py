"""Tells a caller how far a save or a load is, and how long training was held up: a function of bytes done and bytes in all, or a bar on the
terminal. No torch.

A thread looks at the counters ten times a second and calls the function. So no thread that moves bytes ever waits for it, and it need not
be safe for several threads. Where nobody asks, there is no thread. A function that raises is not called again; one that hangs is left
behind.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType

from ckpt.errors import UsageError

log = logging.getLogger("ckpt")

ProgressCallback = Callable[[int, int], object]
"""Takes the bytes that this rank has done, and has to do in all."""

INTERVAL = 0.1
"""Seconds between two calls."""
_PATIENCE = 2.0
"""Seconds that the end of a save or a load waits for a call that is going on."""


def callback_of(*, progress: bool | ProgressCallback | None, leads: bool, title: str) -> ProgressCallback | None:
    """The function that ``progress=`` stands for; True is a bar on the leading rank's terminal."""
    given: object = progress
    if given is None or given is False:
        return None
    if given is True:
        return partial(_draw, title) if leads and sys.stderr.isatty() else None
    check_progress(progress, "True or a function")
    assert callable(progress)
    return progress


def check_progress(progress: object, takes: str = "a function") -> None:
    """Raise UsageError unless ``progress`` is a function or None."""
    if progress is not None and not callable(progress):
        raise UsageError(f"progress= takes {takes} of bytes done and bytes in all, not {progress!r}")


def _draw(title: str, done: int, total: int) -> None:
    """A bar of ``rich``, which is imported when there is something to draw."""
    from rich.console import Console
    from rich.progress_bar import ProgressBar

    console = Console(stderr=True)
    bar = ProgressBar(total=max(total, 1), completed=done if total else 1, width=32)
    with console.capture() as drawn:
        console.print(bar, end="")
    end = "\n" if done >= total else ""
    sys.stderr.write(f"\r{title} {drawn.get()} {100 * done // max(total, 1) if total else 100:3d} %{end}")
    sys.stderr.flush()


@contextmanager
def reported(callback: ProgressCallback | None, counts: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """While the block runs, call ``callback`` with ``counts()`` whenever these have changed; after a block that succeeds, with all done."""
    if callback is None:
        yield
        return
    reporter = _Reporter(callback, counts)
    try:
        yield
    except BaseException:
        reporter.stop()
        raise
    reporter.stop()
    reporter.finish()


class _Reporter:
    def __init__(self, callback: ProgressCallback, counts: Callable[[], tuple[int, int]]) -> None:
        self._callback = callback
        self._counts = counts
        self._last: tuple[int, int] = (-1, -1)
        self._failed = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-callback", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL) and not self._failed:
            self._call(self._counts())

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(_PATIENCE)

    def finish(self) -> None:
        """Report that all is done, unless the function hangs."""
        if not self._thread.is_alive():
            _, total = self._counts()
            self._call((total, total))

    def _call(self, counts: tuple[int, int]) -> None:
        done, total = counts
        if self._failed or counts == self._last or (not total and not self._stopped.is_set()):  # nobody knows yet how much it is
            return
        self._last = counts
        try:
            self._callback(done, total)
        except Exception:  # whoever watches must not harm what is watched
            self._failed = True
            log.warning("the progress callback has raised, and is not called again", exc_info=True)


# How long training was held up by one save.


class Stall:
    """A sum of stretches of time in which training waited: ``with stall: …``. Thread-safe; what overlaps counts once.

    A stretch that is going on counts up to now, so whoever asks while a rank still waits hears of it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self._since = 0.0
        self._sum = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if self._waiting == 0:
                self._since = time.perf_counter()
            self._waiting += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._waiting -= 1
            if self._waiting == 0:
                self._sum += time.perf_counter() - self._since

    def add(self, seconds: float) -> None:
        """A stretch that somebody else has measured, and that overlaps no other."""
        with self._lock:
            self._sum += seconds

    @property
    def seconds(self) -> float:
        """So far."""
        with self._lock:
            return self._sum + (time.perf_counter() - self._since if self._waiting else 0.0)
