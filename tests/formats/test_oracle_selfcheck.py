"""The oracle reads a checkpoint written by hand from docs/format.md, and finds every damage and every broken rule that is tried here."""

from __future__ import annotations

import copy
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from tests.formats.oracle import DTYPES, read, read_state

ID = "0123456789abcdef"
W = np.arange(12, dtype="<f4").reshape(4, 3)
BOXED = np.arange(6, dtype="<i8").reshape(2, 3)
COMPLEX = np.array(1.5 - 2j, dtype="<c16").tobytes()

SCHEMAS = {
    "tensors": {
        "name": pa.string(),
        "dtype": pa.string(),
        "shape": pa.list_(pa.int64()),
        "logical": pa.list_(pa.int64()),
        "grid": pa.int32(),
        "alias": pa.string(),
        "rank": pa.int32(),
    },
    "grids": {"cuts": pa.list_(pa.list_(pa.int64())), "boxes": pa.list_(pa.int64()), "files": pa.list_(pa.int32())},
    "files": {"path": pa.string(), "size": pa.int64(), "header": pa.int64(), "digest": pa.string(), "rank": pa.int32()},
}


def row(name: str, dtype: str, shape: list[int], grid: int, **others: Any) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape, "logical": None, "grid": grid, "alias": None, "rank": None} | others


def cut(cuts: list[list[int]], files: list[int]) -> dict[str, Any]:
    return {"cuts": cuts, "boxes": None, "files": files}


SAMPLE: dict[str, Any] = {
    "tensors": [
        row("a.w", "float32", [4, 3], 0, logical=[3, 3]),
        row("b", "bfloat16", [2], 1),
        row("c", "complex128", [], 2),
        row("empty", "float32", [0, 3], 3),
        row("f4", "float4_e2m1fn_x2", [2, 1], 4),
        row("f4s", "float4_e2m1fn_x2", [], 2),
        row("i", "int64", [2, 3], 5),
        row("mine", "uint8", [2], 6, rank=1),
        row("odd]", "bool", [], 2),
        row("pair", "complex32", [1, 2], 7),
        row("tied", "float32", [4, 3], -1, alias="a.w"),
    ],
    "grids": [
        cut([[0, 1, 4], [0, 3]], [0, 1]),
        cut([[0, 2]], [0]),
        cut([], [0]),
        cut([[0, 0], [0, 3]], [0]),
        cut([[0, 2], [0, 1]], [1]),
        {"cuts": None, "boxes": [0, 0, 1, 3, 1, 0, 1, 2, 1, 2, 1, 1], "files": [1, 1, 0]},
        cut([[0, 2]], [1]),
        cut([[0, 1], [0, 1, 2]], [1]),
    ],
    "data": [
        {
            "c[]": ("U8", [16], COMPLEX),
            "i[1:2,2:3]": ("I64", [1, 1], BOXED[1:, 2:].tobytes()),
            "a.w[0:1,:]": ("F32", [1, 3], W[:1].tobytes()),
            "empty": ("F32", [0, 3], b""),
            "b": ("BF16", [2], b"\x80\x3f\x00\xc0"),
            "odd][]": ("BOOL", [], b"\x01"),
            "f4s[]": ("F4", [2], b"\x21"),
        },
        {
            "i[0:1,:]": ("I64", [1, 3], BOXED[:1].tobytes()),
            "i[1:2,0:2]": ("I64", [1, 2], BOXED[1:, :2].tobytes()),
            "a.w[1:4,:]": ("F32", [3, 3], W[1:].tobytes()),
            "pair[:,0:1]": ("U8", [1, 1, 4], b"ABCD"),
            "pair[:,1:2]": ("U8", [1, 1, 4], b"EFGH"),
            "f4": ("F4", [2, 2], b"\x43\x65"),
            "mine": ("U8", [2], b"\x07\x08"),
        },
    ],
    "state": {"state": {"step": 3, "w": {"$tensor": "a.w"}, "r": {"$per_rank": True}}, "ranks": {"0": {"r": 1}, "1": {"r": 2}}},
    "record": {
        "format": "ckpt",
        "version": 1,
        "id": ID,
        "created": "2024-05-06T07:08:09Z",
        "writer": "by hand",
        "world_size": 2,
        "features": [],
        "tensor_bytes": 48 + 4 + 16 + 0 + 2 + 1 + 48 + 2 + 1 + 8,
    },
    "meta": {},  # replaces members of the metadata of data files
    "files": {},  # replaces values in files.arrow
    "path": f"data/{ID}-%05d.safetensors",
    "align": 4096,
    "gap": b"",  # after each chunk
}

