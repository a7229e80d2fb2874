"""A job in short: which of its steps a saving policy picks, and step infos for keeping policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, timezone

from hypothesis import strategies as st

from ckpt.policies import (
    All,
    AnyOf,
    AtSteps,
    Best,
    EveryBudget,
    EveryMinutes,
    EveryOptimal,
    EverySteps,
    KeepPolicy,
    Latest,
    Moment,
    OnPreemption,
    SavePolicy,
    StepInfo,
    Tagged,
    Within,
)

EPOCH = datetime(2025, 1, 1, tzinfo=timezone.utc)


def train(policy: SavePolicy, steps: Iterable[int], *, started: int = -1, seconds: Sequence[float] | None = None) -> dict[int, str]:
    """Run through ``steps``, saving whenever ``policy`` says so; the steps saved, with the reasons. ``seconds`` are the clock's."""
    saved: dict[int, str] = {}
    last_step, last_at = (started, None) if started >= 0 else (None, None)
    for position, step in enumerate(steps):
        clock = 0.0 if seconds is None else seconds[position]
        moment = Moment(step=step, started_step=started, seconds=clock, last_saved_step=last_step, last_saved_at=last_at)
        reason = policy.due(moment)
        assert policy.due(moment) == reason
        if reason is not None:
            saved[step] = reason
            last_step, last_at = step, clock
    return saved


def info(
    step: int, *, hours: float | None = None, metrics: dict[str, float] | None = None, tags: Iterable[str] = (), **more: object
) -> StepInfo:
    """A step created ``hours`` after the epoch; without ``hours`` in the order of steps."""
    created = EPOCH + timedelta(hours=step if hours is None else hours)
    return StepInfo(step=step, created=created, metrics=metrics or {}, tags=frozenset(tags), **more)  # type: ignore[arg-type]


def later(hours: float) -> datetime:
    return EPOCH + timedelta(hours=hours)


@st.composite
def runs(draw: st.DrawFn, max_size: int = 8, *, branches: bool = True) -> list[StepInfo]:
    """Steps in any order: with ties, clocks that jump, odd metrics, tags, references to any step, some not committed; of several
    ``branches``."""
    numbers = draw(st.lists(st.integers(0, 30), unique=True, max_size=max_size))
    value = st.sampled_from([float("nan"), float("inf"), float("-inf"), 0.0, 1.0, -2.5, 3])
    return [
        info(
            number,
            hours=draw(st.integers(-5, 40)),
            metrics=draw(st.dictionaries(st.sampled_from(["loss", "acc"]), value)),
            tags=draw(st.frozensets(st.sampled_from(["best", "release-1", "x"]), max_size=2)) if draw(st.integers(0, 4)) == 0 else (),
            referred_by=tuple(draw(st.lists(st.sampled_from([*numbers, 99]), max_size=2))) if draw(st.booleans()) else (),
            base_of=tuple(draw(st.lists(st.sampled_from(numbers), max_size=2))) if draw(st.integers(0, 4)) == 0 else (),
            committed=draw(st.integers(0, 4)) > 0,
            abandoned=branches and draw(st.integers(0, 3)) == 0,
        )
        for number in numbers
    ]


saving = st.one_of(
    st.builds(EverySteps, st.integers(1, 12), start=st.integers(0, 9)),
    st.builds(EveryMinutes, st.integers(1, 90) | st.floats(0.01, 100)),
    st.lists(st.integers(0, 40), min_size=1, max_size=5).map(AtSteps),
    st.builds(EveryBudget, st.floats(0.01, 99), least_seconds=st.floats(0.1, 1e4)),
    st.builds(EveryOptimal, st.floats(0.01, 1e4)),
    st.just(OnPreemption()),
)
keeping = st.one_of(
    st.builds(Latest, st.integers(1, 4)),
    st.builds(EverySteps, st.integers(1, 12), start=st.integers(0, 9)),
    st.builds(Within, hours=st.integers(1, 30), days=st.sampled_from([0, 0.5, 1])),
    st.builds(Best, st.sampled_from(["loss", "acc"]), st.integers(1, 3), mode=st.sampled_from(["min", "max"])),
    st.lists(st.sampled_from(["*", "release*", "nothing"]), max_size=2).map(lambda globs: Tagged(*globs)),
    st.just(All()),
)


def any_of(policies: st.SearchStrategy[SavePolicy] | st.SearchStrategy[KeepPolicy]) -> st.SearchStrategy:
    """One of ``policies``, or several of them joined."""
    return st.lists(policies, min_size=1, max_size=3).map(lambda found: AnyOf(*found))
