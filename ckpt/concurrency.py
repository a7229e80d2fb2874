"""Threads, and pauses of the garbage collector."""

from __future__ import annotations

import gc
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import finalize

# Runs tasks on a few threads that live as long as the tasks.
#
# Not ``concurrent.futures``: its pools take no tasks any more once the main thread has ended, and a save in the background may go on then.

R = TypeVar("R")
T = TypeVar("T")


def run_tasks(tasks: Sequence[Callable[[], None]], threads: int, name: str) -> None:
    """Run all tasks, begun in order. The first error is raised when none runs any more; after it no other task begins."""
    if min(threads, len(tasks)) <= 1:
        for task in tasks:
            task()
        return
    todo, lock, errors = iter(tasks), threading.Lock(), list[BaseException]()

    def work() -> None:
        while True:
            with lock:
                task = None if errors else next(todo, None)
            if task is None:
                return
            try:
                task()
            except BaseException as err:  # noqa: BLE001  raised below
                errors.append(err)

    others = [threading.Thread(target=copy_context().run, args=(work,), name=f"{name}-{i}") for i in range(1, min(threads, len(tasks)))]
    started: list[threading.Thread] = []
    with suppress(RuntimeError):  # no more threads can be started: those that run, and this one, do all of the work
        for thread in others:
            thread.start()
            started.append(thread)
    work()
    for thread in started:
        thread.join()
    if errors:
        raise errors.pop(0)


def map_tasks(work: Callable[[T], R], given: Sequence[T], threads: int, name: str) -> list[R]:
    """What ``work`` gives for each of ``given``, in their order; raises as :func:`run_tasks`."""
    if min(threads, len(given)) <= 1:
        return [work(each) for each in given]
    results: dict[int, R] = {}

    def run(at: int) -> None:
        results[at] = work(given[at])

    run_tasks([partial(run, at) for at in range(len(given))], threads, name)
    return [results[at] for at in range(len(given))]


def when_dropped(owner: object, close: Callable[..., object], *arguments: Any) -> finalize[..., Any]:
    """Call ``close`` once: when ``owner`` is dropped, or what this gives is called. Not when the program ends, as saves go on in threads
    then: whoever is left holds files and sockets that the system closes."""
    closing = finalize(owner, close, *arguments)
    closing.atexit = False
    return closing


def program_ends() -> bool:
    """Whether the main thread has ended: in a function of ``atexit`` nobody waits any more for a thread that is left running."""
    return not threading.main_thread().is_alive()


class Pending(Generic[R]):
    """Work on a thread of its own; whoever starts it asks for the result."""

    def __init__(self, work: Callable[[], R], name: str, *, daemon: bool | None = None) -> None:
        """``daemon``: the process does not wait for it when it ends."""
        self._found: list[R] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=copy_context().run, args=(self._run, work), name=name, daemon=daemon)
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


class ProcessLock:
    """A lock that lives as long as the process. In a forked child it is free, since no thread of the parent is there to end its block, and
    ``forget`` is called."""

    def __init__(self, forget: Callable[[], object] = lambda: None) -> None:
        self._forget = forget
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._forget()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        if self._lock.locked():  # it is free in a child that was forked in this very block
            self._lock.release()


# No collection of cyclic garbage while very many small objects are made that all stay.

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


# How long the call that goes on lets others be silent: who asks something within it waits no longer for the answer.

patience: ContextVar[float] = ContextVar("patience", default=math.inf)
"""Seconds. Threads of ``run_tasks``, ``imap_unordered`` and ``Pending`` have that of whoever began them."""
silence_counts_from: ContextVar[float] = ContextVar("silence_counts_from", default=math.inf)
"""A moment (``time.monotonic``): whoever has been waited for in vain since then is not asked again."""


@contextmanager
def waiting_once(seconds: float = math.inf, since: float = math.inf) -> Iterator[None]:
    """For work that harms nothing if it fails. Whoever is silent is waited for once, and no longer than ``seconds``; and no more if that
    was already so ``since`` then."""
    before = patience.set(min(seconds, patience.get()))
    counted_before = silence_counts_from.set(min(since, time.monotonic(), silence_counts_from.get()))
    try:
        yield
    finally:
        patience.reset(before)
        silence_counts_from.reset(counted_before)


# Work that nobody waits for, and that one thread does, however often it is asked for.


class Rounds:
    """``work`` on a thread of its own, which lives as long as there is something to do; a program that ends waits for it. Who asks while it
    goes on gets one more round, so that each sees what was there when it asked."""

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self._work = work
        self._name = name
        self._lock = threading.Lock()
        self._asked = False
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Have one round begin from now on."""
        with self._lock:
            self._asked = True
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name)
                thread.start()  # first: where that fails, the next one who asks tries again
                self._thread = thread
            thread = self._thread
        if program_ends():
            thread.join()

    def wait(self, seconds: float) -> bool:
        """Whether nothing goes on any more within so many seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    if not self._asked:
                        self._thread = None
                        return
                    self._asked = False
                self._work()
        except BaseException:
            with self._lock:
                self._thread = None
            raise


# Whether a thread had to wait: the sign that storage is slow, and that more threads pay.

COUNTS_WAITS = hasattr(resource, "RUSAGE_THREAD")
"""Whether the system counts them for each thread."""


def waits_so_far() -> int:
    """How often this thread has given up its core of its own accord; 0 where nobody counts."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if COUNTS_WAITS else 0
