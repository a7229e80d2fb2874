"""A process that saves again and again is killed at any moment: what can be loaded then is one whole state, at least the last one saved."""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.net.group import current_group
from ckpt.net.store import QUIET
from ckpt.policies import EveryMinutes, EverySteps, Latest, OnPreemption
from ckpt.policies.save import SaveCost
from tests.distributed.ranks import Lost, Ranks
from tests.failures.states import state, stored

KILLS = 15
LONGEST = 8
"""Saves before the kill. Their time is that of a save in the same process: a busy machine slows all of them."""


def save_until_killed(url: str, first: int, journal: str, saves: float) -> None:
    """Save states ``first``, ``first + 1``, … at one URL, and write each number down when its save has returned."""
    me, done = os.getpid(), os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (first, first + 1):
        began = time.monotonic()
        ckpt.save(url, state(number))
        os.write(done, f"{number}\n".encode())
    seconds = saves * (time.monotonic() - began)
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(me, signal.SIGKILL)
        os._exit(0)
    for number in itertools.count(first + 2):
        ckpt.save(url, state(number))
        os.write(done, f"{number}\n".encode())


def test_the_last_save_that_returned_survives_sigkill(ranks: Ranks, directory: str) -> None:
    url, journal = f"{directory}/run", Path(directory, "journal")
    chance = random.Random(1)
    number, unfinished = 0, 0
    for _ in range(KILLS):
        first = number + 1
        (lost,) = ranks.run(
            1, save_until_killed, url, first, str(journal), chance.uniform(0, LONGEST), process_group=False, allow_death=True
        )
        assert isinstance(lost, Lost) and lost.exitcode == -signal.SIGKILL, lost
        returned = int(journal.read_text().split()[-1])
        assert returned > first
        number = stored(url)
        assert number in (returned, returned + 1), f"killed after save {returned} returned; loaded {number}"
        unfinished = max(unfinished, returned - first - 1)
    assert unfinished > 0, "every process was killed in its third save: give them longer"
    ckpt.save(url, state(10**6))
    assert stored(url) == 10**6


# ---------------------------- A job that saves hundreds of times uses no more of anything after the last save than after the first hundred.


@dataclass(frozen=True, kw_only=True)
class Used:
    """What a process and its run use: ``memory`` and ``disk`` in bytes, all else counted; ``files`` with directories."""

    memory: int
    objects: int
    descriptors: int
    threads: int
    files: int
    disk: int
    keys: int


def used(root: str) -> Used:
    gc.collect()
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:  # not the resident size, which counts pages of libraries too
        memory = next(int(line.split()[1]) for line in file if line.startswith("Anonymous:")) * 1024
    files = list(Path(root).rglob("*"))
    store: Any = current_group().served
    return Used(
        memory=memory,
        objects=sum(type(o) is not SaveCost for o in gc.get_objects()),  # of which the last 64 are kept
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        files=len(files),
        disk=sum(p.stat().st_size for p in files if p.is_file()),
        keys=store.num_keys() if store is not None else 0,
    )


def settle(found: list[Used]) -> None:
    """A thread of the last save may be on its way out, and its keys may wait to be deleted."""
    store: Any = current_group().served
    end = time.monotonic() + 20
    while found and time.monotonic() < end:
        if threading.active_count() <= found[0].threads and (store is None or store.num_keys() <= found[0].keys):
            return
        time.sleep(0.05)


def many_saves(root: str, saves: int, warm: int, by_clock: bool) -> tuple[Used, Used]:
    """Train and save after every step, every third time waiting for it. Gives what is used after ``warm`` saves and after
    all."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "own": ckpt.PerRank(0), "text": "x" * 100}
    save = EveryMinutes(1e-9) if by_clock else EverySteps(1) | OnPreemption()
    used(root)  # asking takes memory too
    found = []
    made = n = 0
    with ckpt.Checkpointer(root, save=save, keep=Latest(2), job=ckpt.Job(timeout=60)) as c:
        while made < saves:
            n += 1
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            if by_clock:
                dist.all_reduce(torch.ones(1))
            if not c.step(n, state, metrics={"loss": 1.0 / n}):
                continue
            made += 1
            if made % 3 == 0 or made in (warm, saves):
                c.wait()
            if made in (warm, saves):
                if dist.is_initialized():
                    dist.barrier()
                    time.sleep(20 * QUIET)  # then there is time to delete keys
                settle(found)
                found.append(used(root))
                if dist.is_initialized():
                    dist.barrier()
    return found[0], found[1]


def check(before: Used, after: Used, saves: int) -> None:
    text = f"{asdict(before)} → {asdict(after)} in {saves} saves"
    print(text)
    assert after.memory - before.memory < 3 * 2**20 + 1000 * saves, text  # the state has 50 KB, and asking costs a megabyte
    assert after.objects - before.objects < 10 + saves / 4, text  # a warm process makes a few of its own
    assert after.descriptors <= before.descriptors, text
    assert after.threads <= before.threads, text
    assert after.files == before.files and after.disk <= 1.02 * before.disk, text
    assert after.keys <= before.keys, text


@pytest.mark.parametrize("saves", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_saves_of_one_process(ranks: Ranks, directory: str, saves: int) -> None:
    before, after = ranks.run(1, many_saves, directory, saves, 100, False, process_group=False, timeout=120)[0]
    check(before, after, saves - 100)


@pytest.mark.parametrize("by_clock", [False, True], ids=["by-steps", "by-the-clock"])
def test_many_saves_on_two_ranks(ranks: Ranks, directory: str, by_clock: bool) -> None:
    saves, warm = (14, 7) if by_clock else (100, 40)
    for before, after in ranks.run(2, many_saves, directory, saves, warm, by_clock, timeout=120):
        check(before, after, saves - warm)
