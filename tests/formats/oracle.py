"""A second reader of format version 1, written from docs/format.md alone: no code of the package, all is verified, files are read whole."""

from __future__ import annotations

import itertools
import json
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import zstandard
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

TABLE = """bool 1 BOOL, uint8 1 U8, int8 1 I8, uint16 2 U16, int16 2 I16, uint32 4 U32, int32 4 I32, uint64 8 U64, int64 8 I64, float16 2
F16, bfloat16 2 BF16, float32 4 F32, float64 8 F64, float8_e4m3fn 1 F8_E4M3, float8_e5m2 1 F8_E5M2, float8_e4m3fnuz 1 F8_E4M3FNUZ,
float8_e5m2fnuz 1 F8_E5M2FNUZ, float8_e8m0fnu 1 F8_E8M0, complex64 8 C64, float4_e2m1fn_x2 1 F4, complex32 4 U8, complex128 16 U8"""
DTYPES = {name: (int(size), stored) for name, size, stored in (row.split() for row in TABLE.split(","))}
INTS = "list<int64>"
TENSORS = {"name": "string", "dtype": "string", "shape": INTS, "logical": f"{INTS}?", "grid": "int32", "alias": "string?", "rank": "int32?"}
GRIDS = {"cuts": f"list<{INTS}>?", "boxes": f"{INTS}?", "files": "list<int32>"}  # ? may be null
RANKS = {"rank": "int32", "length": "int64", "digest": "uint64"}
APART = ["ranks.arrow", "ranks.jsonl"]
FILES = {"path": "string", "size": "int64", "header": "int64", "digest": "string", "rank": "int32"}


