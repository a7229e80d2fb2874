"""Spreads jobs that come one by one over threads, and gives their results as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar

R = TypeVar("R")


def imap_unordered(jobs: Iterable[Callable[[], R]], threads: int, name: str) -> Iterator[R]:
    """Run ``jobs`` on ``threads`` threads called ``name``; their results, in the order in which they end.

    Only a few jobs are taken from the iterable ahead of those that run, so that it need not hold all, and an interrupt ends soon. After an
    error no further job begins; those that run are waited for, and the error is raised.
    """
    jobs = iter(jobs)
    with ThreadPoolExecutor(threads, thread_name_prefix=name) as pool:
        try:
            running: set[Future[R]] = {pool.submit(job) for job in islice(jobs, 2 * threads)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {pool.submit(job) for job in islice(jobs, len(done))}
                for future in done:
                    yield future.result()
        except BaseException:  # after Ctrl-C, too: no further job may begin
            pool.shutdown(wait=False, cancel_futures=True)
            raise
