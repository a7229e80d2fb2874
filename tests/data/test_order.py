"""Every sample of an epoch once, whatever happens to the job: in plain arithmetic, many jobs at random."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import StateError, UsageError
from ckpt.training.data import Batches, Position, share, shuffled


@st.composite
def lives(draw: st.DrawFn) -> tuple[int, str, list[tuple[int, int, int]]]:
    """Samples of the dataset, what becomes of the tail, and the lives of a job: parts, samples per step, steps until it is killed."""
    samples = draw(st.integers(1, 40))
    tail = draw(st.sampled_from(["carry", "drop", "short"]))
    most = samples if tail == "drop" else 50
    life = st.integers(1, min(5, most)).flatmap(lambda parts: st.tuples(st.just(parts), st.integers(parts, most), st.integers(0, 12)))
    return samples, tail, draw(st.lists(life, min_size=1, max_size=6))


def live(samples: int, tail: str, jobs: list[tuple[int, int, int]]) -> tuple[list[list[int]], list[int]]:
    """Runs the lives. Returns the samples of each step, all parts one after another, and the epoch that each step began in."""
    state = None
    steps, epochs = [], []
    for parts, size, count in jobs:
        ranks = [Batches(samples, size=size, part=part, parts=parts, tail=tail, seed=3) for part in range(parts)]  # type: ignore[arg-type]
        position = Position() if state is None else ranks[0].position_of(state)
        for _ in range(count):
            mine = [rank.at(position) for rank in ranks]
            assert max(map(len, mine)) - min(map(len, mine)) <= 1
            steps.append([sample for part in mine for sample in part])
            epochs.append(ranks[0].steps.settled(position).epoch)
            position = ranks[0].steps.step(position)[1]
        state = ranks[0].position_state(position)
    return steps, epochs


@given(lives())
def test_each_sample_of_each_epoch_once(job) -> None:
    samples, tail, jobs = job
    steps, epochs = live(samples, tail, jobs)
    if tail == "carry":
        flat = [sample for step in steps for sample in step]
        by_epoch = [flat[i : i + samples] for i in range(0, len(flat), samples)]
    else:
        by_epoch = [
            [s for step, e in zip(steps, epochs, strict=True) if e == epoch for s in step] for epoch in range(max(epochs, default=-1) + 1)
        ]
    sizes = {size for _, size, _ in jobs}
    for i, seen in enumerate(by_epoch):
        assert max(Counter(seen).values(), default=1) == 1
        assert seen == [int(s) for s in shuffled(samples, 3, i)[: len(seen)]]
        if i + 1 < len(by_epoch):
            assert len(seen) == samples if tail != "drop" else samples - len(seen) < max(sizes)
    if tail != "short":
        assert [len(step) for step in steps] == [size for _, size, count in jobs for _ in range(count)]


@given(samples=st.integers(1, 60), size=st.integers(1, 20), tail=st.sampled_from(["carry", "short"]), loops=st.integers(1, 4))
def test_a_loop_ends_with_the_epoch(samples: int, size: int, tail: str, loops: int) -> None:
    batches = Batches(samples, size=size, tail=tail, order="as-is")  # type: ignore[arg-type]
    used: list[int] = []
    for _ in range(loops):
        epoch, expected = batches.steps.settled(batches.start).epoch, len(batches)
        found = list(batches)
        assert len(found) == expected
        used += [sample for batch in found for sample in batch]
        assert batches.steps.settled(batches.start).epoch > epoch
        if tail == "short":
            assert len(used) == samples * (epoch + 1)
    assert used == [i % samples for i in range(len(used))]


@given(count=st.integers(0, 200), parts=st.integers(1, 20))
def test_shares_are_even_and_whole(count: int, parts: int) -> None:
    shares = [range(count)[share(count, part, parts)] for part in range(parts)]
    assert [i for s in shares for i in s] == list(range(count))
    assert {len(s) for s in shares} <= {count // parts, -(-count // parts)}


def test_the_order_of_an_epoch_never_changes() -> None:
    """Written down once: a job that is resumed years later must go on in the order that it began with."""
    assert [int(i) for i in shuffled(10, 0, 0)] == [6, 1, 0, 5, 3, 8, 7, 9, 2, 4]
    assert [int(i) for i in shuffled(10, 7, 3)] == [5, 4, 9, 2, 7, 1, 0, 8, 3, 6]
    assert sorted(shuffled(1000, 1, 1)) == list(range(1000))
    assert not np.array_equal(shuffled(1000, 1, 1), shuffled(1000, 1, 2))


def test_an_order_of_ones_own() -> None:
    batches = Batches(4, size=2, order=lambda epoch: [3, 2, 1, 0] if epoch % 2 else [0, 1, 2, 3])
    assert [list(batches), list(batches)] == [[[0, 1], [2, 3]], [[3, 2], [1, 0]]]
    with pytest.raises(UsageError, match=r"order\(0\) gives 3 samples, not 4"):
        list(Batches(4, size=2, order=lambda epoch: [1, 2, 3]))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"samples": 0, "size": 1}, "out of 0 samples"),
        ({"samples": 5, "size": 6, "tail": "drop"}, "leaves out all"),
        ({"samples": 5, "size": 2, "tail": "keep"}, "tail is"),
        ({"samples": 5, "size": 2, "part": 2, "parts": 2}, "part 2 of 2"),
        ({"samples": 5, "size": 1, "parts": 2}, "part 0 of 2 in batches of 1"),
        ({"samples": 5, "size": 1, "order": "random"}, "order is"),
        ({"samples": 5, "size": 1, "seed": -1}, "seed not negative"),
    ],
)
def test_numbers_that_do_not_fit(arguments, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Batches(**arguments)


@pytest.mark.parametrize(("change", "text"), [({"samples": 6}, "samples 5, now 6"), ({"seed": 2}, "order shuffled 1, now shuffled 2")])
def test_a_position_counts_in_its_own_order_only(change, text: str) -> None:
    state = Batches(5, size=2, seed=1).position_state(Position(epoch=1, taken=2))
    with pytest.raises(StateError, match=text):
        Batches(**{"samples": 5, "size": 2, "seed": 1, **change}).position_of(state)
