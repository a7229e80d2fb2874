"""Headers of data files: valid safetensors, aligned, and refused if anything is off even where the digest is right."""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from ckpt import settings
from ckpt.catalog import DataFile
from ckpt.dtypes import DTYPES
from ckpt.errors import CorruptError, CoverageError, FormatError, StateError
from ckpt.formats.native.datafile import (
    CODED_CHUNKS,
    HEADER_LIMIT,
    ChunkSpec,
    coded_groups,
    plan_coded_file,
    plan_data_file,
    plan_data_files,
)
from ckpt.formats.native.header import parse_header
from ckpt.io_backends.registry import open_backend
from ckpt.plan.layout.geometry import Box
from tests.formats.native_sample import ID, coded_samples, sample, samples, two_ranks, write_data
from tests.formats.oracle import CODECS as ORACLE_CODECS


def spec(name, offset, shape, whole, dtype="float32"):
    return ChunkSpec(name=name, box=Box(offset, shape), shape=whole, dtype=DTYPES[dtype])


def many(count):
    """Chunks as a rank of a large job has them: 64 per tensor."""
    return [spec(f"model.layers.{i // 64}.wq.weight", (128 * (i % 64), 0), (128, 512), (8192, 512), "bfloat16") for i in range(count)]


def test_golden():
    """The bytes that the specification fixes, written out by hand."""
    chunks = [spec("b", (0,), (3,), (3,), "int8"), spec("a", (0, 0), (1, 2), (2, 2)), spec("a", (1, 0), (1, 2), (2, 2))]
    plan = plan_data_file(chunks, id=ID, rank=7)
    header = plan.encode_header([1, 2, 2**64 - 1])
    assert (plan.path, plan.header, plan.size) == (f"data/{ID}-00007.safetensors", 4096, 4096 + 19)
    assert struct.unpack("<Q", header[:8]) == (4088,)
    assert json.loads(header[8:]) == {
        "__metadata__": {
            "ckpt.version": "1",
            "ckpt.id": ID,
            "ckpt.rank": "7",
            "ckpt.digests": "0000000000000002" + "ffffffffffffffff" + "0000000000000001",
        },
        "a[0:1,:]": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]},
        "a[1:2,:]": {"dtype": "F32", "shape": [1, 2], "data_offsets": [8, 16]},
        "b": {"dtype": "I8", "shape": [3], "data_offsets": [16, 19]},
    }
    assert header.rstrip(b" ").endswith(b"}")
    assert plan.offsets.tolist() == [4096 + 16, 4096, 4096 + 8]
    assert plan.lengths.tolist() == [3, 8, 8]
    row = plan.row(header)
    assert row == DataFile(path=plan.path, size=4115, header=4096, digest=xxhash.xxh3_128_hexdigest(header), rank=7)
    parsed = parse_header(header, row, "there")
    assert (parsed.id, parsed.rank) == (ID, 7)
    assert {k: tuple(c) for k, c in parsed.chunks.items()} == {
        "b": ("I8", (3,), 4112, 3, "0000000000000001"),
        "a[0:1,:]": ("F32", (1, 2), 4096, 8, "0000000000000002"),
        "a[1:2,:]": ("F32", (1, 2), 4104, 8, "ffffffffffffffff"),
    }


@given(samples())
def test_chunks_are_aligned_and_disjoint(made):
    chunks = [ChunkSpec(name=s.name, box=b, shape=s.shape, dtype=s.dtype) for s in made for b in s.chunks()]
    plan = plan_data_file(chunks, id=ID, rank=0)
    assert plan.header % 4096 == 0
    assert all(o % c.dtype.itemsize == 0 for o, c in zip(plan.offsets.tolist(), chunks, strict=True))
    used = Counter(byte for o, n in zip(plan.offsets.tolist(), plan.lengths.tolist(), strict=True) for byte in range(o, o + n))
    assert used == Counter(range(plan.header, plan.size))


@given(samples())
def test_parse_inverts(made):
    chunks = [ChunkSpec(name=s.name, box=b, shape=s.shape, dtype=s.dtype) for s in made for b in s.chunks()]
    plan = plan_data_file(chunks, id=ID, rank=3)
    digests = [xxhash.xxh3_64_intdigest(bytes([i])) for i in range(len(chunks))]
    header = plan.encode_header(digests)
    assert len(header) == plan.header
    found = parse_header(header, plan.row(header), "there").chunks
    wanted = zip(plan.offsets.tolist(), plan.lengths.tolist(), [f"{d:016x}" for d in digests], strict=True)
    assert Counter(c[2:] for c in found.values()) == Counter(wanted)


