"""How work is divided over processes: every item once, and no process with much more than its share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt.plan.machines import balanced, bytes_of, runs

SIZES = st.lists(st.integers(0, 1000), max_size=60)
PROCESSES = st.integers(1, 12)


@given(SIZES, PROCESSES)
def test_every_item_is_done_once(sizes: list[int], processes: int) -> None:
    for shares in (balanced(sizes, processes), runs(sizes, processes)):
        assert len(shares) == processes
        assert sorted(n for share in shares for n in share) == list(range(len(sizes)))
    assert [n for run in runs(sizes, processes) for n in run] == list(range(len(sizes)))


@given(SIZES, PROCESSES)
def test_shares_are_even_up_to_one_item(sizes: list[int], processes: int) -> None:
    counted = [max(1, size) for size in sizes]
    for shares in (balanced(sizes, processes), runs(sizes, processes)):
        most = max(sum(counted[n] for n in share) for share in shares)
        assert most <= sum(counted) / processes + max(counted, default=0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(2, 3))
def test_balanced_is_near_the_best(sizes: list[int], processes: int) -> None:
    """Graham's bound, against all ways there are."""
    loads = {(0,) * processes}
    for size in sizes:
        loads = {tuple(sorted((*load[:i], load[i] + size, *load[i + 1 :]))) for load in loads for i in range(processes)}
    best = min(max(load) for load in loads)
    assert 3 * max(sum(sizes[n] for n in share) for share in balanced(sizes, processes)) <= 4 * best


def test_files_of_one_size_go_round() -> None:
    assert balanced([7] * 5, 2) == [[0, 2, 4], [1, 3]]
    assert balanced([1, 9, 4], 4) == [[1], [2], [0], []]
    assert runs([5] * 6, 3) == [range(2), range(2, 4), range(4, 6)]


def test_only_a_share_without_items_has_no_bytes() -> None:
    sizes = [5, 0, 0]
    assert bytes_of(sizes, balanced(sizes, 4)) == [5, 1, 1, 0]
    assert bytes_of(sizes, runs(sizes, 2)) == [5, 2]