def read(directory: str | Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor by name, aliases too: dtype, global shape (padding included) and row-major bytes. AssertionError if anything is off."""
    try:
        return _read(Path(directory))[0]
    except (OSError, ValueError, TypeError, LookupError, StopIteration, AttributeError, pa.ArrowException, zstandard.ZstdError) as e:
        raise AssertionError(f"not readable: {e!r}") from e


def read_state(directory: str | Path) -> dict[str, Any]:
    """state.json as it stands, of a checkpoint that ``read`` accepts."""
    read(directory)
    return _read(Path(directory))[1]


def _read(root: Path) -> tuple[dict[str, Any], Any]:
    raw = (root / "checkpoint.json").read_bytes()
    record = _json(raw)
    own, ident, made, index = record["digest"], record["id"], record["created"], {}
    assert xxh3_128_hexdigest(raw.replace(own.encode(), b"0" * 32)) == own, "commit record: digest"
    assert (record["format"], record["version"]) == ("ckpt", 1), "unknown format, version"
    assert {*record["features"]} <= {"codecs", "ranks", "references", "anchors"}, "unknown feature"
    assert re.fullmatch("[0-9a-z]{16}", ident) and re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d", made), f"commit record: {ident!r}, {made!r}"
    for one, two in itertools.pairwise([{"id": "", "after": 0}, *record.get("branches", ())]):
        assert re.fullmatch("[0-9a-z]{16}", two["id"]) and two["after"] >= one["after"] and two["id"] > one["id"], "commit record: branches"
    assert all(branch["id"] < ident for branch in record.get("branches", ())), "commit record: branches"
    names = ["tensors.arrow", "grids.arrow", "files.arrow", "state.json", *(APART if "ranks" in record["features"] else [])]
    for name, entry in ((n, record["index"][n]) for n in names):
        index[name] = raw = (root / entry["path"]).read_bytes()
        must = {"path": f"index-{ident}/{name}", "size": len(raw), "digest": xxh3_128_hexdigest(raw)}.items()
        assert must <= entry.items(), f"{name}: is {must}, not {entry}"
    of_grids = GRIDS | ({"anchors": "list<int32>?"} if "anchors" in record["features"] else {})
    rows, grids, files = (_table(index[f"{n}.arrow"], c) for n, c in (("tensors", TENSORS), ("grids", of_grids), ("files", FILES)))
    unread = [_data_file(root, ident, f) for f in files]  # what a tensor has read is taken out
    own = [not f["path"].startswith("../") for f in files]
    assert own == sorted(own, reverse=True) and all(own) == ("references" not in record["features"]), "files.arrow: references"
    about, strong = zip(*(file.pop("") for file in unread), strict=True) if unread else ((), ())
    keys = [{*file} for file in unread]
    assert [r["name"] for r in rows] == sorted({r["name"] for r in rows}), "tensors.arrow: names not sorted or not unique"
    if "ranks" in record["features"]:
        assert all(r["rank"] is None for r in rows) and _json(index["state.json"])["ranks"] == {}, "ranks in two places"
        rows += _rows_apart(index, grids, files)
    assert len({r["name"] for r in rows}) == len(rows), "a name in two rows of ranks"
    tensors = {r["name"]: _tensor(r, grids[r["grid"]], unread, strong) for r in rows if r["alias"] is None}
    assert not any(u for u, mine in zip(unread, own, strict=True) if mine), f"chunks that no tensor has: {[*map(list, unread)]}"
    taken = [k - {*u} for k, u in zip(keys, unread, strict=True)]  # of a file that is referred to, all else may be of other tensors
    coded = [k for of_file in taken for k in of_file if re.search(r"\]#[a-z0-9-]+\Z", k)]
    used = [{k.rpartition("[")[0] for k in of_file} for of_file in taken]
    said = {n: (d, tuple(s)) for names, file in zip(used, about, strict=True) for n, (d, s) in file.items() if n in names}
    assert said == {r["name"]: (r["dtype"], tuple(r["shape"])) for r in rows if r["name"] in said}, "ckpt.dtypes or ckpt.shapes"
    assert bool(coded) == ("codecs" in record["features"]), f"features {record['features']}, but coded are {coded}"
    assert any("#xor-" in k for k in coded) == ("anchors" in record["features"]), f"features {record['features']}, but coded are {coded}"
    assert record["tensor_bytes"] == sum(len(t[2]) for t in tensors.values()), "commit record: tensor_bytes"
    ours = [*rows, *(file for file, mine in zip(files, own, strict=True) if mine)]
    assert all(0 <= (r["rank"] or 0) < record["world_size"] for r in ours), "a rank is not below world_size"
    aliases = {r["name"]: tensors[r["alias"]] for r in rows if r["alias"] is not None}  # KeyError: an alias of an alias, or of nothing
    by_name = {r["name"]: {c: r[c] for c in ("dtype", "shape", "logical", "rank")} for r in rows}
    alike = [r["grid"] == -1 and by_name[r["name"]] == by_name[r["alias"]] for r in rows if r["name"] in aliases]
    assert all(alike), "an alias with a grid, or of another dtype, shape, padding or rank"
    state = _json(index["state.json"])
    assert state.keys() == {"state", "ranks"} and all(0 <= int(r) < record["world_size"] for r in state["ranks"]), "state.json: members"
    return tensors | aliases, state


def _rows_apart(index: dict[str, bytes], grids: list[dict[str, Any]], files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as tensors.arrow would have them; their grids are added."""
    table, data = _table(index["ranks.arrow"], RANKS), index["ranks.jsonl"]
    ends, found = [*accumulate((r["length"] for r in table), initial=0)], []
    assert ends[-1] == len(data) and [r["rank"] for r in table] == sorted({r["rank"] for r in table}), "ranks.arrow: lengths or ranks"
    for r, a, b in zip(table, ends, ends[1:], strict=False):
        assert int(xxh3_64_hexdigest(data[a:b]), 16) == r["digest"], f"ranks.jsonl: digest of rank {r['rank']}"
        row, mine = _json(data[a:b]), [i for i, f in enumerate(files) if f["rank"] == r["rank"]]
        of: dict[str, Any] = {}
        for name, t in row["tensors"].items():
            cuts, numbers = t.get("cuts", [[0, n] for n in t["shape"]]), t.get("files", [0])
            grids.append({"cuts": cuts, "boxes": None, "files": [mine[n] for n in numbers]})
            about = {"dtype": t["dtype"], "shape": t["shape"], "logical": None, "rank": r["rank"]}
            of[name] = {"name": name, "grid": len(grids) - 1, "alias": None} | about
        found += [*of.values(), *({**of[to], "name": name, "alias": to, "grid": -1} for name, to in row["aliases"].items())]
    return found


def _json(raw: bytes | str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), f"JSON: a key comes twice in {[k for k, _ in pairs]}"
        return dict(pairs)

    text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
    return json.loads(text, object_pairs_hook=unique, parse_constant=int)  # NaN and Infinity are not JSON: ValueError


def _table(raw: bytes, columns: dict[str, str]) -> list[dict[str, Any]]:
    found = pa.ipc.open_file(raw).read_all()
    kinds = {c: re.sub(r"\w+: | not null", "", str(found.schema.field(c).type)) for c in columns}
    assert kinds == {c: kind.rstrip("?") for c, kind in columns.items()}, f"columns {kinds}, not {columns}"
    assert not any(found[c].null_count for c in columns if columns[c][-1] != "?"), "null in a column that may have none"
    return [{c: row[c] for c in columns} for row in found.to_pylist()]


def _data_file(root: Path, ident: str, row: dict[str, Any]) -> dict[str, tuple[str, list[int], bytes]]:
    path, elsewhere = row["path"], re.fullmatch(r"\.\./[^/]+/(data/([0-9a-z]{16})-.*)", row["path"])
    inner, ident = (elsewhere[1], elsewhere[2]) if elsewhere else (path, ident)
    assert re.fullmatch(rf"data/{ident}-{row['rank']:05d}(-\d+)?\.safetensors", inner), f"{path}: path"
    raw = (root / path).read_bytes()
    assert len(raw) == row["size"], f"{path}: size"
    start = 8 + int.from_bytes(raw[:8], "little")
    assert start == row["header"] and start % 4096 == 0 and xxh3_128_hexdigest(raw[:start]) == row["digest"], f"{path}: header"
    meta = (header := _json(raw[8:start])).pop("__metadata__")
    assert [meta[f"ckpt.{k}"] for k in ("version", "id", "rank")] == ["1", ident, str(row["rank"])], f"{path}: {meta}"
    spans = sorted(e["data_offsets"] for e in header.values())
    assert [0, *(b for _, b in spans)] == [*(a for a, _ in spans), len(raw) - start], f"{path}: entries leave a hole or overlap"
    found = {k: (e["dtype"], e["shape"], raw[start + e["data_offsets"][0] : start + e["data_offsets"][1]]) for k, e in header.items()}
    digests = re.findall("[0-9a-f]{16}|.+", meta["ckpt.digests"])
    wrong = [k for k, d in zip(sorted(found), digests, strict=True) if xxh3_64_hexdigest(found[k][2]) != d]
    assert not wrong, f"{path}: digest of {wrong}"
    strong = re.findall("[0-9a-f]{32}|.+", meta.get("ckpt.digests128", "0" * 32 * len(found)))
    plain = [(k, d) for k, d in zip(sorted(found), strong, strict=True) if "]#" not in k and int(d, 16)]
    assert not [k for k, d in plain if xxh3_128_hexdigest(found[k][2]) != d], f"{path}: ckpt.digests128"
    dtypes, shapes = _json(meta.get("ckpt.dtypes", "{}")), _json(meta.get("ckpt.shapes", "{}"))
    coded = {k.rpartition("[")[0] for k in found if re.search(r"\]#[a-z0-9-]+\Z", k)}
    assert dtypes.keys() == shapes.keys() == coded, f"{path}: ckpt.dtypes or ckpt.shapes, where {coded} are coded"
    return found | {"": ({n: (dtypes[n], shapes[n]) for n in dtypes}, dict(zip(sorted(found), strong, strict=True)))}  # no key is empty


def _boxes(row: dict[str, Any], grid: dict[str, Any]) -> list[Any]:
    """Start and stop of each chunk in each dimension."""
    name, shape, cuts, flat = row["name"], row["shape"], grid["cuts"], grid["boxes"]
    assert row["grid"] >= 0 and (cuts is None) != (flat is None), f"{name}: no grid, or not one of cuts and boxes"
    boxes: Any = [[]] if flat is None else [[(o, o + s) for o, s in b.T.tolist()] for b in np.reshape(flat, (-1, 2, len(shape)))]
    for c, n in zip(cuts, shape, strict=True) if cuts is not None else ():
        assert [c[0], c[-1]] == [0, n] and c == (sorted(set(c)) if n else [0, 0]), f"{name}: cuts {cuts} of {shape}"
        boxes = [[*box, (c[i], c[i + 1])] for box in boxes for i in range(len(c) - 1)]
    return boxes


def _tensor(
    row: dict[str, Any], grid: dict[str, Any], unread: list[dict[str, Any]], strong: tuple[dict[str, str], ...]
) -> tuple[str, tuple[int, ...], bytes]:
    name, dtype, shape, files = row["name"], row["dtype"], row["shape"], grid["files"]
    (size, stored), logical = DTYPES[dtype], shape if row["logical"] is None else row["logical"]
    assert 1 <= len(name.encode()) <= 4096 and "\0" not in name, f"not a name: {name[:99]!r}"
    assert all(0 <= a <= n for a, n in zip(logical, shape, strict=True)), f"{name}: logical {logical} of {shape}"
    boxes = _boxes(row, grid)
    whole, times = np.zeros((*shape, size), np.uint8), np.zeros(shape, np.int64)
    anchors = [-1] * len(boxes) if grid.get("anchors") is None else grid["anchors"]
    for box, file, anchor in zip(boxes, files * len(boxes) if len(files) == 1 else files, anchors, strict=True):
        part, at = [b - a for a, b in box], tuple(slice(a, b) for a, b in box)
        wanted = [*part, size] if dtype in ("complex32", "complex128") else [*part[:-1], 2 * (part or [1])[-1]] if stored == "F4" else part
        ranges = ",".join(":" if (a, b) == (0, n) else f"{a}:{b}" for (a, b), n in zip(box, shape, strict=True))
        mistakable = re.search(r"\](#[a-z0-9-]+)?\Z", name) or name == "__metadata__"
        bare = part == shape and not mistakable and len(wanted) == len(shape)
        key, codec = name if bare else f"{name}[{ranges}]", None
        inside = all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True))
        if file >= 0 and key not in unread[file]:
            key, codec = next(((f"{name}[{ranges}]#{c}", c) for c in CODECS if f"{name}[{ranges}]#{c}" in unread[file]), (key, None))
        assert inside and file >= 0 and key in unread[file], f"{key}: not in shape {shape}, or not in data file {file}"
        *said, raw = unread[file].pop(key)
        if codec is not None:
            assert said == ["U8", [len(raw)]] and 0 < len(raw) <= 0.97 * whole[at].size, f"{key}: {said}, or coded for nothing"
            said, raw = [stored, wanted], CODECS[codec](raw, whole[at].size, size)
            if codec == "xor-planes-zstd":
                raw = _xor(raw, unread[anchor] if anchor >= 0 else {}, name if bare else f"{name}[{ranges}]", f"{name}[{ranges}]", size)
                assert xxh3_128_hexdigest(raw) == strong[file][key], f"{key}: ckpt.digests128"
        assert said == [stored, wanted] and len(raw) == whole[at].size <= 64 << 20, f"{key}: {said}, not {[stored, wanted]}, or its size"
        whole[at], times[at] = np.frombuffer(raw, np.uint8).reshape(*part, size), times[at] + 1
    assert (times == 1).all(), f"{name}: chunks leave a hole or overlap"
    return dtype, tuple(shape), whole.tobytes()


