"""How far one take of a sink is on this rank, and how long its phases took. No torch."""

from __future__ import annotations

import threading

from ckpt.tracing.spans import Spans


class TakeMeter:
    """Counts bytes of the state; threads of the take add to it, and a progress callback reads it. ``spans`` has the phases."""

    def __init__(self, spans: Spans) -> None:
        self.spans = spans
        self._total = 0
        self._done = 0
        self._lock = threading.Lock()

    def begin(self, total: int) -> None:
        """So many bytes are to come; a version that was dropped on the way is followed by another one."""
        with self._lock:
            self._total, self._done = total, 0

    def add(self, nbytes: int) -> None:
        """So many more came from other processes: compared with their digests, or copied from memory that was."""
        with self._lock:
            self._done += nbytes

    def counts(self) -> tuple[int, int]:
        """Bytes done, and in all."""
        with self._lock:
            return min(self._done, self._total), self._total
