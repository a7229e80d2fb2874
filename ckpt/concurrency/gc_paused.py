"""No collection of cyclic garbage while very many small objects are made that all stay."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_paused = 0
_was_on = False


def _resume() -> None:
    """In a forked child nobody leaves the blocks that the parent's threads were in."""
    global _lock, _paused
    _lock = threading.Lock()
    if _paused and _was_on:
        gc.enable()
    _paused = 0


os.register_at_fork(after_in_child=_resume)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the collector for all threads; the last to leave lets it go on, if it was on.

    A plan of many thousand tensors sets off collections again and again, each of which walks through all objects of the process and finds
    nothing.
    """
    global _paused, _was_on
    with _lock:
        if _paused == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _paused += 1
    try:
        yield
    finally:
        with _lock:
            _paused -= 1
            if _paused == 0 and _was_on:
                gc.enable()
