"""Ranks that save after the same step, whatever told one of them to, and go on together."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.policies import EveryMinutes, EverySteps, OnPreemption
from tests.distributed.ranks import Ranks


def notice_on_one_rank(root: str, who: int, lockstep: bool, stride: int) -> tuple[list[int], int]:
    """Ranks step at their own speed unless ``lockstep``; one is told in between. Gives what it saved, and where it ended."""
    rank = dist.get_rank()
    saved = []
    n = 0
    with ckpt.Checkpointer(root, save=EverySteps(10**6) | OnPreemption(), timeout=30) as c:
        for turn in range(1, 400):
            n = turn * stride
            if lockstep:
                dist.all_reduce(torch.ones(1))
            time.sleep(0.002 * (1 + rank))
            if turn == 20 and rank == who:
                os.kill(os.getpid(), signal.SIGTERM)
            if c.step(n, {"x": torch.full((3,), float(n)), "own": ckpt.PerRank(rank)}):
                saved.append(n)
            if c.preempted:
                break
        assert c.preempted
    return saved, n


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(("lockstep", "stride"), [(True, 1), (True, 7), (False, 1)])
def test_all_ranks_save_after_the_same_step(ranks: Ranks, tmp_path: Path, who: int, lockstep: bool, stride: int) -> None:
    found = ranks.run(3, notice_on_one_rank, str(tmp_path), who, lockstep, stride)
    assert len({(tuple(saved), n) for saved, n in found}) == 1
    saved, n = found[0]
    assert saved == [n] and n >= 20 * stride
    assert [s.number for s in ckpt.list_steps(str(tmp_path)) if s.committed] == saved


def by_the_clock(root: str) -> list[int]:
    saved = []
    with ckpt.Checkpointer(root, save=EveryMinutes(0.01), timeout=30) as c:
        for n in range(1, 60):
            time.sleep(0.02 + 0.005 * dist.get_rank())
            dist.all_reduce(torch.ones(1))
            if c.step(n, {"x": torch.full((3,), float(n))}):
                saved.append(n)
    return saved


def test_a_clock_of_the_leader(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, by_the_clock, str(tmp_path))
    assert found[0] == found[1] and len(found[0]) >= 2
    assert [s.number for s in ckpt.list_steps(str(tmp_path)) if s.committed] == found[0]


def passed_over(root: str) -> tuple[int | None, float]:
    x = torch.zeros(1000)
    with ckpt.Checkpointer(root, timeout=30) as c:
        return c.restore({"x": x}), float(x[0])


def save_two(root: str) -> None:
    with ckpt.Checkpointer(root) as c:
        for n in (1, 2):
            c.save(n, {"x": torch.full((1000,), float(n))})
            c.wait()


def test_damage_that_only_one_rank_reads_sends_all_ranks_back(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(1, save_two, str(tmp_path))
    (path,) = (tmp_path / "step-00000002").glob("data/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert ranks.run(2, passed_over, str(tmp_path)) == [(1, 1.0)] * 2
