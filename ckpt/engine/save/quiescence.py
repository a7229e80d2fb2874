"""Whether operations on tensors that began before a moment are over. No torch.

torch raises a tensor's version when an operation on it ends. So versions that are equal prove nothing while an operation goes on: it may
have changed half of the memory. They prove it after a *grace period*, the term of read-copy-update (McKenney and Slingwine, 1998): once
each thread has passed a quiescent point, one in no operation, every operation that began before has ended and was counted.

Here these points are the calls that wait for a save: ``fence``, ``result`` and the like. Other threads may be anywhere, so what is not
known to wait counts as an operation. ``sys._current_frames`` would tell more, but a thread that ends meanwhile can make it wait for ever.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_OURS, _LOADING = "ckpt-", "ckpt-read"
"""How the names of this package's threads begin, and of those among them that write into tensors."""
_waiting: Counter[int] = Counter()
"""Threads, by their ids, that are at a quiescent point."""
_lock = threading.Lock()


@contextmanager
def quiescent() -> Iterator[None]:
    """This thread does nothing to a tensor in the block."""
    ident = threading.get_ident()
    with _lock:
        _waiting[ident] += 1
    try:
        yield
    finally:
        with _lock:
            _waiting[ident] -= 1
            if not _waiting[ident]:
                del _waiting[ident]


class GracePeriod:
    """Begins now, for the operations of all threads that have begun, but for those of the package's own that read tensors alone."""

    def __init__(self) -> None:
        # All threads that exist now, except this package's own: a thread that starts later starts its operations
        # after the period began. Those that load into tensors count, since they write.
        self._left = {t.ident for t in threading.enumerate() if not t.name.startswith(_OURS) or t.name.startswith(_LOADING)}

    def elapsed(self) -> bool:
        """Whether they are all over. Ask again and again: a thread that was at a quiescent point may go where it likes after that."""
        if self._left:
            # A thread that has ended is in no operation. One that is inside ``quiescent`` is at a safe point now,
            # which is enough even if it leaves right after: what it does from then on began after the period.
            alive = {t.ident for t in threading.enumerate()}
            with _lock:
                self._left = {ident for ident in self._left if ident in alive and ident not in _waiting}
        return not self._left

    def passed(self, thread: int) -> bool:
        """Whether one thread was at a quiescent point when it was last asked."""
        return thread not in self._left


def _forget_parent() -> None:
    """In a forked child no thread of the parent goes on."""
    global _lock
    _lock = threading.Lock()
    _waiting.clear()


os.register_at_fork(after_in_child=_forget_parent)