def _zstd(raw: bytes, nbytes: int, _: int) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True).read(nbytes + 1)


def _planes(raw: bytes, nbytes: int, size: int) -> bytes:
    at, count = 8, int.from_bytes(raw[4:8], "little")
    assert [*raw[:4]] == [1, size, 0, 0] and 4096 <= count <= 1 << 20, f"header of planes-zstd: {raw[:8]!r}"
    elements = np.zeros((nbytes // size, size), np.uint8)
    for start in range(0, len(elements), count):
        block = elements[start : start + count]
        lengths, begin = np.frombuffer(raw[at + size : at + 5 * size], "<u4").tolist(), at + 5 * size
        ends = [*accumulate(lengths, initial=begin)]
        for p, kind in enumerate(raw[at : at + size]):
            part = raw[ends[p] : ends[p + 1]]
            plane = zstandard.ZstdDecompressor().decompress(part) if kind == 1 else part * len(block) if kind == 2 else part
            assert kind < 3 and len(plane) == len(block) and (kind < 2 or len(part) == 1), f"plane {p}: kind {kind}, {len(plane)} bytes"
            block[:, p] = np.frombuffer(plane, np.uint8)
        at = ends[-1]
    assert at == len(raw), f"planes end at {at} of {len(raw)}"
    return elements.tobytes()


def _xor(raw: bytes, anchors: dict[str, Any], key: str, box: str, size: int) -> bytes:
    found = next(k for k in (key, f"{box}#zstd", f"{box}#planes-zstd") if k in anchors)
    other = anchors.pop(found)[2]
    other = other if found == key else CODECS[found.rpartition("#")[2]](other, len(raw), size)
    return bytes(np.frombuffer(raw, np.uint8) ^ np.frombuffer(other, np.uint8))


CODECS = {"zstd": _zstd, "planes-zstd": _planes, "xor-planes-zstd": _planes}
