"""No collection of cyclic garbage while very many small objects are made that all stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_paused = 0
_was_on = False


@contextmanager
def uncollected() -> Iterator[None]:
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
