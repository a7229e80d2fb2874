"""Cases of several choices, of which each two occur together: the others show the same again, and run with ``--slow``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*axes: Sequence[Any], ids: Sequence[Sequence[str]] | None = None) -> list[Any]:
    """All combinations of one value of each axis, as parameters; those that add no new pair of values are marked slow."""
    names = ids if ids is not None else [[getattr(value, "__name__", str(value)) for value in axis] for axis in axes]
    left = {pair for cell in product(*(range(len(axis)) for axis in axes)) for pair in _pairs(cell)}
    cells = list(product(*(range(len(axis)) for axis in axes)))
    chosen: set[tuple[int, ...]] = set()
    while left:  # the one with most new pairs, the first of several
        best = max(cells, key=lambda cell: sum(pair in left for pair in _pairs(cell)))
        chosen.add(best)
        left -= {*_pairs(best)}
    return [
        pytest.param(
            *(axis[n] for axis, n in zip(axes, cell, strict=True)),
            id="-".join(of[n] for of, n in zip(names, cell, strict=True)),
            marks=() if cell in chosen else pytest.mark.slow,
        )
        for cell in cells
    ]


def _pairs(cell: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return list(combinations(enumerate(cell), 2))
