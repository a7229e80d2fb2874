"""Views give the elements that numpy gives for the same operations, and turned round they give the sources back."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from ckpt.catalog import Grid
from ckpt.errors import UsageError
from ckpt.plan import views
from ckpt.plan.layout.geometry import Box, flat_to_boxes
from ckpt.plan.layout.partition import MOST_BOXES, StridedView, boxes_of_view
from ckpt.plan.reads import Copy, overlapping_chunks
from ckpt.plan.views import LogicalTensor
from tests.box_strategies import as_arrays, boxes_in, grids, shapes

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
        (lambda: views.transpose(views.whole("a", (4, 2)), [0, 0]), "not an order"),
        (lambda: views.part(views.whole("a", (4,)), Box((2,), (3,))), "does not lie in"),
        (lambda: views.padded(views.whole("a", (4,)), 0, 3), "more than 3"),
        (lambda: views.unstack(views.whole("a", (4,)), 1), "no axis 1"),
    ],
)
def test_what_cannot_be_is_told(wrong: object, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        wrong()  # type: ignore[operator]


# ------------------------------------------------------------------------------------------------------------------------------------------
# Views of tensors as boxes: every element of a view lies in exactly one box, beside the element that a copy pairs with it.

Array = npt.NDArray[np.int64]


def described(view: Array, base: Array) -> StridedView:
    offset = (view.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // view.itemsize
    return StridedView(view.shape, tuple(s // view.itemsize for s in view.strides), offset)


def shown(base: Array, view: StridedView) -> Array:
    strides = tuple(s * base.itemsize for s in view.strides)
    return as_strided(base.reshape(-1)[view.offset :], view.shape, strides, writeable=False)


@st.composite
def strided_views(draw: st.DrawFn, base: Array) -> Array:
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
    view = data.draw(strided_views(base))
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


# --------------------------------------------- The copies of a join tile the target, and copying through numpy gives the target's elements.

ONE_FILE = np.zeros(1, dtype=np.int32)


def stored_chunks(grid: Grid, array: np.ndarray) -> list[np.ndarray]:
    """What a writer stores: a contiguous copy of each chunk, in the order of the grid."""
    offsets, sizes = (a.tolist() for a in grid.all_boxes())
    return [array[Box(tuple(o), tuple(s)).slices].copy() for o, s in zip(offsets, sizes, strict=True)]


def through_copies(copies: list[Copy], chunks: list[np.ndarray], target: Box) -> tuple[np.ndarray, np.ndarray]:
    """The target as the copies fill it, -1 where none does; and how many copies fill each element."""
    filled, times = np.full(target.shape, -1, dtype=np.int64), np.zeros(target.shape, dtype=np.int64)
    for copy in copies:
        assert chunks[copy.chunk].shape == copy.chunk_box.shape
        to = copy.box.relative_to(target.offset).slices
        filled[to] = chunks[copy.chunk][copy.box.relative_to(copy.chunk_box.offset).slices]
        times[to] += 1
    return filled, times


@given(shapes(), st.data())
def test_copies_tile_the_target_and_carry_its_elements(shape: tuple[int, ...], data: st.DataObject) -> None:
    grid, target = data.draw(grids(shape)), data.draw(boxes_in(shape))
    array = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    copies = overlapping_chunks(grid, target)
    filled, times = through_copies(copies, stored_chunks(grid, array), target)
    assert np.array_equal(filled, array[target.slices])
    assert (times == 1).all()
    assert all(c.box.numel > 0 for c in copies)


@given(shapes(), st.data())
def test_copies_come_in_chunk_order_and_name_whole_chunks(shape: tuple[int, ...], data: st.DataObject) -> None:
    grid, target = data.draw(grids(shape)), data.draw(boxes_in(shape))
    offsets, sizes = (a.tolist() for a in grid.all_boxes())
    copies = overlapping_chunks(grid, target)
    chunks = [c.chunk for c in copies]
    assert chunks == sorted(set(chunks))
    for copy in copies:
        assert copy.chunk_box == Box(tuple(offsets[copy.chunk]), tuple(sizes[copy.chunk]))
        numbers = (copy.chunk, *copy.box.offset, *copy.box.shape, *copy.chunk_box.offset, *copy.chunk_box.shape)
        assert {type(n) for n in numbers} == {int}  # numpy integers would not pass through JSON


@given(shapes(min_side=1), st.data())
def test_a_missing_chunk_leaves_its_elements_out(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Coverage is proven elsewhere; a hole must give fewer copies, not wrong ones."""
    offsets, sizes = data.draw(grids(shape)).all_boxes()
    lost = data.draw(st.integers(0, len(offsets) - 1))
    hole = Box(tuple(offsets[lost].tolist()), tuple(sizes[lost].tolist()))
    grid = Grid(boxes=(np.delete(offsets, lost, axis=0), np.delete(sizes, lost, axis=0)), files=ONE_FILE)
    target = data.draw(boxes_in(shape, min_side=1))
    array = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    expected = array.copy()
    expected[hole.slices] = -1
    filled, times = through_copies(overlapping_chunks(grid, target), stored_chunks(grid, array), target)
    assert np.array_equal(filled, expected[target.slices])
    assert np.array_equal(times, expected[target.slices] != -1)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.data())
