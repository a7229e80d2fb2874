"""Views of tensors as boxes: every element of a view lies in exactly one box, beside the element that a copy pairs with it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from ckpt.plan.layout.geometry import Box
from ckpt.plan.layout.partition import MOST_BOXES, StridedView, boxes_of_view
from tests.box_strategies import shapes

Array = npt.NDArray[np.int64]


def described(view: Array, base: Array) -> StridedView:
    offset = (view.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // view.itemsize
    return StridedView(view.shape, tuple(s // view.itemsize for s in view.strides), offset)


def shown(base: Array, view: StridedView) -> Array:
    strides = tuple(s * base.itemsize for s in view.strides)
    return as_strided(base.reshape(-1)[view.offset :], view.shape, strides, writeable=False)


@st.composite
def views(draw: st.DrawFn, base: Array) -> Array:
    """What a loader does with a tensor: cut, transpose, divide and join dimensions; without a copy."""
    view = base
    for _ in range(draw(st.integers(0, 4))):
        how = draw(st.sampled_from(["cut", "step", "turn", "divide", "join"]))
        if view.ndim == 0:
            break
        dim = draw(st.integers(0, view.ndim - 1))
        size = view.shape[dim]
        if how in ("cut", "step"):
            start = draw(st.integers(0, size))
            stop = draw(st.integers(start, size))
            at = slice(start, stop, draw(st.integers(1, 3)) if how == "step" else 1)
            view = view[(slice(None),) * dim + (at,)]
        elif how == "turn":
            view = view.transpose(draw(st.permutations(range(view.ndim))))
        elif how == "divide":
            part = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0] or [1]))
            new = (*view.shape[:dim], -1 if size else 0, part, *view.shape[dim + 1 :])
            view = view.reshape(new) if view.size and np.shares_memory(view.reshape(new), view) else view
        elif view.ndim > 1 and dim and view.size:
            new = (*view.shape[: dim - 1], view.shape[dim - 1] * size, *view.shape[dim + 1 :])
            joined = view.reshape(new)
            view = joined if np.shares_memory(joined, view) else view
    return view


@given(st.data())
def test_boxes_have_the_elements_of_a_view_beside_those_of_the_other_side(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_side=6, max_dims=3))
    base = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    view = data.draw(views(base))
    turned = data.draw(st.permutations(range(view.ndim)))
    memory = np.full(3 + 2 * view.size, -1, dtype=np.int64)  # the other side: the same shape, in any order, somewhere in its memory
    there = memory[3 : 3 + view.size].reshape([view.shape[d] for d in turned]).transpose(np.argsort(turned))
    boxes = boxes_of_view(shape, described(view, base), described(there, memory))
    if boxes is None:
        return
    seen: list[int] = []
    for box, beside in boxes:
        assert box.shape == beside.shape
        seen += base[box.slices].reshape(-1).tolist()
        shown(memory, beside)  # lies inside
        strides = tuple(s * 8 for s in beside.strides)
        as_strided(memory[beside.offset :], beside.shape, strides)[...] = base[box.slices]
    assert sorted(seen) == sorted(view.reshape(-1).tolist()) and len(set(seen)) == len(seen)
    assert (there == view).all() and (memory >= 0).sum() == view.size


@given(st.data())
def test_what_loaders_do_is_never_refused(data: st.DataObject) -> None:
    """Any cuts, any order of dimensions, and dimensions divided: no walk across rows."""
    shape = data.draw(shapes(min_side=1, max_side=6, max_dims=3))
    base = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    view = base
    for dim in range(base.ndim):
        start = data.draw(st.integers(0, shape[dim]))
        stop = data.draw(st.integers(start, shape[dim]))
        view = view[(slice(None),) * dim + (slice(start, stop),)]
    if view.ndim and view.size:
        dim = data.draw(st.integers(0, view.ndim - 1))
        part = data.draw(st.sampled_from([n for n in range(1, view.shape[dim] + 1) if view.shape[dim] % n == 0]))
        old = view.strides[dim]
        new = (*view.shape[:dim], view.shape[dim] // part, part, *view.shape[dim + 1 :])
        view = as_strided(view, new, (*view.strides[:dim], old * part, old, *view.strides[dim + 1 :]))
    view = view.transpose(data.draw(st.permutations(range(view.ndim))))
    boxes = boxes_of_view(shape, described(view, base))
    assert boxes is not None and sum(box.numel for box, _ in boxes) == view.size
    assert len(boxes) <= 1  # a part of one dimension, divided, is one range of it still


@pytest.mark.parametrize(
    ("shape", "view", "boxes"),
    [
        ((6, 4), StridedView((4, 6), (1, 4), 0), [Box((0, 0), (6, 4))]),
        ((6, 4), StridedView((2, 4), (12, 1), 0), [Box((0, 0), (1, 4)), Box((3, 0), (1, 4))]),
        ((6, 4), StridedView((24,), (1,), 0), [Box((0, 0), (6, 4))]),
        ((6, 4), StridedView((8,), (1,), 4), [Box((1, 0), (2, 4))]),
        ((6, 4), StridedView((12,), (2,), 0), [Box((0, 0), (6, 1)), Box((0, 2), (6, 1))]),
        ((), StridedView((), (), 0), [Box((), ())]),
        ((3, 0), StridedView((3, 0), (1, 1), 0), []),
        ((6, 4), StridedView((5,), (1,), 2), None),  # across rows
        ((6, 4), StridedView((3, 4), (0, 1), 0), None),  # one row thrice
        ((6, 4), StridedView((3, 3), (1, 1), 0), None),  # elements twice
        ((6, 4), StridedView((6, 5), (4, 1), 0), None),  # beyond the end
        ((6, 4), StridedView((5,), (5,), 0), None),  # a diagonal
        ((2 * MOST_BOXES + 2, 2), StridedView((MOST_BOXES + 1,), (4,), 0), None),
    ],
)
def test_views_by_hand(shape: tuple[int, ...], view: StridedView, boxes: list[Box] | None) -> None:
    found = boxes_of_view(shape, view)
    assert (found if found is None else [box for box, _ in found]) == boxes
