"""A save of two ranks in which one rank's storage fails, or the rank dies, at each of its operations in turn.

The ranks are threads here, so that hundreds of saves take seconds; ``test_dead_ranks.py`` has processes.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch.distributed import HashStore

import ckpt
from ckpt.engine.save.options import SaveOptions
from ckpt.engine.save.save import save_state
from ckpt.errors import DeadlineError, NoSpaceError, RankFailedError, StorageError
from ckpt.io_backends.faulty import Fault, FaultyProcess, SimulatedCrash
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend, wrap_backends
from ckpt.net.group import Group
from ckpt.net.store import group_store
from tests.distributed.ranks import at_once
from tests.failures.states import copy, layout, state, stored
from tests.pairwise import pairwise

BEFORE, NEW, LATER = 1, 2, 3
ERRORS = {"error": StorageError, "short_write": StorageError, "no_space": NoSpaceError}
DEADLINE = 1.0
"""Seconds; a save takes some milliseconds."""
JOBS = 16
"""Jobs that wait for deadlines, or for each other's errors, at the same time."""


@dataclass(eq=False)
class Job:
    """One save of two ranks: what each did to the storage, and what each raised."""

    processes: list[FaultyProcess]
    raised: list[BaseException | None] = field(default_factory=lambda: [None, None])
    threads: dict[int, int] = field(default_factory=dict)
    """Thread → rank. Several jobs run at once, and wrappers are shared by all threads."""

    def wrap(self, backend: Backend) -> Backend:
        rank = self.threads.get(threading.get_ident())
        return backend if rank is None else self.processes[rank].wrap(backend)


def save(url: str, number: int, rank: int = 0, fault: Fault | None = None, timeout: float = 60.0) -> Job:
    """Save state ``number`` on two ranks, of which ``rank`` has a fault."""
    job = Job([FaultyProcess(fault if r == rank else None) for r in range(2)])
    store = HashStore()

    def run(r: int) -> None:
        job.threads[threading.get_ident()] = r
        options = SaveOptions(layout=layout(2), timeout=timeout, check_replicas=True, threads=1, spans=False)
        try:
            save_state(url, state(number, r, 2), Group(r, (0, 1), group_store(store, "two", r)), options)
        except (ckpt.CkptError, SimulatedCrash) as err:
            job.raised[r] = err
        finally:
            del job.threads[threading.get_ident()]  # the next thread may get the same number

    with wrap_backends(job.wrap):
        threads = [threading.Thread(target=run, args=(r,)) for r in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
    return job


def files(url: str) -> dict[str, int]:
    return {entry.path: entry.size for entry in open_backend(url).list_prefix()}


def operations(root: str, rank: int) -> tuple[str, ...]:
    """What a rank does in a save that replaces a checkpoint."""
    assert save(f"{root}/before", BEFORE).raised == [None, None]
    copy(f"{root}/before", f"{root}/counted")
    job = save(f"{root}/counted", NEW)
    assert job.raised == [None, None]
    assert stored(f"{root}/counted") == NEW
    return job.processes[rank].log


@pytest.mark.parametrize(("root", "rank", "kind"), pairwise(["posix", "memory"], [0, 1], [*ERRORS]), indirect=["root"])
def test_an_error_of_one_rank_ends_the_save_on_both(root: str, rank: int, kind: str) -> None:
    log = operations(root, rank)
    publish = log.index("put_if checkpoint.json") if rank == 0 else len(log)

    def fail_at(n: int) -> None:
        url, where = f"{root}/{n}", f"{kind} at operation {n} of rank {rank}, {log[n]}"
        if log.index(next(what for what in log if what.startswith("create"))) <= n < publish and root.startswith("/"):
            first = f"{root}/new/{n}/{n}"
            failed = save(first, NEW, rank, Fault(at=n, kind=kind)).raised  # type: ignore[arg-type]
            assert Path(first).exists() == (failed == [None, None]), f"{where}: an empty directory stays"
        copy(f"{root}/before", url)
        was_there = files(url)
        job = save(url, NEW, rank, Fault(at=n, kind=kind))  # type: ignore[arg-type]
        mine, other = job.raised[rank], job.raised[1 - rank]
        if n > publish:  # what is left is to remove the files of the replaced checkpoint
            assert (mine, other, stored(url)) == (None, None, NEW), where
        else:
            assert type(mine) is ERRORS[kind] and mine.hint, f"{where}: {mine!r}"
            assert type(other) is ERRORS[kind] or (type(other) is RankFailedError and f"rank {rank} raised" in str(other)), (
                f"{where}: {other!r}"
            )
            assert other.hint == mine.hint, where
            assert stored(url) == BEFORE and files(url) == was_there, where
        assert save(url, LATER).raised == [None, None] and stored(url) == LATER, where

    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(fail_at, (n for n, what in enumerate(log) if kind != "short_write" or what.startswith("write"))))


@pytest.mark.alone
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_crash_of_one_rank_ends_the_save_on_the_other(directory: str, rank: int, after: bool) -> None:
    log = operations(directory, rank)
    publish = log.index("put_if checkpoint.json") if rank == 0 else len(log)

    def crash_at(n: int) -> None:
        url, where = f"{directory}/{n}", f"crash {'after' if after else 'before'} operation {n} of rank {rank}, {log[n]}"
        copy(f"{directory}/before", url)
        job = save(url, NEW, rank, Fault(at=n, kind="crash", after=after, lose_unsynced=True, seed=n), timeout=DEADLINE)
        # what a save has replaced may be removed after the call has returned, if that takes long
        assert isinstance(job.raised[rank], SimulatedCrash) or (n > publish and job.raised[rank] is None), where
        other = job.raised[1 - rank]
        if other is None:
            assert n >= publish and stored(url) == NEW, where
        else:
            assert isinstance(other, RankFailedError | DeadlineError) and f"rank {rank}" in str(other), f"{where}: {other!r}"
            assert stored(url) == (NEW if n > publish or (n == publish and after) else BEFORE), where
        assert save(url, LATER).raised == [None, None] and stored(url) == LATER, where

    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(crash_at, range(len(log))))


@pytest.mark.alone
def test_a_leader_that_is_slow_to_commit_finds_all_data_still_there(directory: str) -> None:
    """The other rank gives up, but cannot know that nothing will be committed: its files must stay."""
    log = operations(directory, 0)

    def check(name: str, what: str) -> None:
        url, at = f"{directory}/{name}", next(n for n, line in enumerate(log) if line.startswith(what))
        save(url, BEFORE)
        job = save(url, NEW, 0, Fault(at=at, kind="slow", seconds=2.5 * DEADLINE), timeout=DEADLINE)
        assert isinstance(job.raised[1], DeadlineError) and "rank 0" in str(job.raised[1]), what
        assert job.raised[0] is None and stored(url) == NEW, what

    at_once(check, [("looks", "list_prefix data/"), ("index", "create index-"), ("record", "put_if")])
