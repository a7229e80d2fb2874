"""How long training was held up by one save. No torch."""

from __future__ import annotations

import threading
import time
from types import TracebackType


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
