"""Writes the conformance set of format version 1: ``python -m tests.conformance.generate``.

Written from docs/format.md alone, with json, pyarrow, xxhash, zstandard and numpy, and no code of the package: what it writes is what the
page says, not what our writer does. ``accept`` and ``refuse`` are explained in README.md.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import zstandard
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

HERE = Path(__file__).parent
SOURCES = "/tmp/ckpt-conformance-sources"
"""Where the files of the virtual checkpoint are expected: roots are absolute."""

_TABLE = """bool 1 BOOL, uint8 1 U8, int8 1 I8, uint16 2 U16, int16 2 I16, uint32 4 U32, int32 4 I32, uint64 8 U64, int64 8 I64,
float16 2 F16, bfloat16 2 BF16, float32 4 F32, float64 8 F64, float8_e4m3fn 1 F8_E4M3, float8_e5m2 1 F8_E5M2, float8_e4m3fnuz 1 F8_E4M3FNUZ,
float8_e5m2fnuz 1 F8_E5M2FNUZ, float8_e8m0fnu 1 F8_E8M0, complex64 8 C64, float4_e2m1fn_x2 1 F4, complex32 4 U8, complex128 16 U8"""
DTYPES = {name: (int(size), stored) for name, size, stored in (row.split() for row in _TABLE.split(","))}

INTS = pa.list_(pa.int64())
TENSORS = {
    "name": pa.utf8(),
    "dtype": pa.utf8(),
    "shape": INTS,
    "logical": INTS,
    "grid": pa.int32(),
    "alias": pa.utf8(),
    "rank": pa.int32(),
}
GRIDS = {"cuts": pa.list_(INTS), "boxes": INTS, "files": pa.list_(pa.int32())}
ANCHORS = {"anchors": pa.list_(pa.int32())}
XOR = "xor-planes-zstd"
RANKS = {"rank": pa.int32(), "length": pa.int64(), "digest": pa.uint64()}
FILES = {"path": pa.utf8(), "size": pa.int64(), "header": pa.int64(), "digest": pa.utf8(), "rank": pa.int32()}
SOURCE_ROWS = {"root": pa.utf8(), "path": pa.utf8(), "size": pa.int64(), "stamp": pa.utf8()}
EXTENT_ROWS = {"offset": pa.int64(), "length": pa.int64(), "digest": pa.utf8(), "strides": INTS}

Box = tuple[tuple[int, int], ...]
"""Start and stop for each dimension."""


@dataclass(kw_only=True)
class Tensor:
    """``parts``: each chunk's box and the data file that has it; None: one chunk, file 0. ``irregular``: the grid is stored as boxes.
    ``anchor``: the tensor that chunks are differences from, if
    ``codec`` is ``XOR``; data file ``anchor_file`` has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: list[tuple[Box, int]] | None = None
    cuts: list[list[int]] | None = None
    irregular: bool = False
    logical: tuple[int, ...] | None = None
    alias: str | None = None
    rank: int | None = None
    codec: str | None = None
    data: bytes | None = None
    anchor: Tensor | None = None
    anchor_file: int = -1

    def raw(self) -> bytes:
        """The row-major bytes: a pattern that depends on the name."""
        if self.data is not None:
            return self.data
        count = int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype][0]
        pattern = (np.arange(count, dtype=np.int64) * 7 + sum((self.alias or self.name).encode())) % 251
        return (pattern % 2 if self.dtype == "bool" else pattern).astype(np.uint8).tobytes()

    def boxes(self) -> list[tuple[Box, int]]:
        if self.parts is not None:
            return self.parts
        cuts = self.cuts or [[0, n] for n in self.shape]
        return [(box, 0) for box in product(*(list(pairwise(c)) for c in cuts))]


@dataclass(kw_only=True)
class Checkpoint:
    """What ``write`` writes. The hooks change what is written before the digests above it are made, so that only they are wrong."""

    tensors: list[Tensor] = field(default_factory=list)
    state: Any = field(default_factory=dict)
    ranks: dict[str, Any] = field(default_factory=dict)
    id: str = "0conformance0001"
    world_size: int = 2
    files: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    """Rank and number of each data file."""
    record: dict[str, Any] = field(default_factory=dict)
    """Members of the commit record to add or replace."""
    tables: Callable[[dict[str, dict[str, list[Any]]]], None] = lambda tables: None
    header: Callable[[dict[str, Any]], None] = lambda header: None
    data: Callable[[bytearray], None] = lambda data: None
    apart: Callable[[dict[str, dict[str, Any]]], None] | None = None
    """With the extension ``ranks``; changes its rows, by rank, before they are written."""
    index: Callable[[dict[str, bytes]], None] = lambda index: None


def key_of(tensor: Tensor, box: Box) -> str:
    import re

    mistakable = re.search(r"\](#[a-z0-9-]+)?\Z", tensor.name) or tensor.name == "__metadata__"
    same_dims = tensor.dtype not in ("complex32", "complex128") and not (tensor.dtype == "float4_e2m1fn_x2" and not tensor.shape)
    whole = all((a, b) == (0, n) for (a, b), n in zip(box, tensor.shape, strict=True))
    ranges = ",".join(":" if (a, b) == (0, n) else f"{a}:{b}" for (a, b), n in zip(box, tensor.shape, strict=True))
    if tensor.codec is not None:
        return f"{tensor.name}[{ranges}]#{tensor.codec}"
    return tensor.name if whole and same_dims and not mistakable else f"{tensor.name}[{ranges}]"


def stored_shape(dtype: str, shape: list[int]) -> list[int]:
    if dtype in ("complex32", "complex128"):
        return [*shape, DTYPES[dtype][0]]
    return [*shape[:-1], 2 * (shape or [1])[-1]] if dtype == "float4_e2m1fn_x2" else shape


def chunk_bytes(tensor: Tensor, box: Box) -> bytes:
    size = DTYPES[tensor.dtype][0]
    whole = np.frombuffer(tensor.raw(), np.uint8).reshape(*tensor.shape, size)
    return whole[tuple(slice(a, b) for a, b in box)].tobytes()


def difference(raw: bytes, anchor: bytes) -> bytes:
    return (np.frombuffer(raw, np.uint8) ^ np.frombuffer(anchor, np.uint8)).tobytes()


