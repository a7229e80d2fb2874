"""Views give the elements that numpy gives for the same operations, and turned round they give the sources back."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.plan import views
from ckpt.plan.layout.geometry import Box
from ckpt.plan.views import LogicalTensor

Arrays = dict[str, np.ndarray]
Pair = tuple[LogicalTensor, np.ndarray]


def read(view: LogicalTensor, arrays: Arrays) -> np.ndarray:
    """The view's elements, -1 where it has filling."""
    found = np.full(view.shape, -1, dtype=np.int64)
    for box, source, part, axes in view.pieces:
        block = arrays[source][part.slices]
        block = block.transpose([*[a for a in axes if a is not None], *[a for a in range(block.ndim) if a not in axes]])
        found[box.slices] = block.reshape(box.shape)
    return found


def array(shape: tuple[int, ...], first: int) -> np.ndarray:
    return np.arange(first, first + math.prod(shape), dtype=np.int64).reshape(shape)


@st.composite
def programs(draw: st.DrawFn) -> tuple[LogicalTensor, np.ndarray, Arrays]:
    """A random program of operations over a few stored tensors of one shape, beside the same program in numpy."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    arrays = {f"t{i}": array(shape, i * 1000) for i in range(draw(st.integers(1, 4)))}
    now: list[Pair] = [(views.whole(name, a.shape), a) for name, a in arrays.items()]
    for _ in range(draw(st.integers(0, 5))):
        now = draw(steps(now))
    view, expected = now[0]
    if len(now) > 1:
        view, expected = views.concat([v for v, _ in now], 0), np.concatenate([a for _, a in now])
    return view, expected, arrays


@st.composite
def steps(draw: st.DrawFn, now: list[Pair]) -> list[Pair]:
    rank = now[0][1].ndim
    axis = draw(st.integers(0, rank - 1))
    kind = draw(st.sampled_from(["stack", "concat", "interleave", "transpose", "halves", "unstack"]))
    if kind == "stack" and rank < 5:
        return [(views.stack([v for v, _ in now], axis), np.stack([a for _, a in now], axis))]
    if kind == "concat":
        return [(views.concat([v for v, _ in now], axis), np.concatenate([a for _, a in now], axis))]
    if kind == "interleave":
        size = now[0][1].shape[axis]
        groups = draw(st.sampled_from([g for g in range(1, size + 1) if size % g == 0]))
        mixed = [p for group in zip(*[np.split(a, groups, axis) for _, a in now], strict=True) for p in group]
        return [(views.interleave([v for v, _ in now], axis, groups), np.concatenate(mixed, axis))]
    if kind == "transpose":
        order = draw(st.permutations(range(rank)))
        return [(views.transpose(v, order), a.transpose(order)) for v, a in now]
    if kind == "halves" and now[0][1].shape[axis] % 2 == 0:
        half = now[0][1].shape[axis] // 2
        return [p for v, a in now for p in zip(views.split(v, axis, [half, half]), np.split(a, 2, axis), strict=True)]
    if kind == "unstack" and rank > 1 and len(now) * now[0][1].shape[axis] <= 12:
        parts = [zip(views.unstack(v, axis), np.moveaxis(a, axis, 0), strict=True) for v, a in now]
        return [p for pairs in parts for p in pairs]
    return now


@given(programs())
def test_a_view_gives_what_numpy_gives(program: tuple[LogicalTensor, np.ndarray, Arrays]) -> None:
    view, expected, arrays = program
    assert view.shape == expected.shape
    assert np.array_equal(read(view, arrays), expected)
    assert view.fault() is None


@given(programs(), st.data())
def test_a_box_of_a_view(program: tuple[LogicalTensor, np.ndarray, Arrays], data: st.DataObject) -> None:
    view, expected, arrays = program
    start = [data.draw(st.integers(0, s - 1)) for s in view.shape]
    box = Box(tuple(start), tuple(data.draw(st.integers(1, s - a)) for s, a in zip(view.shape, start, strict=True)))
    assert np.array_equal(read(views.part(view, box), arrays), expected[box.slices])


def test_fused_qkv_of_megatron() -> None:
    """4 query heads, 2 key-value heads of 3 rows: q0 q1 k0 v0 q2 q3 k1 v1 (facts of the layout, written out by hand)."""
    q, k, v = array((12, 2), 0), array((6, 2), 100), array((6, 2), 200)
    parts = [views.whole(n, a.shape) for n, a in (("q", q), ("k", k), ("v", v))]
    fused = views.interleave(parts, 0, 2)
    by_hand = np.concatenate([q[:6], k[:3], v[:3], q[6:], k[3:], v[3:]])
    assert np.array_equal(read(fused, {"q": q, "k": k, "v": v}), by_hand)
    apart = views.deinterleave(views.whole("qkv", by_hand.shape), 0, 2, [12, 6, 6])
    for one, expected in zip(apart, (q, k, v), strict=True):
        assert np.array_equal(read(one, {"qkv": by_hand}), expected)


def test_padding_is_filling() -> None:
    view = views.padded(views.whole("w", (3, 2)), 0, 5)
    assert read(view, {"w": array((3, 2), 0)}).tolist() == [[0, 1], [2, 3], [4, 5], [-1, -1], [-1, -1]]
    fault = view.fault()
    assert fault is not None
    assert (fault.box, fault.times) == (Box((3, 0), (2, 2)), 0)
    assert views.filled(view) == 6


def test_filling_at_the_end_is_padding() -> None:
    w = views.whole("w", (3, 2))
    assert views.padded(w, 0, 5).unpadded == (3, 2)
    assert views.padded(views.padded(w, 0, 5), 1, 4).unpadded == (3, 2)
    assert w.unpadded is None
    assert views.concat([views.padded(w, 0, 5), w], 0).unpadded is None
    assert LogicalTensor(shape=(2,), pieces=()).unpadded is None


def test_the_beginning_of_a_tensor_is_not_all_of_it() -> None:
    w = views.whole("w", (4, 6))
    assert w.is_all_of((4, 6))
    for axis, sizes in ((0, (3, 1)), (1, (2, 4))):
        assert not views.split(w, axis, sizes)[0].is_all_of((4, 6))


def test_a_scalar_and_an_empty_tensor() -> None:
    assert read(views.whole("s", ()), {"s": np.array(7)}) == 7
    assert read(views.stack([views.whole("s", ())] * 2, 0), {"s": np.array(7)}).tolist() == [7, 7]
    assert views.concat([views.whole("e", (0, 2)), views.whole("w", (1, 2))], 0).shape == (1, 2)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: views.concat([], 0), "nothing to put together"),
        (lambda: views.concat([views.whole("a", (2, 3)), views.whole("b", (2, 4))], 0), "cannot be put together"),
        (lambda: views.stack([views.whole("a", (2,)), views.whole("b", (3,))], 0), "cannot be put together"),
        (lambda: views.split(views.whole("a", (4,)), 0, [1, 2]), "do not make up"),
        (lambda: views.interleave([views.whole("a", (4,))], 0, 3), "3 equal groups"),
        (lambda: views.interleave([views.whole("a", (4,))], 0, 0), "0 equal groups"),
        (lambda: views.transpose(views.whole("a", (4, 2)), [0, 0]), "no order"),
        (lambda: views.part(views.whole("a", (4,)), Box((2,), (3,))), "does not lie in"),
        (lambda: views.padded(views.whole("a", (4,)), 0, 3), "more than 3"),
        (lambda: views.unstack(views.whole("a", (4,)), 1), "no axis 1"),
    ],
)
def test_what_cannot_be_is_told(wrong: object, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        wrong()  # type: ignore[operator]
