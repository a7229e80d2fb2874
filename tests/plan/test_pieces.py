"""Pieces of a chunk tile what they are cut from, lie where they say, and are no longer than asked for."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt.plan.layout.geometry import Box
from ckpt.plan.reads import pieces
from tests.box_strategies import boxes_in, shapes


@given(st.data(), st.integers(-1, 60))
def test_pieces_tile_their_box(data: st.DataObject, limit: int) -> None:
    shape = data.draw(shapes(max_dims=4).filter(lambda s: 0 not in s))
    origin = tuple(data.draw(st.integers(0, 3)) for _ in shape)
    inner = data.draw(boxes_in(shape))
    chunk, cover = Box(origin, shape), Box(tuple(o + b for o, b in zip(origin, inner.offset, strict=True)), inner.shape)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    times = np.zeros(shape, dtype=np.int64)
    last = -1
    for piece in pieces(chunk, cover, limit):
        where = tuple(slice(o - b, o - b + n) for o, b, n in zip(piece.box.offset, origin, piece.box.shape, strict=True))
        inside = numbers[where]
        assert (inside.min(), inside.max()) == (piece.start, piece.start + piece.length - 1)
        assert piece.length <= max(limit, 1)
        assert piece.start > last
        last = piece.start
        times[where] += 1
    wanted = np.zeros(shape, dtype=np.int64)
    wanted[tuple(slice(o, o + n) for o, n in zip(inner.offset, inner.shape, strict=True))] = 1
    assert (times == wanted).all()


@given(shapes(max_dims=4).filter(lambda s: 0 not in s), st.integers(1, 60))
def test_pieces_of_a_whole_chunk_leave_no_byte_out(shape: tuple[int, ...], limit: int) -> None:
    end = 0
    for piece in pieces(Box.whole(shape), Box.whole(shape), limit):
        assert piece.start == end
        end = piece.start + piece.length
    assert end == math.prod(shape)


def test_an_empty_box_has_no_pieces() -> None:
    assert list(pieces(Box((0, 0), (4, 4)), Box((1, 2), (0, 2)), 8)) == []


def test_pieces_are_as_long_as_they_may_be() -> None:
    assert [p.length for p in pieces(Box.whole((10, 4)), Box.whole((10, 4)), 12)] == [12, 12, 12, 4]
    assert [p.length for p in pieces(Box.whole((1, 2, 6)), Box.whole((1, 2, 6)), 4)] == [4, 2, 4, 2]