# -------------------------------------------------------------------------------------------------- other readers


def test_safetensors_reads_numpy_dtypes(tmp_path):
    kinds = [d for d in DTYPES.values() if d.numpy is not None and d.name not in ("complex64", "complex128")]
    made = [sample(d.name, d.name, (3, 2), [[0, 1, 3], [0, 2]]) for d in kinds]
    (row,), _ = write_data(open_backend(str(tmp_path)), made)
    with safe_open(tmp_path / row.path, framework="numpy") as file:
        for s in made:
            whole = np.concatenate([file.get_tensor(f"{s.name}[0:1,:]"), file.get_tensor(f"{s.name}[1:3,:]")])
            np.testing.assert_array_equal(whole.view(np.uint8), s.data.view(s.dtype.numpy)[..., 0].view(np.uint8))
            assert whole.dtype == s.dtype.numpy


def test_safetensors_reads_torch_dtypes(tmp_path):
    torch = pytest.importorskip("torch")
    kinds = [d for d in DTYPES.values() if d.safetensors != "U8" and hasattr(torch, d.name)]
    assert {"bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"} <= {d.name for d in kinds}
    made = [sample(d.name, d.name, (3, 2)) for d in kinds]
    (row,), _ = write_data(open_backend(str(tmp_path)), made)
    with safe_open(tmp_path / row.path, framework="pt") as file:
        assert file.metadata()["ckpt.id"] == ID
        for s in made:
            found = file.get_tensor(s.name)
            assert (found.dtype, tuple(found.shape)) == (getattr(torch, s.name), s.shape)
            np.testing.assert_array_equal(found.contiguous().view(torch.uint8).numpy().ravel(), s.data.ravel())


def test_safetensors_reads_everything_else(tmp_path):
    """What torch spells otherwise still comes out as its bytes; an empty file is a file."""
    rows, _ = write_data(open_backend(str(tmp_path)), two_ranks())
    keys = set()
    for row in rows:
        with safe_open(tmp_path / row.path, framework="pt") as file:
            keys |= set(file.keys())
            if row.rank == 0:
                np.testing.assert_array_equal(file.get_tensor("c[0:1]").numpy(), two_ranks()[4].data[:1])
    assert keys == {"w[0:1,:]", "w[1:4,:]", "layers.0/é[1][:]", "scalar", "empty", "c[0:1]", "c[1:2]", "f4"}
    plan = plan_data_file([], id=ID, rank=0)
    (tmp_path / "none").write_bytes(plan.encode_header([]))
    with safe_open(tmp_path / "none", framework="numpy") as file:
        assert list(file.keys()) == []
    assert parse_header(plan.encode_header([]), plan.row(plan.encode_header([])), "there").chunks == {}


# ------------------------------------------------------------------------------------------------------ many files


def test_long_headers_are_split():
    chunks = many(1000)
    plans = plan_data_files(chunks, id=ID, rank=12, limit=30_000)
    assert [p.path for p in plans] == [f"data/{ID}-00012{f'-{n}' if n else ''}.safetensors" for n in range(len(plans))]
    assert len(plans) > 4
    assert all(p.header - 8 <= 30_000 for p in plans)
    assert [(p.first, len(p)) for p in plans] == [(sum(map(len, plans[:n])), len(p)) for n, p in enumerate(plans)]
    assert sum(map(len, plans)) == 1000
    keys = set()
    for p in plans:
        header = p.encode_header(range(len(p)))
        keys |= set(parse_header(header, p.row(header), "there").chunks)
    assert len(keys) == 1000


def test_no_chunks_no_files():
    assert plan_data_files([], id=ID, rank=0) == []


def test_limit_too_small_for_one_chunk():
    with pytest.raises(ValueError, match=r"limit of 100 bytes is too small for the chunk w"):
        plan_data_files([spec("w", (0,), (1,), (1,))], id=ID, rank=0, limit=100)


def test_the_default_limit_is_that_of_safetensors():
    assert HEADER_LIMIT == 100_000_000
    assert len(plan_data_files(many(1000), id=ID, rank=0)) == 1