def coded(codec: str, raw: bytes, size: int) -> bytes:
    if codec == "zstd":
        return b"".join(zstandard.ZstdCompressor().compress(raw[at : at + (1 << 20)]) for at in range(0, len(raw), 1 << 20))
    elements, count = np.frombuffer(raw, np.uint8).reshape(-1, size), 4096
    out = bytes([1, size, 0, 0]) + struct.pack("<I", count)
    for start in range(0, len(elements), count):
        planes = [elements[start : start + count, p].tobytes() for p in range(size)]
        kinds = [2 if len(set(p)) == 1 else 1 if i % 2 else 0 for i, p in enumerate(planes)]  # all three kinds, where the bytes allow
        parts = [p[:1] if k == 2 else zstandard.ZstdCompressor().compress(p) if k == 1 else p for p, k in zip(planes, kinds, strict=True)]
        out += bytes(kinds) + struct.pack(f"<{size}I", *map(len, parts)) + b"".join(parts)
    return out


def arrow(columns: dict[str, list[Any]], types: dict[str, pa.DataType], compression: str | None = None) -> bytes:
    table = pa.table({name: pa.array(columns[name], types[name]) for name in types})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def seal(record: dict[str, Any]) -> bytes:
    raw = json.dumps({**record, "digest": "0" * 32}, indent=2).encode()
    at = raw.rindex(b"0" * 32)
    return raw[:at] + xxh3_128_hexdigest(raw).encode() + raw[at + 32 :]


def write(root: Path, c: Checkpoint) -> None:
    (root / "data").mkdir(parents=True)
    stored = [t for t in c.tensors if t.alias is None]
    rows: dict[str, list[Any]] = {name: [] for name in FILES}
    for number, (rank, count) in enumerate(c.files):
        path = f"data/{c.id}-{rank:05d}{f'-{count}' if count else ''}.safetensors"
        _data_file(root / path, c, stored, number, rank, rows)
    tables = {"tensors": {n: [] for n in TENSORS}, "grids": {n: [] for n in GRIDS}, "files": rows}
    for t in sorted((t for t in c.tensors if c.apart is None or t.rank is None), key=lambda t: t.name):
        grid = -1 if t.alias is not None else len(tables["grids"]["files"])
        if t.alias is None:
            boxes = t.boxes()
            flat = [n for box, _ in boxes for n in (*(a for a, _ in box), *(b - a for a, b in box))]
            numbers = [file for _, file in boxes]
            tables["grids"]["cuts"].append(None if t.irregular else t.cuts or [[0, n] for n in t.shape])
            tables["grids"]["boxes"].append(flat if t.irregular else None)
            tables["grids"]["files"].append(numbers[:1] if len({*numbers}) == 1 else numbers)
            tables["grids"].setdefault("anchors", []).append(None if t.anchor is None else [t.anchor_file] * len(boxes))
        for name, value in (
            *(("name", t.name), ("dtype", t.dtype), ("shape", list(t.shape)), ("logical", t.logical and list(t.logical))),
            *(("grid", grid), ("alias", t.alias), ("rank", t.rank)),
        ):
            tables["tensors"][name].append(value)
    anchored = any(t.anchor is not None for t in stored)
    c.tables(tables)
    of_grids = GRIDS | (ANCHORS if anchored else {})
    types = {"tensors": TENSORS, "grids": of_grids, "files": FILES}
    index = {f"{n}.arrow": arrow(tables[n], types[n], "zstd" if n == "tensors" else None) for n in tables}
    index["state.json"] = json.dumps({"state": c.state, "ranks": {} if c.apart else c.ranks}, ensure_ascii=False).encode()
    index |= _apart(c) if c.apart else {}
    named = {"codecs": any(t.codec for t in stored), "ranks": c.apart is not None, "anchors": anchored}
    features = [feature for feature, is_needed in named.items() if is_needed]
    commit(root, c, index, features, sum(len(t.raw()) for t in stored))


def _apart(c: Checkpoint) -> dict[str, bytes]:
    """The index files of the extension ``ranks``."""
    rows: dict[str, dict[str, Any]] = {r: {"values": c.ranks[r], "tensors": {}, "aliases": {}} for r in sorted(c.ranks, key=int)}
    for t in (t for t in c.tensors if t.rank is not None):
        row = rows[str(t.rank)]
        if t.alias is not None:
            row["aliases"][t.name] = t.alias
            continue
        mine = [number for number, (rank, _) in enumerate(c.files) if rank == t.rank]
        row["tensors"][t.name] = {"dtype": t.dtype, "shape": list(t.shape)}
        if t.cuts:
            row["tensors"][t.name] |= {"cuts": t.cuts, "files": [mine.index(file) for _, file in t.boxes()]}
    assert c.apart is not None
    c.apart(rows)
    texts = {int(r): json.dumps(row, ensure_ascii=False).encode() + b"\n" for r, row in rows.items()}
    table: dict[str, list[Any]] = {"rank": [*texts], "length": [*map(len, texts.values())], "digest": []}
    table["digest"] = [int(xxh3_64_hexdigest(text), 16) for text in texts.values()]
    c.tables({"ranks": table})
    return {"ranks.arrow": arrow(table, RANKS), "ranks.jsonl": b"".join(texts.values())}


def commit(root: Path, c: Checkpoint, index: dict[str, bytes], features: list[str], tensor_bytes: int) -> None:
    c.index(index)
    (root / f"index-{c.id}").mkdir(parents=True, exist_ok=True)
    entries = {}
    for name, raw in index.items():
        (root / f"index-{c.id}" / name).write_bytes(raw)
        entries[name] = {"path": f"index-{c.id}/{name}", "size": len(raw), "digest": xxh3_128_hexdigest(raw)}
    record = {"format": "ckpt", "version": 1, "id": c.id, "created": "2026-11-22T10:00:00.000+00:00", "writer": "conformance 1"}
    record |= {"world_size": c.world_size, "features": features, "index": entries, "tensor_bytes": tensor_bytes}
    (root / "checkpoint.json").write_bytes(seal(record | c.record))


