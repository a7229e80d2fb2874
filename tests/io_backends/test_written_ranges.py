"""``WrittenRanges`` against a mask of booleans."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt.io_backends.writer_base import WrittenRanges

SIZE = 40
RANGES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(lambda r: (min(r), max(r))), max_size=30)


@given(ranges=RANGES)
def test_counts_every_byte_once(ranges: list[tuple[int, int]]) -> None:
    mask = np.zeros(SIZE, dtype=bool)
    written = WrittenRanges(SIZE)
    for start, stop in ranges:
        mask[start:stop] = True
        written.add(start, stop)
        assert written.count == mask.sum()
        assert len(written._starts) == np.count_nonzero(np.diff(mask, prepend=False) & mask)  # one entry per run, however it came about


def test_a_hole_does_not_hide_behind_repeats() -> None:
    written = WrittenRanges(10)
    for start, stop in ((0, 6), (2, 6), (7, 10)):  # 13 bytes in all, byte 6 not among them
        written.add(start, stop)
    assert written.count == 9
    written.add(6, 7)
    assert written.count == 10
