"""How many round trips to the job's store a save and a load wait for, one after another, where one takes long."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

import ckpt
from ckpt import Layout, Replicate, Shard
from ckpt.net import group as groups
from ckpt.net.group import Group
from ckpt.net.store import group_store
from tests.distributed.far_store import FarStore
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.alone

ROUND_TRIP = 0.1
"""Seconds: so many that all else hardly counts."""


def state_of(version: int) -> dict[str, Any]:
    return {"rows": torch.full((6, 1024), float(version)), "same": torch.full((64, 256), float(version)), "version": version}


MOST = {"save": 12, "load": 12, "load, exchange": 18}
"""The exchange has a phase more, and says where the others are: 13, and 15 for the leader."""


def save_and_load(folder: str, port: int, most: int) -> dict[str, list[float]]:
    """Round trips of each call, on this rank: until those of all are few enough: a busy machine adds to them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    groups._groups[dist.group.WORLD] = Group(rank, tuple(range(world)), group_store(store, "far", rank), store)
    layout = Layout({"dp": world}, [("rows", Shard(0, "dp")), ("*", Replicate())])
    took: dict[str, list[float]] = {what: [] for what in MOST}
    for what, measured in took.items():
        for n in range(most):
            number = n if what == "save" else n % len(took["save"])
            state = state_of(number if what == "save" else -1)
            dist.barrier()
            began = time.monotonic()
            if what == "save":
                ckpt.save(f"{folder}/{number}", state, layout=layout)
            else:
                ckpt.load(f"{folder}/{number}", state, layout=layout, read=ckpt.ReadOptions(exchange=what != "load"))
            measured.append(round((time.monotonic() - began) / ROUND_TRIP, 1))
            assert state["version"] == number and state["rows"].unique().tolist() == [float(number)]
            least = torch.tensor(min(measured[1:], default=float("inf")))
            dist.all_reduce(least, dist.ReduceOp.MAX)
            if least <= MOST[what]:
                break
    return took


def test_a_save_and_a_load_wait_for_few_round_trips(ranks: Ranks, tmp_path: Path) -> None:
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with FarStore(served.port, ROUND_TRIP) as far:
        results = ranks.run(4, save_and_load, str(tmp_path), far.port, 8, timeout=200)
    print(*results, sep="\n")
    later = {what: max(min(took[what][1:]) for took in results) for what in results[0]}
    assert [what for what, count in later.items() if count > MOST[what]] == [], results
