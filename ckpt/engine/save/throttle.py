"""How much of the interpreter a save in the background takes from training.

Copying and hashing very many small tensors is Python, and Python threads take turns: work without a pause would leave a training loop of
small operations a fifth of its speed. So the background rests after it, longer than it worked, unless somebody waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

RESTS = 12
"""So many times as long as it worked."""
LONGEST = 0.05
"""Seconds of one rest."""


class Throttle:
    """The pace of one save. Without haste, :meth:`work` rests after its block; :meth:`hurry` ends all rests."""

    def __init__(self) -> None:
        self._haste = threading.Event()

    @property
    def hurried(self) -> bool:
        """Whether somebody waits for the save."""
        return self._haste.is_set()

    def hurry(self) -> None:
        self._haste.set()

    @contextmanager
    def work(self) -> Iterator[None]:
        # CPU time of this thread, not wall time: while it waits for storage or for the lock it takes nothing away
        # from training, and needs no rest for that.
        began = time.thread_time()
        yield
        if not self._haste.is_set():
            self._haste.wait(min(RESTS * (time.thread_time() - began), LONGEST))
