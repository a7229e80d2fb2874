"""Work that nobody waits for, and that one thread does, however often it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .workers import program_ends


class Rounds:
    """``work`` on a thread of its own, which lives as long as there is something to do; a program that ends waits for it. Who asks while it
    goes on gets one more round, so that each sees what was there when it asked."""

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self._work = work
        self._name = name
        self._lock = threading.Lock()
        self._asked = False
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Have one round begin from now on."""
        with self._lock:
            self._asked = True
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name)
                thread.start()  # first: where that fails, the next one who asks tries again
                self._thread = thread
            thread = self._thread
        if program_ends():
            thread.join()

    def wait(self, seconds: float) -> bool:
        """Whether nothing goes on any more within so many seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        try:
            while self._next():
                self._work()
        except BaseException:
            with self._lock:
                self._thread = None
            raise

    def _next(self) -> bool:
        with self._lock:
            goes_on, self._asked = self._asked, False
            if not goes_on:
                self._thread = None
            return goes_on
