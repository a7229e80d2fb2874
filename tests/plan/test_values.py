"""Values of several ranks join as plain dicts would, and what differs is an error."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import ConsistencyError, UsageError
from ckpt.plan import tree
from ckpt.plan.values import join_values
from tests.test_tree import no_leaf, no_special, same

plain_leaves = st.integers(0, 1) | st.sampled_from([0.0, -0.0, True, None, "a", ()]) | st.lists(st.integers(0, 1), max_size=2)
plain_trees = st.recursive(
    plain_leaves, lambda inner: st.dictionaries(st.sampled_from(["a", "b", "$", 1, (2,)]), inner, max_size=4), max_leaves=8
)


def united(a: Any, b: Any) -> Any:
    """The two as one dict; AssertionError if some path has two values."""
    if isinstance(a, dict) and isinstance(b, dict):
        return {k: united(a[k], b[k]) if k in a and k in b else {**a, **b}[k] for k in {**a, **b}}
    assert same(a, b)
    return a


@given(st.dictionaries(st.sampled_from("abc"), plain_trees), st.lists(st.sets(st.sampled_from("abc")), min_size=1, max_size=4))
def test_parts_of_one_state_make_it_whole_again(state: dict[str, Any], parts: list[set[str]]) -> None:
    nodes = [([i], tree.encode({k: state[k] for k in state if k in part}, "", no_leaf)) for i, part in enumerate(parts)]
    seen = set.union(*parts)
    assert tree.decode(join_values(nodes), no_special) == {k: v for k, v in state.items() if k in seen}


@given(plain_trees, plain_trees)
def test_two_states_join_exactly_if_no_path_has_two_values(a: Any, b: Any) -> None:
    nodes = [([0], tree.encode({"r": a}, "", no_leaf)), ([1], tree.encode({"r": b}, "", no_leaf))]
    try:
        wanted = united({"r": a}, {"r": b})
    except AssertionError:
        with pytest.raises(ConsistencyError):
            join_values(nodes)
    else:
        assert same(tree.decode(join_values(nodes), no_special), wanted)


def test_different_values_are_reported_with_path_values_and_ranks() -> None:
    same_part = {"lr": 0.1, "deep": {"a": 1}}
    nodes = [
        ([0, 1, 2], {**same_part, "seed": 1}),
        ([5, 3], {**same_part, "seed": 2, "deep": {"a": 1.0}}),
        ([4], {**same_part, "seed": 1}),
    ]
    with pytest.raises(ConsistencyError) as caught:
        join_values(nodes)
    lines = caught.value.message.splitlines()
    assert "2 values" in lines[0]
    assert [line.strip() for line in lines[1:]] == [
        "deep.a: 1 on ranks 0-2, 4, 1.0 on ranks 3, 5",
        "seed: 1 on ranks 0-2, 4, 2 on ranks 3, 5",
    ]
    assert "ckpt.PerRank" in (caught.value.hint or "")


def test_at_most_ten_conflicts_are_shown_and_all_are_counted() -> None:
    with pytest.raises(ConsistencyError) as caught:
        join_values([([r], {f"k{i}": r for i in range(25)}) for r in range(2)])
    assert "25 values" in caught.value.message
    assert sum(" on rank 1" in line for line in caught.value.message.splitlines()) == 10
    assert "15 more" in caught.value.message


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (0, False),
        (1, 1.0),
        (0.0, -0.0),
        (None, {}),
        ([1], [1, 2]),
        ([1], {"$tuple": [1]}),
        ([[1]], {"$tuple": [[1]]}),
        ([[1]], [[1], [2]]),
        ([[1], [2]], [[1]]),
        ({"$tensor": "a"}, {"$tensor": "b"}),
        ("1", 1),
    ],
)
def test_values_that_python_or_json_may_take_for_equal_are_not(a: tree.Node, b: tree.Node) -> None:
    with pytest.raises(ConsistencyError, match="x: "):
        join_values([([0], {"x": a}), ([1], {"x": b})])


def test_nan_is_equal_to_itself() -> None:
    node = tree.encode({"loss": math.nan, "a": np.array([math.nan])}, "", no_leaf)
    assert join_values([([0], node), ([1], json.loads(json.dumps(node)))]) == node


def test_plain_and_typed_mappings_are_united() -> None:
    parts: list[dict[Any, Any]] = [{"a": 1, "m": {0: "x"}}, {5: 2, "m": {1: "y", "0": "z"}}, {"m": {}, "$": 3}]
    joined = join_values([([i], tree.encode(p, "", no_leaf)) for i, p in enumerate(parts)])
    assert tree.decode(joined, no_special) == {"a": 1, "m": {0: "x", 1: "y", "0": "z"}, 5: 2, "$": 3}


def test_lists_of_containers_join_by_element_and_lists_of_scalars_conflict_whole() -> None:
    chunks = [([0], {"m": [{"a": 1}, {"b": 2}], "t": {"$tuple": [{}]}}), ([1], {"m": [{"a": 1}, {"c": 3}], "t": {"$tuple": [{"k": 1}]}})]
    assert join_values(chunks) == {"m": [{"a": 1}, {"b": 2, "c": 3}], "t": {"$tuple": [{"k": 1}]}}
    random = [([r], {"rng": {"$tuple": [3, {"$tuple": [r] * 624}, None]}}) for r in range(2)]
    with pytest.raises(ConsistencyError, match=r"1 value of") as caught:
        join_values(random)
    assert "rng.1: " in caught.value.message
    assert len(caught.value.message) < 400


def test_a_module_joins_with_the_same_module_that_has_extra_states_on_other_ranks() -> None:
    plain, prefix = {"model": {"$tensors": "model"}}, {"": {"$tensors": "model"}}
    nodes = [([0], plain), ([1], {"model": {**prefix, "a": 1}}), ([2], {"model": {**prefix, "b": 2}})]
    assert join_values(nodes) == {"model": {**prefix, "a": 1, "b": 2}}
    assert join_values([([0], plain), ([1], plain)]) == plain
    with pytest.raises(ConsistencyError, match="model"):
        join_values([([0], plain), ([1], {"model": {"$tensors": "other"}})])


def groups(*pairs: tuple[str, Any]) -> tree.Node:
    return {"g": {"$param_groups": [{"params": list(names), "options": {"lr": lr}} for names, lr in pairs]}}


def test_param_groups_with_equal_options_are_one_wherever_they_stand() -> None:
    joined = join_values([([0], groups(("ab", 1), ("c", 2))), ([1], groups(("cd", 2), ("be", 1))), ([2], groups(("f", 3), ("", 4)))])
    assert joined == groups(("abe", 1), ("cd", 2), ("f", 3), ("", 4))


def test_equal_param_groups_stay_as_they_are() -> None:
    node = groups(("a", 1), ("b", 1))
    assert join_values([([0], node), ([1], groups(("a", 1), ("b", 1)))]) == node


def test_a_parameter_with_two_options_is_one_conflict_per_option() -> None:
    with pytest.raises(ConsistencyError) as caught:
        join_values([([0, 1], groups(("abc", 0.1), ("z", 5))), ([2], groups(("bcd", 0.2), ("z", 5)))])
    assert caught.value.message.splitlines()[1:] == ["  g.b.lr: 0.1 on ranks 0-1, 0.2 on rank 2 (and so for 1 more parameters)"]
    with pytest.raises(ConsistencyError) as caught:
        join_values([([0], groups(("a", 0.1))), ([1], groups(("a", 0.2))), ([2], groups(("a", 0.2), ("b", 0.1)))])
    assert caught.value.message.splitlines()[1:] == ["  g.a.lr: 0.1 on rank 0, 0.2 on ranks 1-2"]


def test_an_option_that_one_side_lacks_is_a_conflict() -> None:
    with_wd = {"$param_groups": [{"params": ["w"], "options": {"lr": 1, "wd": 0}}]}
    with pytest.raises(ConsistencyError, match=re.escape('g.w: {"lr":1} on rank 0, {"lr":1,"wd":0} on rank 1')):
        join_values([([0], groups(("w", 1))), ([1], {"g": with_wd})])


def test_merging_nothing_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        join_values([])


def test_merging_changes_no_input() -> None:
    nodes = [
        groups(("a", 1)),
        groups(("b", 1)),
        {"g": groups(("b", 1))["g"], "m": {"$map": [[1, {"x": 1}]]}},
        {"m": {"$map": [[1, {"y": 1}]]}},
    ]
    before = json.dumps(nodes)
    join_values([([i], n) for i, n in enumerate(nodes)])
    assert json.dumps(nodes) == before
