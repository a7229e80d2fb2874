"""Changes that a format's own structure suggests, with digests, lengths and checksums made right afterwards."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from tests.failures.damage import places, sealed

from .seeds import Files

NUMBERS = (0, 1, -1, 2, 3, 7, 8, 4096, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, -(2**63), 2**63, 2**70, 10**400, 1.5, -0.0, 1e308)
TEXTS = (
    "",
    "x",
    "../x",
    "/etc/passwd",
    "a\0b",
    "A" * 32,
    "k" * 5000,
    "\ud800",
    "\x1b[2J",
    "float32",
    "F32",
    "bfloat16",
    "$tensor",
    "::",
    "0",
)
TAGS = (
    *("$tensor", "$tensors", "$map", "$tuple", "$set", "$frozenset", "$bytes", "$float", "$complex", "$scalar", "$array", "$inline"),
    *("$dtype", "$device", "$size", "$per_rank", "$param_groups", "$unknown", "__metadata__", "a"),
)


def mutated(kind: str, files: Files, rng: random.Random) -> Files:
    """A copy of a checkpoint with one to three changes."""
    changed = dict(files)
    for _ in range(rng.randint(1, 3)):
        if kind in ("native", "coded", "virtual"):
            _native(changed, rng)
        else:
            _foreign(changed, rng)
    return changed


# ------------------------------------------------------------------------------------------------------------- values


def _value(rng: random.Random, depth: int = 0) -> Any:
    pick = rng.randint(0, 7 if depth < 2 else 4)
    if pick <= 1:
        return rng.choice(NUMBERS)
    if pick == 2:
        return rng.choice(TEXTS)
    if pick <= 4:
        return rng.choice((None, True, False, []))
    if pick == 5:
        return [_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(TAGS): _value(rng, depth + 1)}


def _json(document: Any, rng: random.Random) -> Any:
    """A JSON document with one value replaced, removed or added."""
    document = json.loads(json.dumps(document))
    ways = [way for way in places(document) if way]
    if not ways:
        return _value(rng)
    *before, key = rng.choice(ways)
    parent = document
    for step in before:
        parent = parent[step]
    how = rng.choice(("set", "set", "set", "remove", "add"))
    if how == "remove":
        del parent[key]
    elif how == "add" and isinstance(parent, dict):
        parent[rng.choice((*TAGS, *TEXTS))] = _value(rng)
    elif how == "add":
        parent.insert(key, _value(rng))
    else:
        parent[key] = _value(rng)
    return document


def _bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed without any idea of what they mean."""
    how = rng.choice(("flip", "flip", "flip", "cut", "grow", "zero", "move", "integer"))
    if not data:
        return b"x"
    at = rng.randrange(len(data))
    changed = bytearray(data)
    if how == "flip":
        for _ in range(rng.randint(1, 6)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del changed[at:]
    elif how == "grow":
        changed[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 40)))
    elif how == "zero":
        changed[at : at + 8] = bytes(len(changed[at : at + 8]))
    elif how == "move":
        piece, to = changed[at : at + rng.randint(1, 64)], rng.randrange(len(data))
        changed[to : to + len(piece)] = piece
    else:
        number = struct.pack("<Q", rng.choice([n for n in NUMBERS if isinstance(n, int) and 0 <= n < 2**64]))
        changed[at : at + 8] = number[: len(changed[at : at + 8])]
    return bytes(changed)


# ------------------------------------------------------------------------------------------------------------- native


def _native(files: Files, rng: random.Random) -> None:
    try:
        record = json.loads(files["checkpoint.json"])
        where = {name: entry["path"] for name, entry in record["index"].items()}
        assert all(path in files for path in where.values())
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError):
        files["checkpoint.json"] = _bytes(files.get("checkpoint.json", b""), rng)  # an earlier change went too far to go on from
        return
    kind = rng.choice(("record", "state", "state", "cell", "cell", "cell", "arrow", "header", "header", "chunk", "plain"))
    if kind == "record":
        record = _json(record, rng)
    elif kind == "state":
        files[where["state.json"]] = _document(files[where["state.json"]], rng)
    elif kind in ("cell", "arrow"):
        name = rng.choice([name for name in where if name.endswith(".arrow")])
        files[where[name]] = (_table if kind == "cell" else _bytes)(files[where[name]], rng)
    elif kind in ("header", "chunk"):
        data = [path for path in files if path.startswith("data/")]
        if data:
            path = rng.choice(data)
            files[path] = (_header if kind == "header" else _chunk)(files[path], rng)
            _reseal_files(files, where)
    else:
        path = rng.choice(sorted(files))
        files[path] = _bytes(files[path], rng)
        return
    if isinstance(record, dict) and isinstance(record.get("index"), dict):
        for name, path in where.items():
            entry = record["index"].get(name)
            if isinstance(entry, dict) and kind != "record":
                entry.update(size=len(files[path]), digest=xxh3_128_hexdigest(files[path]))
    files["checkpoint.json"] = sealed(record)


