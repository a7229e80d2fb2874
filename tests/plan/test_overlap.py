"""The copies of a join tile the target, and copying through numpy gives the target's elements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.catalog import Grid
from ckpt.plan.layout.geometry import Box, flat_to_boxes
from ckpt.plan.reads import Copy, overlapping_chunks
from tests.box_strategies import as_arrays, boxes_in, grids, shapes

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