def test_empty_cells_give_no_copies(inner: list[int], data: st.DataObject) -> None:
    """Repeated boundaries are what a rank with nothing in an uneven cut leaves."""
    cuts = (0, *sorted(inner), 12)
    target = data.draw(boxes_in((12,)))
    copies = overlapping_chunks(Grid(cuts=(cuts,), files=ONE_FILE), target)
    owner = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    assert all(c.box.numel > 0 for c in copies)
    assert [c.chunk for c in copies for _ in range(c.box.numel)] == owner[target.slices].tolist()


@pytest.mark.parametrize("box", [Box((0, 0), (0, 3)), Box((4, 3), (0, 0)), Box((2, 1), (1, 0))], ids=str)
def test_an_empty_box_has_no_copies(box: Box) -> None:
    whole = as_arrays([Box.whole((4, 3))], 2)
    assert overlapping_chunks(Grid(cuts=((0, 2, 4), (0, 3)), files=ONE_FILE), box) == []
    assert overlapping_chunks(Grid(boxes=whole, files=ONE_FILE), box) == []


def test_a_scalar_is_one_copy() -> None:
    scalar = Box((), ())
    expected = [Copy(chunk=0, chunk_box=scalar, box=scalar)]
    assert overlapping_chunks(Grid(cuts=(), files=ONE_FILE), scalar) == expected
    assert overlapping_chunks(Grid(boxes=as_arrays([scalar], 0), files=ONE_FILE), scalar) == expected


def test_a_box_in_one_cell_is_one_copy() -> None:
    grid = Grid(cuts=((0, 10, 20, 30), (0, 5, 8)), files=ONE_FILE)
    assert overlapping_chunks(grid, Box((12, 5), (8, 2))) == [Copy(chunk=3, chunk_box=Box((10, 5), (10, 3)), box=Box((12, 5), (8, 2)))]


def test_a_box_beyond_the_tensor_gets_what_there_is() -> None:
    grid = Grid(cuts=((0, 2, 4),), files=ONE_FILE)
    assert overlapping_chunks(grid, Box((3,), (9,))) == [Copy(chunk=1, chunk_box=Box((2,), (2,)), box=Box((3,), (1,)))]
    assert overlapping_chunks(grid, Box((4,), (3,))) == []


def test_offsets_beyond_32_bits() -> None:
    side = 1 << 40
    grid = Grid(cuts=((0, side, 2 * side), (0, side)), files=ONE_FILE)
    copies = overlapping_chunks(grid, Box((side - 1, 5), (2, side - 5)))
    assert [c.box for c in copies] == [Box((side - 1, 5), (1, side - 5)), Box((side, 5), (1, side - 5))]


def test_flat_ranges_of_two_ranks_meet_in_a_row() -> None:
    """A ZeRO-style cut in the middle of a row, read back as columns."""
    shape, middle = (4, 6), 9
    chunks = flat_to_boxes(shape, 0, middle) + flat_to_boxes(shape, middle, 24)
    assert chunks == [Box((0, 0), (1, 6)), Box((1, 0), (1, 3)), Box((1, 3), (1, 3)), Box((2, 0), (2, 6))]
    copies = overlapping_chunks(Grid(boxes=as_arrays(chunks, 2), files=ONE_FILE), Box((0, 2), (4, 2)))
    assert [(c.chunk, c.box) for c in copies] == [
        (0, Box((0, 2), (1, 2))),
        (1, Box((1, 2), (1, 1))),
        (2, Box((1, 3), (1, 1))),
        (3, Box((2, 2), (2, 2))),
    ]
