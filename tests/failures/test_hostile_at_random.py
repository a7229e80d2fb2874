"""Checkpoints with right digests and random changes in any of their files; ``test_hostile_files.py`` has the ones that were thought of."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.failures.damage import Copy, arrow_file, places
from tests.failures.hostile import survives, tampering

NUMBERS = st.sampled_from([0, 1, -1, 2, 3, 5, 7, 8, 12, 4096, 8192, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63), 2**63, 2**70])
_TEXTS = (
    *("", "x", "../x", "/x", "rows", "flat", "tied.a", "tied.b", "model.0.weight", "rng.state@rank1", "checkpoint.json", "b[0:1]"),
    *("__metadata__", "F32", "I64", "U8", "float32", "bfloat16", "int64", "complex128", "float4_e2m1fn_x2", "nonsense"),
    *("\ud800", "A" * 32, "k" * 5000),
)
_TAGS = (
    *("$tensor", "$tensors", "$map", "$tuple", "$set", "$frozenset", "$bytes", "$float", "$complex", "$scalar", "$array", "$dtype"),
    *("$device", "$size", "$inline", "$per_rank", "$param_groups", "$unknown", "$", "", "a"),
)
TEXTS, TAGS = st.sampled_from(_TEXTS), st.sampled_from(_TAGS)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TAGS, inner, max_size=2),
    max_leaves=6,
)


def changed(data: st.DataObject, document: Any) -> Any:
    """A JSON document with a few values replaced, removed, renamed or added."""
    document = json.loads(json.dumps(document))
    for _ in range(data.draw(st.integers(1, 3))):
        ways = [way for way in places(document) if way]
        if not ways:
            return data.draw(VALUES)
        *before, key = data.draw(st.sampled_from(ways))
        parent = document
        for step in before:
            parent = parent[step]
        how = data.draw(st.sampled_from(["set", "set", "set", "remove", "add"]))
        if how == "set":
            parent[key] = data.draw(VALUES)
        elif how == "remove":
            del parent[key]
        elif isinstance(parent, list):
            parent.insert(key, data.draw(VALUES))
        else:
            parent[data.draw(TAGS | TEXTS)] = data.draw(VALUES)
    return document


@pytest.mark.parametrize(
    "members", [{"created": "yesterday"}, {"created": "0001-01-01T00:00:00"}, {"tensor_bytes": -(1 << 70)}, {"world_size": -1}]
)
def test_members_that_are_only_shown(copy: Copy, right: dict[str, bytes], members: dict[str, Any]) -> None:
    with tampering(copy):
        copy.commit({**copy.members, **members})
        assert survives(copy, right)["ckpt ls"] is None


@given(data=st.data())
def test_any_state(copy: Copy, right: dict[str, bytes], data: st.DataObject) -> None:
    with tampering(copy):
        copy.set_state(changed(data, copy.state()))
        survives(copy, right)


@given(data=st.data())
def test_any_commit_record(copy: Copy, right: dict[str, bytes], data: st.DataObject) -> None:
    with tampering(copy):
        copy.commit(changed(data, {k: v for k, v in copy.members.items() if k != "digest"}))
        survives(copy, right)


@given(data=st.data(), number=st.integers(0, 1))
def test_any_header(copy: Copy, right: dict[str, bytes], data: st.DataObject, number: int) -> None:
    with tampering(copy):
        copy.set_header(number, json.dumps(changed(data, copy.header(number))).encode())
        survives(copy, right)


@given(data=st.data(), name=st.sampled_from(["tensors.arrow", "grids.arrow", "files.arrow"]))
def test_any_table(copy: Copy, right: dict[str, bytes], data: st.DataObject, name: str) -> None:
    with tampering(copy):
        columns = copy.table(name)
        for _ in range(data.draw(st.integers(1, 3))):
            rows = min(map(len, columns.values()), default=0)
            if not rows:
                break
            row, how = (
                data.draw(st.integers(0, rows - 1)),
                data.draw(st.sampled_from(["cell", "cell", "cell", "twice", "remove", "column"])),
            )
            column = data.draw(st.sampled_from(sorted(columns)))
            if how == "cell":
                columns[column][row] = _other(data, columns[column][row])
            elif how == "column":
                del columns[column]
            else:
                columns = {c: v[: row + (how == "twice")] + v[row + (how == "remove") :] for c, v in columns.items()}
        copy.set_table(name, columns)
        survives(copy, right)


def _other(data: st.DataObject, value: Any) -> Any:
    """Another value, mostly of the same kind."""
    if isinstance(value, list) and value and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], _other(data, value[at]), *value[at + 1 :]]
    if isinstance(value, list):
        return data.draw(st.sampled_from([[], None, value + value, value[:-1], [[0, 1]], [0, 4]]))
    if isinstance(value, int):
        return data.draw(NUMBERS | st.none())
    return data.draw((TEXTS if isinstance(value, str) else st.lists(NUMBERS, max_size=4)) | st.none())


@given(data=st.data(), name=st.sampled_from(["tensors.arrow", "grids.arrow", "files.arrow"]))
def test_any_bytes(copy: Copy, right: dict[str, bytes], data: st.DataObject, name: str) -> None:
    """Arrow's own reader sees these before anything is checked."""
    with tampering(copy):
        whole = bytearray(arrow_file({c: copy.arrow(name)[c] for c in copy.arrow(name).column_names}))
        for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), min_size=1, max_size=8)):
            whole[at] = value
        copy.set_index(name, bytes(whole[: data.draw(st.sampled_from([len(whole), len(whole), len(whole) // 2, 20]))]))
        survives(copy, right)
