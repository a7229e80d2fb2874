"""What each keeping policy keeps, against a plain statement of it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.policies import All, AnyOf, Best, EverySteps, KeepPolicy, Latest, OnPreemption, StepInfo, Tagged, Within, retention
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


# --------------------------------------------------- What may be removed: the rules that no policy turns off, and that rules only ever add.

NOW = later(50)
nows = st.integers(-20, 80).map(later)


def told(keep: KeepPolicy, steps: list[StepInfo]) -> dict[int, str]:
    return {v.step: str(v) for v in retention(keep, steps, NOW)}


@given(any_of(keeping), runs(), nows)
def test_every_step_has_one_verdict(keep: KeepPolicy, steps: list[StepInfo], now: datetime) -> None:
    verdicts = retention(keep, steps, now)
    assert [v.step for v in verdicts] == sorted(s.step for s in steps)
    assert len(verdicts) == len(steps)
    by_outcome = {o: {v.step for v in verdicts if v.outcome == o} for o in ("kept", "removed", "left")}
    assert by_outcome["left"] == {s.step for s in steps if not s.committed}
    assert sorted(verdicts.removed) == sorted(by_outcome["removed"])
    assert set(verdicts.kept) == by_outcome["kept"]
    assert all(v.reasons and all(v.reasons) for v in verdicts)


@given(any_of(keeping), runs(), nows)
def test_kept_is_just_what_has_a_cause(keep: KeepPolicy, steps: list[StepInfo], now: datetime) -> None:
    committed = {s.step: s for s in steps if s.committed}
    expected = {step for step, reason in keep.explain(steps, now).items() if reason is not None}
    expected |= {step for step, s in committed.items() if s.tags}
    if committed:
        expected.add(max(committed))
        expected.add(max(committed.values(), key=lambda s: (s.created, s.step)).step)
        if live := [s for s in committed.values() if not s.abandoned]:
            expected |= {max(s.step for s in live), max(live, key=lambda s: (s.created, s.step)).step}
    for _ in steps:  # so often that the longest chain of references is through
        held = {step for step, s in committed.items() if any(r in expected or r not in committed for r in s.users if r != step)}
        expected |= held
    assert set(retention(keep, steps, now).kept) == expected


@given(any_of(keeping), keeping, runs(), nows)
def test_a_further_rule_never_removes_more(keep: KeepPolicy, further: KeepPolicy, steps: list[StepInfo], now: datetime) -> None:
    assert set(retention(keep | further, steps, now).removed) <= set(retention(keep, steps, now).removed)


@given(any_of(keeping), runs(), nows)
def test_what_was_abandoned_takes_the_place_of_nothing(keep: KeepPolicy, steps: list[StepInfo], now: datetime) -> None:
    """What would be kept without it is kept beside it, and what would be kept if it were not abandoned as well."""
    kept = set(retention(keep, steps, now).kept)
    live = [s for s in steps if not s.abandoned]
    assert {step for step, reason in keep.explain(live, now).items() if reason is not None} <= kept
    assert set(retention(keep, [replace(s, abandoned=False) for s in steps], now).kept) <= kept
    assert set(retention(keep, steps, now, abandoned=False).kept) <= kept


@given(any_of(keeping), runs(), nows)
def test_twice_removes_nothing_further(keep: KeepPolicy, steps: list[StepInfo], now: datetime) -> None:
    removed = retention(keep, steps, now).removed
    remaining = [s for s in steps if s.step not in removed]
    assert retention(keep, remaining, now).removed == ()


@given(any_of(keeping), runs(), nows, nows)
def test_time_alone_never_removes_what_a_good_clock_kept(keep: KeepPolicy, steps: list[StepInfo], now: datetime, other: datetime) -> None:
    newest = max((s.created for s in steps if s.committed), default=now)
    late, later_still = sorted((max(now, newest), max(other, newest)))
    assert retention(keep, steps, late) == retention(keep, steps, later_still)


@given(any_of(keeping), runs(), nows)
def test_removal_may_stop_anywhere(keep: KeepPolicy, steps: list[StepInfo], now: datetime) -> None:
    """No prefix of the removals leaves a checkpoint without bytes that it uses, unless two use each other."""
    referrers = {s.step: set(s.users) - {s.step} for s in steps}

    def users(step: int) -> set[int]:
        found: set[int] = set()
        open_ends = [step]
        while open_ends:
            new = referrers.get(open_ends.pop(), set()) - found
            found |= new
            open_ends += new
        return found

    gone: set[int] = set()
    for step in retention(keep, steps, now).removed:
        gone.add(step)
        assert all(user in gone or step in users(user) for user in referrers[step])


def test_what_is_said() -> None:
    steps = [
        info(500),
        info(1000),
        info(1500, tags=["prod", "good"]),
        info(2000, metrics={"loss": 0.5}, referred_by=(2500, 4000)),
        info(2200, referred_by=(2300,)),
        info(2300),
        info(2500),
        info(3000),
        info(3500),
        info(4000),
        info(4500, committed=False),
    ]
    assert told(Latest(3) | EverySteps(1000), steps) == {
        500: "removed: no rule keeps it",
        1000: "kept: every 1000 steps",
        1500: "kept: tagged 'good', 'prod'",
        2000: "kept: every 1000 steps; step 4000 refers to it",
        2200: "removed: no rule keeps it",
        2300: "removed: no rule keeps it",
        2500: "removed: no rule keeps it",
        3000: "kept: Latest(3); every 1000 steps",
        3500: "kept: Latest(3)",
        4000: "kept: newest; Latest(3); every 1000 steps",
        4500: "left: not committed",
    }
    assert retention(Latest(3) | EverySteps(1000), steps, NOW).removed == (500, 2300, 2200, 2500)


def test_the_last_whole_checkpoint_before_a_part_that_is_kept() -> None:
    steps = [info(1, base_of=(2,)), info(2), info(3, base_of=(4, 5, 6)), info(4), info(5), info(6)]
    assert told(Latest(2), steps) == {
        1: "removed: no rule keeps it",
        2: "removed: no rule keeps it",
        3: "kept: steps 5, 6 are parts, and may lie over it",
        4: "removed: no rule keeps it",
        5: "kept: Latest(2)",
        6: "kept: newest; Latest(2)",
    }
    assert retention(Latest(2), steps, NOW).removed == (2, 1, 4)


def test_what_is_said_of_a_run_that_went_back() -> None:
    steps = [info(80), info(81), info(83), info(90, abandoned=True), info(95, abandoned=True, tags=["mine"]), info(100, abandoned=True)]
    said = {81: "removed: no rule keeps it", 83: "kept: newest; Latest(1)", 90: "removed: abandoned; no rule keeps it"}
    assert told(Latest(1), steps) == {
        80: "removed: no rule keeps it",
        **said,
        95: "kept: tagged 'mine'",
        100: "kept: highest; Latest(1)",
    }
    dropped = retention(Latest(1), steps, NOW, abandoned=False)
    assert (dropped.kept, dropped.removed) == ((83, 95), (80, 81, 90, 100))


def test_only_the_newest() -> None:
    assert told(Tagged("none"), [info(1), info(2)]) == {1: "removed: no rule keeps it", 2: "kept: newest"}


def test_no_steps() -> None:
    verdicts = retention(Latest(1), [], NOW)
    assert (list(verdicts), verdicts.kept, verdicts.removed) == ([], (), ())


def test_a_run_that_went_back_keeps_what_it_writes() -> None:
    steps = [info(4000, hours=1), info(5000, hours=2), info(3000, hours=3), info(3100, hours=4)]
    assert told(Latest(1), steps) == {
        3000: "removed: no rule keeps it",
        3100: "kept: written last",
        4000: "removed: no rule keeps it",
        5000: "kept: newest; Latest(1)",
    }


def test_references_hold_through_others() -> None:
    steps = [info(1, referred_by=(2,)), info(2, referred_by=(3,)), info(3, referred_by=(4,)), info(4)]
    assert told(Latest(1), steps) == {
        1: "kept: step 2 refers to it",
        2: "kept: step 3 refers to it",
        3: "kept: step 4 refers to it",
        4: "kept: newest; Latest(1)",
    }


@pytest.mark.parametrize("unfinished", [[], [info(9, committed=False)]])
def test_a_save_that_goes_on_holds_what_it_uses(unfinished: list[StepInfo]) -> None:
    steps = [info(1, referred_by=(2,)), info(2, referred_by=(9,)), info(3), *unfinished]
    told_of = told(Latest(1), steps)
    assert told_of[1] == "kept: step 2 refers to it"
    assert told_of[2] == "kept: step 9 refers to it"


def test_one_step_holds_all_that_it_uses() -> None:
    steps = [info(1, referred_by=(4,)), info(2, referred_by=(4,)), info(3, referred_by=(4,)), info(4)]
    assert retention(Latest(1), steps, NOW).kept == (1, 2, 3, 4)


def test_steps_that_use_each_other_can_go() -> None:
    steps = [info(1, referred_by=(1, 2)), info(2, referred_by=(1,)), info(3)]
    assert set(retention(Latest(1), steps, NOW).removed) == {1, 2}


def test_many_references_are_counted() -> None:
    steps = [info(1, referred_by=(2, 3, 4, 5, 6)), *(info(s) for s in range(2, 7))]
    assert told(All(), steps)[1] == "kept: All(); steps 2, 3, 4 and 2 more refer to it"


def test_a_long_chain_is_judged() -> None:
    count = 3000
    steps = [info(n, hours=0, referred_by=(n + 1,)) for n in range(count)] + [info(count + 1)]
    assert len(retention(Latest(1), steps, NOW).kept) == count + 1  # the last refers to a step that is not there
    loose = [*steps[:-2], info(count - 1, hours=0), steps[-1]]
    assert retention(Latest(1), loose, NOW).removed == tuple(range(count - 1, -1, -1))


def test_a_run_over_time() -> None:
    """Retention after each save: what is left at the end are the latest, the multiples and the best so far, and never less than two."""
    losses = itertools.cycle([5.0, 4.0, 3.0, 9.0, 8.0, 2.5, 7.0])
    keep = Latest(2) | EverySteps(1000) | Best("loss", mode="min")
    there: list[StepInfo] = []
    for step, loss in zip(range(100, 3501, 100), losses, strict=False):
        there.append(info(step, metrics={"loss": loss}))
        removed = retention(keep, there, NOW).removed
        there = [s for s in there if s.step not in removed]
        assert len(there) >= min(2, step // 100)
    assert [s.step for s in there] == [1000, 2000, 3000, 3400, 3500]
    assert {s.step: s.metrics["loss"] for s in there}[3400] == 2.5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: retention(OnPreemption(), [], NOW), "OnPreemption() does not say what to keep"),
        (lambda: retention(None, [], NOW), "None does not say what to keep"),
        (lambda: retention(Latest(1), [info(1), info(1)], NOW), "two checkpoints of step 1"),
        (lambda: retention(Within(hours=1), [], datetime(2025, 1, 1)), "now is a datetime with a time zone"),
    ],
)
def test_rules_that_cannot_be_are_refused(make, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert words in str(caught.value)
