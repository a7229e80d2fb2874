"""Runs tasks on a few threads that live as long as the tasks.

Not ``concurrent.futures``: its pools take no tasks any more once the main thread has ended, and a save in the background may go on then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Generic, TypeVar

R = TypeVar("R")
T = TypeVar("T")


def run_tasks(tasks: Sequence[Callable[[], None]], threads: int, name: str) -> None:
    """Run all tasks, begun in order. The first error is raised when none runs any more; after it no other task begins."""
    if min(threads, len(tasks)) <= 1:
        for task in tasks:
            task()
        return
    _Run(tasks).run(min(threads, len(tasks)), name)


def map_tasks(work: Callable[[T], R], given: Sequence[T], threads: int, name: str) -> list[R]:
    """What ``work`` gives for each of ``given``, in their order; raises as :func:`run_tasks`."""
    results: dict[int, R] = {}

    def run(at: int) -> None:
        results[at] = work(given[at])

    run_tasks([partial(run, at) for at in range(len(given))], threads, name)
    return [results[at] for at in range(len(given))]


class _Run:
    def __init__(self, tasks: Sequence[Callable[[], None]]) -> None:
        self.tasks = iter(tasks)
        self.lock = threading.Lock()
        self.error: BaseException | None = None

    def run(self, threads: int, name: str) -> None:
        others = [threading.Thread(target=copy_context().run, args=(self.work,), name=f"{name}-{i}") for i in range(1, threads)]
        started: list[threading.Thread] = []
        with suppress(RuntimeError):  # no more threads can be started: those that run, and this one, do all of the work
            for thread in others:
                thread.start()
                started.append(thread)
        self.work()
        for thread in started:
            thread.join()
        if self.error is not None:
            raise self.error

    def work(self) -> None:
        while True:
            with self.lock:
                task = None if self.error is not None else next(self.tasks, None)
            if task is None:
                return
            try:
                task()
            except BaseException as err:  # noqa: BLE001  run() raises it
                with self.lock:
                    self.error = self.error or err


def program_ends() -> bool:
    """Whether the main thread has ended: in a function of ``atexit`` nobody waits any more for a thread that is left running."""
    return not threading.main_thread().is_alive()


class Pending(Generic[R]):
    """Work on a thread of its own; whoever starts it asks for the result."""

    def __init__(self, work: Callable[[], R], name: str) -> None:
        self._found: list[R] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=copy_context().run, args=(self._run, work), name=name)
        self._thread.start()

    def _run(self, work: Callable[[], R]) -> None:
        try:
            self._found.append(work())
        except BaseException as err:  # noqa: BLE001  result() raises it
            self._error = err

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def result(self) -> R:
        """What the work gave, or its error raised; waits for it."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._found[0]
