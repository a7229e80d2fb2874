"""Keys of chunks: the examples of the specification, and that no two chunks share one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.dtypes import DTYPES
from ckpt.formats.native.datafile import chunk_key, coded_key, name_problem, parse_key
from ckpt.plan.layout.geometry import Box
from tests.box_strategies import boxes_in, shapes
from tests.formats.native_sample import NAMES


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
        ("a]#zstd", Box((0,), (3,)), (3,), "float32", "a]#zstd[:]"),
        ("a[:]#planes-zstd", Box((), ()), (), "float32", "a[:]#planes-zstd[]"),
        ("a#zstd", Box((0,), (3,)), (3,), "float32", "a#zstd"),
        ("a]#", Box((0,), (3,)), (3,), "float32", "a]#"),
        ("a]#Zstd", Box((0,), (3,)), (3,), "float32", "a]#Zstd"),
        ("a]#zstd\n", Box((0,), (3,)), (3,), "float32", "a]#zstd\n"),
    ],
)
def test_key(name, box, shape, dtype, key):
    assert chunk_key(name, box, shape, DTYPES[dtype]) == key


@pytest.mark.parametrize(
    ("name", "box", "shape", "key"),
    [
        ("w", Box((0, 0), (128, 64)), (256, 64), "w[0:128,:]#zstd"),
        ("w", Box((0, 0), (256, 64)), (256, 64), "w[:,:]#zstd"),
        ("w", Box((), ()), (), "w[]#zstd"),
        ("w]#zstd", Box((1,), (1,)), (3,), "w]#zstd[1:2]#zstd"),
    ],
)
def test_coded_key(name, box, shape, key):
    assert coded_key(name, box, shape, "zstd") == key
    assert parse_key(key)[::2] == (name, "zstd")


CODECS = st.sampled_from([None, "zstd", "planes-zstd", "x-9"])


def key_of(name, box, shape, dtype, codec):
    return chunk_key(name, box, shape, DTYPES[dtype]) if codec is None else coded_key(name, box, shape, codec)


@given(NAMES, st.data(), st.sampled_from(sorted(DTYPES)), CODECS)
def test_parse_inverts(name, data, dtype, codec):
    shape = data.draw(shapes())
    box = data.draw(boxes_in(shape))
    found, ranges, coded = parse_key(key_of(name, box, shape, dtype, codec))
    assert (found, coded) == (name, codec)
    if ranges is None:
        assert box == Box.whole(shape)
    else:
        spans = [(0, n) if r is None else r for r, n in zip(ranges, shape, strict=True)]
        assert spans == list(zip(box.offset, box.end, strict=True))


@given(NAMES, NAMES, st.data(), CODECS, CODECS)
def test_keys_differ(name, other, data, codec, theirs):
    """A tensor called as another one's chunk must not take its key."""
    shape = data.draw(shapes(min_side=1, max_dims=2))
    box = data.draw(boxes_in(shape, min_side=1))
    key = key_of(name, box, shape, "float32", codec)
    if key != name:
        whole = data.draw(shapes(min_side=1, max_dims=2))
        assert key_of(key, Box.whole(whole), whole, "float32", theirs) != key
    if (other, theirs) != (name, codec):
        assert key_of(other, box, shape, "float32", theirs) != key


NOT_KEYS = ["]", "[0:1]", "a]", "a[0]", "a[0:1,]", "a[,]", "a[01:2]", "a[-1:2]", "a[2:1]", "a[0:1]]", "a[١:٢]"]
NOT_KEYS += ["a]#zstd", "[:]#zstd", "a[0]#zstd"]


@pytest.mark.parametrize("key", [*NOT_KEYS, "a[0:1", "a[:]#", "a[:]#ZSTD"])
def test_not_a_key(key):
    if key in NOT_KEYS:
        with pytest.raises(ValueError, match=r"box|range"):
            parse_key(key)
    else:
        assert parse_key(key) == (key, None, None)


@pytest.mark.parametrize(("name", "word"), [("", "0 bytes"), ("é" * 2049, "4098 bytes"), ("a\0", "NUL"), ("\udc80", "surrogate")])
def test_bad_names(name, word):
    assert word in name_problem(name)


def test_good_names():
    assert [name_problem(n) for n in ("a", "é" * 2048, "a b\n", "__metadata__")] == [None] * 4