def test_refuses_a_chunk_twice_and_bad_names():
    twice = [spec("w", (0,), (1,), (2,)), spec("w", (0,), (1,), (2,))]
    with pytest.raises(CoverageError, match=r"w\[0:1\]"):
        plan_data_file(twice, id=ID, rank=0)
    with pytest.raises(StateError, match="NUL"):
        plan_data_files([spec("w\0", (0,), (1,), (2,))], id=ID, rank=0)
    with pytest.raises(ValueError, match="1 digests for 2 chunks"):
        plan_data_file(many(2), id=ID, rank=0).encode_header([1])


@pytest.mark.parametrize("number", [0, 3])
def test_labelled_is_the_plan_of_another_save(number):
    other = "zyxwvutsrqponmlk"
    chunks = [*many(5), spec("b", (0,), (3,), (3,), "int8")]
    codecs, lengths = [None, "zstd", None, None, None, None], [c.nbytes for c in chunks]
    lengths[1] = 9
    for planned in (
        lambda id: plan_data_file(chunks, id=id, rank=7),
        lambda id: plan_coded_file(chunks, codecs, lengths, id=id, rank=123456, number=number),
    ):
        plan, wanted = planned(ID).labelled(other), planned(other)
        assert (plan.path, plan.header, plan.size) == (wanted.path, wanted.header, wanted.size)
        assert plan.offsets.tolist() == wanted.offsets.tolist()
        assert plan.encode_header(range(6)) == wanted.encode_header(range(6))
    with pytest.raises(ValueError, match="not an id"):
        plan_data_file(chunks, id=ID, rank=7).labelled("x")


def test_labelling_costs_the_same_for_many_chunks():
    few, lots = (plan_data_file(many(n), id=ID, rank=0) for n in (2, 2000))
    assert calls(lambda: lots.labelled(ID))[0] == calls(lambda: few.labelled(ID))[0]


def test_digests_as_an_array():
    plan = plan_data_file(many(3), id=ID, rank=0)
    digests = [2**64 - 1, 0, 2**63]
    assert plan.encode_header(np.array(digests, dtype=np.uint64)) == plan.encode_header(digests)
    with pytest.raises(ValueError, match="2 digests for 3 chunks"):
        plan.encode_header(np.zeros(2, dtype=np.uint64))


# ---------------------------------------------------------------------------------------------------- coded chunks


def test_golden_with_coded_chunks():
    """The bytes that the specification fixes, written out by hand."""
    chunks = [
        spec("b", (0, 0), (200, 2), (200, 2), "bfloat16"),
        spec("i", (0,), (3,), (3,), "int8"),
        spec("a", (0,), (60,), (90,)),
        spec("a", (60,), (30,), (90,)),
        spec('"', (), (), (), "complex128"),
    ]
    plan = plan_coded_file(chunks, ["planes-zstd", None, None, "zstd", "zstd"], [101, 3, 240, 13, 15], id=ID, rank=7, number=2)
    header = plan.encode_header([1, 2, 3, 4, 5])
    assert (plan.path, plan.header, plan.size) == (f"data/{ID}-00007-2.safetensors", 4096, 4096 + 372)
    assert plan.offsets.tolist() == [4096 + 243, 4096 + 240, 4096, 4096 + 344, 4096 + 357]
    assert plan.lengths.tolist() == [101, 3, 240, 13, 15]
    found = json.loads(header[8:])
    metadata = found.pop("__metadata__")
    assert json.loads(metadata.pop("ckpt.dtypes")) == {"b": "bfloat16", "a": "float32", '"': "complex128"}
    assert json.loads(metadata.pop("ckpt.shapes")) == {"b": [200, 2], "a": [90], '"': []}
    assert metadata == {
        "ckpt.version": "1",
        "ckpt.id": ID,
        "ckpt.rank": "7",
        "ckpt.digests": "".join(f"{n:016x}" for n in (5, 3, 4, 1, 2)),
    }
    assert list(found.items()) == [
        ("a[0:60]", {"dtype": "F32", "shape": [60], "data_offsets": [0, 240]}),
        ("i", {"dtype": "I8", "shape": [3], "data_offsets": [240, 243]}),
        ("b[:,:]#planes-zstd", {"dtype": "U8", "shape": [101], "data_offsets": [243, 344]}),
        ("a[60:90]#zstd", {"dtype": "U8", "shape": [13], "data_offsets": [344, 357]}),
        ('"[]#zstd', {"dtype": "U8", "shape": [15], "data_offsets": [357, 372]}),
    ]
    parsed = parse_header(header, plan.row(header), "there")
    assert parsed.chunks['"[]#zstd'] == ("U8", (15,), 4096 + 357, 15, f"{5:016x}")


