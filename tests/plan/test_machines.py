"""Machines of ranks in few bytes, against a search through all ranks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.plan.machines import ancestors, has_descendants, neighbours, numbers_of, spell

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


@given(LISTS, st.integers(1, 8))
def test_a_value_comes_to_every_rank_and_once_to_every_machine(machines: list[str], fan: int) -> None:
    numbers = numbers_of(spell(machines), len(machines))
    above = [ancestors(place, numbers, fan) for place in range(len(machines))]
    assert above[0] == []
    for place, path in enumerate(above[1:], 1):
        assert path == [path[0], *above[path[0]]], "the ancestors of the first one are the others"
        assert path[-1] == 0
        assert place not in path
    into = [machines[place] for place, path in enumerate(above) if path and machines[path[0]] != machines[place]]
    assert sorted(into) == sorted({*machines} - {machines[0]})
    below = [sum(path[:1] == [place] for path in above) for place in range(len(machines))]
    assert max(below) <= 2 * fan
    assert [has_descendants(place, numbers, fan) for place in range(len(machines))] == [count > 0 for count in below]
