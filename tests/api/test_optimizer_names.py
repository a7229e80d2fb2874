"""Names of optimizer states as DCP writes them, without their module: which module is meant, or that nobody can know."""

from __future__ import annotations

import pytest

from ckpt.adapters.binding.optimizer_names import _module


@pytest.mark.parametrize(
    ("wanted", "stored", "module"),
    [
        ({"model.a", "model.b"}, {"a", "b"}, "model"),
        ({"model.a"}, {"a", "b"}, "model"),  # the first of two pipeline stages
        ({"model.a", "model.b"}, {"a"}, "model"),  # b never had a gradient
        ({"m.0.w", "m.1.0.w"}, {"0.w", "1.0.w"}, "m"),  # though 0.w is also the name of m.1.0.w within m.1
        ({"m.0.w", "m.1.0.w", "m.1.1.w"}, {"0.w", "1.w"}, None),  # of m, with other layers, or of m.1: nobody knows
        ({"a.w", "b.w"}, {"w"}, None),
        ({"model.a"}, {"model.a"}, None),
        ({"model.a"}, set(), None),
    ],
)
def test_the_module_in_front_of_stored_names(wanted: set[str], stored: set[str], module: str | None) -> None:
    assert _module(wanted, stored) == module
