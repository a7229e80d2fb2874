"""Every layout into every other in memory, bit for bit: weights in two dtypes, both moments, steps, options of groups, values of ranks.

Half of the pairs share their ranks, half are apart: then the target's ranks are newcomers and the source's leave. What is expected is
sliced by hand (layouts.py). All pairs run in eight processes that are started once; by default each layout is a source and a target
several times, with ``--slow`` all pairs run. A save and a load of the same states show that layouts and oracle agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.distributed.ranks import Ranks
from tests.live.layouts import LAYOUTS
from tests.live.moving import Move, Pair, by_reshard, by_storage, run_pairs

NAMES = list(LAYOUTS)
NAMED = [
    ("fsdp2-tp2", "engine-tp4"),
    ("fsdp4", "engine-tp4"),
    ("pp2-vpp2-tp2-ep2", "engine-tp2-ep2"),
    ("pp2-vpp2-tp2-ep2", "tp4-ep4"),
    ("zero3", "pp2-tp2"),
    ("zero3-tp2", "fsdp3"),
    ("tp3-uneven", "zero3"),
    ("hsdp2x2", "tp2"),
]
"""Pairs that have to be there whatever else is."""


def pair(source: str, target: str) -> Pair:
    """The optimizer is new and the ranks are others for pairs that lie as the fields of a chess board."""
    i, j = NAMES.index(source), NAMES.index(target)
    return Pair(source=source, target=target, apart=(i + j) % 2 == 1, optimizer="new" if (i // 2 + j) % 3 == 0 else "stepped")


ALL = [pair(a, b) for a in NAMES for b in NAMES]
FIFTH = [p for p in ALL if (NAMES.index(p.target) - NAMES.index(p.source)) % len(NAMES) == 5]
"""Each layout once as a source and once as a target."""
FEW = [p for p in ALL if (p.source, p.target) in NAMED or p in FIFTH or (p.source == p.target and NAMES.index(p.source) % 3 == 0)]
REST = [p for p in ALL if p not in FEW]
GROUPS = {f"{start + 1}-{min(start + 40, len(REST))}": REST[start : start + 40] for start in range(0, len(REST), 40)}
"""The ranks run one group after the other, each within the time of one test."""
ORACLE = [p for p in ALL if p.source == p.target or (NAMES.index(p.target) - NAMES.index(p.source)) % len(NAMES) == 7][::2]


@dataclass(eq=False)
class Matrix:
    """Runs pairs when the first test asks."""

    ranks: Ranks
    outcomes: dict[str, list[dict[str, tuple[list[str], Any, float]]]] = field(default_factory=dict)

    def run(self, name: str, pairs: list[Pair], move: Move) -> list[dict[str, tuple[list[str], Any, float]]]:
        if name not in self.outcomes:
            self.outcomes[name] = self.ranks.run(8, run_pairs, pairs, move, timeout=60 + 4 * len(pairs))
        return self.outcomes[name]

    def problems(self, name: str, pairs: list[Pair], move: Move, pair: Pair) -> list[str]:
        by_rank = self.run(name, pairs, move)
        return [f"rank {r}: {p}" for r, outcome in enumerate(by_rank) if str(pair) in outcome for p in outcome[str(pair)][0]]


@pytest.fixture(scope="module")
def matrix(ranks: Ranks) -> Matrix:
    return Matrix(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("pair", ORACLE, ids=str)
def test_a_save_and_a_load_agree_with_the_oracle(matrix: Matrix, pair: Pair) -> None:
    assert matrix.problems("storage", ORACLE, by_storage, pair) == []


@pytest.mark.parametrize("pair", FEW, ids=str)
def test_pair(matrix: Matrix, pair: Pair) -> None:
    assert matrix.problems("few", FEW, by_reshard, pair) == []


@pytest.mark.parametrize("pair", FEW, ids=str)
def test_every_byte_is_sent_once(matrix: Matrix, pair: Pair) -> None:
    """Each rank gets what it needs, from itself or from others, and nothing else."""
    reports = [outcome[str(pair)][1] for outcome in matrix.run("few", FEW, by_reshard) if str(pair) in outcome]
    traffic = reports[0].ranks
    assert all(report.ranks == {rank: traffic[rank]} for rank, report in enumerate(reports) if rank)
    assert sum(t.sent for t in traffic.values()) == sum(t.received for t in traffic.values())
    assert [rank for rank, t in traffic.items() if t.needed != t.copied + t.received] == []
    mine = {rank: (r.bytes_needed, r.bytes_sent, r.bytes_copied, r.bytes_received) for rank, r in enumerate(reports)}
    assert mine == {rank: (t.needed, t.sent, t.copied, t.received) for rank, t in traffic.items()}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_every_other_pair(matrix: Matrix, group: str) -> None:
    problems = {str(pair): matrix.problems(group, GROUPS[group], by_reshard, pair) for pair in GROUPS[group]}
    assert {pair: wrong for pair, wrong in problems.items() if wrong} == {}


def test_every_layout_is_a_source_and_a_target() -> None:
    assert {p.source for p in FEW} == {p.target for p in FEW} == set(NAMES)
    assert {(p.source, p.target) for p in FEW} >= set(NAMED)
    assert {p.apart for p in FEW} == {True, False} and {p.optimizer for p in FEW} == {"new", "stepped"}
