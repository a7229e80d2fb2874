"""Saving as often as it pays: a simulated job whose clock is injected, against the budget and against the published formulas."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from ckpt.errors import UsageError
from ckpt.policies import EveryBudget, EveryOptimal, Moment, SaveCost, SavePolicy
from ckpt.policies.save import daly
from ckpt.runs.save_schedule import CostMeter
from ckpt.telemetry.progress import Stall

EPOCH = 1.8e9
"""When a job begins, in seconds since 1970."""


class SimulatedSave:
    """Blocks ``blocked`` seconds in the call, which ``began`` then, and goes on until ``ends``."""

    def __init__(self, clock: SimulatedJob, began: float, ends: float) -> None:
        self.stall = Stall()
        self.called = 0.0
        self.failed_in = None
        self.clock, self.began, self.ends = clock, began, ends

    @property
    def ended(self) -> float | None:
        return self.ends - self.began if self.clock.now >= self.ends else None


class SimulatedJob:
    """Steps of ``step(n)`` seconds. A save blocks for ``blocked(n)`` seconds, then goes on for ``lasts`` ones, in which a step takes
    ``slower`` times as long. ``lost`` is what all saves really cost."""

    def __init__(self, step: Callable[[int], float], blocked: Callable[[int], float], lasts: float = 0.0, slower: float = 1.0) -> None:
        self.step, self.blocked, self.lasts, self.slower = step, blocked, lasts, slower
        self.now = self.lost = 0.0
        self.saved: list[float] = []
        self.meter = CostMeter()

    def run(self, policy: SavePolicy, hours: float) -> SimulatedJob:
        n, save, last = 0, None, None
        while self.now < 3600 * hours:
            n += 1
            usual = self.step(n)
            left = max(0.0, save.ends - self.now) if save is not None else 0.0
            took = usual * self.slower if left >= usual * self.slower else usual + left * (1 - 1 / self.slower)
            self.lost += took - usual
            self.now += took
            self.meter.enter(self.now, step=True)
            moment = Moment(
                step=n,
                started_step=0,
                seconds=self.now,
                time=EPOCH + self.now,
                last_saved_at=last,
                measuring=self.meter.measuring,
                step_seconds=self.meter.step_seconds,
                saves=self.meter.saves,
            )
            if policy.due(moment) is not None:
                last = self.now
                self.saved.append(last)
                self.now += self.blocked(n)
                self.lost += self.blocked(n)
                save = SimulatedSave(self, last, self.now + self.lasts)
                self.meter.begun(save, self.now)
                if policy.ends(moment):
                    break
            self.meter.leave(self.now, step=True)
        return self

    @property
    def percent(self) -> float:
        """Of the time from the first save on, since which there is a cost to keep to."""
        return 100 * self.lost / (self.now - self.saved[0])


def noise(seed: int) -> Callable[[int], float]:
    """Steps of two seconds, give or take a fifth, with an evaluation of a minute every 100 steps."""
    source = random.Random(seed)
    return lambda n: (60.0 if n % 100 == 0 else 0.0) + 2.0 * source.uniform(0.8, 1.2)


@pytest.mark.parametrize("percent", [1.0, 5.0])
@pytest.mark.parametrize(
    ("blocked", "lasts", "slower"),
    [
        (lambda n: 2.0, 0.0, 1.0),
        (lambda n: 1.0 + n % 7, 0.0, 1.0),
        (lambda n: 0.3, 30.0, 1.15),
        (lambda n: 0.2 if n < 8_000 else 4.0, 20.0, 1.1),  # a storage that gets slower
    ],
    ids=["blocks", "blocks, each time another", "slows", "changes"],
)
def test_the_budget_is_kept(percent: float, blocked: Callable[[int], float], lasts: float, slower: float) -> None:
    job = SimulatedJob(noise(1), blocked, lasts, slower).run(EveryBudget(percent, least_seconds=5.0), hours=8)
    assert len(job.saved) > 20
    assert job.percent == pytest.approx(percent, rel=0.2)


def test_without_slowing_nothing_is_measured_but_the_block() -> None:
    """Evaluations that fall beside a save, and chance, are not its cost."""
    job = SimulatedJob(noise(2), lambda n: 1.0, lasts=25.0).run(EveryBudget(5.0, least_seconds=5.0), hours=8)
    assert abs(sum(s.slowed for s in job.meter.saves)) < 0.5 * sum(s.blocked for s in job.meter.saves)


def test_cheap_saves_are_not_made_up_for_at_once() -> None:
    """An hour without saves earns nothing, and saves are never closer than they may be."""
    job = SimulatedJob(lambda n: 0.5, lambda n: 0.001).run(EveryBudget(1.0, least_seconds=120.0), hours=1)
    gaps = [b - a for a, b in zip(job.saved, job.saved[1:], strict=False)]
    assert job.saved[0] == 120.0 and min(gaps) >= 120.0


def test_what_is_owed() -> None:
    policy = EveryBudget(1.0)
    first, second = SaveCost(began=100.0, blocked=2.0, slowed=1.0, durable=9.0), SaveCost(began=200.0, blocked=1.0)
    assert policy.owed((first,), 100.0) == 3.0 and policy.owed((first,), 400.0) == 0.0
    assert policy.owed((first, second), 300.0) == 3.0 - 1.0 + 1.0 - 1.0
    moment = Moment(step=9, started_step=0, seconds=399.0, last_saved_step=5, last_saved_at=100.0, saves=(first,))
    assert policy.due(moment) is None
    assert "the last one cost 3 s" in str(policy.due(Moment(step=9, started_step=0, seconds=400.0, last_saved_at=100.0, saves=(first,))))
    assert policy.due(Moment(step=9, started_step=0, seconds=999.0, last_saved_at=100.0, saves=(first,), measuring=True)) is None


@pytest.mark.parametrize(
    ("cost", "mtbf"), [(0.0, 3600.0), (3.0, 3600.0), (240.0, 21_600.0), (5000.0, 3000.0), (6000.0, 3000.0), (9000.0, 3000.0)]
)
def test_the_formula_minimises_what_is_lost(cost: float, mtbf: float) -> None:
    """The minimum of Daly's model of restarts, to 1 % where saves are short."""
    if cost >= 2 * mtbf:
        assert daly(cost, mtbf) == mtbf
        return

    def wall(interval: float) -> float:  # Daly's equation 19, without the constant factors: failures are exponential
        return (math.exp((interval + cost) / mtbf) - 1) / interval

    found = daly(cost, mtbf)
    best = min((i * mtbf / 20_000 for i in range(1, 60_000)), key=wall) if cost else 0.0
    assert found == pytest.approx(best, rel=0.01 if cost < 0.1 * mtbf else 0.1, abs=0.2)


