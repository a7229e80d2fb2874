"""The oracle finds every damage and every broken rule that is tried here. What the conformance set refuses, it refuses there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from xxhash import xxh3_64_hexdigest

from tests.conformance import generate
from tests.conformance.generate import Checkpoint, Tables, Tensor, write
from tests.conformance.generate import _base as base
from tests.conformance.generate import _boxes as boxes
from tests.conformance.generate import _cell as cell
from tests.conformance.generate import _coded as coded
from tests.conformance.generate import _entry as entry
from tests.conformance.generate import _with as changed
from tests.formats import oracle
from tests.formats.oracle import read, read_state

Header = dict[str, Any]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    write(tmp_path / "good", base())
    return tmp_path / "good"


def test_values_are_read_as_they_stand(good: Path) -> None:
    assert read_state(good) == {"state": base().state, "ranks": {}}


def test_the_table_of_dtypes_is_that_of_the_conformance_set() -> None:
    assert oracle.DTYPES == generate.DTYPES


FILES = ["checkpoint.json", *(f"index-{base().id}/{n}" for n in ("tensors.arrow", "grids.arrow", "files.arrow", "state.json"))]
FILES += [f"data/{base().id}-0000{r}.safetensors" for r in (0, 1)]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_found(good: Path, name: str) -> None:
    raw, right = (good / name).read_bytes(), read(good)
    data = range(4096, len(raw)) if name.startswith("data") else ()
    for at in [*range(0, len(raw), max(1, len(raw) // 40)), *data, len(raw) - 1]:
        flipped = bytearray(raw)
        flipped[at] ^= 1 << at % 8
        (good / name).write_bytes(flipped)
        with pytest.raises(AssertionError):
            read(good)
    (good / name).write_bytes(raw)
    assert read(good) == right


@pytest.mark.parametrize("name", FILES)
def test_truncated_longer_and_missing_files_are_found(good: Path, name: str) -> None:
    raw = (good / name).read_bytes()
    for changed_bytes in (raw[:-1], raw + b" ", b""):
        (good / name).write_bytes(changed_bytes)
        with pytest.raises(AssertionError):
            read(good)
    (good / name).unlink()
    with pytest.raises(AssertionError, match="No such file"):
        read(good)


def of_meta(**members: str) -> Callable[[Header], None]:
    return entry("__metadata__", **{f"ckpt.{name}": value for name, value in members.items()})


def renamed(old: str, new: str) -> Callable[[Header], None]:
    """Under another key, with its digest where it belongs then."""

    def change(header: Header) -> None:
        if old in header:
            digests = dict(zip(sorted({*header} - {"__metadata__"}), _digests(header), strict=True))
            header[new], digests[new] = header.pop(old), digests.pop(old)
            header["__metadata__"]["ckpt.digests"] = "".join(digests[k] for k in sorted(digests))

    return change


def added(key: str) -> Callable[[Header], None]:
    """An entry of no bytes behind the others of the file that has ``a``."""

    def change(header: Header) -> None:
        if "a" in header:
            digests = dict(zip(sorted({*header} - {"__metadata__"}), _digests(header), strict=True)) | {key: xxh3_64_hexdigest(b"")}
            end = max(e["data_offsets"][1] for k, e in header.items() if k != "__metadata__")
            header[key] = {"dtype": "U8", "shape": [0], "data_offsets": [end, end]}
            header["__metadata__"]["ckpt.digests"] = "".join(digests[k] for k in sorted(digests))

    return change


def _digests(header: Header) -> list[str]:
    text = header["__metadata__"]["ckpt.digests"]
    return [text[at : at + 16] for at in range(0, len(text), 16)]


def as_state(text: bytes) -> Checkpoint:
    return changed(index=lambda index: index.update({"state.json": text}))


def with_tensor(tensor: Tensor, **changes: Any) -> Checkpoint:
    return changed(tensors=[*base().tensors, tensor], **changes)


def odd_boxes(tables: Tables) -> None:
    boxes([0, 0, 2, 3, 2])(tables)


ODD, PAIR = (Tensor(name=name, dtype=dtype, shape=()) for name, dtype in (("odd]", "bool"), ("pair", "complex128")))
EMPTY = Tensor(name="zero", dtype="float32", shape=(0, 3))

BROKEN: dict[str, tuple[Checkpoint, str]] = {
    "format": (changed(record={"format": "other"}), "unknown format"),
    "id": (changed(record={"id": "UPPERCASE0000000"}), "commit record: .UPPERCASE"),
    "time": (changed(record={"created": "yesterday"}), "yesterday"),
    "bytes": (changed(record={"tensor_bytes": 129}), "tensor_bytes"),
    "ranks": (changed(record={"world_size": 1}), "world_size"),
    "state": (as_state(b'{"state": {}}'), "state.json"),
    "rank of a state": (as_state(b'{"state": {}, "ranks": {"2": {}}}'), "state.json"),
    "dtype of the same size": (changed(tables=cell("tensors", "dtype", 3, "int32")), "F32"),
    "no grid": (changed(tables=cell("tensors", "grid", 0, -1)), "a: no grid"),
    "null": (changed(tables=cell("tensors", "dtype", 0, None)), "null"),
    "name": (changed(tables=cell("tensors", "name", 0, "a\0")), "not a name"),
    "long name": (changed(tables=cell("tensors", "name", 0, "a" * 4097)), "not a name"),
    "cuts start late": (changed(tables=cell("grids", "cuts", 2, [[1, 2, 4], [0, 3]])), "cuts"),
    "cuts twice": (changed(tables=cell("grids", "cuts", 0, [[0, 0, 2]])), "cuts"),
    "cuts of an empty dimension": (with_tensor(EMPTY, tables=cell("grids", "cuts", 3, [[0], [0, 3]])), "cuts"),
    "other file": (changed(tables=cell("grids", "files", 2, [1, 0])), "not in data file 1"),
    "negative file": (changed(tables=cell("grids", "files", 0, [-2])), "not in data file -2"),
    "negative box": (changed(tables=boxes([0, 0, 2, 3, -1, 0, 2, 3])), "not in shape"),
    "odd boxes": (changed(tables=odd_boxes), "not readable"),
    "chunk too many": (changed(header=added("extra")), "extra"),
    "bare key of a name that ends in ]": (with_tensor(ODD, header=renamed("odd][]", "odd]")), "odd"),
    "bare key of an entry with other dimensions": (with_tensor(PAIR, header=renamed("pair[]", "pair")), "not in data file"),
    "key with ranges of a whole tensor": (changed(header=renamed("a", "a[0:2]")), "a: not in"),
    "version of the file": (changed(header=of_meta(version="2")), "ckpt.version"),
    "rank of the file": (changed(header=of_meta(rank="1")), "ckpt.rank"),
    "size of the file": (changed(tables=cell("files", "size", 0, 1)), "size"),
    "name of the file": (changed(tables=cell("files", "path", 0, "data/0.safetensors")), "path"),
    "gap": (changed(data=lambda data: data.extend(b"?")), "hole"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_found_though_every_digest_fits(tmp_path: Path, case: str) -> None:
    checkpoint, says = BROKEN[case]
    write(tmp_path / "c", checkpoint)
    with pytest.raises(AssertionError, match=says):
        read(tmp_path / "c")


def coded_with(
    data: Callable[[bytes], bytes] = lambda raw: raw, header: Callable[[Header], None] = lambda header: None, **record: Any
) -> Checkpoint:
    checkpoint = coded(data)
    inner = checkpoint.header
    checkpoint.header = lambda entries: (inner(entries), header(entries))[0]
    checkpoint.record = record
    return checkpoint


def as_zstd(data: bytes) -> Checkpoint:
    """What is said to be a zstd chunk of 16,384 bytes."""
    return coded_with(lambda raw: data, renamed("c[:]#planes-zstd", "c[:]#zstd"))


def compressed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


RIGHT = coded(lambda raw: raw).tensors[0].raw()
KEY = "c[:]#planes-zstd"

BROKEN_CODED: dict[str, tuple[Checkpoint, str]] = {
    "no feature": (coded_with(features=[]), "features"),
    "nothing coded": (changed(record={"features": ["codecs"]}), "coded"),
    "no dtypes": (coded_with(header=of_meta(dtypes="{}")), "ckpt.dtypes"),
    "no shapes": (coded_with(header=of_meta(shapes="{}")), "ckpt.shapes"),
    "dtypes of others": (changed(header=of_meta(dtypes='{"a": "int64"}', shapes='{"a": [2]}')), "ckpt.dtypes"),
    "wrong dtype": (coded_with(header=of_meta(dtypes='{"c": "int32"}')), "ckpt.dtypes or"),
    "wrong shape": (coded_with(header=of_meta(shapes='{"c": [4095]}')), "ckpt.shapes"),
    "key without a box": (coded_with(header=renamed(KEY, "c#planes-zstd")), "ckpt.dtypes"),
    "key with ranges of a whole tensor": (coded_with(header=renamed(KEY, "c[0:4096]#planes-zstd")), "c: not in"),
    "other codec": (as_zstd(compressed(RIGHT)[:-1] + b"x"), "not readable|or its size"),
    "entry": (coded_with(header=lambda header: header[KEY].update(shape=[1, *header[KEY]["shape"]])), "U8"),
    "coded and not": (changed(header=added("a[0:2]")), "chunks that no tensor has"),
    "short": (as_zstd(compressed(RIGHT[:-1])), "or its size"),
    "long": (as_zstd(compressed(RIGHT) + compressed(b"x")), "or its size"),
    "not a frame": (as_zstd(b"x" * 20), "not readable"),
    "for nothing": (as_zstd(bytes(16_000)), "for nothing"),
    "planes of another size": (coded_with(lambda raw: raw[:1] + b"\x02" + raw[2:]), "header of planes"),
    "a bare key that looks coded": (
        with_tensor(Tensor(name="z]#a", dtype="uint8", shape=(2,)), header=renamed("z]#a[:]", "z]#a")),
        "ckpt.dtypes",
    ),
}


@pytest.mark.parametrize("case", BROKEN_CODED)
def test_a_broken_rule_of_coded_chunks_is_found(tmp_path: Path, case: str) -> None:
    checkpoint, says = BROKEN_CODED[case]
    write(tmp_path / "c", checkpoint)
    with pytest.raises(AssertionError, match=says):
        read(tmp_path / "c")


def test_a_column_of_another_type_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(generate.TENSORS, "grid", pa.int64())
    write(tmp_path / "c", base())
    with pytest.raises(AssertionError, match="columns .*int64"):
        read(tmp_path / "c")


def test_a_key_that_comes_twice_is_found() -> None:
    with pytest.raises(AssertionError, match="a key comes twice"):
        oracle._json('{"a": {"b": 1, "b": 1}}')