def _document(data: bytes, rng: random.Random) -> bytes:
    try:
        return json.dumps(_json(json.loads(data), rng)).encode()
    except (ValueError, RecursionError):
        return _bytes(data, rng)


def _table(data: bytes, rng: random.Random) -> bytes:
    try:
        table = pa.ipc.open_file(data).read_all()
        table.validate(full=True)  # else reading it could end this process
        columns = {name: table[name].to_pylist() for name in table.column_names}
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return _bytes(data, rng)
    rows = table.num_rows
    name = rng.choice(list(columns))
    how = rng.choice(("cell", "cell", "cell", "cell", "twice", "remove", "column"))
    if how == "column" or not rows:
        del columns[name]
    elif how == "cell":
        row = rng.randrange(rows)
        columns[name][row] = _cell(columns[name][row], rng)
    else:
        row = rng.randrange(rows)
        columns = {n: v[: row + (how == "twice")] + v[row + (how == "remove") :] for n, v in columns.items()}
    arrays = {}
    for column, values in columns.items():
        for attempt in (lambda v=values, c=column: pa.array(v, table.schema.field(c).type), lambda v=values: pa.array(v)):
            try:
                arrays[column] = attempt()
                break
            except (pa.ArrowException, OverflowError, UnicodeEncodeError):
                continue
        else:
            arrays[column] = pa.array([ascii(v) for v in values])
    sink = pa.BufferOutputStream()
    changed = pa.table(arrays)
    with pa.ipc.new_file(sink, changed.schema) as writer:
        writer.write_table(changed)
    return bytes(sink.getvalue())


def _cell(value: Any, rng: random.Random) -> Any:
    if isinstance(value, list) and value and rng.random() < 0.6:
        at = rng.randrange(len(value))
        return [*value[:at], _cell(value[at], rng), *value[at + 1 :]]
    if isinstance(value, list):
        return rng.choice(([], None, value + value, value[:-1], [0, 4], [2**40] * 3))
    if isinstance(value, int):
        return rng.choice([n for n in NUMBERS if isinstance(n, int)] + [None])
    return rng.choice((*TEXTS, None))


def _split(data: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length], data[8 + length :]


