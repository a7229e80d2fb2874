"""Properties of boxes, cuts and flat ranges against numpy, which enumerates the elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt.plan.layout import geometry
from ckpt.plan.layout.geometry import (
    Blocks,
    Box,
    box_to_flat,
    ceil_cuts,
    cell_box,
    cells,
    cells_overlapping,
    even_cuts,
    find_fault,
    flat_to_boxes,
    intersect_all,
    merge_cuts,
    row_major_strides,
    strided_blocks,
)
from tests.box_strategies import as_arrays, boxes_in, cuts_of, shapes, tilings


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """A tensor whose elements are their own positions in the row-major flattening."""
    return np.arange(math.prod(shape), dtype=np.int64).reshape(shape)


def mask(shape: tuple[int, ...], box: Box) -> np.ndarray:
    found = np.zeros(shape, dtype=bool)
    found[box.slices] = True
    return found


# ------------------------------------------------------------------------------------------------------------------- boxes


@given(st.data())
def test_intersection_is_the_common_elements(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    both = mask(shape, a) & mask(shape, b)
    common = a.intersect(b)
    assert (common is not None) == both.any()
    if common is not None:
        assert np.array_equal(mask(shape, common), both)


@given(st.data())
def test_without_is_the_rest(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    rest = a.without(b)
    times = sum((mask(shape, box).astype(int) for box in rest), np.zeros(shape, int))
    assert np.array_equal(times, (mask(shape, a) & ~mask(shape, b)).astype(int))
    assert all(box.numel for box in rest) and len(rest) <= max(2 * len(shape), 1)


@given(st.data())
def test_intersect_all_is_the_intersection_with_each(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    box, others = data.draw(boxes_in(shape)), data.draw(st.lists(boxes_in(shape), max_size=6))
    hit, offsets, sizes = intersect_all(box, *as_arrays(others, len(shape)))
    commons = {i: mask(shape, box) & mask(shape, other) for i, other in enumerate(others)}
    assert hit.tolist() == [i for i, common in commons.items() if common.any()]
    for i, offset, size in zip(hit.tolist(), offsets.tolist(), sizes.tolist(), strict=True):
        assert np.array_equal(mask(shape, Box(tuple(offset), tuple(size))), commons[i])


@given(st.data())
def test_contains_is_subset(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_dims=2))
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape, min_side=min((1, *shape))))
    if b.numel:
        assert a.contains(b) == bool(mask(shape, a)[b.slices].all())


@given(st.data())
def test_moving_a_box_moves_its_elements(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    outer = data.draw(boxes_in(shape))
    inner = data.draw(boxes_in(outer.shape))
    array = numbered(shape)
    moved = inner.shifted(outer.offset)
    assert np.array_equal(array[moved.slices], array[outer.slices][inner.slices])
    assert moved.relative_to(outer.offset) == inner
    assert moved.numel == array[moved.slices].size


@pytest.mark.parametrize(("offset", "shape"), [((0,), ()), ((0, 0), (1,)), ((-1,), (2,)), ((0,), (-1,))])
def test_what_is_no_box_is_refused(offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not a box"):
        Box(offset, shape)


def test_box_prints_as_a_slice() -> None:
    assert str(Box((2, 0), (3, 7))) == "[2:5,0:7]"
    assert str(Box((), ())) == "[]"


@given(shapes(min_side=1))
def test_row_major_strides_are_numpys(shape: tuple[int, ...]) -> None:
    assert row_major_strides(shape) == np.zeros(shape, dtype=np.int8).strides


# -------------------------------------------------------------------------------------------------------------------- cuts


@given(st.integers(0, 60), st.integers(1, 20))
def test_ceil_cuts_are_torch_chunk(size: int, parts: int) -> None:
    chunks = [c.tolist() for c in torch.arange(size).chunk(parts)]
    chunks += [[]] * (parts - len(chunks))  # torch leaves out the parts behind the last element
    cuts = ceil_cuts(size, parts)
    assert [list(range(lo, hi)) for lo, hi in itertools.pairwise(cuts)] == chunks


@given(st.integers(0, 60), st.integers(1, 20))
def test_even_cuts_are_array_split(size: int, parts: int) -> None:
    cuts = even_cuts(size, parts)
    assert [list(range(lo, hi)) for lo, hi in itertools.pairwise(cuts)] == [p.tolist() for p in np.array_split(np.arange(size), parts)]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1), min_size=1, max_size=3))
def test_merge_cuts_is_the_sorted_union(cuts: list[list[int]]) -> None:
    assert merge_cuts(*cuts) == tuple(sorted(set().union(*cuts)))


@given(st.data())
def test_cells_are_the_product_in_row_major_order(data: st.DataObject) -> None:
    shape = data.draw(shapes(max_dims=3))
    cuts = data.draw(cuts_of(shape))
    offsets, sizes = cells(cuts)
    pairs = [list(itertools.pairwise(c)) for c in cuts]
    expected = list(itertools.product(*pairs))
    assert offsets.shape == sizes.shape == (len(expected), len(shape))
    assert offsets.tolist() == [[lo for lo, _ in cell] for cell in expected]
    assert (offsets + sizes).tolist() == [[hi for _, hi in cell] for cell in expected]


def test_cells_of_more_dimensions_than_arrays_have() -> None:
    offsets, sizes = cells([*[(0, 1)] * 40, (0, 1, 3), *[(0, 1)] * 40])
    assert offsets.shape == (2, 81) and offsets.sum(axis=1).tolist() == [0, 1] and sizes[:, 40].tolist() == [1, 2]


@given(st.data())
def test_cell_box_is_the_cell_of_that_number(data: st.DataObject) -> None:
    cuts = data.draw(cuts_of(data.draw(shapes(max_dims=3))))
    offsets, sizes = cells(cuts)
    listed = [Box(tuple(o), tuple(s)) for o, s in zip(offsets.tolist(), sizes.tolist(), strict=True)]
    assert [cell_box(cuts, i) for i in range(len(listed))] == listed
    for outside in (-1, len(listed)):
        with pytest.raises(IndexError):
            cell_box(cuts, outside)


@given(st.data())
def test_cells_overlapping_share_an_element(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    cuts, box = data.draw(cuts_of(shape)), data.draw(boxes_in(shape))
    number = np.full(shape, -1)
    for i, (offset, size) in enumerate(zip(*(a.tolist() for a in cells(cuts)), strict=True)):
        number[Box(tuple(offset), tuple(size)).slices] = i
    assert cells_overlapping(cuts, box).tolist() == np.unique(number[box.slices]).tolist()


@given(st.integers(1, 12), st.integers(1, 9), st.data())
def test_empty_cells_overlap_nothing(size: int, parts: int, data: st.DataObject) -> None:
    cuts = ceil_cuts(size, parts)
    box = data.draw(boxes_in((size,)))
    number = np.repeat(np.arange(parts), np.diff(cuts))
    assert cells_overlapping([cuts], box).tolist() == np.unique(number[box.slices]).tolist()


# ------------------------------------------------------------------------------------------------------------- flat ranges


def contiguous(shape: tuple[int, ...], lo: int, hi: int) -> bool:
    """Whether flat elements ``[lo, hi)`` are exactly the elements of one box, by enumeration."""
    at = np.stack(np.unravel_index(np.arange(lo, hi), shape)) if shape else np.zeros((0, 1), dtype=np.int64)
    return math.prod((at.max(axis=1) - at.min(axis=1) + 1).tolist()) == hi - lo


def fewest(shape: tuple[int, ...], start: int, stop: int) -> int:
    """The least number of boxes, each a flat range, that follow each other from ``start`` to ``stop``."""
    need = {start: 0}
    for hi in range(start + 1, stop + 1):
        need[hi] = 1 + min(need[lo] for lo in range(start, hi) if contiguous(shape, lo, hi))
    return need[stop]


@given(shapes(), st.data())
def test_flat_ranges_become_boxes_that_cover_them_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = flat_to_boxes(shape, start, stop)
    array = numbered(shape)
    elements = [i for b in boxes for i in array[b.slices].ravel().tolist()]
    assert elements == list(range(start, stop))
    assert all(b.numel for b in boxes)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


TINY = [(), (4,), (3, 3), (1, 4), (4, 1), (2, 3, 2), (2, 2, 2), (3, 1, 2), (1, 2, 3), (2, 1, 2, 2)]


@pytest.mark.parametrize("shape", TINY, ids=str)
def test_flat_ranges_become_the_fewest_boxes(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            assert len(flat_to_boxes(shape, start, stop)) == fewest(shape, start, stop), (start, stop)


def test_the_bound_on_boxes_is_reached() -> None:
    assert [len(flat_to_boxes((4,) * d, 1, 4**d - 1)) for d in (1, 2, 3, 4)] == [1, 3, 5, 7]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7), (7, 7)])
def test_flat_ranges_outside_of_the_tensor_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="does not lie in a tensor of shape"):
        flat_to_boxes((2, 3), start, stop)


@given(shapes(), st.data())
def test_box_to_flat_finds_the_contiguous_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    box = data.draw(boxes_in(shape))
    elements = numbered(shape)[box.slices].ravel()
    if elements.size == 0:
        assert box_to_flat(shape, box) == (0, 0)
    elif (np.diff(elements) == 1).all():
        assert box_to_flat(shape, box) == (elements[0], elements[-1] + 1)
    else:
        assert box_to_flat(shape, box) is None


# ---------------------------------------------------------------------------------------------------------- strided blocks


@given(shapes(min_side=1), st.data())
def test_strided_blocks_are_the_maximal_runs_of_the_box(shape: tuple[int, ...], data: st.DataObject) -> None:
    box = data.draw(boxes_in(shape, min_side=1))
    elements = numbered(shape)[box.slices].ravel()
    blocks = strided_blocks(shape, box)
    runs = np.split(elements, np.flatnonzero(np.diff(elements) != 1) + 1)
    assert blocks.starts().tolist() == [r[0] for r in runs]
    assert {blocks.length} == {len(r) for r in runs}
    assert blocks.runs == len(runs)
    assert blocks.span == (elements[0], elements[-1] + 1)


@given(shapes(min_side=1), st.data())
def test_strided_blocks_are_canonical(shape: tuple[int, ...], data: st.DataObject) -> None:
    blocks = strided_blocks(shape, data.draw(boxes_in(shape, min_side=1)))
    assert all(c > 1 for c in blocks.counts)
    steps = [c * s for c, s in zip(blocks.counts, blocks.strides, strict=True)]
    assert all(outer > inner for outer, inner in zip(blocks.strides, steps[1:], strict=False))
    assert not blocks.strides or blocks.strides[-1] > blocks.length


def test_strided_blocks_join_dimensions_where_they_can() -> None:
    assert strided_blocks((4, 8, 6), Box((0, 0, 1), (4, 8, 3))) == Blocks(start=1, length=3, counts=(32,), strides=(6,))
    assert strided_blocks((4, 8, 6), Box((1, 2, 0), (2, 3, 6))) == Blocks(start=60, length=18, counts=(2,), strides=(48,))
    assert strided_blocks((), Box((), ())) == Blocks(start=0, length=1, counts=(), strides=())


# ------------------------------------------------------------------------------------------------------------------ tiling


def coverage(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    count = np.zeros(shape, dtype=np.int64)
    for b in boxes:
        count[b.slices] += 1
    return count


def check_fault(shape: tuple[int, ...], boxes: list[Box]) -> None:
    count = coverage(shape, boxes)
    fault = find_fault(shape, *as_arrays(boxes, len(shape)))
    if (count == 1).all():
        assert fault is None
    else:
        assert fault is not None
        assert fault.box.numel > 0
        assert fault.times != 1
        assert (count[fault.box.slices] == fault.times).all()


@pytest.fixture(params=["dense", "split"])
def counting(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways to count; without memory for a dense count only the smallest pieces are counted."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "split":
            patch.setattr(geometry, "_DENSE_CELLS", 0)
        yield request.param


@pytest.mark.usefixtures("counting")
class TestFindFault:
    @given(shape=shapes(), data=st.data())
    def test_tilings_have_none(self, shape: tuple[int, ...], data: st.DataObject) -> None:
        boxes = data.draw(tilings(shape))
        assert (coverage(shape, boxes) == 1).all()
        assert find_fault(shape, *as_arrays(boxes, len(shape))) is None

    @given(shape=shapes(min_side=1), data=st.data())
    def test_a_tiling_with_one_box_changed_is_judged_as_numpy_does(self, shape: tuple[int, ...], data: st.DataObject) -> None:
        boxes = data.draw(tilings(shape))
        boxes[data.draw(st.integers(0, len(boxes) - 1))] = data.draw(boxes_in(shape))
        check_fault(shape, boxes)

    @given(shape=shapes(), data=st.data())
    def test_any_boxes_are_judged_as_numpy_does(self, shape: tuple[int, ...], data: st.DataObject) -> None:
        check_fault(shape, data.draw(st.lists(boxes_in(shape), max_size=8)))

    @given(order=st.permutations(range(16)), missing=st.integers(0, 15))
    @example(order=list(range(16)), missing=15)
    def test_one_missing_element_is_found(self, order: list[int], missing: int) -> None:
        """Sixteen slabs, one of them with a hole: more than four compressed cells per box, so that the split path does split."""
        slabs = [Box((i, 0, 0), (1, 16, 16)) for i in order if i != missing]
        sides = ((0, missing), (missing + 1, 16))
        around = [Box((missing, lo, 0), (1, hi - lo, 16)) for lo, hi in sides]
        around += [Box((missing, missing, lo), (1, 1, hi - lo)) for lo, hi in sides]
        fault = find_fault((16, 16, 16), *as_arrays(slabs + around, 3))
        assert fault == geometry.TilingFault(Box((missing,) * 3, (1, 1, 1)), 0)

    def test_a_scalar_needs_exactly_one_box(self) -> None:
        for n in range(4):
            fault = find_fault((), *as_arrays([Box((), ())] * n, 0))
            assert (fault is None) if n == 1 else (fault == geometry.TilingFault(Box((), ()), n))

    def test_a_tensor_without_elements_needs_none(self) -> None:
        assert find_fault((3, 0), *as_arrays([], 2)) is None


def test_a_staircase_too_fine_for_a_dense_count_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A diagonal of unit boxes, the rest in bars: 64 × 64 compressed cells, and only one of them is covered twice."""
    monkeypatch.setattr(geometry, "_DENSE_CELLS", 0)
    n = 64
    boxes = [Box((i, i), (1, 1)) for i in range(n)]
    boxes += [Box((i, 0), (1, i)) for i in range(n)] + [Box((i, i + 1), (1, n - i - 1)) for i in range(n)]
    assert find_fault((n, n), *as_arrays(boxes, 2)) is None
    fault = find_fault((n, n), *as_arrays([*boxes, Box((40, 50), (1, 1))], 2))
    assert fault == geometry.TilingFault(Box((40, 50), (1, 1)), 2)
