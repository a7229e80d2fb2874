"""Nested state ⇄ nodes: what comes back equals what went in, and states of several ranks join as plain dicts would."""

from __future__ import annotations

import collections
import enum
import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt.errors import FormatError, StateError
from ckpt.plan import tree

NUMPY_DTYPES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
NUMPY_DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]


def no_leaf(value: object, path: str) -> None:
    return None


def no_special(kind: str, payload: Any) -> object:
    raise AssertionError(f"no {kind} was encoded")


def through_json(value: object, leaf: tree.Leaf = no_leaf) -> Any:
    return json.loads(json.dumps(tree.encode(value, "", leaf), allow_nan=False).encode())


def round_trip(value: object) -> object:
    return tree.decode(through_json(value), no_special)


def same(a: Any, b: Any) -> bool:
    """Equal with types, signs of zeros and NaNs."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return bool(
            a.shape == b.shape and a.dtype.newbyteorder("=") == b.dtype.newbyteorder("=") and a.tolist().__repr__() == b.tolist().__repr__()
        )
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and repr(a) == repr(b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return sorted(repr(_sorted_sets(v)) for v in a) == sorted(repr(_sorted_sets(v)) for v in b)
    return bool(a == b) if isinstance(a, int) else repr(a) == repr(b)


# ------------------------------------------------------------------------------------------------------- round trips

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.text("$.ab", max_size=4),
    st.binary(max_size=8),
    st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda:3"), torch.Size([2, 3]), torch.Size([])]),
)
numpy_values = st.sampled_from(NUMPY_DTYPES).flatmap(
    lambda name: st.builds(
        lambda raw, shape: (
            np.frombuffer(raw[: math.prod(shape) * np.dtype(name).itemsize], name).reshape(shape)
            if name != "bool"
            else np.frombuffer(raw[: math.prod(shape)], "uint8").reshape(shape) > 127
        ),
        st.binary(min_size=96, max_size=96),
        st.sampled_from([(), (0,), (1,), (2, 3), (3, 0, 2)]),
    )
)
hashable = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3), max_leaves=4)
states = st.recursive(
    scalars | numpy_values | numpy_values.filter(lambda a: a.ndim == 0).map(lambda a: a[()]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
        st.dictionaries(hashable, inner, max_size=3),
        st.sets(hashable, max_size=3),
    ),
    max_leaves=12,
)


def has_twin_nans(value: Any) -> bool:
    if isinstance(value, (set, frozenset, dict)) and len(set(map(repr, map(_sorted_sets, value)))) != len(value):
        return True
    below = [*value, *value.values()] if isinstance(value, dict) else value
    return isinstance(value, (list, tuple, set, frozenset, dict)) and any(map(has_twin_nans, below))


def _sorted_sets(value: Any) -> Any:
    if isinstance(value, frozenset):
        return ("frozenset", sorted(repr(_sorted_sets(v)) for v in value))
    return tuple(map(_sorted_sets, value)) if type(value) is tuple else value


@given(states.filter(lambda s: not has_twin_nans(s)))
@example({"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "-0.0": -0.0, "big": 2**200 + 1, "-big": -(2**200), "tiny": 5e-324})
@example({"$tensor": "not a tensor"})
@example({"": {"": 1}, 5: 1, "5": 2, None: 3, True: 4, 0.5: 5, (1, ("a", None)): 6, b"k": 7, frozenset({1, "a"}): 8})
def test_what_goes_in_comes_out(state: object) -> None:
    assert same(round_trip(state), state)


def test_the_comparison_of_these_tests_tells_values_apart() -> None:
    pairs = [(0.0, -0.0), (1, 1.0), (1, True), ((1,), [1]), ({1: 2}, {1: 3}), (np.float32(1), 1.0), (np.zeros(2), np.zeros((2, 1)))]
    assert not any(same(a, b) for a, b in pairs)
    assert same(math.nan, float("nan"))


def test_bits_of_arrays_and_floats_are_kept() -> None:
    nan = np.array([0x7FF8_0000_0000_0123, 0x8000_0000_0000_0000], dtype=np.uint64).view(np.float64)
    back = round_trip({"a": nan, "s": nan[0], "f": 0.1 + 0.2})
    assert isinstance(back, dict)
    assert back["a"].tobytes() == nan.tobytes()
    assert back["s"].tobytes() == nan[0].tobytes()
    assert back["f"].hex() == (0.1 + 0.2).hex()


def test_arrays_of_any_byte_order_and_stride_come_back_native_and_writable() -> None:
    wanted = np.arange(12, dtype=np.int32).reshape(3, 4).T
    back: Any = round_trip(wanted.astype(">i4"))
    assert back.dtype == np.dtype("int32")
    assert back.dtype.isnative
    np.testing.assert_array_equal(back, wanted)
    back += 1


def test_nodes_are_those_of_the_specification() -> None:
    assert tree.encode({"a": io.BytesIO(b"\x00\xff")}, "", no_leaf) == {"a": {"$bytesio": "AP8="}}
    state = {"a": (1, b"\x00\xff"), "s": {3, 1, 2}, "z": np.int16(-2), "n": np.array([[1, 2]], "uint16"), 7: torch.float8_e4m3fn}
    assert tree.encode(state, "", no_leaf) == {
        "$map": [
            ["a", {"$tuple": [1, {"$bytes": "AP8="}]}],
            ["s", {"$set": [1, 2, 3]}],
            ["z", {"$scalar": ["int16", "/v8="]}],
            ["n", {"$array": ["uint16", [1, 2], "AQACAA=="]}],
            [7, {"$dtype": "float8_e4m3fn"}],
        ]
    }
    assert tree.encode([math.inf, 1j, torch.Size([2])], "", no_leaf) == [{"$float": "inf"}, {"$complex": [0.0, 1.0]}, {"$size": [2]}]


def test_ordered_and_default_dicts_and_counters_come_back_as_dicts_in_their_order() -> None:
    state = collections.OrderedDict([("b", 1), ("a", collections.defaultdict(list, {"x": [1]})), ("c", collections.Counter([3, 3]))])
    assert same(round_trip(state), {"b": 1, "a": {"x": [1]}, "c": {3: 2}})


def test_importing_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, ckpt.plan.tree; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    root = Path(tree.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


# ------------------------------------------------------------------------------------------------------------ leaves


def test_leaf_gets_what_is_not_plain_with_its_path_and_special_reads_it_back() -> None:
    model, weights = torch.nn.Linear(1, 1), torch.zeros(1)
    asked = []

    def leaf(value: object, path: str) -> tree.Node:
        asked.append((path, value))
        return {"$tensors": path} if value is model else {"$tensor": path}

    node = through_json({"model": model, "o": [{5: weights}, ({"a/b.c": weights},)], "plain": torch.Size([1])}, leaf)
    assert [path for path, _ in asked] == ["model", "o.0.5", "o.1.0.a/b.c"]
    assert all(value is weights for _, value in asked[1:])
    back = tree.decode(node, lambda kind, payload: (kind, payload))
    o = [{5: ("$tensor", "o.0.5")}, ({"a/b.c": ("$tensor", "o.1.0.a/b.c")},)]
    assert back == {"model": ("$tensors", "model"), "o": o, "plain": torch.Size([1])}


def test_paths_start_at_the_path_given() -> None:
    seen: list[str] = []
    tree.encode({"a": object()}, "root", lambda value, path: seen.append(path) or 1)
    assert seen == ["root.a"]


@pytest.mark.parametrize(
    ("path", "key", "joined"),
    [
        ("", "a", "a"),
        ("a", "b.c/d", "a.b.c/d"),
        ("a", 0, "a.0"),
        ("a", -5, "a.-5"),
        ("", 5, "5"),
        ("a", True, "a.true"),
        ("a", None, "a.null"),
        ("a", 0.5, "a.0.5"),
        ("a", (1, "x"), 'a.{"$tuple":[1,"x"]}'),
        ("a", "é", "a.é"),
    ],
)
def test_join(path: str, key: object, joined: str) -> None:
    assert tree.join(path, key) == joined


# ---------------------------------------------------------------------------------------------------------- refusals


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


class Name(str):
    __slots__ = ()


REFUSED = [
    (Colour.RED, "Colour", ".value"),
    (Point(1), "Point", "_asdict"),
    (Name("a"), "Name", "str(value)"),
    (collections.ChainMap({"a": 1}), "collections.ChainMap", "dict(value)"),
    (np.array([None]), "numpy.ndarray", "tolist"),
    (np.str_("a"), "numpy.str_", "tolist"),
    (np.ma.zeros(2), "MaskedArray", "np.asarray"),
    (bytearray(b"a"), "bytearray", "bytes(value)"),
    (object(), "object", "ckpt.PerRank"),
    (torch.zeros(1), "torch.Tensor", "state_dict and load_state_dict"),
    (lambda: 0, "function", "make it a tensor or a JSON value"),
    ("a\ud800", "ud800", "bytes"),
    (10**4300, "4300 digits", "to_bytes"),
    ({(Colour.RED,): 1}, "Colour", ".value"),
    ({"\udfff": 1}, "udfff", "bytes"),
    ({object()}, "object", "state_dict"),
    ({math.nan: 1, float("nan"): 2}, "NaN", "one NaN"),
    ({math.nan, float("nan")}, "NaN", "one NaN"),
]


@pytest.mark.parametrize(
    ("value", "what", "way_out"), REFUSED, ids=lambda x: x if isinstance(x, str) and x.isascii() and x.isprintable() else "v"
)
def test_refusals_name_the_path_the_type_and_a_way_out(value: object, what: str, way_out: str) -> None:
    with pytest.raises(StateError) as caught:
        tree.encode({"outer": [0, value]}, "", no_leaf)
    assert "outer.1" in caught.value.message
    assert what in caught.value.message
    assert way_out in (caught.value.hint or "")


def test_the_longest_integer_that_is_taken_survives_json() -> None:
    assert round_trip(2**14284 - 1) == 2**14284 - 1


def test_leaf_may_take_what_would_be_refused() -> None:
    assert tree.encode([Colour.RED, Point(3)], "", lambda value, path: {"$tensor": f"{path}!"}) == [{"$tensor": "0!"}, {"$tensor": "1!"}]


def test_cycles_are_refused_and_shared_values_are_not() -> None:
    loop: list[Any] = [1]
    loop.append({"back": (loop,)})
    with pytest.raises(StateError, match=r"'x\.1\.back\.0' contains itself"):
        tree.encode({"x": loop}, "", no_leaf)
    shared = [1]
    assert tree.encode([shared, shared, {"a": shared}], "", no_leaf) == [[1], [1], {"a": [1]}]


def test_depth_is_limited_before_python_gives_up() -> None:
    deep: Any = 0
    for _ in range(tree.MAX_DEPTH):
        deep = [deep]
    assert round_trip(deep) == deep
    with pytest.raises(StateError, match="containers deep"):
        tree.encode([deep], "", no_leaf)
    chain: Any = 0
    for _ in range(500):
        chain = frozenset({chain})
    with pytest.raises(StateError, match="containers deep"):
        tree.encode(chain, "", no_leaf)


@pytest.mark.parametrize(
    "node",
    [
        {"$new": 1},
        {"$tuple": [], "other": 1},
        {"other": 1, "$set": []},
        {"$tuple": 1},
        {"$map": [[1]]},
        {"$map": [[[], 1]]},
        {"$map": [[1, 1], [1, 2]]},
        {"$set": [[]]},
        {"$bytes": "a"},
        {"$bytes": 5},
        {"$bytes": "AP8=\n"},
        {"$float": "huge"},
        {"$float": []},
        {"$complex": [1.0]},
        {"$complex": ["1", 2.0]},
        {"$scalar": ["int64", "AAAA"]},
        {"$scalar": ["object", "AAAAAAAAAAA="]},
        {"$scalar": ["datetime64[s]", "AAAAAAAAAAA="]},
        {"$array": ["int8", [3], "AAA="]},
        {"$array": ["int8", "x"]},
        {"$dtype": "nn"},
        {"$dtype": 4},
        {"$device": "no such device"},
        {"$device": 1},
        {"$size": ["a"]},
    ],
    ids=json.dumps,
)
def test_malformed_and_unknown_nodes_are_format_errors_that_name_the_path(node: tree.Node) -> None:
    with pytest.raises(FormatError, match=r"a\.1"):
        tree.decode({"a": [0, node]}, no_special)


# --------------------------------------------------------------------------------------------------------------- look


def test_find_follows_keys_and_indices() -> None:
    state = {"a": [{5: (10, 20)}, None], "$b": {"x": 1}, (1, 2): {None: "n"}}
    node = through_json(state)
    assert tree.find(node, []) is node
    assert tree.find(node, ["a", 0, 5, 1]) == 20
    assert tree.find(node, ["a", 1]) is None
    assert tree.find(node, ["$b"]) == {"x": 1}
    assert tree.find(node, [(1, 2), None]) == "n"
    for keys in (["b"], ["a", 2], ["a", -1], ["a", "0"], ["a", 0, "5"], ["a", 1, 0], ["$map"], ["a", 0, 5, 1, 0]):
        assert tree.find(node, keys) is tree.MISSING, keys
    assert tree.find({"$tensor": "t"}, ["$tensor"]) is tree.MISSING


def test_leaves_walk_mappings_and_lists_that_hold_tensors() -> None:
    tensor, per_group = {"$tensor": "t"}, {"$param_groups": []}
    node = {
        "m": {"$map": [[5, 1], [{"$tuple": [1]}, "v"], ["s", {}]]},
        "plain": [1, {"a": 2}],
        "mixed": [1, {"$tuple": [tensor, [2]]}, {"x": per_group}],
        "bytes": {"$bytes": ""},
        "none": None,
    }
    assert list(tree.leaves(node)) == [
        ("m.5", 1),
        ('m.{"$tuple":[1]}', "v"),
        ("m.s", {}),
        ("plain", [1, {"a": 2}]),
        ("mixed.0", 1),
        ("mixed.1.0", tensor),
        ("mixed.1.1", [2]),
        ("mixed.2.x", per_group),
        ("bytes", {"$bytes": ""}),
        ("none", None),
    ]
    assert list(tree.leaves({})) == [("", {})]
    assert list(tree.leaves(3)) == [("", 3)]


def test_shorten_keeps_short_texts_and_cuts_long_ones() -> None:
    assert tree.shorten({"b": 1, "a": "é"}) == '{"a":"é","b":1}'
    assert tree.shorten([1] * 100, limit=10) == "[1,1,1,1,…"
    assert tree.shorten("x" * 78) == '"' + "x" * 78 + '"'
    assert len(tree.shorten("x" * 79)) == 80
