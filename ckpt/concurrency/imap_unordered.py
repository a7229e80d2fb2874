"""Spreads jobs that come one by one over threads, and gives their results as they come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from contextvars import copy_context
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

R = TypeVar("R")


def imap_unordered(jobs: Iterable[Callable[[], R]], threads: int, name: str) -> Iterator[R]:
    """Run ``jobs`` on ``threads`` threads called ``name``; their results, in the order in which they end.

    Only a few jobs are taken from the iterable ahead of those that run, so that it need not hold all, and an interrupt ends soon. After an
    error no further job begins; those that run are waited for, and the error is raised.
    """
    jobs = iter(jobs)
    workers = _Workers[R](name)
    try:
        for job in islice(jobs, 2 * threads):
            workers.add(job, threads)
        while workers.unread:
            result = workers.next()
            for job in islice(jobs, 1):
                workers.add(job, threads)
            yield result
    finally:  # after Ctrl-C, too: no further job may begin
        workers.end()


class _Workers(Generic[R]):
    """Threads of our own: pools of ``concurrent.futures`` take no jobs any more once the main thread has ended."""

    def __init__(self, name: str) -> None:
        self.unread = 0
        """Jobs whose results nobody has."""
        self._name = name
        self._todo: SimpleQueue[Callable[[], R] | None] = SimpleQueue()
        self._ended: SimpleQueue[tuple[list[R], BaseException | None]] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def add(self, job: Callable[[], R], threads: int) -> None:
        """Have it run, when one of so many threads is free."""
        self._todo.put(job)
        self.unread += 1
        if len(self._threads) < threads:
            thread = threading.Thread(target=copy_context().run, args=(self._work,), name=f"{self._name}-{len(self._threads)}")
            thread.start()
            self._threads.append(thread)

    def next(self) -> R:
        """The result of a job that ended, or its error raised."""
        results, error = self._ended.get()
        self.unread -= 1
        if error is not None:
            raise error
        return results[0]

    def end(self) -> None:
        """Wait for the jobs that run; others do not begin."""
        with suppress(Empty):
            while True:
                self._todo.get_nowait()
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._todo.get()) is not None:
            try:
                self._ended.put(([job()], None))
            except BaseException as err:  # noqa: BLE001  next() raises it
                self._ended.put(([], err))
