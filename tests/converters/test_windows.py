"""Windows of files, and boxes of views read into memory, against numpy."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.converters.buffered import ViewBox, read_views
from ckpt.converters.selection import seams_of
from ckpt.converters.target import FileItem, slabs, windows
from ckpt.engine.load.reader import Reader
from ckpt.formats.registry import open_catalog
from ckpt.plan import views
from ckpt.plan.layout.geometry import Box

SHAPES = st.lists(st.integers(0, 6), max_size=4)


@st.composite
def boxes(draw: Any) -> Box:
    shape = draw(SHAPES)
    return Box(tuple(draw(st.integers(0, 9)) for _ in shape), tuple(shape))


@given(boxes(), st.sampled_from([1, 2, 8]), st.lists(st.integers(0, 15), unique=True).map(sorted), st.integers(1, 200))
def test_slabs_are_the_box_row_by_row(box: Box, itemsize: int, seams: list[int], most: int) -> None:
    found = list(slabs(box, itemsize, seams, most))
    numbers = np.arange(box.numel).reshape(box.shape)
    back = tuple(-o for o in box.offset)
    flat = [numbers[b.shifted(back).slices].ravel() for b in found if b.shifted(back)]
    assert (np.concatenate(flat) if flat else np.zeros(0)).tolist() == list(range(box.numel))
    assert all(b.numel * itemsize <= max(most, itemsize) for b in found)
    if box.shape and box.shape[0] > 1 and all(box.numel // box.shape[0] * itemsize <= most for _ in "1") and box.numel * itemsize > most:
        ends = [b.offset[0] + b.shape[0] for b in found[:-1]]
        rows = max(1, most // (box.numel // box.shape[0] * itemsize))
        starts = [b.offset[0] for b in found]
        for start, end in zip(starts, ends, strict=False):
            inside = [s for s in seams if start < s <= start + rows]
            assert end == (inside[-1] if inside else start + rows)


@given(st.lists(st.tuples(boxes(), st.sampled_from([1, 4]), st.integers(0, 30)), max_size=6), st.integers(8, 300), st.integers(1, 300))
def test_windows_have_each_byte_once(rows: list[tuple[Box, int, int]], most: int, enough: int) -> None:
    items, at = [], 0
    for i, (box, size, gap) in enumerate(rows):
        items.append(FileItem(f"t{i}", box, at + gap, size))
        at += gap + items[-1].length
    found = list(windows(items, [[]] * len(items), most, enough))
    covered = [b for w in found for s in w for b in range(s.start, s.start + s.length)]
    assert covered == [b for i in items for b in range(i.offset, i.offset + i.length)]
    for window in found:
        start, stop = window[0].start, window[-1].start + window[-1].length
        assert sum(s.length for s in window) <= stop - start
        assert len(window) == 1 or window[-1].start - start <= most
        assert all(s.length == s.box.numel * items[s.item].itemsize for s in window)
        for last, first in pairwise(window):
            assert last.item == first.item or first.start - start < enough
    for before, after in pairwise(found):  # none ends early within an item
        last, first = before[-1], after[0]
        assert last.item != first.item or last.start + last.length - before[0].start + first.length > most


def transformed(shapes: dict[str, tuple[int, ...]]) -> dict[str, views.LogicalTensor]:
    a, b = (views.whole(n, shapes[n]) for n in "ab")
    return {
        "fused": views.interleave([a, b], 0, 2),
        "stacked": views.stack([views.transpose(a, [1, 0, 2])] * 2, 1),
        "padded": views.padded(views.split(b, 1, [1, 3])[1], 1, 5),
        "one": views.unstack(a, 1)[2],
    }


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_box_of_a_view_is_what_numpy_says(tmp_path_factory: Any, data: Any) -> None:
    url = str(tmp_path_factory.getbasetemp() / "read-views")
    a, b = torch.arange(4 * 4 * 3.0).reshape(4, 4, 3), -torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)
    if not Path(url).exists():
        ckpt.save(url, {"a": a, "b": b})
    expected = {
        "fused": torch.cat([a[:2], b[:1], a[2:], b[1:]]),
        "stacked": torch.stack([a.permute(1, 0, 2)] * 2, 1),
        "padded": torch.cat([b[:, 1:], torch.zeros(2, 2, 3)], 1),
        "one": a[:, 2],
    }
    catalog = open_catalog(url)
    made = transformed({n: t.shape for n, t in catalog.tensors.items()})
    parts, wanted = [], []
    for name in data.draw(st.lists(st.sampled_from(sorted(expected)), min_size=1, max_size=3)):
        shape = tuple(expected[name].shape)
        low = [data.draw(st.integers(0, n - 1)) for n in shape]
        box = Box(tuple(low), tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, low, strict=True)))
        kind = data.draw(st.sampled_from([torch.float32, torch.float64]))
        parts.append(ViewBox(made[name], box, torch.full(box.shape, math.nan, dtype=kind)))
        wanted.append(expected[name][box.slices].to(kind))
    read_views(Reader(catalog=catalog, verify="full", threads=2), parts)
    assert all(torch.equal(p.memory, w) for p, w in zip(parts, wanted, strict=True))


def test_seams_are_where_chunks_and_pieces_end(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("ckpt.settings.CHUNK", 24)
    from ckpt import convert

    ckpt.save(str(tmp_path / "s"), {"a": torch.arange(21.0).reshape(7, 3)})
    convert(str(tmp_path / "s"), str(tmp_path / "n"), to="native")
    catalog = open_catalog(str(tmp_path / "n"))
    a = views.whole("a", (7, 3))
    assert seams_of(catalog, a) == [0, 2, 4, 6]
    assert seams_of(catalog, views.concat([views.part(a, Box((3, 0), (4, 3))), a], 0)) == [0, 1, 3, 4, 6, 8, 10]
    assert seams_of(catalog, views.transpose(a, [1, 0])) == [0]
