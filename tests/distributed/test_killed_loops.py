"""Training jobs under random policies that are killed at random moments, again and again: each goes on from a committed step, and in the
end every loss and every sample is as in a run that nothing has interrupted."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import ckpt
from tests.distributed.killed import STEPS, Life, Plan, expected, live
from tests.distributed.ranks import Lost, Ranks

KILLS = {1: 12, 2: 4}
"""Number of ranks → kills."""
SLOW = {1: 100, 2: 40}


def newest(root: Path) -> int | None:
    """The newest committed step; nothing that is there is damaged, and what it holds is whole."""
    steps = ckpt.list_steps(str(root))
    assert not any(s.damaged for s in steps)
    numbers = [s.number for s in steps if s.committed]
    return numbers[-1] if numbers else None


def check(root: Path, step: int | None, losses: list[float], world: int) -> None:
    """The checkpoint of a step holds the samples and losses up to it, and every tensor can be read."""
    if step is None:
        return
    view = ckpt.open(f"{root}/step-{step:08d}")
    for tensor in view.tensors():
        tensor.read()
    state = view.state()
    assert state["losses"] == losses[: step + 1]
    for rank in range(world):
        assert view.per_rank("seen", rank) == [s for i, s in enumerate(expected()[: 4 * (step + 1)]) if i % 4 % world == rank]


def logged(log: Path) -> list[tuple[int, float]]:
    """The last line may have been cut off."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [(int(n), float(loss)) for n, loss in (line.split() for line in lines)]


def killed_again_and_again(ranks: Ranks, folder: Path, world: int, kills: int, seed: int) -> tuple[int, int, int]:
    """Gives the number of kills, of those that left an unfinished save, and of runs that came to their end."""
    chance = random.Random(seed)
    whole = Plan.at_random(chance)
    group = world > 1
    ranks.run(world, live, str(folder / "whole"), str(folder / "whole.log"), whole, Life(newest=None), process_group=group)
    losses = [loss for _, loss in logged(folder / "whole.log")]
    assert len(losses) == STEPS
    died = torn = runs = 0
    longest = least = 0.7 if world > 1 else 0.4
    while died < kills:
        root, log, plan = folder / f"{runs}", folder / f"{runs}.log", Plan.at_random(chance)
        runs += 1
        last: int | None = None
        while last != STEPS - 1:
            at = chance.uniform(0.005, longest)
            told = chance.uniform(0, at) if chance.random() < 0.2 else None
            life = Life(newest=newest(root), killed=tuple(at + (r and chance.uniform(0, 0.1)) for r in range(world)), told=told)
            found = ranks.run(world, live, str(root), str(log), plan, life, allow_death=True, process_group=group, timeout=30)
            raised = [f for f in found if isinstance(f, Lost) and f.error is not None and "gloo" not in str(f.error)]
            assert not raised and not any(f.hung for f in found if isinstance(f, Lost)), "\n".join(map(str, found))
            ended = not any(isinstance(f, Lost) for f in found)
            died += not ended
            if ended or newest(root) == life.newest:  # a machine with much to do takes longer to save anything
                longest = max(least, longest / 2) if ended else longest * 1.5
            torn += any(not s.committed for s in ckpt.list_steps(str(root)))
            last = found[0] if ended else newest(root)
            check(root, newest(root), losses, world)
        wrong = [(n, loss) for n, loss in logged(log) if loss != losses[n]]
        assert wrong == [], f"{plan}"
        assert {n for n, _ in logged(log)} == set(range(STEPS))
    return died, torn, runs


@pytest.mark.parametrize("world", [1, 2])
def test_killed_again_and_again(ranks: Ranks, tmp_path: Path, world: int) -> None:
    died, torn, _ = killed_again_and_again(ranks, tmp_path, world, KILLS[world], seed=11)
    assert died >= KILLS[world] and (torn or world > 1)  # few of the few jobs of two ranks die in a save


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [1, 2])
def test_killed_a_hundred_times(ranks: Ranks, tmp_path: Path, world: int) -> None:
    died, torn, runs = killed_again_and_again(ranks, tmp_path, world, SLOW[world], seed=12)
    print(f"{world} ranks: {died} kills, {torn} in the middle of a save, {runs} runs")
