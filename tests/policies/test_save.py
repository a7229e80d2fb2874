"""When a save is due: each policy against a plain statement of what it promises, whatever the steps and clocks do."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import signal
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.policies import (
    AnyOf,
    AtSteps,
    Before,
    EveryBudget,
    EveryMinutes,
    EveryOptimal,
    EverySteps,
    Latest,
    Moment,
    OnPreemption,
    SaveCost,
    SavePolicy,
    Tagged,
    from_json,
    machine_deadline,
    to_json,
)
from ckpt.policies.both import VARIABLES
from ckpt.policies.save import daly
from ckpt.runs.save_schedule import CostMeter
from ckpt.telemetry.spans import Stall
from tests.policies.jobs import any_of, saving, train

increments = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def seen(started: int, gaps: list[int]) -> list[int]:
    return [started + total for total in itertools.accumulate(gaps)]


def first_after(marks: list[int], started: int, steps: list[int]) -> set[int]:
    """For each mark after the start, the first of ``steps`` that is not before it."""
    found = (next((s for s in steps if s >= mark), None) for mark in marks if mark > started)
    return {step for step in found if step is not None}


@given(st.integers(1, 50), st.integers(0, 120), st.integers(-1, 300), increments)
def test_every_steps_is_due_once_per_multiple(n: int, start: int, started: int, gaps: list[int]) -> None:
    steps = seen(started, gaps)
    marks = [m for m in range(start, steps[-1] + 1, n) if m > 0]
    saved = train(EverySteps(n, start=start), steps, started=started)
    assert saved.keys() == first_after(marks, started, steps)
    assert all(("first after" in reason) == (step not in marks) for step, reason in saved.items())


@given(st.lists(st.integers(0, 400), min_size=1), st.integers(-1, 300), increments)
def test_at_steps_is_due_once_per_step(wanted: list[int], started: int, gaps: list[int]) -> None:
    steps = seen(started, gaps)
    saved = train(AtSteps(wanted), steps, started=started)
    assert saved.keys() == first_after(wanted, started, steps)


def test_a_job_that_resumes_between_two_multiples() -> None:
    assert train(EverySteps(500), range(1004, 2600), started=1003) == dict.fromkeys((1500, 2000, 2500), "every 500 steps")


def test_steps_that_skip_multiples() -> None:
    saved = train(EverySteps(500), range(7, 1100, 7), started=0)
    assert saved == {504: "every 500 steps (the first after 500)", 1001: "every 500 steps (the first after 1000)"}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (EverySteps(10), [10, 20]),
        (EverySteps(10, start=5), [5, 15]),
        (EverySteps(1, start=18), [18, 19, 20]),
        (AtSteps(0), [0]),
        (AtSteps(0, 3) | EverySteps(10), [0, 3, 10, 20]),
        (AtSteps(300), []),
    ],
)
def test_from_the_first_step(policy: SavePolicy, expected: list[int]) -> None:
    assert list(train(policy, range(21))) == expected


def test_a_save_that_was_put_off_stays_due() -> None:
    policy = EverySteps(10) | AtSteps(10)
    for step in (10, 11, 19):
        assert policy.due(Moment(step=step, started_step=0, last_saved_step=3)) is not None
    assert policy.due(Moment(step=19, started_step=0, last_saved_step=11)) is None


@given(any_of(saving), st.integers(0, 100), st.floats(0, 1e6), st.booleans())
def test_a_step_that_is_saved_is_never_due(policy: SavePolicy, step: int, seconds: float, preempted: bool) -> None:
    moment = Moment(step=step, started_step=-1, seconds=seconds, last_saved_step=step, last_saved_at=0.0, preempted=preempted)
    assert policy.due(moment) is None


def test_steps_that_went_back_untold_count_only_when_hit() -> None:
    due = [s for s in range(901, 1000) if EverySteps(10).due(Moment(step=s, started_step=0, last_saved_step=1000))]
    assert due == list(range(910, 1000, 10))


# -------------------------------------------------------------------------------------------------------------- clocks


@given(st.floats(0.5, 5), st.lists(st.floats(0.1, 200), max_size=60))
def test_every_minutes_with_a_good_clock(minutes: float, durations: list[float]) -> None:
    clock = list(itertools.accumulate(durations))
    expected, last = [], 0.0
    for step, now in enumerate(clock):
        if now - last >= minutes * 60:
            expected.append(step)
            last = now
    assert list(train(EveryMinutes(minutes), range(len(clock)), seconds=clock)) == expected


@given(st.integers(0, 199), st.floats(0, 1e7))
def test_a_clock_that_goes_back_delays_one_save_by_twice_the_minutes_at_most(when: int, back: float) -> None:
    real = [10.0 * (i + 1) for i in range(200)]
    clock = [now - (back if i >= when else 0) for i, now in enumerate(real)]
    saved = [0.0, *(real[step] for step in train(EveryMinutes(5), range(200), seconds=clock)), real[-1]]
    assert max(b - a for a, b in itertools.pairwise(saved)) <= 3 * 300 + 10
    assert sum(b - a > 310 for a, b in itertools.pairwise(saved)) <= 1
    assert min((b - a for a, b in itertools.pairwise(saved[:-1])), default=300) >= (300 if back == 0 else 0)


def test_minutes_count_from_any_save() -> None:
    policy = EverySteps(100) | EveryMinutes(1)
    saved = train(policy, range(1, 121), started=0, seconds=[float(s) for s in range(1, 121)])
    assert saved == {60: "every minute", 100: "every 100 steps"}


def test_preemption() -> None:
    moment = Moment(step=7, started_step=0, preempted=True)
    assert OnPreemption().due(moment) == "preempted"
    assert (EverySteps(7) | OnPreemption()).due(moment) == "every 7 steps; preempted"
    assert OnPreemption().due(dataclasses.replace(moment, preempted=False)) is None


@pytest.mark.parametrize("given", [[signal.SIGKILL], [signal.SIGTERM, 9], [signal.SIGSTOP]])
def test_a_signal_that_nobody_can_watch(given: list[int]) -> None:
    with pytest.raises(UsageError, match="no process can watch SIG(KILL|STOP)"):
        OnPreemption(signals=given)


# --------------------------------------------------------------------------------------------------- who has to decide

moments = st.builds(
    Moment,
    step=st.integers(0, 100),
    started_step=st.integers(-1, 100),
    last_saved_step=st.none() | st.integers(0, 100),
    seconds=st.floats(-1e5, 1e5),
    last_saved_at=st.none() | st.floats(-1e5, 1e5),
    preempted=st.booleans(),
)


@given(any_of(saving), moments)
def test_the_two_parts_make_the_whole(policy: SavePolicy, now: Moment) -> None:
    parts = [part for part in (policy.rank_part, policy.leader_part) if part is not None]
    assert parts
    assert (policy.due(now) is not None) == any(part.due(now) is not None for part in parts)
    assert (policy.rank_part is None) == all(
        isinstance(p, EveryMinutes | EveryBudget | EveryOptimal | OnPreemption) for p in getattr(policy, "policies", (policy,))
    )
    assert (policy.leader_part is None) == all(isinstance(p, EverySteps | AtSteps) for p in getattr(policy, "policies", (policy,)))


@given(any_of(saving), moments, moments)
def test_the_local_part_looks_at_steps_only(policy: SavePolicy, now: Moment, other: Moment) -> None:
    if policy.rank_part is not None:
        elsewhere = dataclasses.replace(now, seconds=other.seconds, last_saved_at=other.last_saved_at, preempted=other.preempted)
        assert policy.rank_part.due(now) == policy.rank_part.due(elsewhere)


def test_the_parts_are_policies_themselves() -> None:
    policy = AnyOf(EverySteps(5), EveryMinutes(3), AtSteps(1), OnPreemption())
    assert policy.rank_part == EverySteps(5) | AtSteps(1)
    assert policy.leader_part == EveryMinutes(3) | OnPreemption()
    assert (EverySteps(5) | EverySteps(7)).leader_part is None
    assert (EverySteps(5) | EverySteps(7)).rank_part == EverySteps(5) | EverySteps(7)


def test_a_policy_of_ones_own_is_the_leaders() -> None:
    class WhenHot(SavePolicy):
        def reason(self, now: Moment) -> str | None:
            return "hot" if now.seconds > 100 else None

    hot = WhenHot()
    policy = EverySteps(10) | hot
    assert policy.leader_part is hot
    assert policy.due(Moment(step=3, started_step=0, seconds=101)) == "hot"
    assert policy.due(Moment(step=3, started_step=0, seconds=99)) is None


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EverySteps(0), "EverySteps(n) is a whole number of at least 1, not 0"),
        (lambda: EverySteps(2.5), "not 2.5"),
        (lambda: EverySteps(True), "not True"),
        (lambda: EverySteps(5, start=-1), "EverySteps(start)"),
        (lambda: EveryMinutes(0), "positive number, not 0"),
        (lambda: EveryMinutes(float("nan")), "not nan"),
        (lambda: EveryMinutes(10**400), "positive number"),
        (lambda: EveryMinutes("5"), "not '5'"),
        (lambda: AtSteps(), "no steps"),
        (lambda: AtSteps([]), "no steps"),
        (lambda: AtSteps("12"), "not '1'"),
        (lambda: AtSteps(3, -1), "not -1"),
        (lambda: AnyOf(), "no policies"),
        (lambda: AnyOf(EverySteps(3), OnPreemption(), Latest(2)), "cannot be joined"),
        (lambda: OnPreemption() | Latest(2), "Latest(2) does not say when to save"),
        (lambda: EverySteps(3) | OnPreemption() | Tagged("x"), "Tagged('x') does not say when to save"),
        (lambda: EverySteps(3) | 500, "500 cannot be joined"),
        (lambda: Moment(step=1.0, started_step=0), "Moment.step"),
        (lambda: Moment(step=1, started_step=-2), "Moment.started_step"),
        (lambda: Moment(step=1, started_step=0, seconds=float("nan")), "Moment.seconds"),
    ],
)
def test_what_cannot_be_is_refused(make, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert words in str(caught.value)


# ------------------------------------------------------------------------------------------------------------------------------------------
# The last save before a deadline: in time and not much earlier, in a job whose clock is simulated; and where the deadline comes from.


@given(
    step=st.floats(0.1, 30.0),
    block=st.floats(0.0, 5.0),
    lasts=st.floats(0.0, 200.0),
    hours=st.floats(1.0, 3.0),
    reserve=st.floats(0.0, 300.0),
)
def test_the_last_save_is_durable_in_time(step: float, block: float, lasts: float, hours: float, reserve: float) -> None:
    policy = EveryMinutes(10) | Before(EPOCH + 3600 * hours, reserve=reserve)
    job = SimulatedJob(lambda n: step * (1 + n % 3 / 4), lambda n: block, lasts, slower=1.1).run(policy, hours + 1)
    *_, before, last = job.saved
    durable = max(last, before + block + lasts) + block + lasts
    assert durable <= 3600 * hours, "the one before may be going on, and is waited for"
    assert last >= 3600 * hours - (reserve + 2 * (block + lasts) + 6 * step + 1), "and no work is given up for nothing"


def test_when_it_is_due() -> None:
    policy = Before(EPOCH + 1000, reserve=100.0)

    def moment(time: float | None, **more: object) -> Moment:
        return Moment(step=5, started_step=0, time=None if time is None else EPOCH + time, **more)  # type: ignore[arg-type]

    assert policy.due(moment(899.0)) is None and policy.due(moment(None)) is None
    assert policy.due(moment(900.0)) == "before 2027-01-15 08:16:40 UTC" and policy.ends(moment(900.0))
    assert policy.due(moment(800.0, step_seconds=50.0)) is not None
    assert policy.due(moment(5000.0)) is not None, "a deadline that has passed ends the job at once, with a save"
    assert policy.due(moment(950.0, ended=True)) is None
    joined = EveryMinutes(1) | policy | OnPreemption()
    assert joined.due(moment(899.0, seconds=70.0)) == "every minute" and not joined.ends(moment(899.0, seconds=70.0))
    assert joined.ends(moment(900.0)) and joined.ends(moment(0.0, preempted=True))
    assert not EveryMinutes(1).ends(moment(900.0, preempted=True)) and not Before(None).ends(moment(1e12))


def test_what_a_deadline_is() -> None:
    utc = datetime(2027, 3, 1, 12, tzinfo=timezone.utc)
    berlin = utc.astimezone(timezone(timedelta(hours=1)))
    assert Before(utc) == Before(berlin) == Before(utc.timestamp()) == from_json(to_json(Before(utc)))
    for wrong in ("12:00", True, 0, -1.0, float("nan"), utc.replace(tzinfo=None), 3.5 * 3600, utc.timestamp() * 1000):
        with pytest.raises(UsageError, match="deadline"):
            Before(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="reserve"):
        Before(utc, reserve=-1)


def test_what_machines_say() -> None:
    sagemaker, mlp, slurm = VARIABLES
    assert machine_deadline({}) is None and machine_deadline({slurm: " "}) is None
    assert machine_deadline({sagemaker: "1800000200", mlp: "1800000100.5", slurm: "1800000300"}) == datetime.fromtimestamp(
        1800000100.5, timezone.utc
    )
    for wrong in ("soon", "nan", "-5", "0", "3600", "1800000000000"):
        with pytest.raises(UsageError, match=slurm):
            machine_deadline({slurm: wrong})


# ------------------------------------------------------------------------------------------------------------------------------------------
# Saving as often as it pays: a simulated job whose clock is injected, against the budget and against the published formulas.

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
