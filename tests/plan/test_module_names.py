"""Names of parameters without their module: which module is meant, or that nobody can know."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.plan.match import EnclosingModule, enclosing_module


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ({"model.a", "model.b"}, {"a", "b"}, ("model", {"a", "b"}, False)),
        ({"model.a"}, {"a", "b"}, ("model", {"a"}, False)),  # the first of two pipeline stages
        ({"model.a", "model.b"}, {"a"}, ("model", {"a"}, False)),  # b never had a gradient
        ({"wrapped.model.a", "model.b", "a.b"}, {"a"}, ("wrapped.model", {"a"}, False)),
        ({"m.0.w", "m.1.0.w"}, {"0.w", "1.0.w"}, ("m", {"0.w", "1.0.w"}, True)),  # though 0.w is also the name of m.1.0.w within m.1
        ({"m.0.w", "m.1.0.w", "m.1.1.w"}, {"0.w", "1.w"}, ("m.1", {"0.w", "1.w"}, True)),  # a guess: the caller sees what is not explained
        ({"a.w", "b.w"}, {"w"}, None),
        ({"a.w", "a.x", "b.w", "b.y"}, {"w", "x", "y"}, None),
        ({"model.a"}, {"model.a"}, None),
        ({"model.a"}, set(), None),
        (set(), {"a"}, None),
    ],
)
def test_the_module_in_front(outer: set[str], inner: set[str], expected: tuple[str, set[str], bool] | None) -> None:
    module = enclosing_module(inner, outer)
    assert module == (None if expected is None else EnclosingModule(path=expected[0], explained=expected[1], rivals=expected[2]))


_NAMES = st.lists(st.sampled_from("ab01"), min_size=1, max_size=4).map(".".join)


@given(st.frozensets(_NAMES, max_size=6), st.frozensets(_NAMES, max_size=6))
def test_no_other_module_explains_what_the_chosen_one_does_not(inner: frozenset[str], outer: frozenset[str]) -> None:
    paths = {name[:i] for name in outer for i, character in enumerate(name) if character == "."}
    explains = {path: {name for name in inner if f"{path}.{name}" in outer} for path in paths}
    module = enclosing_module(inner, outer)
    if module is None:
        fitting = [names for names in explains.values() if names]
        assert not fitting or inner & outer or not any(all(names < best or names is best for names in fitting) for best in fitting)
    else:
        assert module.explained == explains[module.path]
        assert all(names < module.explained for path, names in explains.items() if path != module.path)
        assert module.rivals == (sum(map(bool, explains.values())) > 1)