def _data_file(path: Path, c: Checkpoint, stored: list[Tensor], number: int, rank: int, rows: dict[str, list[Any]]) -> None:
    header: dict[str, Any] = {}
    data, digests, strong = bytearray(), {}, dict[str, str]()
    written = [(t, box) for t in stored for box, file in t.boxes() if file == number]
    written += [(t.anchor, box) for t in stored for box, _ in t.boxes() if t.anchor is not None and t.anchor_file == number]
    about = {t.name: t for t, _ in written if t.codec}.values()
    for t, box in sorted(written, key=lambda chunk: (chunk[0].codec is not None, -DTYPES[chunk[0].dtype][0])):
        raw, shape = chunk_bytes(t, box), [b - a for a, b in box]
        entry: dict[str, Any] = {"dtype": DTYPES[t.dtype][1], "shape": stored_shape(t.dtype, shape)}
        if t.anchor is not None:
            strong[key_of(t, box)] = xxh3_128_hexdigest(raw)
            raw = difference(raw, chunk_bytes(t.anchor, box))
        if t.codec is not None:
            raw = coded(t.codec, raw, DTYPES[t.dtype][0])
            entry = {"dtype": "U8", "shape": [len(raw)]}
        header[key_of(t, box)] = entry | {"data_offsets": [len(data), len(data) + len(raw)]}
        digests[key_of(t, box)] = xxh3_64_hexdigest(raw)
        data += raw
    meta = {"ckpt.version": "1", "ckpt.id": c.id, "ckpt.rank": str(rank), "ckpt.digests": "".join(digests[k] for k in sorted(digests))}
    if about:
        meta |= {"ckpt.dtypes": json.dumps({t.name: t.dtype for t in about}), "ckpt.shapes": json.dumps({t.name: t.shape for t in about})}
    if strong:
        meta["ckpt.digests128"] = "".join(strong.get(k, "0" * 32) for k in sorted(digests))
    header["__metadata__"] = meta
    c.header(header)
    text = json.dumps(header, ensure_ascii=False).encode()
    head = text.ljust(-(-(8 + len(text)) // 4096) * 4096 - 8)
    head = struct.pack("<Q", len(head)) + head
    c.data(data)
    path.write_bytes(head + data)
    for name, value in (("path", f"data/{path.name}"), ("size", len(head) + len(data)), ("header", len(head))):
        rows[name].append(value)
    rows["digest"].append(xxh3_128_hexdigest(head))
    rows["rank"].append(rank)


def _write_virtual(root: Path, sources: Path) -> list[Tensor]:
    """Chunks in a raw file: plain, with a digest, transposed by strides, and padding by strides of 0."""
    raw = bytes(range(256)) * 2
    sources.mkdir(parents=True)
    (sources / "values.bin").write_bytes(raw)
    matrix = np.frombuffer(raw[16:64], "<f4").reshape(3, 4)
    tensors = [
        Tensor(name="padded", dtype="float32", shape=(2, 2), data=raw[0:4] * 4),
        Tensor(name="plain", dtype="int16", shape=(8,), data=raw[100:116]),
        Tensor(name="rows", dtype="float32", shape=(3, 4), data=raw[16:64], cuts=[[0, 1, 3], [0, 4]]),
        Tensor(name="transposed", dtype="float32", shape=(4, 3), data=matrix.T.tobytes()),
    ]
    extents = [
        *((0, 4, None, [0, 0]), (100, 16, xxh3_64_hexdigest(raw[100:116]), None)),
        *((16, 16, None, None), (32, 32, xxh3_64_hexdigest(raw[32:64]), None), (16, 48, None, [4, 16])),
    ]
    c = Checkpoint(tensors=tensors, state={t.name: {"$tensor": t.name} for t in tensors}, world_size=1)
    names = [t.name for t in tensors]
    table = {"name": names, "dtype": [t.dtype for t in tensors], "shape": [list(t.shape) for t in tensors], "logical": [None] * 4}
    table |= {"grid": list(range(4)), "alias": [None] * 4, "rank": [None] * 4}
    grids = {"cuts": [t.cuts or [[0, n] for n in t.shape] for t in tensors], "boxes": [None] * 4, "files": [[0]] * 4}
    index = {
        "tensors.arrow": arrow(table, TENSORS),
        "grids.arrow": arrow(grids, GRIDS),
        "files.arrow": arrow({n: [] for n in FILES}, FILES),
    }
    index["state.json"] = json.dumps({"state": c.state, "ranks": {}}).encode()
    index["sources.arrow"] = arrow({"root": [SOURCES], "path": ["values.bin"], "size": [len(raw)], "stamp": [None]}, SOURCE_ROWS)
    columns = zip(*extents, strict=True)
    index["extents.arrow"] = arrow(dict(zip(EXTENT_ROWS, map(list, columns), strict=True)), EXTENT_ROWS)
    root.mkdir(parents=True)
    commit(root, c, index, ["extents"], sum(len(t.raw()) for t in tensors))
    return tensors


# ------------------------------------------------------------------------------------------------------------- accept


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


VALUES: dict[str, Any] = {
    "null": None,
    "flags": [True, False],
    "integer": 3,
    "large": 123456789012345678901234567890,
    "negative": -(2**63),
    "float": 3.0,
    "tiny": 5e-324,
    "tenth": 0.1,
    "minus zero": -0.0,
    "text": 'naïve ☃ \U0001f642 "quoted" \\ \n\t',
    "empty": {},
    "list": [[], [1, [2.5, "x"]]],
    "tuple": {"$tuple": [1, {"$tuple": []}]},
    "mapping": {"$map": [[1, "one"], [{"$tuple": [2, "b"]}, "pair"], ["$odd", None], [None, True], [1.5, 2]]},
    "set": {"$set": [1, "x"]},
    "frozenset": {"$frozenset": [{"$tuple": [1, 2]}]},
    "bytes": {"$bytes": _b64(bytes(range(256)))},
    "bytesio": {"$bytesio": _b64(b"\0\xff")},
    "floats": [{"$float": "nan"}, {"$float": "inf"}, {"$float": "-inf"}],
    "complex": [{"$complex": [1.0, -2.5]}, {"$complex": [{"$float": "inf"}, 0.0]}],
    "scalar": {"$scalar": ["float32", _b64(struct.pack("<f", 1.5))]},
    "scalars": [{"$scalar": ["bool", _b64(b"\1")]}, {"$scalar": ["uint64", _b64(struct.pack("<Q", 2**64 - 1))]}],
    "array": {"$array": ["int16", [2, 3], _b64(struct.pack("<6h", 1, -2, 3, -4, 5, -6))]},
    "arrays": [{"$array": ["float64", [0, 2], ""]}, {"$array": ["complex64", [], _b64(struct.pack("<2f", 1, 2))]}],
    "inline": {"$inline": ["bfloat16", [2], _b64(b"\x80\x3f\x00\x40")]},
    "dtypes": [{"$dtype": "bfloat16"}, {"$dtype": "float8_e4m3fn"}, {"$dtype": "qint8"}],
    "devices": [{"$device": "cpu"}, {"$device": "cuda:1"}],
    "size": {"$size": [2, 0, 5]},
    "key.with.dots": {"and more": 1},
    "": "an empty key",
}

_ODD_NAMES = ("a b", "ünïcode ☃", "x]", "x]#zstd", "x[0:1]", "__metadata__", "..", "a/../b", "a\\b", "tab\tnew\nline", '"', "k" * 4096)


def accepted() -> dict[str, Checkpoint]:
    """Checkpoints that a reader reads, by case."""
    shapes = ((), (0,), (3,), (2, 3), (2, 0, 4))
    dtypes = [Tensor(name=f"{d}.{'x'.join(map(str, s)) or 'scalar'}", dtype=d, shape=s) for d in DTYPES for s in shapes]
    halves: list[tuple[Box, int]] = [(((0, 3), (0, 4)), 0), (((3, 5), (0, 4)), 1)]
    irregular: list[tuple[Box, int]] = [(((0, 1), (2, 4)), 1), (((1, 3), (0, 4)), 0), (((0, 1), (0, 2)), 0)]
    grid = [(box, i % 3) for i, box in enumerate(product([(0, 2), (2, 5)], [(0, 1), (1, 3), (3, 4)]))]
    grids = [
        Tensor(name="rows", dtype="float32", shape=(5, 4), parts=halves, cuts=[[0, 3, 5], [0, 4]]),
        Tensor(name="rows2", dtype="int8", shape=(5, 4), parts=halves, cuts=[[0, 3, 5], [0, 4]]),
        Tensor(name="blocks", dtype="float64", shape=(5, 4), parts=grid, cuts=[[0, 2, 5], [0, 1, 3, 4]]),
        Tensor(name="irregular", dtype="int32", shape=(3, 4), parts=irregular, irregular=True),
        Tensor(name="irregular in one file", dtype="int32", shape=(3, 4), parts=[(b, 1) for b, _ in irregular], irregular=True),
        Tensor(name="padded", dtype="bfloat16", shape=(8, 3), logical=(7, 3)),
        Tensor(name="padded twice", dtype="uint8", shape=(4, 4), logical=(3, 2)),
        Tensor(name="alias of padded", dtype="bfloat16", shape=(8, 3), logical=(7, 3), alias="padded"),
        Tensor(name="own@rank1", dtype="int64", shape=(2,), rank=1, parts=[(((0, 2),), 1)]),
    ]
    names = [Tensor(name=name, dtype="int16", shape=(2,)) for name in _ODD_NAMES]
    names += [Tensor(name=f"cut {name[:40]}", dtype="int16", shape=(2,), cuts=[[0, 1, 2]]) for name in _ODD_NAMES]
    half: list[tuple[Box, int]] = [(((0, 2), (0, 3)), 2), (((2, 4), (0, 3)), 1)]
    own = [
        Tensor(name="w", dtype="float32", shape=(4, 3), parts=[(((0, 4), (0, 3)), 0)]),
        Tensor(name="g@rank0", dtype="uint8", shape=(16,), rank=0, parts=[(((0, 16),), 0)]),
        Tensor(name="cut@rank2", dtype="int16", shape=(4, 3), rank=2, parts=half, cuts=[[0, 2, 4], [0, 3]]),
        Tensor(name="scalar@rank2", dtype="float64", shape=(), rank=2, parts=[((), 1)]),
        Tensor(name="tied@rank2", dtype="int16", shape=(4, 3), rank=2, alias="cut@rank2"),
    ]
    smooth = np.linspace(0, 1, 5000, dtype="<f4")
    codecs = [
        Tensor(name="zstd", dtype="float32", shape=(100, 50), data=smooth.tobytes(), codec="zstd"),
        Tensor(name="zstd, two frames", dtype="uint8", shape=(1500000,), data=bytes(1500000), codec="zstd"),
        Tensor(name="planes", dtype="float32", shape=(5000,), data=smooth.tobytes(), codec="planes-zstd"),
        Tensor(name="planes of 16", dtype="complex128", shape=(200,), data=np.arange(200).astype("<c16").tobytes(), codec="planes-zstd"),
        Tensor(name="planes, cut", dtype="bfloat16", shape=(4, 2500), cuts=[[0, 2, 4], [0, 2500]], codec="planes-zstd", data=bytes(20000)),
        Tensor(name="as it is", dtype="float32", shape=(3,)),
    ]
    close, far = np.linspace(0, 1, 6000, dtype="<f4"), np.random.default_rng(1).bytes(24000)
    anchors = [
        _difference("plain anchor", close, None),
        _difference("anchor of planes", close, "planes-zstd", cuts=[[0, 40, 60], [0, 100]]),
        _difference("anchor of zstd", close, "zstd"),
        Tensor(name="whole", dtype="float32", shape=(60, 100), data=far),
    ]
    model = [Tensor(name=f"net.{n}", dtype="float32", shape=(2, 2)) for n in ("0.weight", "1.weight")]
    model += [Tensor(name="optim.state.net.0.weight.exp_avg", dtype="float32", shape=(2, 2))]
    groups = [{"params": ["net.0.weight", "net.1.weight"], "options": {"lr": 0.001, "betas": {"$tuple": [0.9, 0.999]}}}]
    objects = {
        "net": {"": {"$tensors": "net"}, "0._extra_state": {"scale": 2.0}},
        "optim": {
            "state": {"": {"$tensors": "optim.state"}, "net.0.weight": {"step": 7}},
            "param_groups": {"$param_groups": groups},
        },
        "rng": {"$per_rank": True},
    }
    fields = ("net.w#q", "net.w#inner#a", "list.0#q")
    made = [Tensor(name=name, dtype="int8", shape=(2, 2)) for name in fields]
    described = {"__tensor_flatten__": "some.Class", "dtype": "bfloat16", "shape": [2, 2], "context": [{"$size": [2, 2]}, True]}
    wrappers = {
        "net": {"": {"$tensors": "net"}, "w": {**described, "inside": {"inner": described}}},
        "list": [{**described, "context": {"object": "some.Enum.MEMBER"}, "tensors": {"q": {"$tensor": "list.0#q"}}}],
    }
    more = {"x-unknown": {"ignored": [1]}, "metrics": {"loss": 2.5, "worst": "nan", "best": "-inf"}, "tags": ["kept", "naïve"]}
    more |= {"inline": {"state.json": _b64(b"{}")}, "branches": [{"id": "0conformance0000", "after": 3}]}
    taken = [Tensor(name="rows", dtype="float32", shape=(5, 4), parts=[(box, file + 1) for box, file in halves], cuts=[[0, 3, 5], [0, 4]])]
    taken += [Tensor(name="own", dtype="int8", shape=(3,))]

    def named(tensors: list[Tensor]) -> dict[str, Any]:
        return {t.name: {"$tensor": t.name} for t in tensors if t.rank is None and not t.name.startswith("$")}

    return {
        "dtypes": Checkpoint(tensors=dtypes, state=named(dtypes)),
        "grids": Checkpoint(
            tensors=grids, state=named(grids), files=[(0, 0), (1, 0), (1, 1)], ranks={"1": {"own": {"$tensor": "own@rank1"}}}
        ),
        "names": Checkpoint(tensors=names, state=named(names)),
        "values": Checkpoint(state=VALUES, ranks={"0": {"a": 1, "b.0": {"$tuple": [2]}}, "1": {"a": 2, "b.0": {"$tuple": []}}}),
        "codecs": Checkpoint(tensors=codecs, state=named(codecs)),
        "anchors": Checkpoint(tensors=anchors, state=named(anchors), files=[(0, 0), (0, 1)]),
        "objects": Checkpoint(tensors=model, state=objects, ranks={"0": {"rng": [1, 2]}, "1": {"rng": [3, 4]}}),
        "wrappers": Checkpoint(tensors=made, state=wrappers),
        "members": Checkpoint(record=more, world_size=16384),
        "empty": Checkpoint(world_size=1, files=[]),
        "references": _referring("accept/grids", Checkpoint(tensors=taken, state=named(taken), world_size=1)),
        "ranks": Checkpoint(
            tensors=own,
            state={"w": {"$tensor": "w"}, "rng": {"$per_rank": True}},
            ranks={
                "0": {"rng": {"$tensor": "g@rank0"}, "n": 1},
                "2": {"rng": {"$tuple": [{"$tensor": "cut@rank2"}, 2.5]}},
                "10": {"rng": "ü"},
            },
            files=[(0, 0), (2, 0), (2, 1)],
            world_size=11,
            apart=lambda rows: None,
        ),
    }


def _referring(owner: str, c: Checkpoint, *, features: tuple[str, ...] = ("references",), path: str = "../{0.name}/data/{1}") -> Checkpoint:
    """The same, with two more rows of files.arrow: the first data file of each rank of ``owner``, which is written already."""

    def tables(tables: dict[str, dict[str, list[Any]]]) -> None:
        for rank in range(2):
            file = HERE / owner / "data" / f"0conformance0001-{rank:05d}.safetensors"
            raw, rows = file.read_bytes(), tables["files"]
            header = 8 + int.from_bytes(raw[:8], "little")
            row = {"path": path.format(HERE / owner, file.name), "size": len(raw), "header": header, "rank": rank}
            for column, value in (row | {"digest": xxh3_128_hexdigest(raw[:header])}).items():
                rows[column].append(value)

    c.id, c.tables, c.record = "0conformance0006", tables, {"features": list(features), "reusable": True}
    return c


def _refers(**how: Any) -> Checkpoint:
    """One tensor that lies in a refused case whose files are right."""
    halves: list[tuple[Box, int]] = [(((0, 2), (0, 3)), 1), (((2, 4), (0, 3)), 2)]
    w = Tensor(name="w", dtype="float32", shape=(4, 3), parts=halves, cuts=[[0, 2, 4], [0, 3]])
    return _referring("refuse/record-version", Checkpoint(tensors=[w], state={"w": {"$tensor": "w"}}, world_size=1), **how)


def _difference(name: str, values: np.ndarray[Any, Any], codec: str | None, cuts: list[list[int]] | None = None) -> Tensor:
    """A tensor that is stored as its difference from one with other last bits, in data file 1 and with ``codec``."""
    raw, shape = values.tobytes(), (60, 100)
    before = (np.frombuffer(raw, "<u4") ^ (np.arange(values.size, dtype="<u4") % 3)).tobytes()
    anchor = Tensor(name=name, dtype="float32", shape=shape, data=before, codec=codec, cuts=cuts)
    return Tensor(name=name, dtype="float32", shape=shape, data=raw, codec=XOR, cuts=cuts, anchor=anchor, anchor_file=1)


def expected(c: Checkpoint) -> dict[str, Any]:
    """What a reader gives for it, as README.md says."""
    tensors = {}
    for t in c.tensors:
        tensors[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "logical": t.logical and list(t.logical), "alias": t.alias}
        tensors[t.name] |= {"rank": t.rank, "bytes": len(t.raw()), "xxh3_128": xxh3_128_hexdigest(t.raw())}
    ranks = {r: {path: typed(node) for path, node in nodes.items()} for r, nodes in c.ranks.items()}
    return {"world_size": c.world_size, "tensors": tensors, "state": typed(c.state), "ranks": ranks}


def typed(node: Any) -> list[Any]:
    """A value as ``[type, …]``, every number as text."""
    if isinstance(node, dict):
        tag = next((k for k in node if k.startswith("$")), None)
        if tag is None:
            return ["mapping", sorted([["string", k], typed(v)] for k, v in node.items())]
        payload = node[tag]
        if tag == "$map":
            return ["mapping", [[typed(k), typed(v)] for k, v in payload]]
        if tag in ("$tuple", "$set", "$frozenset"):
            return [tag[1:], [typed(n) for n in payload]]
        if tag in ("$scalar", "$array", "$inline"):
            kind, shape, raw = payload if len(payload) == 3 else (payload[0], [], payload[1])
            return [tag[1:], kind, shape, base64.b64decode(raw).hex()]
        if tag == "$bytes":
            return ["bytes", base64.b64decode(payload).hex()]
        if tag == "$bytesio":
            return ["bytesio", base64.b64decode(payload).hex()]
        if tag == "$float":
            return ["float", payload]
        if tag == "$complex":
            return ["complex", *(typed(n)[1] for n in payload)]
        if tag == "$param_groups":
            return ["param_groups", [{"params": g["params"], "options": typed(g["options"])} for g in payload]]
        return [tag[1:], payload]
    if isinstance(node, list):
        return ["list", [typed(n) for n in node]]
    if isinstance(node, bool):
        return ["bool", str(node).lower()]
    if node is None:
        return ["null"]
    return ["string", node] if isinstance(node, str) else ["int", str(node)] if isinstance(node, int) else ["float", repr(node)]


# ------------------------------------------------------------------------------------------------------------- refuse


def _base() -> Checkpoint:
    """Small and right: every refused case is this one with one thing changed."""
    halves: list[tuple[Box, int]] = [(((0, 2), (0, 3)), 0), (((2, 4), (0, 3)), 1)]
    tensors = [
        Tensor(name="w", dtype="float32", shape=(4, 3), parts=halves, cuts=[[0, 2, 4], [0, 3]]),
        Tensor(name="a", dtype="int64", shape=(2,)),
        Tensor(name="tied", dtype="int64", shape=(2,), alias="a"),
        Tensor(name="s", dtype="float32", shape=()),
    ]
    return Checkpoint(tensors=tensors, state={t.name: {"$tensor": t.name} for t in tensors}, files=[(0, 0), (1, 0)])


Tables = dict[str, dict[str, list[Any]]]


def _cell(table: str, column: str, row: int, value: Any) -> Callable[[Tables], None]:
    def change(tables: Tables) -> None:
        if table in tables:
            tables[table][column][row] = value

    return change


def _entry(key: str, **members: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        if key in header:
            header[key] |= members

    return change


def _with(**changes: Any) -> Checkpoint:
    c = _base()
    for name, value in changes.items():
        setattr(c, name, value)
    return c


def _coded(data: Callable[[bytes], bytes]) -> Checkpoint:
    """One coded chunk whose stored bytes are changed; its digest and length are right."""
    t = Tensor(name="c", dtype="float32", shape=(4096,), data=np.arange(4096, dtype="<f4").tobytes(), codec="planes-zstd")
    right = coded("planes-zstd", t.raw(), 4)
    wrong = data(right)

    def header(entries: dict[str, Any]) -> None:
        entries["c[:]#planes-zstd"] = {"dtype": "U8", "shape": [len(wrong)], "data_offsets": [0, len(wrong)]}
        entries["__metadata__"]["ckpt.digests"] = xxh3_64_hexdigest(wrong)

    def replace(stored: bytearray) -> None:
        stored[:] = wrong

    return Checkpoint(tensors=[t], state={"c": {"$tensor": "c"}}, header=header, data=replace, world_size=1)


def _anchored(**hooks: Any) -> Checkpoint:
    """One chunk that is a difference, in data file 0, and its anchor in data file 1. A hook changes what is written."""
    t = _difference("d", np.linspace(0, 1, 6000, dtype="<f4"), None)
    return Checkpoint(tensors=[t], state={"d": {"$tensor": "d"}}, files=[(0, 0), (0, 1)], world_size=1, **hooks)


def _of_difference() -> Checkpoint:
    """The same, but the anchor is a difference itself."""
    c = _anchored()
    anchor = c.tensors[0].anchor
    assert anchor is not None
    c.tensors[0].anchor = _difference("d", np.frombuffer(anchor.raw(), "<f4"), None)
    return c


def _without_128(header: dict[str, Any]) -> None:
    header["__metadata__"].pop("ckpt.digests128", None)


def _renamed_codec() -> Checkpoint:
    c = _coded(lambda raw: raw)
    inner = c.header

    def header(entries: dict[str, Any]) -> None:
        inner(entries)
        entries["c[:]#unknown-codec"] = entries.pop("c[:]#planes-zstd")

    c.header = header
    return c


def _ranks(*, row: dict[str, Any] | None = None, **hooks: Any) -> Checkpoint:
    """The base with values of two ranks apart, and members of the second one's row."""
    c = _with(**hooks)
    c.ranks, c.apart = {"0": {"v": 1}, "1": {"v": 2}}, lambda rows: rows["1"].update(row or {})
    return c


def _flip(data: bytearray) -> None:
    if data:
        data[0] ^= 1


def _state(node: Any) -> Checkpoint:
    c = _base()
    c.state["value"] = node
    return c


def _deep(depth: int) -> Any:
    node: Any = 1
    for _ in range(depth):
        node = [node]
    return node


def _swap(tables: Tables) -> None:
    for column in tables["tensors"].values():
        column[0], column[1] = column[1], column[0]


def _twice(tables: Tables) -> None:
    for column in tables["tensors"].values():
        column.insert(1, column[0])


def refused() -> dict[str, tuple[str, str, Checkpoint]]:
    """Case → section of docs/format.md, what is wrong, and the checkpoint. Rows of tensors.arrow are a, s, tied, w; of grids a, s, w."""
    uncoded, byte = {"index": {}}, {"dtype": "int8", "shape": []}
    return {
        "record-version": ("2", "version 2", _with(record={"version": 2})),
        "record-feature": ("2", "an unknown feature", _with(record={"features": ["telepathy"]})),
        "record-features-exclude": ("10", "codecs and extents at once", _with(record={"features": ["codecs", "extents"]})),
        "record-index-missing": ("2", "the record names no index files", _with(record=uncoded)),
        "record-path-upwards": ("2", "a path of the index with ..", _with(index=_upwards)),
        "record-digest": ("2", "the record's own digest is wrong", _base()),
        "record-digest-twice": ("2", "the digits of the digest occur twice", _base()),
        "index-digest": ("3", "a byte of tensors.arrow is changed", _base()),
        "header-digest": ("3", "a byte of a header is changed", _base()),
        "chunk-digest": ("3", "a byte of a chunk is changed", _with(data=_flip)),
        "file-missing": ("5", "a data file is missing", _base()),
        "file-truncated": ("5", "a data file lacks its last byte", _base()),
        "files-path-upwards": ("5", "a data file's path with ..", _with(tables=_cell("files", "path", 0, "data/../../x.safetensors"))),
        "files-header-too-long": ("5", "a header longer than its file", _with(tables=_cell("files", "header", 0, 1 << 20))),
        "tensors-unsorted": ("4", "names are not sorted", _with(tables=_swap)),
        "tensors-twice": ("4", "a name occurs twice", _with(tables=_twice)),
        "tensors-dtype": ("7", "an unknown dtype", _with(tables=_cell("tensors", "dtype", 0, "float128"))),
        "tensors-negative-shape": ("4", "a negative size", _with(tables=_cell("tensors", "shape", 0, [-2]))),
        "tensors-logical": ("4", "a logical size larger than the tensor", _with(tables=_cell("tensors", "logical", 3, [5, 3]))),
        "tensors-logical-short": ("4", "a logical shape of fewer dimensions", _with(tables=_cell("tensors", "logical", 3, [4]))),
        "tensors-grid-row": ("4", "a grid that does not exist", _with(tables=_cell("tensors", "grid", 0, 7))),
        "alias-of-nothing": ("4", "an alias of no tensor", _with(tables=_cell("tensors", "alias", 2, "b"))),
        "alias-of-alias": ("4", "an alias of itself", _with(tables=_cell("tensors", "alias", 2, "tied"))),
        "alias-shape": ("4", "an alias of another shape", _with(tables=_cell("tensors", "shape", 2, [1]))),
        "alias-logical": ("4", "an alias without the padding of its target", _with(tables=_cell("tensors", "logical", 0, [1]))),
        "alias-rank": ("4", "an alias of a tensor of one rank that is the job's", _with(tables=_cell("tensors", "rank", 0, 1))),
        "alias-with-grid": ("4", "an alias with a grid", _with(tables=_cell("tensors", "grid", 2, 0))),
        "grid-hole": ("5", "boxes that leave a hole and overlap", _with(tables=_boxes([0, 0, 2, 3, 1, 0, 2, 3]))),
        "grid-too-small": ("5", "boxes that do not cover the tensor", _with(tables=_boxes([0, 0, 2, 3, 2, 0, 1, 3]))),
        "grid-outside": ("5", "a box that leaves the tensor", _with(tables=_boxes([0, 0, 2, 3, 3, 0, 2, 3]))),
        "grid-cuts-decrease": ("5", "cuts that do not increase", _with(tables=_cell("grids", "cuts", 2, [[0, 3, 2, 4], [0, 3]]))),
        "grid-cuts-end": ("5", "cuts that end before the size", _with(tables=_cell("grids", "cuts", 2, [[0, 2, 3], [0, 3]]))),
        "grid-cuts-dimensions": ("5", "cuts of too few dimensions", _with(tables=_cell("grids", "cuts", 2, [[0, 2, 4]]))),
        "grid-both": ("5", "cuts and boxes at once", _with(tables=_cell("grids", "boxes", 0, [0, 2]))),
        "grid-neither": ("5", "neither cuts nor boxes", _with(tables=_cell("grids", "cuts", 0, None))),
        "grid-scalar-boxes": ("5", "boxes of a scalar", _with(tables=_scalar_boxes)),
        "grid-file": ("5", "a data file that does not exist", _with(tables=_cell("grids", "files", 0, [9]))),
        "grid-files-count": ("5", "a file for too few chunks", _with(tables=_cell("grids", "files", 2, [0, 1, 0]))),
        "header-key": ("6", "a chunk under another key", _with(header=_rename("w[0:2,:]", "w[0:3,:]"))),
        "header-dtype": ("6", "an entry of another dtype", _with(header=_entry("a", dtype="F64"))),
        "header-shape": ("6", "an entry of another shape", _with(header=_entry("a", shape=[1, 2]))),
        "header-offsets": ("6", "entries that overlap", _with(header=_entry("s", data_offsets=[0, 4]))),
        "header-id": ("6", "a data file of another save", _with(header=_entry("__metadata__", **{"ckpt.id": "0000000000000000"}))),
        "header-digests-count": ("6", "a digest too few", _with(header=_entry("__metadata__", **{"ckpt.digests": "0" * 16}))),
        "state-unknown-kind": ("8", "an unknown $ key", _state({"$telepathy": 1})),
        "state-kind-and-key": ("8", "a $ key beside another key", _state({"$tuple": [], "x": 1})),
        "state-map-pair": ("8", "a pair of $map with three members", _state({"$map": [[1, 2, 3]]})),
        "state-map-twice": ("8", "a key twice in $map", _state({"$map": [[1, 2], [1, 3]]})),
        "state-map-equal": ("8", "keys of $map that are equal: 1 and true", _state({"$map": [[1, 2], [True, 3]]})),
        "state-map-size": ("8", "a $size and a $tuple that are equal", _state({"$map": [[{"$size": [1]}, 2], [{"$tuple": [1.0]}, 3]]})),
        "state-map-list": ("8", "a key of $map that is a list", _state({"$map": [[[1], 2]]})),
        "state-map-bytesio": ("8", "a key of $map that is a $bytesio", _state({"$map": [[{"$bytesio": ""}, 1]]})),
        "state-set-twice": ("8", "elements of $set that are equal: 1 and true", _state({"$set": [1, True]})),
        "state-set-mapping": ("8", "a mapping in a set", _state({"$set": [{"a": 1}]})),
        "state-complex-bool": ("8", "a $complex of true", _state({"$complex": [True, 2]})),
        "state-complex-scalar": ("8", "a $complex of a numpy scalar", _state({"$complex": [{"$scalar": ["float64", _b64(bytes(8))]}, 2]})),
        "state-float": ("8", "a $float that is a number", _state({"$float": "1.0"})),
        "state-bytes": ("8", "bytes that are no base64", _state({"$bytes": "*"})),
        "state-bytes-padding": ("8", "base64 with more padding than it needs", _state({"$bytes": "YWJj===="})),
        "state-inline-large": ("8", "an inline tensor of 72 elements", _state({"$inline": ["int8", [8, 9], _b64(bytes(72))]})),
        "state-array-size": ("8", "an array with too few bytes", _state({"$array": ["int16", [3], _b64(b"1234")]})),
        "state-array-dtype": ("8", "an array of bfloat16, which numpy lacks", _state({"$array": ["bfloat16", [1], _b64(b"12")]})),
        "state-inline-size": ("8", "an inline tensor with too many bytes", _state({"$inline": ["float32", [1], _b64(b"12345678")]})),
        "state-dtype": ("8", "a torch.dtype that does not exist", _state({"$dtype": "float128"})),
        "state-size": ("8", "a torch.Size with a float", _state({"$size": [1.5]})),
        "state-tensor": ("8", "a tensor that the index lacks", _state({"$tensor": "missing"})),
        "state-deep": ("9", "nodes nested 200 deep", _state(_deep(200))),
        "state-nan": ("8", "NaN, which is not JSON", _state(float("nan"))),
        "ranks-and-extents": ("12", "ranks and extents at once", _with(record={"features": ["ranks", "extents"]})),
        "ranks-digest": ("12", "a row of another digest", _ranks(tables=_cell("ranks", "digest", 1, 7))),
        "ranks-length": ("12", "rows that end before the file", _ranks(index=_more_rows)),
        "ranks-decrease": ("12", "ranks that decrease", _ranks(tables=_cell("ranks", "rank", 1, 0))),
        "ranks-name-twice": (
            "12",
            "a tensor of a rank that is the job's too",
            _ranks(row={"tensors": {"a": byte}}),
        ),
        "ranks-file": (
            "12",
            "a data file that the rank lacks",
            _ranks(row={"tensors": {"x": byte | {"files": [9]}}}),
        ),
        "ranks-node": ("12", "a value with an unknown $ key", _ranks(row={"values": {"x": {"$telepathy": 1}}})),
        "ranks-alias": ("12", "an alias of nothing", _ranks(row={"aliases": {"x": "y"}})),
        "coded-unknown-codec": ("10", "an unknown codec", _renamed_codec()),
        "coded-version": ("10", "planes of another version", _coded(lambda raw: b"\2" + raw[1:])),
        "coded-kind": ("10", "a plane of kind 3", _coded(lambda raw: raw[:8] + b"\3" + raw[9:])),
        "coded-lengths": ("10", "a byte after the last plane", _coded(lambda raw: raw + b"\0")),
        "coded-truncated": ("10", "the last byte is missing", _coded(lambda raw: raw[:-1])),
        "references-feature": ("14", "a reference without the feature", _refers(features=())),
        "references-upwards": ("14", "a reference to a directory that is not beside", _refers(path="../../refuse/{0.name}/data/{1}")),
        "references-directory": ("14", "a reference to no file of a checkpoint's data", _refers(path="../{0.name}/./data/{1}")),
        "anchors-none": ("15", "a difference without an anchor", _anchored(tables=_cell("grids", "anchors", 0, [-1]))),
        "anchors-file": ("15", "a file that does not have the anchor", _anchored(tables=_cell("grids", "anchors", 0, [0]))),
        "anchors-count": ("15", "anchors of more chunks than there are", _anchored(tables=_cell("grids", "anchors", 0, [1, 1]))),
        "anchors-difference": ("15", "an anchor that is a difference itself", _of_difference()),
        "anchors-digest": ("15", "no XXH3-128 of what a difference stands for", _anchored(header=_without_128)),
        "anchors-feature": ("15", "differences without the feature", _anchored(record={"features": ["codecs"]})),
        "anchors-and-extents": ("15", "anchors and extents at once", _with(record={"features": ["codecs", "anchors", "extents"]})),
        "joint-record": ("17", "a joint record, which has no tensors of its own", _joint("trainer/step-00000010")),
        "joint-given-up": ("17", "a step that does not exist", _joint(None, given_up="buffer did not come")),
        "joint-path-upwards": ("17", "a member's path with ..", _joint("trainer/../../step-00000010")),
        "joint-feature": ("17", "a joint record with another feature", _joint("trainer/step-00000010", features=["codecs", "members"])),
    }


def _joint(path: str | None, **members: Any) -> Checkpoint:
    """A joint record of one member, or of none."""
    row = {} if path is None else {"trainer": {"path": path, "id": "0conformance0001"}}
    return _with(record={"features": ["members"], "index": {}, "members": row, "generation": "0conformance0000", **members})


def _write_joint(run: Path) -> dict[str, Any]:
    """A step of two members, beside which one of them has a later save that no joint record names. Gives what a reader gives."""
    right: dict[str, Any] = {}
    for name, id in (("trainer", "0conformance0001"), ("buffer.1", "0conformance0002")):
        c = _with(id=id)
        c.state["name"] = name
        write(run / name / "step-00000010", c)
        right[name] = expected(c)
    write(run / "trainer" / "step-00000011", _with(id="0conformance0004"))
    row = {n: {"path": f"{n}/step-00000010", "id": f"0conformance000{at}"} for at, n in enumerate(right, 1)}
    tensor_bytes = 2 * sum(len(t.raw()) for t in _base().tensors if t.alias is None)
    whole = {"members": row, "generation": "0conformance0000", "metrics": {"reward": 0.5}, "tags": ["good"]}
    commit(run / "step-00000010", Checkpoint(id="0conformance0003", world_size=4, record=whole), {}, ["members"], tensor_bytes)
    (run / "step-00000010" / "index-0conformance0003").rmdir()
    given_up = {"members": {}, "generation": "0conformance0000", "given_up": "buffer.1 did not save it"}
    commit(run / "step-00000011", Checkpoint(id="0conformance0005", world_size=0, record=given_up), {}, ["members"], 0)
    (run / "step-00000011" / "index-0conformance0005").rmdir()
    return right


def _upwards(index: dict[str, bytes]) -> None:
    """Done after writing: see ``_spoil``."""


def _more_rows(index: dict[str, bytes]) -> None:
    index["ranks.jsonl"] += b"\n"


def _boxes(flat: list[int]) -> Callable[[Tables], None]:
    def change(tables: Tables) -> None:
        tables["grids"]["cuts"][2], tables["grids"]["boxes"][2] = None, flat

    return change


def _scalar_boxes(tables: Tables) -> None:
    tables["grids"]["cuts"][1], tables["grids"]["boxes"][1] = None, []


def _rename(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        if old in header:
            header[new] = header.pop(old)

    return change


def _spoil(case: str, root: Path) -> None:
    """What is changed in files that are there already."""
    record = root / "checkpoint.json"
    data = sorted((root / "data").iterdir())
    if case == "record-path-upwards":
        members = json.loads(record.read_bytes())
        members["index"]["tensors.arrow"]["path"] = f"data/../{members['index']['tensors.arrow']['path']}"
        record.write_bytes(seal(members))
    elif case == "record-digest":
        record.write_bytes(record.read_bytes().replace(b"2026", b"2025"))
    elif case == "record-digest-twice":
        members = json.loads(record.read_bytes())
        raw = json.dumps({**members, "note": "0" * 32, "digest": "0" * 32}, indent=2).encode()
        digest = xxh3_128_hexdigest(raw).encode()
        record.write_bytes(raw.replace(b"0" * 32, digest))
    elif case == "index-digest":
        _change(next(root.glob("index-*/tensors.arrow")), -20)
    elif case == "header-digest":
        _change(data[0], 4000)
    elif case == "file-missing":
        data[1].unlink()
    elif case.startswith("joint"):
        for directory in (root / "data", next(root.glob("index-*"))):
            shutil.rmtree(directory)
    elif case == "file-truncated":
        data[1].write_bytes(data[1].read_bytes()[:-1])


def _change(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def main() -> None:
    for kind in ("accept", "refuse"):
        shutil.rmtree(HERE / kind, ignore_errors=True)
    for case, c in accepted().items():
        write(HERE / "accept" / case, c)
        _dump(HERE / "accept" / f"{case}.json", expected(c))
    members = HERE / "accept" / "members"  # orphans of other saves, and spans that cannot be read, which readers ignore
    (members / "index-0conformance0000").mkdir()
    (members / "index-0conformance0000" / "state.json").write_bytes(b"not even JSON")
    (members / "index-0conformance0001" / "spans.json").write_bytes(b"\0")
    tensors = _write_virtual(HERE / "accept" / "virtual", HERE / "accept" / "virtual-sources")
    state = {t.name: {"$tensor": t.name} for t in tensors}
    _dump(HERE / "accept" / "virtual.json", expected(Checkpoint(tensors=tensors, state=state, world_size=1)))
    _dump(HERE / "accept" / "joint.json", _write_joint(HERE / "accept" / "joint"))
    for case, (section, why, c) in refused().items():
        write(HERE / "refuse" / case, c)
        _spoil(case, HERE / "refuse" / case)
        _dump(HERE / "refuse" / f"{case}.json", {"section": section, "wrong": why})


def _dump(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
