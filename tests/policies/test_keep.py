"""What each keeping policy keeps, against a plain statement of it."""

from __future__ import annotations

import math
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.policies import All, AnyOf, Best, EverySteps, KeepPolicy, Latest, OnPreemption, StepInfo, Tagged, Within
from tests.policies.jobs import EPOCH, any_of, info, keeping, later, runs


def kept(policy: KeepPolicy, steps: list[StepInfo], now: datetime | None = None) -> list[int]:
    return [step for step, reason in policy.explain(steps, now).items() if reason is not None]


@given(any_of(keeping), runs(), st.none() | st.integers(-10, 60).map(later))
def test_explain_speaks_of_every_step_once(policy: KeepPolicy, steps: list[StepInfo], now: datetime | None) -> None:
    explained = policy.explain(steps, now)
    assert list(explained) == sorted(s.step for s in steps)
    assert all(explained[s.step] is None for s in steps if not s.committed)
    assert all(reason is None or reason for reason in explained.values())
    assert policy.explain(steps[::-1], now) == explained


@given(st.lists(keeping, min_size=1, max_size=3), runs())
def test_any_keeps_what_one_of_them_keeps(policies: list[KeepPolicy], steps: list[StepInfo]) -> None:
    assert kept(AnyOf(*policies), steps) == sorted({step for policy in policies for step in kept(policy, steps)})


@given(runs(branches=False), st.integers(1, 5))
def test_latest(steps: list[StepInfo], n: int) -> None:
    higher = {s.step: sum(o.step > s.step for o in steps if o.committed) for s in steps if s.committed}
    assert kept(Latest(n), steps) == sorted(step for step, above in higher.items() if above < n)


@given(runs(max_size=12, branches=False), st.integers(1, 12), st.integers(0, 9))
def test_every_steps_keeps_the_first_of_each_stretch(steps: list[StepInfo], n: int, start: int) -> None:
    numbers = [s.step for s in steps if s.committed]
    stretches = ([s for s in numbers if mark <= s < mark + n] for mark in range(start, 40, n) if mark > 0)
    assert kept(EverySteps(n, start=start), steps) == [min(stretch) for stretch in stretches if stretch]


def test_every_steps_keeps_what_skipping_steps_saved() -> None:
    steps = [info(s) for s in (100, 504, 1001, 1505, 2002, 2100)]
    explained = EverySteps(1000).explain(steps)
    assert explained == {
        100: None,
        504: None,
        1001: "every 1000 steps (the first after 1000)",
        1505: None,
        2002: "every 1000 steps (the first after 2000)",
        2100: None,
    }


@given(runs(branches=False), st.sampled_from(["min", "max"]), st.integers(1, 4))
def test_best(steps: list[StepInfo], mode: str, n: int) -> None:
    values = {s.step: s.metrics["loss"] for s in steps if s.committed and "loss" in s.metrics and math.isfinite(s.metrics["loss"])}

    def beaten_by(step: int) -> int:
        mine = values[step]
        better = (v > mine if mode == "max" else v < mine for v in values.values())
        return sum(better) + sum(values[o] == mine and o > step for o in values)

    assert kept(Best("loss", n, mode=mode), steps) == sorted(step for step in values if beaten_by(step) < n)


def test_best_says_the_value() -> None:
    steps = [info(1, metrics={"loss": math.nan}), info(2, metrics={"loss": 0.25}), info(3), info(4, metrics={"loss": 0.5})]
    assert Best("loss", mode="min").explain(steps) == {1: None, 2: "Best('loss', mode='min'): 0.25", 3: None, 4: None}


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (None, [3, 4]),
        (later(40), [3, 4]),
        (later(10**6), [3, 4]),  # counted from the newest checkpoint: time alone removes nothing
        (later(35), [2, 3, 4]),  # from now, where checkpoints claim to be of the future
    ],
)
def test_within(now: datetime | None, expected: list[int]) -> None:
    steps = [info(1, hours=0), info(2, hours=11), info(3, hours=16), info(4, hours=40)]
    assert kept(Within(days=1), steps, now) == expected


