"""When a save is due: each policy against a plain statement of what it promises, whatever the steps and clocks do."""

from __future__ import annotations

import dataclasses
import itertools
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.policies import (
    AnyOf,
    AtSteps,
    EveryBudget,
    EveryMinutes,
    EveryOptimal,
    EverySteps,
    Latest,
    Moment,
    OnPreemption,
    SavePolicy,
    Tagged,
)
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
