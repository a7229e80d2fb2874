"""Reshard: every layout of torch into every other, in one call and without storage, compared bit for bit with what torch gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt import live
from tests.distributed.gathered import differences, full_state, local_bytes, options, spoil
from tests.distributed.models import Trained
from tests.distributed.plain import build
from tests.distributed.ranks import Ranks
from tests.distributed.test_reshard_matrix import pick, rank_value

DENSE = ("fsdp4", "hsdp2x2", "fsdp2-tp2", "pp2-tp2")
MOE = ("moe-fsdp4", "moe-ep2-dp2")


def pairs(family: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each layout into the next two, so that each is twice a source and twice a target; the matrix of ``test_matrix.py`` has more."""
    count = len(family)
    return [(source, family[(i + step) % count]) for i, source in enumerate(family) for step in ((1, 2) if count > 2 else (1,))]


# ------------------------------------------------------------------------------------------------------------ in a rank


def fresh(layout: str, *, stepped: bool) -> Trained:
    which = build(layout, seed=2)
    if stepped:
        which.steps(1)
        spoil(which)
    return which


def all_pairs(family: tuple[str, ...]) -> dict[tuple[str, str], list[str]]:
    """Problems of each pair, on this rank."""
    problems: dict[tuple[str, str], list[str]] = {}
    sources = {name: build(name, seed=1).steps(2) for name in family}
    for number, (source, target) in enumerate(pairs(family)):
        problems[source, target] = one_pair(source, sources[source], fresh(target, stepped=number % 2 == 0))
    return problems


def one_pair(name: str, source: Trained, target: Trained) -> list[str]:
    rank = dist.get_rank()
    wanted = full_state(source)
    old = {**source.state(), "step": 2, "done": (name, 1.5, None), "rank": ckpt.PerRank(rank_value(name, rank))}
    new = {**target.state(), "step": 0, "done": None, "rank": ckpt.PerRank(None, reshard=pick)}
    report = live.reshard(old, new, layout=source.layout, new_layout=target.layout)
    problems = differences(full_state(target), wanted) + [f"old: {d}" for d in differences(full_state(source), wanted)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, options(source))
    group_options = {n: o for each in everyone for n, o in each.items()}
    problems += [f"options of {n}: {o} is not {group_options[n]}" for n, o in options(target).items() if o != group_options[n]]
    if (new["step"], new["done"]) != (2, (name, 1.5, None)):
        problems.append(f"plain values are {new['step']}, {new['done']}")
    mine, found = rank_value(name, rank), new["rank"].value
    if found["position"] != mine["position"] or not torch.equal(found["generator"], mine["generator"]):
        problems.append(f"the per-rank value is that of {found['position']}")
    return problems + traffic_problems(report, local_bytes(target) + len(mine["generator"]))


def traffic_problems(report: live.ReshardReport, needed: int) -> list[str]:
    problems = []
    if report.bytes_needed != needed:
        problems.append(f"{report.bytes_needed} bytes needed, the state has {needed}")
    for rank, traffic in report.ranks.items():
        if traffic.needed != traffic.copied + traffic.received:
            problems.append(f"rank {rank}: {traffic}: something came twice, or not at all")
    if dist.get_rank() == 0 and sum(t.sent for t in report.ranks.values()) != sum(t.received for t in report.ranks.values()):
        problems.append(f"{report.ranks}: not all that was sent was received")
    mine = report.ranks[dist.get_rank()]
    if (mine.needed, mine.sent, mine.copied, mine.received) != (
        report.bytes_needed,
        report.bytes_sent,
        report.bytes_copied,
        report.bytes_received,
    ):
        problems.append(f"{report} is not {mine}")
    return problems


@pytest.fixture(scope="module")
def found(ranks: Ranks) -> dict[tuple[str, str], list[str]]:
    """Problems of all pairs, by rank: one run for each family."""
    merged: dict[tuple[str, str], list[str]] = {}
    for family in (DENSE, MOE):
        for rank, by_pair in enumerate(ranks.run(4, all_pairs, family, timeout=180)):
            for pair, problems in by_pair.items():
                merged.setdefault(pair, []).extend(f"rank {rank}: {p}" for p in problems)
    return merged


@pytest.mark.slow  # test_matrix.py has other pairs of the same kinds of layouts
@pytest.mark.parametrize(("source", "target"), [*pairs(DENSE), *pairs(MOE)])
def test_pair(found: dict[tuple[str, str], list[str]], source: str, target: str) -> None:
    assert found[source, target] == []
