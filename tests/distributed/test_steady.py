"""A long life of a job in short: saves one after the other leave nothing in the processes, nor in the run. ``python -m benchmarks --only
steady`` is the long form."""

from __future__ import annotations

import gc
import reprlib
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import steady
from benchmarks.pool import Rank
from tests.distributed.ranks import Ranks
from tests.memory.daemons import daemon_in

WARM, SAVES, ROUNDS = 12, 24, 4
"""What leaks does so in each round. What is new to a process, such as more threads at a time than before, it has once."""
LEFT = {"resident": 65536, "heap": 16384, "blocks": 100, "descriptors": 0.3, "threads": 0.3, "keys": 0.3, "daemon": 16384}
"""Most for each save: caches still fill, and allocators keep what was free. A descriptor, a thread or a key for each save is more."""


def life(folder: str, way: str) -> tuple[dict[str, float], list[str], dict[str, int]]:
    """What a save leaves in this rank, which collections have grown with the saves, and what is left of the run."""
    size = dist.get_world_size()
    rank = Rank(dist.get_rank(), {size: dist.distributed_c10d._get_default_group()}, {})
    steady.begin(rank, ranks=size, folder=folder, way=way)
    after = save(rank, range(1, WARM + 1))
    store = dist.distributed_c10d._get_default_store()
    for first in range(WARM + 1, WARM + ROUNDS * SAVES + 1, SAVES):
        before = after
        collections = [found for found in gc.get_objects() if type(found) in (dict, list, set)]
        lengths = [len(found) for found in collections]
        after = save(rank, range(first, first + SAVES))
        until = time.monotonic() + 30
        while after["keys"] > before["keys"] and time.monotonic() < until:  # they go when nothing else is asked of the store
            time.sleep(0.1)
            after["keys"] = store.num_keys()
        grown = [shown(found) for found, length in zip(collections, lengths, strict=True) if len(found) - length > SAVES // 3]
        left = {what: (after[what] - before[what]) / SAVES for what in LEFT}
        much = torch.tensor(float(any(value > LEFT[what] for what, value in left.items())))
        dist.all_reduce(much)
        del collections
        if not much:
            break
    return left, grown, steady.end(rank, folder=folder)


def save(rank: Rank, steps: range) -> dict[str, float]:
    """Two saves at a time: then a tier is published before its next save is."""
    for first in steps[::2]:
        looked = steady.save(rank, steps=range(first, first + 2))
    return looked


def shown(found: Any) -> str:
    owners = (key for owner in gc.get_referrers(found) if type(owner) is dict for key, value in owner.items() if value is found)
    return f"{next(owners, 'unnamed')}: {len(found)} in {reprlib.repr(found)}"


@pytest.mark.parametrize("way", ["reuse", pytest.param("local", marks=pytest.mark.slow), "memory, local"])
def test_saves_leave_nothing_behind(ranks: Ranks, tmp_path: Path, way: str) -> None:
    with ExitStack() as stack:
        for machine in range(2 if "memory" in way else 0):
            stack.enter_context(daemon_in(tmp_path / f"daemon{machine}"))
        lives = ranks.run(2, life, str(tmp_path), way, timeout=300)
    for left, grown, _ in lives:
        assert grown == []
        assert {what: value for what, value in left.items() if value > LEFT[what]} == {}
    # One more than what stays: what all refer to, or the newest in the local tier.
    assert lives[0][2] == {"steps": steady.KEEP + 1, "orphans": 0, "in memory": 2 * ("memory" in way)}
