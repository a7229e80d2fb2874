"""Checkpoints that somebody made up: all digests are right, and what they vouch for cannot be.

Whatever is in the files, everything that reads a checkpoint ends with one of our errors, or reads tensors that are right: no other
exception, no hang, no memory for bytes that are not there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.engine.verify import verify
from ckpt.errors import CorruptError, FormatError, ShapeError
from tests.failures import rich
from tests.failures.damage import Copy, arrow_file, places
from tests.failures.hostile import raw, refuses, survives, tampering


def test_untouched_it_is_read_in_every_way(copy: Copy, right: dict[str, bytes]) -> None:
    with tampering(copy):
        assert set(survives(copy, right).values()) == {None}
        assert len(right) > 20 and right["rows"] == raw(rich.SHARED["rows"]) and right["flat"] == raw(rich.SHARED["flat"])


def test_rewritten_it_is_read_in_every_way(copy: Copy, right: dict[str, bytes]) -> None:
    """The tampering below is believed: without a change of content nothing is refused."""
    with tampering(copy):
        for name in ("tensors.arrow", "grids.arrow", "files.arrow"):
            copy.set_table(name, copy.table(name))
        copy.set_state(copy.state())
        assert copy.backend.read("checkpoint.json") != copy.files["checkpoint.json"]
        assert set(survives(copy, right).values()) == {None}
        header = json.dumps(copy.header(1)).encode()
        copy.set_header(1, header)
        assert set(survives(copy, right).values()) == {None}


# --------------------------------------------------------------------------------------------------------------- outside

OUTSIDE = ["../x", "/etc/passwd", "data/../../x", "..", ".", "", "data//x", "data/./x", "data\\x", "data/x\0", "a/" * 5000 + "x"]


@pytest.mark.parametrize("path", OUTSIDE)
def test_paths_of_data_files_stay_inside(copy: Copy, right: dict[str, bytes], path: str) -> None:
    with tampering(copy):
        copy.set_row("files.arrow", 0, path=path)
        refuses(copy, right)


@pytest.mark.parametrize("path", [p for p in OUTSIDE if "\0" not in p])
def test_paths_of_index_files_stay_inside(copy: Copy, right: dict[str, bytes], path: str) -> None:
    with tampering(copy):
        copy.members["index"]["files.arrow"]["path"] = path
        copy.commit()
        refuses(copy, right)


MEMBERS: list[tuple[str, Any]] = [
    *[("features", value) for value in ([{}], [[1]], {"a": 1}, "x", None, [None])],
    *[("version", value) for value in (True, 1.0, "1", None, [1], 1 << 70)],
    *[("index", value) for value in (None, [], {}, {"tensors.arrow": 1}, "x")],
    *[("id", value) for value in (1, None, [])],
    *[("created", value) for value in (1, None)],
    *[("world_size", value) for value in ("2", True, None, 2.0)],
    *[("tensor_bytes", value) for value in ("2", None)],
    *[("format", value) for value in (None, {}, "ckpt2")],
]


@pytest.mark.parametrize(("member", "value"), MEMBERS)
def test_members_of_the_commit_record_that_cannot_be(copy: Copy, right: dict[str, bytes], member: str, value: Any) -> None:
    with tampering(copy):
        copy.commit({**copy.members, member: value})
        refuses(copy, right, FormatError if member in ("features", "version", "format") else CorruptError)


# ------------------------------------------------------------------------------------------------------------ absurd sizes


@pytest.mark.parametrize("shape", [[1 << 62], [1 << 62, 1 << 62], [0, 1 << 62, 1 << 62], [-1], [1 << 40], [], [12, 5, 1], None])
@pytest.mark.parametrize("tensor", ["rows", "flat", "scheduler.average", "rng.state@rank1"])
def test_absurd_shapes(copy: Copy, right: dict[str, bytes], tensor: str, shape: list[int] | None) -> None:
    with tampering(copy):
        copy.set_row("tensors.arrow", copy.row(tensor), shape=shape)
        refuses(copy, right)


@pytest.mark.parametrize("tensor", ["rows", "scheduler.average", "rng.state@rank1"])
@pytest.mark.parametrize("size", [1 << 40, 1 << 62])
def test_a_shape_and_files_that_fit_each_other_but_not_the_storage(copy: Copy, right: dict[str, bytes], tensor: str, size: int) -> None:
    """Memory is asked for only when the files are known to be as large as the index says."""
    with tampering(copy):
        grids = copy.table("grids.arrow")
        grids["cuts"].append([[0, size // 8]])
        grids["boxes"].append(None)
        grids["files"].append([0])
        copy.set_table("grids.arrow", grids)
        copy.set_row("tensors.arrow", copy.row(tensor), shape=[size // 8], grid=len(grids["cuts"]) - 1)
        copy.set_row("files.arrow", 0, size=size + 8192)
        refuses(copy, right)
        with pytest.raises(CorruptError):
            ckpt.open(copy.url)[tensor].read()


@pytest.mark.parametrize("cuts", [300, 3000])
def test_a_grid_of_more_cells_than_memory_holds(copy: Copy, right: dict[str, bytes], cuts: int) -> None:
    with tampering(copy):
        grids = copy.table("grids.arrow")
        grids["cuts"].append([list(range(cuts + 1))] * 4)
        grids["boxes"].append(None)
        grids["files"].append([0])
        copy.set_table("grids.arrow", grids)
        copy.set_row("tensors.arrow", copy.row("rows"), shape=[cuts] * 4, grid=len(grids["cuts"]) - 1)
        copy.set_row("files.arrow", 0, size=1 << 60, header=4096)
        refuses(copy, right)
        copy.set_row("files.arrow", 0, size=1 << 60, header=1 << 59)
        refuses(copy, right)


@pytest.mark.parametrize("length", [0, 1, 4087, 4089, 1 << 31, 1 << 60, (1 << 64) - 1])
def test_absurd_header_lengths(copy: Copy, right: dict[str, bytes], length: int) -> None:
    with tampering(copy):
        copy.set_header(0, json.dumps(copy.header()).encode(), length)
        refuses(copy, right)


@pytest.mark.parametrize("change", [{"header": 1 << 60, "size": 1 << 61}, {"header": 0}, {"header": -8}, {"size": -1}, {"rank": -1}])
def test_absurd_rows_of_files(copy: Copy, right: dict[str, bytes], change: dict[str, int]) -> None:
    with tampering(copy):
        copy.set_row("files.arrow", 0, **change)
        refuses(copy, right)


# ------------------------------------------------------------------------------------------------- what contradicts itself

FLAT = [[0, 0, 2, 7], [2, 0, 1, 4], [2, 4, 1, 3], [3, 0, 2, 7]]
"""The boxes of ``flat``: offset and shape of each."""
HUGE = (1 << 63) - 1


@pytest.mark.parametrize(
    "boxes",
    [
        [FLAT[0], FLAT[0], FLAT[1], FLAT[2]],  # as many elements, but twice the same rows, and none of the last ones
        [FLAT[0], FLAT[1], FLAT[2], [2, 0, 2, 7]],
        FLAT[:3],
        [*FLAT[:3], [HUGE, 0, 2, 7]],  # its end overflows
        [*FLAT[:3], [3, 0, HUGE, 7]],
        [*FLAT[:3], [-1, 0, 2, 7]],
        [*FLAT[:3], [3, 0, -2, -7]],
        [*FLAT, [5, 0, 0, 7]],
    ],
)
def test_boxes_that_do_not_tile(copy: Copy, right: dict[str, bytes], boxes: list[list[int]]) -> None:
    """What no box covers must not stay as it was."""
    with tampering(copy):
        grids = copy.table("grids.arrow")
        row = next(i for i, b in enumerate(grids["boxes"]) if b is not None)
        assert grids["boxes"][row] == [n for box in FLAT for n in box]
        files = [int(box in FLAT[2:]) for box in boxes]  # boxes that were stored are found where they are
        copy.set_row("grids.arrow", row, boxes=[n for box in boxes for n in box], files=files)
        refuses(copy, right)
        with pytest.raises(CorruptError):
            ckpt.open(copy.url)["flat"].read()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("name", "vocab"),
        ("name", ""),
        ("name", "n" * 5000),
        ("name", "a\0"),
        ("alias", "rows"),
        ("alias", "tied.b"),
        ("alias", "nothing"),
        ("grid", -1),
        ("grid", 10**6),
        ("logical", [13, 5]),
        ("logical", [1]),
        ("logical", [-1, 5]),
        ("rank", -5),
    ],
)
def test_rows_of_tensors_that_cannot_be(copy: Copy, right: dict[str, bytes], column: str, value: object) -> None:
    with tampering(copy):
        copy.set_row("tensors.arrow", copy.row("rows"), **{column: value})
        refuses(copy, right)


def test_a_dtype_that_is_not_the_stored_one(copy: Copy, right: dict[str, bytes]) -> None:
    with tampering(copy):
        copy.set_row("tensors.arrow", copy.row("rows"), dtype="complex128")
        ends = survives(copy, right)
        assert (ends["load"], ends["open and read"]) == (ShapeError, CorruptError)


def test_an_unknown_dtype_is_another_format(copy: Copy, right: dict[str, bytes]) -> None:
    with tampering(copy):
        copy.set_row("tensors.arrow", copy.row("rows"), dtype="float7")
        refuses(copy, right, FormatError)


@pytest.mark.parametrize("name", ["tensors.arrow", "files.arrow"])
def test_a_row_that_comes_twice(copy: Copy, right: dict[str, bytes], name: str) -> None:
    with tampering(copy):
        copy.set_table(name, {column: [values[0], *values] for column, values in copy.table(name).items()})
        refuses(copy, right)


def test_aliases_in_a_circle(copy: Copy, right: dict[str, bytes]) -> None:
    with tampering(copy):
        copy.set_row("tensors.arrow", copy.row("tied.a"), alias="tied.b", grid=-1)
        refuses(copy, right)


def test_nulls_that_hide_below_a_null(copy: Copy, right: dict[str, bytes]) -> None:
    """Arrow lets a null row of a list column have values; those of the format are read in one piece, and must not become floats."""
    with tampering(copy):
        grids = copy.arrow("grids.arrow")
        files = grids["files"].combine_chunks()
        values = pa.array([None, None, *files.values.to_pylist()], pa.int32())
        offsets = pa.array([0, *[n + 2 for n in files.offsets.to_pylist()]], pa.int32())
        hidden = pa.ListArray.from_arrays(offsets, values, mask=pa.array([True, *[False] * len(files)]))
        columns = {c: pa.concat_arrays([grids[c].combine_chunks().slice(0, 1), grids[c].combine_chunks()]) for c in ("cuts", "boxes")}
        copy.set_index("grids.arrow", arrow_file({**columns, "files": hidden}))
        survives(copy, right)


@pytest.mark.parametrize("data", [b"", b"ARROW1", b"ARROW1\0\0" + b"\0" * 100 + b"ARROW1", b"{}"])
@pytest.mark.parametrize("name", ["tensors.arrow", "grids.arrow", "files.arrow", "state.json"])
def test_index_files_that_are_something_else(copy: Copy, right: dict[str, bytes], name: str, data: bytes) -> None:
    with tampering(copy):
        copy.set_index(name, data)
        refuses(copy, right)


# -------------------------------------------------------------------------------------------------------------- state.json


def nested(depth: int, make: Callable[[Any], Any]) -> bytes:
    text = json.dumps(make("HERE"))
    before, after = text.split('"HERE"')
    return b'{"state": ' + before.encode() * depth + b"1" + after.encode() * depth + b', "ranks": {}}'


@pytest.mark.parametrize("depth", [160, 500, 950, 50_000])
@pytest.mark.parametrize(
    "make", [lambda x: [x], lambda x: {"k": x}, lambda x: {"$tuple": [x]}, lambda x: {"$map": [["k", x]]}, lambda x: {"$map": [[x, 1]]}]
)
def test_nesting_without_end(copy: Copy, right: dict[str, bytes], make: Callable[[Any], Any], depth: int) -> None:
    with tampering(copy):
        copy.set_state(nested(depth, make))
        refuses(copy, right)


MALFORMED: list[Any] = [
    {"$map": 5},
    {"$map": [1]},
    {"$map": [["a", 1, 2]]},
    {"$map": [[{"$tensor": "rows"}, 1]]},
    {"$tuple": 5},
    {"$set": [{"$tensor": "rows"}]},
    {"$tensor": 5},
    {"$tensor": ["rows"]},
    {"$tensors": {"a": 1}},
    {"$inline": []},
    {"$inline": ["float32", [2], "AAAA"]},
    {"$inline": ["float32", [1 << 62], ""]},
    {"$inline": ["nonsense", [], ""]},
    {"$inline": ["float32", [], 7]},
    {"$param_groups": 5},
    {"$param_groups": [{"params": [1], "options": {}}]},
    {"$param_groups": [{"params": ["model.0.weight"]}]},
    {"$param_groups": [{"params": ["model.0.weight"], "options": [1]}]},
    {"$per_rank": 1},
    {"$tensor": "rows", "x": 1},
]


@pytest.mark.parametrize("node", MALFORMED, ids=json.dumps)
@pytest.mark.parametrize("at", ["rows", "optimizer", "scheduler", "values", "new"])
def test_nodes_that_are_malformed(copy: Copy, right: dict[str, bytes], at: str, node: Any) -> None:
    with tampering(copy):
        document = copy.state()
        document["state"][at] = node
        copy.set_state(document)
        refuses(copy, right)


@pytest.mark.parametrize("at", ["scheduler", "values", "rng"])
def test_values_that_refer_to_a_tensor_that_is_not_there(copy: Copy, right: dict[str, bytes], at: str) -> None:
    with tampering(copy):
        document = copy.state()
        if at == "rng":
            document["ranks"]["1"]["rng"]["state"] = {"$tensor": "gone"}
        elif at == "scheduler":
            document["state"]["scheduler"]["average"] = {"$tensor": "gone"}
        else:
            document["state"]["values"] = {"$tensor": "gone"}
        copy.set_state(document)
        ends = survives(copy, right)
        assert ends["load"] is not None and (at == "values" or ends["load"] is ends["load a part"] is CorruptError)


@pytest.mark.parametrize(
    "text", ['{"state": 1e999, "ranks": {}}', '{"state": NaN, "ranks": {}}', '{"state": 1, "ranks": {"x": {}}}', "[]", "7"]
)
def test_documents_that_are_not_of_the_format(copy: Copy, right: dict[str, bytes], text: str) -> None:
    with tampering(copy):
        copy.set_state(text.encode())
        refuses(copy, right)


def test_text_that_is_not_unicode_can_be_shown(copy: Copy, right: dict[str, bytes]) -> None:
    with tampering(copy):
        document = copy.state()
        document["state"]["note\ud800"] = ["\ud800", {"$tensor": "\ud800"}]
        copy.set_state(document)
        survives(copy, right)


def test_a_chunk_whose_key_is_not_unicode(copy: Copy, right: dict[str, bytes]) -> None:
    with tampering(copy):
        header = copy.header()
        header["\ud800"] = header.pop("rows[0:6,:]")
        copy.set_header(0, json.dumps(header).encode())
        refuses(copy, right)
        header["\ud800"]["data_offsets"][0] += 1  # and it is named in a message
        copy.set_header(0, json.dumps(header).encode())
        refuses(copy, right)


MALFORMED = [
    {"$array": ["float32", [2], "AAAA"]},
    {"$array": ["float32", [-1], "AAAAAA=="]},
    {"$array": ["object", [1], "AAAAAA=="]},
    {"$scalar": ["float32"]},
    {"$scalar": ["float32", "not base64"]},
    {"$size": [1.5]},
    {"$size": [2**70]},
    {"$size": "12"},
    {"$dtype": "Tensor"},
    {"$dtype": "banana"},
    {"$dtype": ["float32"]},
    {"$device": "cuda:-1"},
    {"$device": 3},
    {"$bytes": "***"},
    {"$float": "1.0"},
    {"$complex": [1]},
    {"$set": [[1]]},
    {"$map": [[1, 2], [1, 3]]},
    {"$unknown": 1},
    {"nested": [{"$tuple": [{"$unknown": 1}]}]},
]


@pytest.mark.parametrize("node", MALFORMED, ids=json.dumps)
@pytest.mark.parametrize("where", ["state", "ranks", "options"])
def test_verify_refuses_the_values_that_state_refuses(copy: Copy, node: object, where: str) -> None:
    with tampering(copy):
        document = copy.state()
        if where == "state":
            document["state"]["values"] = node
        elif where == "ranks":
            document["ranks"]["1"]["rng"] = node
        else:
            document["state"]["optimizer"]["param_groups"]["$param_groups"][0]["options"]["lr"] = node
        copy.set_state(document)
        with pytest.raises((FormatError, CorruptError)):
            (ckpt.open(copy.url).state(), ckpt.open(copy.url).per_rank("rng", 1))
        report = verify(copy.url, threads=1)
        assert not report.ok
        assert {problem.kind for problem in report.problems} <= {"state", "index"}


# ------------------------------------------------------------------------------------------------------------------------------------------
# Checkpoints with right digests and random changes in any of their files; ``test_hostile_files.py`` has the ones that were thought of.

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
