"""Which ranks take part: process groups, several of them, none, and the same URL again."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
import ckpt.net.group
from ckpt.errors import UsageError
from ckpt.net.store import QUIET
from ckpt.policies import EverySteps
from tests.distributed.ranks import Ranks


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((5, 3), value), "rank": ckpt.PerRank(dist.get_rank())}


def save_in_halves(folder: str) -> tuple[list[float], int]:
    """Ranks 0 and 2 save one checkpoint, ranks 1 and 3 another, at the same time and with different numbers of calls."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = halves[rank % 2]
    for n in range(1 + 2 * (rank % 2)):
        ckpt.save(f"{folder}/{rank % 2}", state_of(10.0 * (rank % 2) + n), job=ckpt.Job(process_group=mine))
    state = state_of(-1.0)
    ckpt.load(f"{folder}/{rank % 2}", state, job=ckpt.Job(process_group=mine))
    dist.barrier()
    ckpt.save(f"{folder}/all", state_of(7.0))
    return state["w"].unique().tolist(), state["rank"].value


def test_groups_of_different_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(4, save_in_halves, str(tmp_path)) == [([0.0], 0), ([12.0], 1), ([0.0], 2), ([12.0], 3)]
    view = ckpt.open(str(tmp_path / "1"))
    assert [view.per_rank("rank", r) for r in (0, 1)] == [1, 3]  # a checkpoint counts the ranks that saved it
    assert ckpt.open(str(tmp_path / "all"))["w"].read().unique().tolist() == [7.0]


def restore_in_halves(folder: str) -> tuple[list[float], str]:
    """Each half restores its own run, with a timeout of its own, while the other half makes another number of calls."""
    half = dist.get_rank() % 2
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with ckpt.Checkpointer(f"{folder}/{half}", save=EverySteps(1), job=ckpt.Job(process_group=halves[half], timeout=20)) as c:
        c.step(1, state_of(float(half)))
        c.wait()
        for _ in range(1 + half):
            state = state_of(-1.0)
            assert c.restore(state, job=ckpt.Job(timeout=10)) == 1
        with pytest.raises(UsageError) as refused:
            c.restore(state, job=ckpt.Job(process_group=dist.group.WORLD))
    return state["w"].unique().tolist(), refused.value.message


def test_a_restore_stays_with_the_ranks_of_its_checkpointer(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(4, restore_in_halves, str(tmp_path))
    assert [values for values, _ in found] == [[0.0], [1.0], [0.0], [1.0]]
    assert all("the ranks that it was made with" in message for _, message in found)


def save_in_twins(folder: str) -> list[float]:
    """Several groups of the same ranks, used in turn."""
    twins = [dist.new_group([0, 1]), dist.group.WORLD, dist.new_group([0, 1]), None]
    for n, group in enumerate(twins * 3):
        ckpt.save(f"{folder}/{n}", state_of(float(n)), job=ckpt.Job(process_group=group))
    found = []
    for n, group in enumerate(reversed(twins * 3)):
        state = state_of(-1.0)
        ckpt.load(f"{folder}/{n}", state, job=ckpt.Job(process_group=group))
        found += state["w"].unique().tolist()
    return found


def test_groups_of_the_same_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, save_in_twins, str(tmp_path)) == [[float(n) for n in range(12)]] * 2


def save_from_outside(folder: str) -> str:
    group = dist.new_group([0, 1])
    try:
        ckpt.save(f"{folder}/a", state_of(1.0), job=ckpt.Job(process_group=group))
    except UsageError as err:
        return str(err)
    return ""


def test_a_rank_that_is_not_in_the_group(ranks: Ranks, tmp_path: Path) -> None:
    first, second, outside = ranks.run(3, save_from_outside, str(tmp_path))
    assert (first, second) == ("", "")
    assert "rank 2 is not in the process group" in outside


def forget(folder: str) -> int:
    """How many of the groups that were used and destroyed are still in memory."""
    used = []
    for n in range(3):
        group = dist.new_group([0, 1])
        ckpt.save(f"{folder}/{n}", state_of(1.0), job=ckpt.Job(process_group=group))
        used.append(weakref.ref(group))
        dist.destroy_process_group(group)
        del group
    gc.collect()
    return sum(ref() is not None for ref in used)


def test_destroyed_groups_are_forgotten(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, forget, str(tmp_path)) == [0, 0]


# ----------------------------------------------------------------------------------------------- what stays in the store


def save_often(folder: str) -> list[int]:
    """Number of keys in the job's store after each of many calls."""
    store = dist.distributed_c10d._get_default_store()
    found = []
    for n in range(6):
        ckpt.save(f"{folder}/{n}", state_of(float(n)))
        dist.barrier()
        time.sleep(20 * QUIET)  # then there is time to delete
        end = time.monotonic() + 20
        while n == 5 and store.num_keys() > found[2] and time.monotonic() < end:
            time.sleep(QUIET)
        found.append(store.num_keys())
        dist.barrier()
    return found


def test_the_store_does_not_fill_up(ranks: Ranks, tmp_path: Path) -> None:
    for counts in ranks.run(3, save_often, str(tmp_path)):
        assert counts[-1] <= counts[2]  # on a busy machine some keys of the third save may wait to be deleted


def one_rank_is_slow(folder: str) -> list[str]:
    """Rank 1 looks for answers once a second. Rank 0 ends the second call by itself at once and begins the third."""
    if dist.get_rank() == 1:
        ckpt.net.call.time.sleep = lambda seconds, sleep=time.sleep: sleep(1.0)
    found = []
    for n in range(3):
        try:
            bad = {"thing": object()} if n == 1 and dist.get_rank() == 0 else {}
            ckpt.save(f"{folder}/{n}", state_of(float(n)) | bad, job=ckpt.Job(timeout=8.0))
            found.append("saved")
        except ckpt.CkptError as err:
            found.append(type(err).__name__)
    return found


def test_answers_stay_until_the_slowest_rank_has_read_them(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, one_rank_is_slow, str(tmp_path))
    assert found == [["saved", "StateError", "saved"], ["saved", "RankFailedError", "saved"]]


# ------------------------------------------------------------------------------------------------------ the same URL


def save_again(url: str, value: float, count: int) -> list[str]:
    ids = [ckpt.save(url, state_of(value + n)).id for n in range(count)]
    dist.barrier()
    return ids


def load_value(url: str) -> list[float]:
    state = state_of(-1.0)
    state["rank"].reshard = lambda values, rank, world: values[0]
    ckpt.load(url, state)
    return state["w"].unique().tolist()


@pytest.mark.parametrize("first", [1, 4])
def test_saving_onto_the_same_url(ranks: Ranks, tmp_path: Path, first: int) -> None:
    url = str(tmp_path / "a")
    ranks.run(first, save_again, url, 10.0, 1)
    found = ranks.run(2, save_again, url, 20.0, 3)
    assert found[0] == found[1] and len(set(found[0])) == 3
    assert ranks.run(3, load_value, url) == [[22.0]] * 3
    names = {p.name for p in (tmp_path / "a").rglob("*") if p.is_file()}
    assert all(
        found[0][-1] in n or n in {"checkpoint.json", "tensors.arrow", "grids.arrow", "files.arrow", "state.json", "spans.json"}
        for n in names
    )
    assert {p.name for p in (tmp_path / "a").iterdir()} == {"checkpoint.json", "data", f"index-{found[0][-1]}"}