@pytest.mark.parametrize("codec", ["zstd", "planes-zstd"])
def test_safetensors_reads_files_with_coded_chunks(tmp_path, codec):
    rows, _ = write_data(open_backend(str(tmp_path)), coded_samples(), codec=codec)
    keys = set()
    for row in rows:
        with safe_open(tmp_path / row.path, framework="numpy") as file:
            keys |= set(file.keys())
            if row.rank == 0:
                blob = file.get_tensor(f"layers.0/é[1][0:32,:]#{codec}")
                raw = ORACLE_CODECS[codec](blob.tobytes(), 32 * 128 * 2, 2)
                assert raw == coded_samples()[0].data[:32].tobytes()
    assert {k for k in keys if "#" not in k} == {"scalar", "empty", "noise[0:1000]", "noise[1000:3000]", "half[500:1000]"}


def test_uncoded_files_are_the_same_bytes():
    """No codec used: nothing in the file tells that one might have been."""
    plain = plan_data_file(many(5), id=ID, rank=7)
    coded = plan_coded_file(many(5), [None] * 5, plain.lengths.tolist(), id=ID, rank=7, number=0)
    assert (coded.path, coded.encode_header(range(5))) == (plain.path, plain.encode_header(range(5)))


@pytest.mark.parametrize(
    ("codec", "length", "word"),
    [("lz4", 5, "'lz4'"), ("zstd", 0, "0 bytes"), ("zstd", 13, "13 bytes"), (None, 11, "11 bytes"), ("zstd", -1, "-1 bytes")],
)
def test_what_cannot_be_coded(codec, length, word):
    with pytest.raises(ValueError, match=f"{word}.*w.*of 12"):
        plan_coded_file([spec("w", (0,), (3,), (3,))], [codec], [length], id=ID, rank=0, number=0)


def test_a_chunk_twice_though_one_is_coded():
    twice = [spec("w", (0,), (1,), (2,)), spec("w", (0,), (1,), (2,))]
    with pytest.raises(CoverageError, match=r"w\[0:1\]"):
        plan_coded_file(twice, [None, "zstd"], [4, 3], id=ID, rank=0, number=0)


def test_a_header_that_would_be_too_long(monkeypatch):
    monkeypatch.setattr("ckpt.formats.native.datafile.HEADER_LIMIT", 10_000)
    with pytest.raises(StateError, match="of 10000"):
        plan_coded_file(many(100), [None] * 100, [c.nbytes for c in many(100)], id=ID, rank=0, number=0)


MB = 1 << 20


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([], []),
        ([0], [1]),
        ([settings.CODED_FILE], [1]),
        ([settings.CODED_FILE + 1, 0, 1], [1, 2]),
        ([64 * MB, 64 * MB, 64 * MB, 1], [2, 2]),
        ([64 * MB, 65 * MB, 63 * MB, 1], [1, 2, 1]),
        ([0] * 5 + [settings.CODED_FILE] + [0] * 5, [11]),
        ([1] * (CODED_CHUNKS + 1), [CODED_CHUNKS, 1]),
    ],
)
def test_groups(lengths, groups):
    assert [s.stop - s.start for s in coded_groups(lengths)] == groups


@given(st.lists(st.integers(0, 70 * MB), max_size=60))
def test_groups_are_consecutive_full_and_not_too_large(lengths):
    groups = coded_groups(lengths)
    assert [i for s in groups for i in range(s.start, s.stop)] == list(range(len(lengths)))
    for s in groups:
        assert s.stop - s.start == 1 or sum(lengths[s]) <= settings.CODED_FILE
        assert s.stop == len(lengths) or sum(lengths[s.start : s.stop + 1]) > settings.CODED_FILE


# ------------------------------------------------------------------------------------------------------------ cost