def test_one_checkpoint_of_the_far_future_costs_the_others_nothing() -> None:
    steps = [info(1, hours=0), info(2, hours=1), info(3, hours=10**6)]
    assert kept(Within(hours=5), steps, later(2)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("globs", "expected"), [((), [1, 2, 3]), (("release*",), [2, 3]), (("best", "release-2"), [1, 3]), (("Best",), []), (("x",), [])]
)
def test_tagged(globs: tuple[str, ...], expected: list[int]) -> None:
    steps = [info(1, tags=["best"]), info(2, tags=["release-1"]), info(3, tags=["release-2", "good"]), info(4)]
    assert kept(Tagged(*globs), steps) == expected


def test_joined_reasons() -> None:
    steps = [info(s) for s in (10, 20, 25)]
    explained = (Latest(2) | EverySteps(10) | All()).explain(steps)
    assert explained == {10: "every 10 steps; All()", 20: "Latest(2); every 10 steps; All()", 25: "Latest(2); All()"}


def test_no_policy_keeps_what_is_not_committed() -> None:
    class Greedy(KeepPolicy):
        def choose(self, steps: list[StepInfo], now: datetime | None) -> dict[int, str]:
            return dict.fromkeys(range(10), "mine")

    assert Greedy().explain([info(1), info(2, committed=False)]) == {1: "mine", 2: None}


def test_a_policy_of_ones_own() -> None:
    class Even(KeepPolicy):
        def choose(self, steps: list[StepInfo], now: datetime | None) -> dict[int, str]:
            return {s.step: "even" for s in steps if s.step % 2 == 0}

    assert (Latest(1) | Even()).explain([info(1), info(2), info(3), info(4, committed=False)]) == {
        1: None,
        2: "even",
        3: "Latest(1)",
        4: None,
    }


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Latest(0), "Latest(n) is a whole number of at least 1, not 0"),
        (lambda: Latest("3"), "not '3'"),
        (lambda: Within(), "Within() needs a time"),
        (lambda: Within(hours=-1), "Within(hours) is a number that is not negative, not -1"),
        (lambda: Within(hours=float("inf")), "not inf"),
        (lambda: Within(days=1e12), "longer than time can be counted"),
        (lambda: Best("", mode="min"), "name of a metric"),
        (lambda: Best("loss", mode="least"), "not 'least'"),
        (lambda: Best("loss"), "not None"),  # type: ignore[call-arg]
        (lambda: Best("loss", 0, mode="min"), "Best(n)"),
        (lambda: Tagged(""), "a glob"),
        (lambda: Latest(3) | OnPreemption(), "OnPreemption() does not say what to keep"),
        (lambda: Latest(3) | 5, "5 does not say what to keep"),
        (lambda: StepInfo(step=-1, created=EPOCH), "StepInfo.step"),
        (lambda: StepInfo(step=1, created=datetime(2025, 1, 1)), "time zone"),
        (lambda: StepInfo(step=1, created="2025-01-01T00:00:00Z"), "not '2025-01-01T00:00:00Z'"),
        (lambda: StepInfo(step=1, created=EPOCH, tags="best"), "frozenset"),
        (lambda: StepInfo(step=1, created=EPOCH, metrics={"loss": "0.1"}), "metric 'loss' of step 1"),
        (lambda: StepInfo(step=1, created=EPOCH, metrics={"loss": 10**400}), "metric 'loss' of step 1"),
        (lambda: StepInfo(step=1, created=EPOCH, referred_by=("2",)), "refers to step 1"),
        (lambda: All().explain([info(3), info(4), info(3, committed=False)]), "two checkpoints of step 3"),
        (lambda: All().explain([], datetime(2025, 1, 1)), "now is a datetime with a time zone"),
    ],
)
def test_what_cannot_be_is_refused(make, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert words in str(caught.value)


def test_time_zones_are_compared_as_times() -> None:
    east = EPOCH.tzinfo.__class__(timedelta(hours=9))
    steps = [StepInfo(step=1, created=EPOCH), StepInfo(step=2, created=(EPOCH + timedelta(hours=2)).astimezone(east))]
    assert kept(Within(hours=2), steps) == [1, 2]
    assert kept(Within(hours=1), steps) == [2]
