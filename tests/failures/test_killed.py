"""A process that saves again and again is killed at any moment: what can be loaded then is one whole state, at least the last one saved."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from pathlib import Path

import ckpt
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
