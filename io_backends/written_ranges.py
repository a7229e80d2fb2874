"""Which bytes of an object have been written: exact, so that a hole cannot hide behind bytes that were written twice."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right

from ckpt.errors import StorageError


class WrittenRanges:
    """The ranges of ``[0, size)`` that were written so far. Thread-safe.

    The ranges are kept sorted, disjoint and not touching, so that neighbouring writes cost one entry.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._lock = threading.Lock()

    def add(self, start: int, stop: int) -> None:
        """Note that ``[start, stop)`` was written."""
        if start == stop:
            return
        with self._lock:
            # All ranges that touch or overlap [start, stop) are neighbours in the sorted lists:
            #
            #  ranges    [--a--]   [--b--]  [--c--]      [--d--]
            #  new            [---------------]
            #  result    [-----------------------]       [--d--]
            #
            # ``first`` is the first one that ends at or after ``start``, ``last`` is behind the last one that begins
            # at or before ``stop``.
            first = bisect_left(self._stops, start)
            last = bisect_right(self._starts, stop)
            if first < last:
                start = min(start, self._starts[first])
                stop = max(stop, self._stops[last - 1])
            self._starts[first:last] = [start]
            self._stops[first:last] = [stop]

    @property
    def count(self) -> int:
        """Number of distinct bytes written."""
        with self._lock:
            return sum(self._stops) - sum(self._starts)

    def check(self, where: str) -> None:
        """Raise StorageError unless every byte was written."""
        count = self.count
        if count != self.size:
            raise StorageError(
                f"{self.size} bytes were planned, but {count} were written",
                where=where,
                hint="a write failed or is missing: save again; if no error came before this one, please report it",
            )
