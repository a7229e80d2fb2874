"""Machines of ranks in few bytes, against a search through all ranks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.plan.machines import neighbours, numbers_of, spell

LISTS = st.one_of(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=20),
    st.lists(st.integers(1, 4), min_size=1, max_size=6).map(lambda sizes: [f"m{i}" for i, n in enumerate(sizes) for _ in range(n)]),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 30)).map(lambda t: [f"m{i // t[0] % t[1]}" for i in range(t[2])]),
)


@given(LISTS)
def test_neighbours_are_those_of_the_same_machine(machines: list[str]) -> None:
    ranks = range(100, 100 + len(machines))
    spelled = json.loads(json.dumps(spell(machines)))
    assert numbers_of(spelled, len(machines)).tolist() == [[*dict.fromkeys(machines)].index(name) for name in machines]
    for place, name in enumerate(machines):
        assert neighbours(spelled, place, ranks) == {rank for rank, other in zip(ranks, machines, strict=True) if other == name}


@pytest.mark.parametrize("size", [1, 8, 10000])
@pytest.mark.parametrize("count", [1, 2000])
def test_usual_placements_take_as_few_bytes_for_any_number_of_ranks(size: int, count: int) -> None:
    """What each of n ranks reads must not grow with n."""
    dealt = [i // size % count for i in range(16384)]
    short_last = [i // size for i in range(16383)]
    one_lacks_two = [i // 8 for i in range(2, 16384)]
    for machines in (dealt, short_last, one_lacks_two):
        assert len(json.dumps(spell(machines))) < 50