def test_the_optimal_interval_follows_what_saves_cost() -> None:
    policy = EveryOptimal(6)
    costs = [4.0, 5.0, 300.0, 5.0, 6.0, 5.0]  # one outlier
    saves = tuple(SaveCost(began=1000.0 * i, blocked=c / 2, slowed=c / 2, durable=9.0) for i, c in enumerate(costs))
    assert policy.interval(()) == 60.0 and policy.interval(saves) == pytest.approx(daly(5.0, 21_600.0) + 5.0)
    job = SimulatedJob(lambda n: 0.5, lambda n: 5.0).run(policy, hours=4)
    gaps = [b - a for a, b in zip(job.saved[1:], job.saved[2:], strict=False)]
    assert all(daly(5.0, 21_600.0) + 5 <= gap <= daly(5.0, 21_600.0) + 6 for gap in gaps) and len(gaps) > 10


def test_what_makes_no_sense() -> None:
    for wrong in (lambda: EveryBudget(0), lambda: EveryBudget(100), lambda: EveryBudget(1, least_seconds=0), lambda: EveryOptimal(-1)):
        with pytest.raises(UsageError):
            wrong()


def test_a_wait_counts_once_and_while_it_goes_on() -> None:
    stall = Stall()
    with stall, stall:
        assert stall.seconds >= 0
    before = stall.seconds
    stall.add(2.0)
    assert 2.0 <= stall.seconds == before + 2.0
