"""Boxes with owners that somebody else chose: every element is stored once, by its owner, and each rank alone finds its chunks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given as cases
from hypothesis import strategies as st

from ckpt import settings
from ckpt.dtypes import dtype
from ckpt.errors import ConsistencyError, CoverageError
from ckpt.plan.external_assignment import AssignedBox, assign_boxes
from ckpt.plan.layout.geometry import Box


def one(box: Box, owner: int, *, name: str = "w", shape: tuple[int, ...], kind: str = "float32") -> AssignedBox:
    return AssignedBox(name=name, dtype=dtype(kind), shape=shape, box=box, owner=owner)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Box, int]]]:
    """A tensor cut in two, again and again, wherever; each part belongs to some rank."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        first = tuple(at if d == dim else n for d, n in enumerate(box.shape))
        rest = tuple(n - at if d == dim else n for d, n in enumerate(box.shape))
        boxes += [Box(box.offset, first), Box(tuple(o + at if d == dim else o for d, o in enumerate(box.offset)), rest)]
    return shape, [(box, draw(st.integers(0, 3))) for box in draw(st.permutations(boxes))]


@cases(cut_tensors(), st.integers(4, 64))
def test_every_element_is_stored_once_by_its_owner(case: tuple[tuple[int, ...], list[tuple[Box, int]]], most: int) -> None:
    shape, boxes = case
    if 0 in shape:  # one box starts at the origin of an empty tensor: DCP's planner drops the others
        boxes = boxes[:1] if not any(boxes[0][0].offset) else [(Box.whole(shape), 0)]
    before, settings.CHUNK = settings.CHUNK, most
    try:
        found = assign_boxes(one(box, owner, shape=shape) for box, owner in boxes)
        alone = {r: assign_boxes(one(box, owner, shape=shape) for box, owner in boxes if owner == r) for _, r in boxes}
    finally:
        settings.CHUNK = before
    found.check()
    owned = found.assignments["w"]
    wanted, stored, times = (np.full(shape, -1) for _ in range(3))
    for box, owner in boxes:
        wanted[box.slices] = owner
    for chunk, owner in enumerate(owned.owners.tolist()):
        box = owned.box(chunk)
        assert box.numel * 4 <= max(most, 4)
        stored[box.slices] = owner
        times[box.slices] += 1
    assert (stored == wanted).all() and (times == 0).all()
    for rank, mine in alone.items():
        numbers = mine.assignments["w"].written_by(rank) if "w" in mine.assignments else []
        assert [mine.assignments["w"].box(i) for i in numbers] == [owned.box(i) for i in owned.written_by(rank)]


def test_regular_boxes_become_cuts_and_share_a_grid() -> None:
    rows = [Box((a, b), (2, 5)) for a, b in itertools.product((0, 2, 4), (0, 5))]
    found = assign_boxes(one(box, i % 2, name=name, shape=(6, 10)) for name in "ab" for i, box in enumerate(rows))
    assert found.assignments["a"] is found.assignments["b"]
    assert found.assignments["a"].cuts == ((0, 2, 4, 6), (0, 5, 10))
    assert found.assignments["a"].owners.tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("boxes", "times"),
    [([Box((0,), (3,))], 0), ([Box((0,), (3,)), Box((2,), (2,))], 2), ([Box((4,), (0,))], 0)],
    ids=["hole", "overlap", "nothing"],
)
def test_holes_and_overlaps_are_found(boxes: list[Box], times: int) -> None:
    found = assign_boxes(one(box, 0, shape=(4,)) for box in boxes)
    with pytest.raises(CoverageError, match=f"stored {times} times"):
        found.check()


def test_ranks_that_disagree_are_found() -> None:
    with pytest.raises(ConsistencyError, match="float32"):
        assign_boxes([one(Box((0,), (2,)), 0, shape=(4,)), one(Box((2,), (2,)), 1, shape=(4,), kind="int8")])