def calls(function):
    """How many functions, in Python or in C, ``function`` calls."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        result = function()
    finally:
        sys.setprofile(before)
    return count, result


def test_cost_per_chunk():
    """Work grows with the number of chunks and stays a few dozen calls for each; counted, as machines differ."""
    costs = {}
    for count in (1000, 2000):
        chunks = many(count)
        planning, (plan, header) = calls(lambda c=chunks: (p := plan_data_files(c, id=ID, rank=0)[0], p.encode_header(range(len(c)))))
        parsing, parsed = calls(lambda p=plan, h=header: parse_header(h, p.row(h), "there"))
        assert len(parsed.chunks) == count
        costs[count] = planning, parsing
    assert costs[2000][0] < 2000 * 50
    assert costs[2000][1] < 2000 * 10
    assert all(double < 2.2 * single for single, double in zip(costs[1000], costs[2000], strict=True))


# --------------------------------------------------------------------------------------------------------- damage

ENTRIES = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "I8", "shape": [3], "data_offsets": [8, 11]}}
METADATA = {"ckpt.version": "1", "ckpt.id": ID, "ckpt.rank": "0", "ckpt.digests": "0" * 32}
ROW = DataFile(path=f"data/{ID}-00000.safetensors", size=4096 + 11, header=4096, digest="", rank=0)


def raw(document, row=ROW, pad=4088):
    text = (document if isinstance(document, bytes) else json.dumps(document).encode()).ljust(pad)
    data = struct.pack("<Q", len(text)) + text
    return data, replace(row, digest=xxhash.xxh3_128_hexdigest(data))


def with_entry(key, **change):
    return {"__metadata__": METADATA, **ENTRIES, key: ENTRIES[key] | change}


def test_hand_made_header_is_read():
    data, row = raw({"__metadata__": METADATA, **ENTRIES})
    assert {k: c.offset for k, c in parse_header(data, row, "there").chunks.items()} == {"a": 4096, "b": 4104}


@pytest.mark.parametrize(
    ("document", "word"),
    [
        (with_entry("b", data_offsets=[9, 12]), "hole"),
        (with_entry("b", data_offsets=[7, 10]), "overlap"),
        (with_entry("b", data_offsets=[8, 12], shape=[4]), "end at byte 12"),
        (with_entry("b", shape=[4]), "do not hold"),
        (with_entry("b", dtype="I16"), "do not hold"),
        (with_entry("b", dtype="X9"), "do not hold"),
        (with_entry("b", dtype=["I8"]), "wrong type"),
        (with_entry("b", shape=[3.0]), "wrong type"),
        (with_entry("b", shape=[-3]), "wrong type"),
        (with_entry("b", shape=3), "lacks"),
        (with_entry("b", data_offsets=[8]), "lacks"),
        (with_entry("b", data_offsets=[8, 2**80]), "lacks"),
        (with_entry("b", data_offsets=[11, 8]), "ends before it starts"),
        ({"__metadata__": METADATA, "a": ENTRIES["a"], "b": {"dtype": "I8"}}, "lacks"),
        ({"__metadata__": METADATA, "a": ENTRIES["a"], "b": 1}, "lacks"),
        ({"__metadata__": METADATA, "a": ENTRIES["a"]}, "1 digests"),
        ({"__metadata__": METADATA | {"ckpt.digests": "0" * 31 + "G"}, **ENTRIES}, "2 digests"),
        ({"__metadata__": METADATA | {"ckpt.digests": "0" * 16}, **ENTRIES}, "2 digests"),
        ({"__metadata__": METADATA | {"ckpt.id": "f" * 16}, **ENTRIES}, "rank 0 of save ffff"),
        ({"__metadata__": METADATA | {"ckpt.rank": "1"}, **ENTRIES}, "rank 1 of save 0123"),
        ({"__metadata__": METADATA | {"ckpt.rank": "-1"}, **ENTRIES}, "who wrote it"),
        ({"__metadata__": {}, **ENTRIES}, "__metadata__"),
        (ENTRIES, "__metadata__"),
        ([], "not a JSON object"),
        (b'{"a": ', "not JSON"),
        (b"\xff", "not JSON"),
    ],
)
def test_wrong_headers(document, word):
    data, row = raw(document)
    with pytest.raises(CorruptError, match="there") as caught:
        parse_header(data, row, "there")
    assert word in str(caught.value)


def test_unknown_version_of_a_data_file():
    data, row = raw({"__metadata__": METADATA | {"ckpt.version": "2"}, **ENTRIES})
    with pytest.raises(FormatError, match="'2'"):
        parse_header(data, row, "there")


def test_header_of_another_length():
    data, row = raw({"__metadata__": METADATA, **ENTRIES})
    with pytest.raises(CorruptError, match="4096"):
        parse_header(data[:-1], row, "there")
    data, row = raw({"__metadata__": METADATA, **ENTRIES}, pad=4089)
    with pytest.raises(CorruptError, match="JSON"):
        parse_header(data, replace(row, header=4097), "there")
    data = struct.pack("<Q", 9) + data[8:4096]
    with pytest.raises(CorruptError, match="9 bytes of JSON"):
        parse_header(data, replace(row, digest=xxhash.xxh3_128_hexdigest(data)), "there")
