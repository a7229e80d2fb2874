"""The harness itself: results, errors, deaths and hangs of ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ckpt.errors import CoverageError
from tests.distributed.ranks import PRELOAD, Lost, Ranks, RanksFailedError


def total(start: int) -> tuple[int, int, float]:
    value = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value.item()


def alone() -> tuple[bool, int]:
    return dist.is_initialized(), torch.get_num_threads()


def not_imported_and_threads_of_the_server() -> tuple[list[str], list[str]]:
    tasks = Path(f"/proc/{os.getppid()}/task").glob("*/comm")
    return [name for name in PRELOAD if name not in sys.modules], [task.read_text().strip() for task in tasks]


def raise_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise CoverageError("a hole", where="tensor w", hint="fill it")
    return "fine"


def raise_while_others_wait() -> None:
    raise_on(1)
    dist.barrier()


def die(rank: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def hang_in_a_function_of_this_name(rank: int) -> str:
    if dist.get_rank() == rank:
        print("before the hang", flush=True)
        time.sleep(600)
    return "done"


def end_of_rank0_is_seen() -> str:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if dist.get_rank() == 0:
        os._exit(7)
    try:
        store.wait(["never"], torch.distributed.distributed_c10d.timedelta(seconds=20))
    except RuntimeError as err:
        return str(err)
    return "the store is still there"


def test_results_in_rank_order(ranks: Ranks) -> None:
    assert ranks.run(3, total, 10) == [(0, 3, 33.0), (1, 3, 33.0), (2, 3, 33.0)]
    assert ranks.run(1, total, 5) == [(0, 1, 5.0)]
    assert ranks.run(4, total, 0, store_on_rank0=True) == [(r, 4, 6.0) for r in range(4)]


def test_without_a_process_group(ranks: Ranks) -> None:
    assert ranks.run(2, alone, process_group=False) == [(False, 1)] * 2


def test_ranks_have_all_imports_of_a_server_with_one_thread(ranks: Ranks) -> None:
    """A thread that has a lock when the server forks would have it in every rank for ever. That of jemalloc (of Arrow) copes with forks."""
    lacking, threads = ranks.run(1, not_imported_and_threads_of_the_server, process_group=False)[0]
    assert lacking == []
    assert len([name for name in threads if name != "jemalloc_bg_thd"]) <= 1, threads


def test_an_error_is_told_with_its_traceback(ranks: Ranks) -> None:
    with pytest.raises(RanksFailedError, match="a hole") as caught:
        ranks.run(2, raise_on, 1)
    assert "in raise_on" in str(caught.value) and "rank 1 raised" in str(caught.value)
    assert [x.rank for x in caught.value.lost] == [1]


def test_an_error_ends_ranks_that_wait_for_the_one_that_raised(ranks: Ranks) -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailedError, match="a hole"):
        ranks.run(2, raise_while_others_wait, timeout=120)
    assert time.monotonic() - began < 60


def test_lost_ranks_are_marked(ranks: Ranks) -> None:
    first, second = ranks.run(2, raise_on, 1, allow_death=True)
    assert first == "fine"
    assert isinstance(second, Lost) and isinstance(second.error, CoverageError)
    assert (second.error.message, second.error.where, second.error.hint) == ("a hole", "tensor w", "fill it")
    first, second = ranks.run(2, die, 0, allow_death=True)
    assert isinstance(first, Lost) and first.exitcode == -signal.SIGKILL and first.error is None
    assert second == "alive"


def test_a_death_is_an_error(ranks: Ranks) -> None:
    with pytest.raises(RanksFailedError, match="rank 1 died with exit code -9"):
        ranks.run(2, die, 1)


def test_a_hang_ends_at_the_deadline_with_stacks(ranks: Ranks) -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailedError, match="hang_in_a_function_of_this_name") as caught:
        ranks.run(2, hang_in_a_function_of_this_name, 1, timeout=6)
    assert 5.5 < time.monotonic() - began < 30
    assert "rank 1 hung" in str(caught.value) and "before the hang" in str(caught.value)
    assert ranks.run(2, total, 1) == [(0, 2, 3.0), (1, 2, 3.0)]


def test_a_store_on_rank_0_dies_with_it(ranks: Ranks) -> None:
    first, second = ranks.run(2, end_of_rank0_is_seen, allow_death=True, store_on_rank0=True)
    assert isinstance(first, Lost) and first.exitcode == 7
    assert isinstance(second, str) and second != "the store is still there"
