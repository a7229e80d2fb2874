"""SIGKILL within the writes and commits of everything that changes a storage: the old is there or the new, whole, and the same goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import Ranks
from tests.removal.killing import KINDS, killed

FEW, MANY = 2, 24
"""Kills of each kind."""


def kill(ranks: Ranks, tmp_path: Path, kind: str, kills: int, seed: int) -> dict[str, int]:
    (found,) = ranks.run(1, killed, kind, str(tmp_path), kills, seed, process_group=False, timeout=60 + 10 * kills)
    assert found["kills"] == kills and found["within a commit"] > 0, found
    return dict(found)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_while_it_writes_or_commits(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    kill(ranks, tmp_path, kind, FEW, seed=21)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_many_times_while_it_writes_or_commits(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    print(f"{kind}: {kill(ranks, tmp_path, kind, MANY, seed=22 + [*KINDS].index(kind))}")
