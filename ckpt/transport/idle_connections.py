"""Connections over which nothing is going on, kept for the next question: making one takes longer than most answers. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar
from weakref import finalize


class Closable(Protocol):
    """A connection that a pool can look at and let go of."""

    def is_open(self) -> bool:
        """Whether the other end is there, as far as can be seen, and has said nothing that nobody asked for."""
        ...

    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class IdleConnections(Generic[C]):
    """At most ``most`` connections, which are closed with the pool. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._idle: list[C] = []
        finalize(self, _close_all, self._idle)

    def take(self, connect: Callable[[], C]) -> C:
        """One that is open, else what ``connect`` makes."""
        return self.take_open() or connect()

    def take_open(self) -> C | None:
        """One that is open; None if there is none."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_open():
                return connection
            connection.close()

    def keep(self, connection: C) -> None:
        """Nothing goes on over it any more."""
        with self._lock:
            if len(self._idle) < self._most:
                self._idle.append(connection)
                return
        connection.close()

    def clear(self) -> None:
        """Close all of them."""
        with self._lock:
            idle = self._idle[:]
            self._idle.clear()
        _close_all(idle)


def _close_all(connections: list[C]) -> None:
    for connection in connections:
        connection.close()
