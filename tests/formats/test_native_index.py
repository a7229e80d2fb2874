"""The four index files: what Arrow alone reads in them, round trips, size, and contradictions."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.catalog import Contents, DataFile, Grid, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.errors import ConsistencyError, CorruptError, FormatError, StateError
from ckpt.formats.native.datafile import chunk_key, coded_key, name_problem, parse_key
from ckpt.formats.native.index import decode_index, encode_index
from ckpt.formats.native.tables import MAX_DEPTH, Ragged, integers, node_problem, to_file
from ckpt.formats.native.tables import column as column_of
from ckpt.plan.layout.geometry import Box
from tests.box_strategies import boxes_in, grids, shapes
from tests.formats.native_sample import NAMES

BF16 = DTYPES["bfloat16"]


def files(count):
    return tuple(DataFile(path=f"data/i-{r:05d}.safetensors", size=8192 + r, header=4096, digest=f"{r:032x}", rank=r) for r in range(count))


def grid(cuts=((0, 2),), of=(0,), boxes=None):
    numbers = np.array(of, dtype=np.int32)
    if boxes is None:
        return Grid(cuts=cuts, files=numbers)
    return Grid(boxes=tuple(np.array(b, dtype=np.int64) for b in boxes), files=numbers)


def tensor(name="w", shape=(2,), **more):
    return TensorEntry(**{"name": name, "dtype": BF16, "shape": shape, "grid": grid()} | more)


def table(data):
    return pa.ipc.open_file(pa.BufferReader(data)).read_all()


def rows(data):
    return table(data).to_pylist()


def arrow(columns, schema):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(pa.table(columns, schema=schema), max_chunksize=1)
    return sink.getvalue().to_pybytes()


def values(g):
    offsets, sizes = g.all_boxes()
    return offsets.tolist(), sizes.tolist(), np.broadcast_to(g.files, len(g)).tolist()


# ------------------------------------------------------------------------------------------------- as specified


def test_columns():
    shared = grid(((0, 1, 3), (0, 4)), (0, 1))
    contents = Contents(
        tensors=(
            tensor("z", (3, 4), grid=shared, logical=(2, 4)),
            tensor("a", (), dtype=DTYPES["int64"], grid=grid((), (1,)), rank=3),
            tensor("é", (3, 4), grid=grid(((0, 1, 3), (0, 4)), (0, 1))),
            tensor("tied", (3, 4), grid=shared, logical=(2, 4), alias="z"),
            tensor("odd", (2, 2), grid=grid(boxes=([[0, 0], [0, 1], [1, 1]], [[2, 1], [1, 1], [1, 1]]), of=(1, 1, 1))),
        ),
        files=files(2),
        state={"x": [1, "é\ud800", None]},
        ranks={1: {"rng": 5}, 0: {}},
    )
    made = encode_index(contents)
    assert set(made) == {"tensors.arrow", "grids.arrow", "files.arrow", "state.json"}
    common = {"logical": None, "alias": None, "rank": None, "dtype": "bfloat16"}
    assert rows(made["tensors.arrow"]) == [
        common | {"name": "a", "dtype": "int64", "shape": [], "grid": 0, "rank": 3},
        common | {"name": "odd", "shape": [2, 2], "grid": 1},
        common | {"name": "tied", "shape": [3, 4], "logical": [2, 4], "grid": -1, "alias": "z"},
        common | {"name": "z", "shape": [3, 4], "logical": [2, 4], "grid": 2},
        common | {"name": "é", "shape": [3, 4], "grid": 2},
    ]
    assert rows(made["grids.arrow"]) == [
        {"cuts": [], "boxes": None, "files": [1]},
        {"cuts": None, "boxes": [0, 0, 2, 1, 0, 1, 1, 1, 1, 1, 1, 1], "files": [1]},
        {"cuts": [[0, 1, 3], [0, 4]], "boxes": None, "files": [0, 1]},
    ]
    assert rows(made["files.arrow"]) == [
        {"path": f"data/i-0000{r}.safetensors", "size": 8192 + r, "header": 4096, "digest": f"{r:032x}", "rank": r} for r in (0, 1)
    ]
    assert json.loads(made["state.json"]) == {"state": {"x": [1, "é\ud800", None]}, "ranks": {"0": {}, "1": {"rng": 5}}}


def test_column_types():
    made = encode_index(Contents(tensors=(tensor(),), files=files(1)))
    types = {n: {f.name: str(f.type) for f in table(made[n]).schema} for n in made if n.endswith(".arrow")}
    numbers = "list<item: int64>"
    assert types == {
        "tensors.arrow": {"name": "string", "dtype": "string", "shape": numbers, "logical": numbers}
        | {"grid": "int32", "alias": "string", "rank": "int32"},
        "grids.arrow": {"cuts": f"list<item: {numbers}>", "boxes": numbers, "files": "list<item: int32>"},
        "files.arrow": {"path": "string", "size": "int64", "header": "int64", "digest": "string", "rank": "int32"},
    }


def test_reads_tables_of_other_writers():
    """Several record batches, no compression, further columns, other names and nullability of list items."""
    made = encode_index(
        Contents(tensors=(tensor("a"), tensor("b", (4,), grid=grid(((0, 1, 4),), (0, 1)))), files=files(2), state=1, ranks={0: {"p": 2}})
    )
    for name in ("tensors.arrow", "grids.arrow", "files.arrow"):
        old = table(made[name])
        fields = [pa.field(f.name, pa.list_(pa.field("element", f.type.value_type))) if f.name == "shape" else f for f in old.schema]
        fields = [pa.field(f.name, f.type) for f in fields]
        schema = pa.schema([*fields, pa.field("more", pa.int8())])
        made[name] = arrow({**{n: old[n].to_pylist() for n in old.column_names}, "more": [1] * len(old)}, schema)
    found = decode_index(made, "there")
    assert [(t.name, t.shape, values(t.grid)) for t in found.tensors] == [
        ("a", (2,), ([[0]], [[2]], [0])),
        ("b", (4,), ([[0], [1]], [[1], [3]], [0, 1])),
    ]
    assert (found.files, found.state, found.ranks) == (files(2), 1, {0: {"p": 2}})


# -------------------------------------------------------------------------------------------------- round trips


@st.composite
def contents(draw):
    tensors = []
    pool = []
    for name in draw(st.lists(NAMES, max_size=6, unique=True)):
        shape = draw(shapes(max_dims=3).filter(lambda s: 0 not in s))
        reuse = [g for s, g in pool if s == shape]
        made = draw(st.sampled_from(reuse)) if reuse and draw(st.booleans()) else draw(grids(shape))
        if not shape:
            made = Grid(cuts=(), files=made.files)
        count = draw(st.sampled_from([1, len(made)]))
        made = Grid(
            cuts=made.cuts, boxes=made.boxes, files=np.array(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)), np.int32)
        )
        pool.append((shape, made))
        logical = draw(st.none() | st.just(tuple(max(n - 1, 0) for n in shape)))
        entry = tensor(name, shape, grid=made, logical=logical, rank=draw(st.none() | st.integers(0, 9)))
        stored = [t for t in tensors if t.alias is None and t.shape == shape]
        if stored and draw(st.booleans()):
            entry = replace(entry, alias=draw(st.sampled_from(stored)).name)
        tensors.append(replace(entry, dtype=draw(st.sampled_from(sorted(DTYPES.values(), key=str)))) if not stored else entry)
    by_name = {t.name: t for t in tensors}
    tensors = [replace(by_name[t.alias], name=t.name, alias=t.alias) if t.alias is not None else t for t in tensors]
    state = draw(
        st.recursive(st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists, max_leaves=4)
    )
    ranks = draw(st.dictionaries(st.integers(0, 20), st.dictionaries(st.text(), st.integers(), max_size=2), max_size=2))
    return Contents(tensors=tuple(tensors), files=files(3), state=state, ranks=ranks)


@given(contents())
def test_round_trip(before):
    after = decode_index(encode_index(before), "there")
    by_name = {t.name: t for t in before.tensors}
    assert [t.name for t in after.tensors] == sorted(by_name)
    for t in after.tensors:
        old = by_name[t.name]
        assert (t.dtype, t.shape, t.logical, t.alias, t.rank) == (old.dtype, old.shape, old.logical, old.alias, old.rank)
        assert values(t.grid) == values(old.grid if old.alias is None else by_name[old.alias].grid)
        assert t.grid.files.dtype == np.int32
    assert (after.files, after.state, after.ranks) == (before.files, before.state, before.ranks)


def test_entries_share_grids():
    same = [tensor(n, grid=grid(((0, 1, 2),), (0, 1))) for n in "abc"]
    found = decode_index(encode_index(Contents(tensors=(*same, tensor("d", alias="b")), files=files(2))), "there")
    assert len({id(t.grid) for t in found.tensors}) == 1


def test_nothing():
    found = decode_index(encode_index(Contents(tensors=(), files=())), "there")
    assert (found.tensors, found.files, found.state, found.ranks) == ((), (), None, {})


# --------------------------------------------------------------------------------------------------------- size


def test_size_does_not_grow_with_tensors_times_ranks():
    """4,000 tensors over 64 ranks: 256,000 chunks, one row for each way of cutting."""
    shared = [tuple(range(0, 64 * (k + 1) + 1, k + 1)) for k in range(8)]
    tensors = tuple(
        tensor(f"model.layers.{i // 10}.block.{i % 10}.weight", (64 * (i % 8 + 1), 16), grid=grid((shared[i % 8], (0, 16)), range(64)))
        for i in range(4000)
    )
    made = encode_index(Contents(tensors=tensors, files=files(64)))
    assert len(rows(made["grids.arrow"])) == 8
    assert sum(map(len, made.values())) < 100_000
    found = decode_index(made, "there")
    assert len({id(t.grid) for t in found.tensors}) == 8
    assert sum(len(t.grid) for t in found.tensors) == 256_000


def test_many_large_grids():
    """Every tensor cut into 1,024 chunks of its own: 512,000 cells without a step for each in Python."""
    order = np.random.default_rng(0)
    tensors = tuple(tensor(f"t{i:04d}", (1024 + i,), grid=grid(((*range(1024), 1024 + i),), order.permutation(1024))) for i in range(500))
    found = decode_index(encode_index(Contents(tensors=tensors, files=files(1024))), "there")
    for old, new in zip(tensors, found.tensors, strict=True):
        assert new.grid.cuts == old.grid.cuts
        assert np.array_equal(new.grid.files, old.grid.files)


# ------------------------------------------------------------------------------------------------- contradictions

BOXES = ([[0, 0], [0, 1]], [[2, 1], [2, 1]])

WRONG = [
    ((tensor("a"), tensor("a")), "twice"),
    ((tensor(""),), "0 bytes"),
    ((tensor(shape=(3,)),), "dimension 0"),
    ((tensor(shape=(2, 1)),), "cuts 1 dimensions"),
    ((tensor(grid=grid(((0, 1, 1, 2),), (0,))),), "dimension 0"),
    ((tensor(grid=grid(((1, 2),), (0,))),), "dimension 0"),
    ((tensor(shape=(0,), grid=grid(((0,),), (0,))),), "dimension 0"),
    ((tensor(shape=(0,), grid=grid(((0, 0, 0),), (0,))),), "dimension 0"),
    ((tensor(grid=grid(of=(2,))),), "not one of the 2"),
    ((tensor(grid=grid(of=(-1,))),), "not one of the 2"),
    ((tensor(grid=grid(of=(0, 1))),), "1 chunks"),
    ((tensor(grid=Grid(files=np.zeros(1, np.int32))),), "both or neither"),
    ((tensor(shape=(2, 3), grid=grid(boxes=BOXES)),), "4 elements"),
    ((tensor(shape=(2, 1), grid=grid(boxes=BOXES)),), "leaves"),
    ((tensor(shape=(2, 2, 1), grid=grid(boxes=BOXES)),), "not boxes"),
    ((tensor(shape=(2, 2), grid=grid(boxes=([[0, 0], [0, 2]], [[2, 2], [2, 0]]))),), "empty"),
    ((tensor(logical=(3,)),), "logical"),
    ((tensor(logical=(1, 1)),), "logical"),
    ((tensor(rank=-1),), "rank"),
    ((tensor(alias="x"),), "not a stored tensor"),
    ((tensor(alias="w"),), "not a stored tensor"),
    ((tensor(), tensor("a", alias="w"), tensor("b", alias="a")), "not a stored tensor"),
    ((tensor(), tensor("a", (3,), alias="w")), "alias"),
    ((tensor(), tensor("a", alias="w", dtype=DTYPES["float16"])), "float16"),
    ((tensor(), tensor("a", alias="w", rank=1)), "alias"),
]


@pytest.mark.parametrize(("tensors", "word"), WRONG)
def test_writers_refuse(tensors, word):
    with pytest.raises(ConsistencyError) as caught:
        encode_index(Contents(tensors=tensors, files=files(2)))
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"path": "../x"}, "../x"),
        ({"path": "/x"}, "/x"),
        ({"header": 9000}, "header 9000"),
        ({"header": 0}, "header 0"),
        ({"rank": -1}, "rank -1"),
        ({"digest": "0" * 31}, "digest"),
        ({"path": "data/i-00001.safetensors"}, "data file occurs twice"),
    ],
)
def test_writers_refuse_files(change, word):
    rows = (replace(files(1)[0], **change), files(2)[1])
    with pytest.raises(ConsistencyError) as caught:
        encode_index(Contents(tensors=(), files=rows))
    assert word in str(caught.value)


@pytest.mark.parametrize("state", [float("nan"), {"x": object()}, b"x"])
def test_state_that_is_not_json(state):
    with pytest.raises(StateError, match="not JSON"):
        encode_index(Contents(tensors=(), files=(), state=state))


@pytest.mark.parametrize("leaf", [1, 1.5, None, "x"])
def test_how_deep_nodes_may_lie(leaf):
    """Only containers count: a float lies as deep as an integer may."""
    node = leaf
    for _ in range(MAX_DEPTH):
        node = [node]
    assert node_problem({"x": node}) is None
    assert "nested" in node_problem({"x": [node]})


def altered(name, column, new, **others):
    """An index of two tensors, one table rewritten with other values in a column."""
    made = encode_index(Contents(tensors=(tensor("a"), tensor("b", (4,), grid=grid(((0, 4),), (1,)))), files=files(2)))
    old = table(made[name])
    columns = {n: old[n].to_pylist() for n in old.column_names} | {column: new} | others
    return made | {name: arrow(columns, pa.schema([pa.field(f.name, f.type) for f in old.schema]))}


def test_altered_is_read_when_nothing_is_wrong():
    assert [t.name for t in decode_index(altered("tensors.arrow", "name", ["a", "c"]), "there").tensors] == ["a", "c"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("tensors.arrow", "name", ["b", "a"]), "not sorted"),
        (("tensors.arrow", "name", ["a", "a"]), "occurs twice"),
        (("tensors.arrow", "name", ["a", None]), "nulls"),
        (("tensors.arrow", "logical", [None, [None]]), "nulls"),
        (("tensors.arrow", "grid", [0, 2]), "row 2"),
        (("tensors.arrow", "grid", [0, -2]), "row -2"),
        (("tensors.arrow", "grid", [0, -1]), "exactly one of a grid and an alias"),
        (("tensors.arrow", "alias", [None, "a"]), "exactly one of a grid and an alias"),
        (("tensors.arrow", "grid", [0, 0]), "dimension 0"),
        (("tensors.arrow", "shape", [[2], [5]]), "dimension 0"),
        (("tensors.arrow", "shape", [[2], [None]]), "nulls"),
        (("grids.arrow", "files", [[0], [2]]), "not one of the 2"),
        (("grids.arrow", "files", [[0], []]), "needs files"),
        (("grids.arrow", "files", [[0], [None]]), "null"),
        (("grids.arrow", "cuts", [[[0, 2]], None]), "exactly one of cuts and boxes"),
        (("grids.arrow", "cuts", [[[0, 2]], [None]]), "nulls"),
        (("grids.arrow", "cuts", [[[0, 2]], [[0, None]]]), "nulls"),
        (("grids.arrow", "boxes", [None, [0, 4]]), "exactly one of cuts and boxes"),
        (("files.arrow", "path", ["data/x", "../x"]), "../x"),
        (("files.arrow", "size", [1, 1]), "size 1"),
    ],
)
def test_readers_refuse(change, word):
    with pytest.raises(CorruptError, match="there") as caught:
        decode_index(altered(*change), "there")
    assert word in str(caught.value)


def test_readers_refuse_boxes_of_other_dimensions():
    with pytest.raises(CorruptError, match="'b' do not have its 1 dimensions"):
        decode_index(altered("grids.arrow", "cuts", [[[0, 2]], None], boxes=[None, [0, 4, 0]]), "there")


def test_unknown_dtype():
    with pytest.raises(FormatError, match=r"float3.*there/tensors\.arrow"):
        decode_index(altered("tensors.arrow", "dtype", ["bfloat16", "float3"]), "there")


RANKS = [b'{"ranks": {"%b": {}}, "state": 1}' % key for key in (b"a", b" 1", b"+1", b"1_0", b"01")]


@pytest.mark.parametrize("name", ["tensors.arrow", "grids.arrow", "files.arrow", "state.json"])
@pytest.mark.parametrize("data", [b"", b"ARROW1\0\0", b"[]", b'{"state": NaN, "ranks": {}}', b'{"state": 1}', *RANKS])
def test_not_a_table(name, data):
    made = encode_index(Contents(tensors=(tensor(),), files=files(1)))
    with pytest.raises(CorruptError, match=f"there/{name}"):
        decode_index(made | {name: data}, "there")


def test_a_column_is_missing():
    made = encode_index(Contents(tensors=(tensor(),), files=files(1)))
    for name in ("tensors.arrow", "grids.arrow", "files.arrow"):
        old = table(made[name])
        for column in old.column_names:
            left = old.drop_columns([column])
            with pytest.raises(CorruptError, match=f"there/{name}"):
                decode_index(made | {name: arrow(left.to_pydict(), left.schema)}, "there")


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 65])
@pytest.mark.parametrize("skipped", [0, 1, 9])
def test_nulls_of_a_list_column_wherever_it_begins(count: int, skipped: int) -> None:
    rows = [None if i % 3 == 1 or i == 8 else [i] * (i % 2) for i in range(count + skipped)]
    for each in (rows, [r or [] for r in rows]):
        column = pa.array(each, pa.list_(pa.int64())).slice(skipped)
        assert Ragged.of(column).nulls.tolist() == [r is None for r in each[skipped:]]


def test_a_list_column_without_rows_may_have_no_offsets():
    """Other writers leave them out."""
    kind, empty = pa.list_(pa.int64()), pa.py_buffer(b"")
    rows = Ragged.of(pa.Array.from_buffers(kind, 0, [None, empty], children=[pa.nulls(0, kind.value_type)]))
    assert (len(rows), rows.offsets.tolist(), rows.values.tolist()) == (0, [0], [])


CELLS = {
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.utf8(): st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    pa.list_(pa.int64()): st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    pa.list_(pa.int32()): st.lists(st.integers(0, 2**31 - 1), max_size=3),
}


@pytest.mark.parametrize("kind", CELLS, ids=str)
@given(st.data())
def test_a_column_is_what_arrow_makes_of_its_values(kind, data):
    """In the bytes of the file, too: where nulls are, and what lies under them."""
    values = data.draw(st.lists(st.none() | CELLS[kind], max_size=20))
    made, wanted, schema = column_of(values, kind), pa.array(values, kind), pa.schema([pa.field("x", kind)])
    made.validate(full=True)
    assert made.equals(wanted) and to_file({"x": made}, schema) == to_file({"x": wanted}, schema)
    if pa.types.is_integer(kind) and None not in values:
        assert integers(made.slice(len(made) // 2)).tolist() == values[len(made) // 2 :]


@pytest.mark.parametrize(("value", "kind"), [(2**31, pa.int32()), (2**63, pa.int64()), ([2**31], pa.list_(pa.int32()))], ids=str)
def test_a_number_that_does_not_fit_a_column_is_an_error(value, kind):
    with pytest.raises(OverflowError):
        column_of([value], kind)


# ----------------------------------------------------- Keys of chunks: the examples of the specification, and that no two chunks share one.


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