def _header(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another header, padded and of the right length."""
    head, rest = _split(data)
    text = _document(head, rng)
    padded = text.ljust(-(-(8 + len(text)) // 4096) * 4096 - 8)
    length = len(padded) if rng.random() < 0.95 else rng.choice((0, 1, 2**40, 2**63, len(padded) + 1))
    return struct.pack("<Q", length) + padded + rest


def _chunk(data: bytes, rng: random.Random) -> bytes:
    """Other stored bytes, of the same length, with the digests that fit them."""
    head, rest = _split(data)
    changed = _bytes(rest, rng)[: len(rest)].ljust(len(rest), b"\0") if rest else rest
    try:
        header = json.loads(head)
        chunks = {k: v["data_offsets"] for k, v in header.items() if k != "__metadata__"}
        header["__metadata__"]["ckpt.digests"] = "".join(xxh3_64_hexdigest(changed[a:b]) for _, (a, b) in sorted(chunks.items()))
        text = json.dumps(header).encode()
    except (ValueError, TypeError, KeyError, AttributeError):
        text = head
    padded = text.ljust(-(-(8 + len(text)) // 4096) * 4096 - 8)
    return struct.pack("<Q", len(padded)) + padded + changed


def _reseal_files(files: Files, where: dict[str, str]) -> None:
    """files.arrow says of every data file what is true now."""
    try:
        read = pa.ipc.open_file(files[where["files.arrow"]]).read_all()
        read.validate(full=True)
        table = read.to_pydict()
        for row, path in enumerate(table["path"]):
            data = files[path]
            header = min(8 + int.from_bytes(data[:8], "little"), len(data))
            table["size"][row], table["header"][row], table["digest"][row] = len(data), header, xxh3_128_hexdigest(data[:header])
        schema = pa.ipc.open_file(files[where["files.arrow"]]).schema
        sink = pa.BufferOutputStream()
        made = pa.table({n: pa.array(table[n], schema.field(n).type) for n in schema.names})
    except (pa.ArrowException, OSError, KeyError, OverflowError, TypeError, UnicodeDecodeError):
        return
    with pa.ipc.new_file(sink, made.schema) as writer:
        writer.write_table(made)
    files[where["files.arrow"]] = bytes(sink.getvalue())


# ------------------------------------------------------------------------------------------------------------ foreign


def _foreign(files: Files, rng: random.Random) -> None:
    path = rng.choice(sorted(files))
    data = files[path]
    if len(files) > 1 and rng.random() < 0.05:
        del files[path]
    elif path.endswith(".json"):
        files[path] = _document(data, rng)
    elif path.endswith(".safetensors"):
        head, rest = _split(data)
        text = _document(head, rng) if rng.random() < 0.8 else _bytes(head, rng)
        files[path] = struct.pack("<Q", len(text)) + text + rest
    elif data[:2] == b"PK":
        files[path] = _archive(data, rng)
    elif data[:1] == b"\x80":
        files[path] = _pickle(data, rng)
    else:
        files[path] = _bytes(data, rng)


def _archive(data: bytes, rng: random.Random) -> bytes:
    """A torch.save archive with one record changed, written anew with the right checksums; or its own bytes changed."""
    if rng.random() < 0.2:
        return _bytes(data, rng)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            records = [(info.filename, old.read(info)) for info in old.infolist()]
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, struct.error):
        return _bytes(data, rng)
    if not records:
        return _bytes(data, rng)
    pickles = [i for i, (name, _) in enumerate(records) if name.endswith("data.pkl")]
    at = rng.choice(pickles) if pickles and rng.random() < 0.85 else rng.randrange(len(records))
    name, raw = records[at]
    how = rng.choice(("change", "change", "change", "change", "drop", "twice", "rename"))
    if how == "change":
        records[at] = (name, _pickle(raw, rng) if name.endswith("data.pkl") else _bytes(raw, rng))
    elif how == "drop":
        del records[at]
    elif how == "twice":
        records.append((name, raw))
    else:
        records[at] = (rng.choice(("../x", "/x", "archive/../data.pkl", "a" * 300, name + "x")), raw)
    sink = io.BytesIO()
    import warnings

    with warnings.catch_warnings(), zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as new:
        warnings.simplefilter("ignore")  # names that come twice are meant
        for record, content in records:
            new.writestr(zipfile.ZipInfo(record), content)
    return sink.getvalue()


_OPCODES = bytes({*b"(.012FIJKLMNPQRSTUVXabcdefghijklopqrstu]}", *range(0x80, 0x99)})
_CALLS: tuple[Callable[[bytes], bytes], ...] = (
    lambda marker: b"cos\nsystem\n(X" + struct.pack("<I", len(marker)) + marker + b"tR",
    lambda marker: b"cbuiltins\nexec\n(X" + struct.pack("<I", len(marker)) + marker + b"tR",
    lambda marker: b"cbuiltins\neval\n\x8c" + bytes([len(marker)]) + marker + b"\x85R",
    lambda marker: b"cposix\nsystem\nX" + struct.pack("<I", len(marker)) + marker + b"\x85R0",
)
MARKER = "ckpt-fuzz-code-ran"
"""A file of this name in the working directory of a case says that code of a pickle ran."""


def _pickle(data: bytes, rng: random.Random) -> bytes:
    how = rng.choice(("byte", "byte", "opcode", "opcode", "call", "text", "bytes"))
    if not data or how == "bytes":
        return _bytes(data, rng)
    at = rng.randrange(len(data))
    if how == "byte":
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if how == "opcode":
        return data[:at] + bytes([rng.choice(_OPCODES)]) + data[at + rng.randint(0, 1) :]
    if how == "call":
        call = rng.choice(_CALLS)(f"touch {MARKER}".encode() if rng.random() < 0.5 else f"open('{MARKER}','w')".encode())
        return data[:2] + call + (b"0" if rng.random() < 0.5 else b"") + data[2:]
    names = (b"torch._utils", b"collections", b"builtins", b"os", b"_rebuild_tensor_v2", b"OrderedDict", b"FloatStorage", b"Metadata")
    return data.replace(rng.choice(names), rng.choice(names), 1)
