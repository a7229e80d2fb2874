"""Keys of chunks: the examples of the specification, and that no two chunks share one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.dtypes import DTYPES
from ckpt.formats.native.keys import chunk_key, name_problem, parse_key
from ckpt.geometry import Box
from tests.box_strategies import boxes_in, shapes
from tests.formats.native_sample import NAMES

F32 = DTYPES["float32"]


@pytest.mark.parametrize(
    ("name", "box", "shape", "dtype", "key"),
    [
        ("model.wq.weight", Box((0, 0), (128, 64)), (256, 64), "float32", "model.wq.weight[0:128,:]"),
        ("model.wq.weight", Box((0, 0), (256, 64)), (256, 64), "float32", "model.wq.weight"),
        ("w", Box((1, 2), (1, 1)), (2, 3), "float32", "w[1:2,2:3]"),
        ("s", Box((), ()), (), "float32", "s"),
        ("s]", Box((), ()), (), "float32", "s][]"),
        ("a[0]", Box((0,), (3,)), (3,), "float32", "a[0][:]"),
        ("__metadata__", Box((0,), (3,)), (3,), "float32", "__metadata__[:]"),
        ("e", Box((0, 0), (0, 4)), (0, 4), "float32", "e"),
        ("e", Box((0, 0), (0, 2)), (0, 4), "float32", "e[:,0:2]"),
        ("c", Box((0,), (3,)), (3,), "complex64", "c"),
        ("c", Box((0,), (3,)), (3,), "complex128", "c[:]"),
        ("c", Box((), ()), (), "complex32", "c[]"),
        ("f", Box((), ()), (), "float4_e2m1fn_x2", "f[]"),
        ("f", Box((0,), (1,)), (1,), "float4_e2m1fn_x2", "f"),
    ],
)
def test_key(name, box, shape, dtype, key):
    assert chunk_key(name, box, shape, DTYPES[dtype]) == key


@given(NAMES, st.data(), st.sampled_from(sorted(DTYPES)))
def test_parse_inverts(name, data, dtype):
    shape = data.draw(shapes())
    box = data.draw(boxes_in(shape))
    found, ranges = parse_key(chunk_key(name, box, shape, DTYPES[dtype]))
    assert found == name
    if ranges is None:
        assert box == Box.whole(shape)
    else:
        spans = [(0, n) if r is None else r for r, n in zip(ranges, shape, strict=True)]
        assert spans == list(zip(box.offset, box.end, strict=True))


@given(NAMES, NAMES, st.data())
def test_keys_differ(name, other, data):
    """A tensor called as another one's chunk must not take its key."""
    shape = data.draw(shapes(min_side=1, max_dims=2))
    box = data.draw(boxes_in(shape, min_side=1))
    key = chunk_key(name, box, shape, F32)
    if key != name:
        whole = data.draw(shapes(min_side=1, max_dims=2))
        assert chunk_key(key, Box.whole(whole), whole, F32) != key
    if other != name:
        assert chunk_key(other, box, shape, F32) != key


@pytest.mark.parametrize(
    "key", ["]", "[0:1]", "a]", "a[0]", "a[0:1,]", "a[,]", "a[01:2]", "a[-1:2]", "a[2:1]", "a[0:1", "a[0:1]]", "a[١:٢]"]
)
def test_not_a_key(key):
    if key.endswith("]"):
        with pytest.raises(ValueError, match=r"box|range"):
            parse_key(key)
    else:
        assert parse_key(key) == (key, None)


@pytest.mark.parametrize(("name", "word"), [("", "0 bytes"), ("é" * 2049, "4098 bytes"), ("a\0", "NUL"), ("\udc80", "surrogate")])
def test_bad_names(name, word):
    assert word in name_problem(name)


def test_good_names():
    assert [name_problem(n) for n in ("a", "é" * 2048, "a b\n", "__metadata__")] == [None] * 4