WANTED = {
    "a.w": ("float32", (4, 3), W.tobytes()),
    "b": ("bfloat16", (2,), b"\x80\x3f\x00\xc0"),
    "c": ("complex128", (), COMPLEX),
    "empty": ("float32", (0, 3), b""),
    "f4": ("float4_e2m1fn_x2", (2, 1), b"\x43\x65"),
    "f4s": ("float4_e2m1fn_x2", (), b"\x21"),
    "i": ("int64", (2, 3), BOXED.tobytes()),
    "mine": ("uint8", (2,), b"\x07\x08"),
    "odd]": ("bool", (), b"\x01"),
    "pair": ("complex32", (1, 2), b"ABCDEFGH"),
    "tied": ("float32", (4, 3), W.tobytes()),
}


def arrow(schema: dict[str, pa.DataType], rows: list[dict[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(rows, pa.schema(list(schema.items())))
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as out:
        out.write_table(table)
    return bytes(sink.getvalue())


def data_file(root: Path, rank: int, sample: dict[str, Any]) -> dict[str, Any]:
    """Write one data file; returns its row of files.arrow."""
    entries = sample["data"][rank]
    header: dict[str, Any] = {}
    data = b""
    for key, (dtype, shape, raw) in entries.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw + sample["gap"]
    digests = "".join(xxh3_64_hexdigest(entries[k][2]) for k in sorted(entries))
    header["__metadata__"] = {"ckpt.version": "1", "ckpt.id": ID, "ckpt.rank": str(rank), "ckpt.digests": digests} | sample["meta"]
    header["__metadata__"] |= sample.get("more", {}).get(rank, {})
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % sample["align"])
    start = struct.pack("<Q", len(text)) + text
    path = sample["path"] % rank
    (root / path).write_bytes(start + data)
    row = {"path": path, "size": len(start + data), "header": len(start), "digest": xxh3_128_hexdigest(start), "rank": rank}
    return row | sample["files"]


def build(root: Path, sample: dict[str, Any]) -> Path:
    (root / "data").mkdir(parents=True)
    (root / f"index-{ID}").mkdir()
    files = [data_file(root, rank, sample) for rank in range(2)]
    index = {
        "tensors.arrow": arrow(SCHEMAS["tensors"], sample["tensors"]),
        "grids.arrow": arrow(SCHEMAS["grids"], sample["grids"]),
        "files.arrow": arrow(SCHEMAS["files"], files),
        "state.json": json.dumps(sample["state"]).encode(),
    }
    entries = {}
    for name, raw in index.items():
        path = f"index-{ID}/{name}"
        (root / path).write_bytes(raw)
        entries[name] = {"path": path, "size": len(raw), "digest": xxh3_128_hexdigest(raw)}
    text = json.dumps(sample["record"] | {"index": entries, "digest": "0" * 32})
    (root / "checkpoint.json").write_text(text.replace("0" * 32, xxh3_128_hexdigest(text.encode())))
    return root


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return build(tmp_path / "good", SAMPLE)


def test_a_checkpoint_written_by_hand_is_read(good: Path) -> None:
    assert read(good) == WANTED
    assert read_state(str(good)) == SAMPLE["state"]


def test_orphans_and_unknown_members_are_ignored(tmp_path: Path) -> None:
    sample = copy.deepcopy(SAMPLE)
    sample["record"]["mood"] = {"digest": "sunny"}
    sample["meta"]["framework"] = "none"
    root = build(tmp_path / "c", sample)
    (root / "data" / "zzzzzzzzzzzzzzzz-00000.safetensors").write_bytes(b"orphans")
    assert read(root) == WANTED


def test_the_table_of_dtypes_has_the_sizes_of_the_specification() -> None:
    sizes = {1: 9, 2: 4, 4: 4, 8: 4, 16: 1}  # counted in section 7
    assert {n: sum(size == n for size, _ in DTYPES.values()) for n in sizes} == sizes
    assert {stored for _, stored in DTYPES.values() if stored.startswith("F")} == {
        *("F16", "F32", "F64", "F4", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0")
    }


FILES = ["checkpoint.json", *(f"index-{ID}/{n}" for n in ("tensors.arrow", "grids.arrow", "files.arrow", "state.json"))]
FILES += [f"data/{ID}-0000{r}.safetensors" for r in (0, 1)]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_found(good: Path, name: str) -> None:
    raw = (good / name).read_bytes()
    data = range(4096, len(raw)) if name.startswith("data") else ()
    for at in [*range(0, len(raw), max(1, len(raw) // 40)), *data, len(raw) - 1]:
        flipped = bytearray(raw)
        flipped[at] ^= 1 << at % 8
        (good / name).write_bytes(flipped)
        with pytest.raises(AssertionError):
            read(good)
    (good / name).write_bytes(raw)
    assert read(good) == WANTED


@pytest.mark.parametrize("name", FILES)
def test_truncated_longer_and_missing_files_are_found(good: Path, name: str) -> None:
    raw = (good / name).read_bytes()
    for changed in (raw[:-1], raw + b" ", b""):
        (good / name).write_bytes(changed)
        with pytest.raises(AssertionError):
            read(good)
    (good / name).unlink()
    with pytest.raises(AssertionError, match="No such file"):
        read(good)


def test_a_file_of_another_save_is_not_taken(good: Path, tmp_path: Path) -> None:
    other = copy.deepcopy(SAMPLE)
    other["data"][1]["mine"] = ("U8", [2], b"\x07\x09")
    build(tmp_path / "other", other)
    shutil.copy(tmp_path / "other" / FILES[-1], good / FILES[-1])
    with pytest.raises(AssertionError, match="header"):
        read(good)


def _grid(number: int, **change: Any) -> Callable[[dict[str, Any]], None]:
    return lambda s: s["grids"][number].update(change)


def _row(number: int, **change: Any) -> Callable[[dict[str, Any]], None]:
    return lambda s: s["tensors"][number].update(change)


def _record(**change: Any) -> Callable[[dict[str, Any]], None]:
    return lambda s: s["record"].update(change)


def _entry(file: int, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda s: s["data"][file].update({key: value})


def _key(file: int, old: str, new: str) -> Callable[[dict[str, Any]], None]:
    return lambda s: s["data"][file].update({new: s["data"][file].pop(old)})


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "format": (_record(format="other"), "unknown format"),
    "version": (_record(version=2), "unknown format, version"),
    "feature": (_record(features=["virtual"]), "feature"),
    "id": (_record(id="UPPERCASE0000000"), "commit record: .UPPERCASE"),
    "time": (_record(created="yesterday"), "yesterday"),
    "bytes": (_record(tensor_bytes=129), "tensor_bytes"),
    "ranks": (_record(world_size=1), "world_size"),
    "state": (lambda s: s["state"].pop("ranks"), "state.json"),
    "rank of a state": (lambda s: s["state"]["ranks"].update({"2": {}}), "state.json"),
    "NaN": (lambda s: s["state"].update(state=float("nan")), "not readable"),
    "order": (lambda s: s["tensors"].insert(0, s["tensors"].pop()), "sorted"),
    "twice": (lambda s: s["tensors"].insert(1, s["tensors"][0]), "not in data file|unique"),
    "dtype": (_row(0, dtype="float31"), "float31"),
    "dtype of the same size": (_row(0, dtype="int32"), "F32"),
    "logical": (_row(0, logical=[5, 3]), "logical"),
    "short logical": (_row(0, logical=[3]), "not readable"),
    "no such grid": (_row(1, grid=99), "not readable"),
    "no grid": (_row(1, grid=-1), "b: no grid"),
    "null": (_row(1, dtype=None), "null"),
    "name": (_row(1, name="a.w\0"), "not a name"),
    "long name": (_row(1, name="b" * 4097), "not a name"),
    "alias of an alias": (lambda s: s["tensors"].append(row("tied2", "float32", [4, 3], -1, alias="tied")), "tied"),
    "alias of nothing": (_row(10, alias="x"), "x"),
    "alias with a grid": (_row(10, grid=0), "alias"),
    "alias of another shape": (_row(10, shape=[12]), "alias"),
    "cuts end early": (_grid(0, cuts=[[0, 1, 3], [0, 3]]), "cuts"),
    "cuts fall": (_grid(0, cuts=[[0, 5, 4], [0, 3]]), "cuts"),
    "cuts start late": (_grid(0, cuts=[[1, 2, 4], [0, 3]]), "cuts"),
    "cuts twice": (_grid(1, cuts=[[0, 0, 2]]), "cuts"),
    "cuts of an empty dimension": (_grid(3, cuts=[[0], [0, 3]]), "cuts"),
    "cuts of fewer dimensions": (_grid(0, cuts=[[0, 1, 4]]), "not readable"),
    "cuts and boxes": (_grid(1, boxes=[0, 2]), "cuts and boxes"),
    "neither": (_grid(1, cuts=None), "cuts and boxes"),
    "files": (_grid(0, files=[0, 1, 1]), "not readable"),
    "no such file": (_grid(0, files=[0, 9]), "not readable"),
    "other file": (_grid(0, files=[1, 0]), "not in data file 1"),
    "negative file": (_grid(1, files=[-2]), "not in data file -2"),
    "hole": (lambda s: (_grid(5, boxes=[0, 0, 1, 3, 1, 0, 1, 2], files=[1, 1])(s), s["data"][0].pop("i[1:2,2:3]")), "hole"),
    "overlap": (
        lambda s: (_grid(5, boxes=[0, 0, 1, 3, 1, 0, 1, 2, 0, 2, 1, 1])(s), _key(0, "i[1:2,2:3]", "i[0:1,2:3]")(s)),
        "hole or overlap",
    ),
    "outside": (
        lambda s: (_grid(5, boxes=[0, 0, 1, 3, 1, 0, 1, 2, 1, 3, 1, 1])(s), _key(0, "i[1:2,2:3]", "i[1:2,3:4]")(s)),
        "not in shape",
    ),
    "negative box": (
        lambda s: (_grid(5, boxes=[0, 0, 1, 3, 1, 0, 1, 2, -1, 2, 1, 1])(s), _key(0, "i[1:2,2:3]", "i[-1:0,2:3]")(s)),
        "not in shape",
    ),
    "odd boxes": (_grid(5, boxes=[0, 0, 1, 3, 1]), "not readable"),
    "chunk missing": (lambda s: s["data"][0].pop("b"), "b: not in"),
    "chunk too many": (_entry(0, "extra", ("U8", [1], b"x")), "extra"),
    "bare key of a name that ends in ]": (_key(0, "odd][]", "odd]"), "odd"),
    "bare key of an entry with other dimensions": (_key(0, "c[]", "c"), "not in data file"),
    "key with ranges of a whole tensor": (_key(0, "b", "b[0:2]"), "b: not in"),
    "stored dtype": (_entry(0, "b", ("F16", [2], b"\x80\x3f\x00\xc0")), "F16"),
    "stored shape": (_entry(0, "b", ("BF16", [1, 2], b"\x80\x3f\x00\xc0")), r"\[1, 2\]"),
    "stored size": (_entry(0, "b", ("BF16", [2], b"\x80\x3f")), "or its size"),
    "digest": (lambda s: s["meta"].update({"ckpt.digests": "0" * 16 * 7}), "digest"),
    "digests too long": (lambda s: s["meta"].update({"ckpt.digests": "0" * 16 * 7 + "!"}), "not readable"),
    "id of the file": (lambda s: s["meta"].update({"ckpt.id": "fedcba9876543210"}), "fedcba9876543210"),
    "version of the file": (lambda s: s["meta"].update({"ckpt.version": "2"}), "ckpt.version"),
    "rank of the file": (lambda s: s["meta"].update({"ckpt.rank": "1"}), "ckpt.rank"),
    "size of the file": (lambda s: s["files"].update(size=1), "size"),
    "header of the file": (lambda s: s["files"].update(header=8192), "header"),
    "name of the file": (lambda s: s.update(path="data/%d.safetensors"), "path"),
    "alignment": (lambda s: s.update(align=512), "header"),
    "gap": (lambda s: s.update(gap=b"?"), "hole"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_found_though_every_digest_fits(tmp_path: Path, case: str) -> None:
    change, says = BROKEN[case]
    sample = copy.deepcopy(SAMPLE)
    change(sample)
    assert sample != SAMPLE
    with pytest.raises(AssertionError, match=says):
        read(build(tmp_path / "c", sample))


FRAME = zstandard.ZstdCompressor().compress(bytes(100))
PLANES = struct.pack("<BBHI", 1, 2, 0, 4096) + bytes([1, 2]) + struct.pack("<II", len(FRAME), 1) + FRAME + b"\x07"


def coded() -> dict[str, Any]:
    """The sample, with ``z`` coded as zstd in one file and ``zz`` as planes-zstd and not at all in both."""
    sample = copy.deepcopy(SAMPLE)
    sample["tensors"] += [row("z", "uint8", [100], 8), row("zz", "int16", [102], 9)]
    sample["grids"] += [cut([[0, 100]], [0]), cut([[0, 100, 102]], [0, 1])]
    sample["data"][0] |= {"z[:]#zstd": ("U8", [len(FRAME)], FRAME), "zz[0:100]#planes-zstd": ("U8", [len(PLANES)], PLANES)}
    sample["data"][1]["zz[100:102]"] = ("I16", [2], b"abcd")
    sample["more"] = {0: {"ckpt.dtypes": '{"z": "uint8", "zz": "int16"}', "ckpt.shapes": '{"z": [100], "zz": [102]}'}}
    sample["record"] |= {"features": ["codecs"], "tensor_bytes": sample["record"]["tensor_bytes"] + 304}
    return sample


def test_coded_chunks_are_read(tmp_path: Path) -> None:
    found = read(build(tmp_path / "c", coded()))
    assert found == WANTED | {"z": ("uint8", (100,), bytes(100)), "zz": ("int16", (102,), b"\0\x07" * 100 + b"abcd")}


def _blob(key: str, raw: bytes) -> Callable[[dict[str, Any]], None]:
    return lambda s: s["data"][0].update({key: ("U8", [len(raw)], raw)})


def _more(member: str, text: str) -> Callable[[dict[str, Any]], None]:
    return lambda s: s["more"][0].update({member: text})


BROKEN_CODED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no feature": (_record(features=[]), "features"),
    "other feature": (_record(features=["codecs", "x"]), "unknown feature"),
    "nothing coded": (lambda s: (s["data"][0].update(SAMPLE["data"][0]), s.update(more={})), "coded"),
    "no dtypes": (lambda s: s["more"][0].pop("ckpt.dtypes"), "ckpt.dtypes"),
    "no shapes": (lambda s: s["more"][0].pop("ckpt.shapes"), "ckpt.shapes"),
    "dtypes of others": (lambda s: s["more"].update({1: s["more"][0]}), "ckpt.dtypes"),
    "wrong dtype": (_more("ckpt.dtypes", '{"z": "int8", "zz": "int16"}'), "ckpt.dtypes or"),
    "wrong shape": (_more("ckpt.shapes", '{"z": [100], "zz": [100]}'), "ckpt.shapes"),
    "key without a box": (_key(0, "z[:]#zstd", "z#zstd"), "ckpt.dtypes"),
    "key with ranges of a whole tensor": (_key(0, "z[:]#zstd", "z[0:100]#zstd"), "z: not in"),
    "unknown codec": (_key(0, "z[:]#zstd", "z[:]#lz4"), "z: not in"),
    "other codec": (_key(0, "z[:]#zstd", "z[:]#planes-zstd"), "header of planes"),
    "entry": (_entry(0, "z[:]#zstd", ("U8", [1, len(FRAME)], FRAME)), "U8"),
    "coded and not": (_entry(0, "zz[0:100]", ("I16", [100], bytes(200))), "chunks that no tensor has"),
    "short": (_blob("z[:]#zstd", zstandard.ZstdCompressor().compress(bytes(99))), "or its size"),
    "long": (_blob("z[:]#zstd", FRAME * 2), "or its size"),
    "not a frame": (_blob("z[:]#zstd", b"x" * 20), "not readable"),
    "for nothing": (_blob("z[:]#zstd", zstandard.ZstdCompressor().compress(bytes(range(100)))), "for nothing"),
    "planes too long": (_blob("zz[0:100]#planes-zstd", PLANES + b"x"), "planes end"),
    "planes too short": (_blob("zz[0:100]#planes-zstd", PLANES[:-1]), "kind 2"),
    "kind": (_blob("zz[0:100]#planes-zstd", PLANES.replace(b"\x01\x02", b"\x01\x03").replace(b"\x01\x03", b"\x01\x02", 1)), "kind 3"),
    "planes of another version": (_blob("zz[0:100]#planes-zstd", b"\x02" + PLANES[1:]), "header of planes"),
    "planes of another size": (_blob("zz[0:100]#planes-zstd", b"\x01\x04" + PLANES[2:]), "header of planes"),
    "a bare key that looks coded": (
        lambda s: (s["tensors"].append(row("zzz]#a", "uint8", [2], 1)), _entry(0, "zzz]#a", ("U8", [2], b"xx"))(s)),
        "ckpt.dtypes",
    ),
}


@pytest.mark.parametrize("case", BROKEN_CODED)
def test_a_broken_rule_of_coded_chunks_is_found(tmp_path: Path, case: str) -> None:
    change, says = BROKEN_CODED[case]
    sample = coded()
    change(sample)
    assert sample != coded()
    with pytest.raises(AssertionError, match=says):
        read(build(tmp_path / "c", sample))


def test_a_column_of_another_type_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMAS["tensors"], "grid", pa.int64())
    with pytest.raises(AssertionError, match="columns .*int64"):
        read(build(tmp_path / "c", SAMPLE))


def test_a_bare_key_named_like_the_metadata_is_not_needed(tmp_path: Path) -> None:
    sample = copy.deepcopy(SAMPLE)
    sample["tensors"].insert(0, row("__metadata__", "uint8", [2], 1))
    sample["data"][0]["__metadata__[:]"] = ("U8", [2], b"\x01\x02")
    sample["record"]["tensor_bytes"] += 2
    assert read(build(tmp_path / "c", sample)) == WANTED | {"__metadata__": ("uint8", (2,), b"\x01\x02")}


def test_a_key_that_comes_twice_is_found(tmp_path: Path) -> None:
    sample = copy.deepcopy(SAMPLE)
    sample["data"][0]["B"] = sample["data"][0]["b"]
    root = build(tmp_path / "c", sample)
    index = root / f"index-{ID}"
    path = root / FILES[-2]
    raw = path.read_bytes().replace(b'"B"', b'"b"')
    path.write_bytes(raw)
    rows = pa.ipc.open_file((index / "files.arrow").read_bytes()).read_all().to_pylist()
    rows[0]["digest"] = xxh3_128_hexdigest(raw[: rows[0]["header"]])
    fixed = arrow(SCHEMAS["files"], rows)
    (index / "files.arrow").write_bytes(fixed)
    record = json.loads((root / "checkpoint.json").read_text())
    record["index"]["files.arrow"].update(size=len(fixed), digest=xxh3_128_hexdigest(fixed))
    text = json.dumps(record | {"digest": "0" * 32})
    (root / "checkpoint.json").write_text(text.replace("0" * 32, xxh3_128_hexdigest(text.encode())))
    with pytest.raises(AssertionError, match="a key comes twice"):
        read(root)
