"""Events on their way to one listener: a queue of bounded length and a thread, so that no listener can hold training up. No torch.

Whoever posts an event never waits, whatever the listener does: one that is full loses events, which are counted and said in the log.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import WeakSet

T = TypeVar("T")

log = logging.getLogger("ckpt")

LIMIT = 1024
"""Events that wait for a listener at most."""


FLUSH = 5.0
"""Seconds that the end of a Checkpointer, or of the program, waits for listeners."""


class ListenerThread(Generic[T]):
    """One listener's end; ``T`` is what it listens to, events as a rule. Its thread is a daemon: a listener that hangs does not keep a
    program from ending for longer than ``FLUSH``. A program that ends without ``close`` waits as long for what was posted."""

    def __init__(self, listener: Callable[[T], object]) -> None:
        self.listener = listener
        self.dropped = 0
        self.failed = 0
        self._name = getattr(listener, "__qualname__", None) or type(listener).__name__
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ckpt-events", daemon=True)
        self._thread.start()
        _open.add(self)

    def post(self, event: T) -> None:
        """Hand over an event. Never waits."""
        if self._closed or self._queue.qsize() >= LIMIT:
            self.dropped += 1
        else:
            self._queue.put(event)

    def end(self) -> None:
        """Let the thread end once the listener has had every event. Does not wait, and nothing may be posted any more."""
        self._queue.put(None)

    def close(self, until: float) -> None:
        """Wait until the listener has had every event, at most until ``time.monotonic()`` says ``until``; say what it missed."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join(max(0.0, until - time.monotonic()))
        left = max(0, self._queue.qsize() - 1) + 1 if self._thread.is_alive() else 0
        if left or self.dropped:
            log.warning("the listener %s has missed %d events: it takes longer than there is time", self._name, left + self.dropped)
        if self.failed > 1:
            log.warning("the listener %s has raised for %d events", self._name, self.failed)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self.listener(event)
            except Exception:  # a listener must not harm the job
                self.failed += 1
                if self.failed == 1:
                    log.warning(
                        "the listener %s raised an error for %s; it still receives later events",
                        self._name,
                        getattr(event, "kind", event),
                        exc_info=True,
                    )


_open: WeakSet[ListenerThread[Any]] = WeakSet()


@atexit.register
def _flush() -> None:
    """At the end of the program, when saves in the background are over: threads that are no daemons have been waited for."""
    until = time.monotonic() + FLUSH
    for thread in list(_open):
        thread.close(until)
