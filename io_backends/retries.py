"""How often this process has had to ask a storage again. Counted for all of the process: what one save has seen is a difference, and
what else goes on beside it counts too."""

from __future__ import annotations

import threading
from typing import NamedTuple


class Retries(NamedTuple):
    """Requests that were made again, and those of them where the storage had asked to slow down."""

    again: int = 0
    throttled: int = 0

    def since(self, before: Retries) -> Retries:
        """What has come since ``before``."""
        return Retries(self.again - before.again, self.throttled - before.throttled)


_lock = threading.Lock()
_total = Retries()


def total() -> Retries:
    """Since the process began."""
    return _total


def count(*, throttled: bool) -> None:
    """A request is made again."""
    global _total
    with _lock:
        _total = Retries(_total.again + 1, _total.throttled + throttled)
