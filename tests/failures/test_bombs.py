"""Small or sparse files that would take all memory, and special files that would be waited for: refused, with a reason, at once."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import ckpt
from ckpt.errors import CkptError, CorruptError, FormatError, StateError
from ckpt.formats.native import index
from ckpt.formats.native.tables import SMALL, from_file, to_file
from tests.failures.damage import Copy, change_record, data_file, index_file

GIB = 1 << 30


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    ckpt.save(str(tmp_path / "c"), {"w": torch.arange(100), "n": 5})
    return tmp_path / "c"


@pytest.fixture
def copy(directory: Path) -> Copy:
    return Copy.of(directory, f"inprocess://{directory.parent.name}")


def leave(nbytes: int) -> None:
    """Memory grows by no more than so many bytes, or MemoryError is raised."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


@pytest.fixture
def little_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    leave(300_000_000)
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def refused(url: str, *kinds: type[CkptError], match: str = "") -> None:
    with pytest.raises(kinds or (CorruptError,), match=match) as caught:
        ckpt.open(url)
    assert caught.value.hint


# ------------------------------------------------------------------------------------------------------------- Arrow


def packed(columns: dict[str, pa.Array], codec: str = "zstd") -> bytes:
    table, sink = pa.table(columns), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def tensors(name: str = "w", shape: Any = (100,), rows: int = 1) -> dict[str, pa.Array]:
    """``tensors.arrow`` of a few tensors."""
    return {
        "name": pa.array([name] * rows),
        "dtype": pa.array(["int64"] * rows),
        "shape": pa.array([shape] * rows, pa.list_(pa.int64())) if isinstance(shape, tuple) else shape,
        "logical": pa.array([None] * rows, pa.list_(pa.int64())),
        "grid": pa.array([0] * rows, pa.int32()),
        "alias": pa.array([None] * rows, pa.utf8()),
        "rank": pa.array([None] * rows, pa.int32()),
    }


def many_dimensions(count: int) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.array(np.zeros(count, np.int64)))


def many_files(rows: int) -> dict[str, pa.Array]:
    zeros = np.zeros(rows, np.int64)
    empty = pa.StringArray.from_buffers(rows, pa.py_buffer(np.zeros(rows + 1, np.int32)), pa.py_buffer(b""))
    return {"path": empty, "size": pa.array(zeros), "header": pa.array(zeros), "digest": empty, "rank": pa.array(zeros.astype(np.int32))}


def shared_name(rows: int) -> dict[str, pa.Array]:
    """A name of 60 MB, a few bytes of index per row."""
    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["x" * 60_000_000]))
    return tensors(rows=rows) | {"name": names}


BOMBS: dict[str, tuple[str, Callable[[], dict[str, pa.Array]]]] = {
    "name": ("tensors.arrow", lambda: tensors(name="x" * 100_000_000)),
    "name that unfolds to little": ("tensors.arrow", lambda: tensors(name="x" * 1_000_000)),
    "shape": ("tensors.arrow", lambda: tensors(shape=many_dimensions(20_000_000))),
    "shape that unfolds to little": ("tensors.arrow", lambda: tensors(shape=many_dimensions(5_000_000))),
    "rows": ("files.arrow", lambda: many_files(5_000_000)),
    "rows that unfold to little": ("files.arrow", lambda: many_files(2_000_000)),
    "dictionary": ("tensors.arrow", lambda: shared_name(1000)),
}


@pytest.mark.parametrize(("bomb", "codec"), [*((bomb, "zstd") for bomb in BOMBS), ("name", "lz4")])
def test_arrow_files_that_unfold_to_much(copy: Copy, bomb: str, codec: str, request: pytest.FixtureRequest) -> None:
    name, columns = BOMBS[bomb]
    data = packed(columns(), codec)
    assert len(data) < 1_000_000
    copy.set_index(name, data)
    request.getfixturevalue("little_memory")
    refused(copy.url, match="cannot be read as this format's table|at most|unfold")


def test_a_footer_that_points_at_one_message_again_and_again(copy: Copy) -> None:
    """The footer is not looked at: what was measured is what is read."""
    data = packed(tensors())
    start = len(data) - 10 - int.from_bytes(data[-10:-6], "little")
    copy.set_index("tensors.arrow", data[:start] + b"\xff" * (len(data) - 10 - start) + data[-10:])
    assert list(ckpt.open(copy.url)) == ["w"]


def test_messages_that_lie() -> None:
    """Any byte of the file may be anything: it is read, or refused in our words."""
    data = packed(tensors())
    for at in range(8, len(data), 7):
        spoilt = bytearray(data)
        spoilt[at] = 0xFF
        with suppress(CorruptError, FormatError):
            from_file(bytes(spoilt), index._TENSORS, "here")


def test_what_is_large_and_right_is_read(tmp_path: Path) -> None:
    """200,000 tensors under long names, and many values."""
    count = 200_000
    columns = tensors(rows=count) | {"name": pa.array([f"model.layers.{i:06d}.self_attn.projection.weight" for i in range(count)])}
    data = to_file({f.name: columns[f.name] for f in index._TENSORS}, index._TENSORS)
    assert len(from_file(data, index._TENSORS, "here")["name"]) == count
    count = 30_000
    ckpt.save(str(tmp_path / "c"), {"values": list(range(count)), "w": torch.zeros(3)})
    found = {"values": [], "w": torch.ones(3)}
    ckpt.load(str(tmp_path / "c"), found, only=["values"])
    assert found["values"] == list(range(count))


# --------------------------------------------------------------------------------------------------------- large files


@pytest.mark.parametrize("name", ["checkpoint.json", "tensors.arrow", "state.json"])
@pytest.mark.usefixtures("little_memory")
def test_sparse_files(directory: Path, name: str) -> None:
    file = directory / name if name == "checkpoint.json" else index_file(directory, name)
    if name != "checkpoint.json":
        members = json.loads((directory / "checkpoint.json").read_bytes())["index"]
        members[name]["size"] = 20 * GIB
        change_record(directory, index=members)
    os.truncate(file, 20 * GIB)
    refused(str(directory), match=r"has 21,474,836,480 bytes; at most [\d,]+ are read")
    steps = ckpt.list_steps(str(directory))
    assert name != "checkpoint.json" or [s.damaged for s in steps] == [True]


def test_a_state_that_takes_more_memory_than_there_is(copy: Copy, request: pytest.FixtureRequest) -> None:
    """No damage: nobody is to go on from an older step for it."""
    copy.set_state(b'{"state":[' + b"[]," * 6_000_000 + b'[]],"ranks":{}}')
    request.getfixturevalue("little_memory")
    leave(40_000_000)
    refused(copy.url, FormatError, match="takes more memory than there is")


def test_nothing_is_saved_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "INDEX_LIMIT", 100_000)
    with pytest.raises(StateError, match="would have .* bytes; at most 100,000 can be read again"):
        ckpt.save(str(tmp_path / "c"), {"values": list(range(50_000))})
    assert not (tmp_path / "c" / "checkpoint.json").exists() and SMALL > 100_000


# ------------------------------------------------------------------------------------------------------- special files


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("special", [pipe, bound, device])
@pytest.mark.parametrize("name", ["checkpoint.json", "tensors.arrow", "state.json", "data"])
@pytest.mark.timeout(30)
def test_special_files(directory: Path, name: str, special: Callable[[Path], None]) -> None:
    files = {"checkpoint.json": directory / name, "data": data_file(directory)}
    file = files.get(name) or index_file(directory, name)
    file.unlink()
    special(file)
    with pytest.raises(CorruptError, match=r"cannot read: it is a (pipe|socket|character device), not a file"):
        ckpt.load(str(directory), {"w": torch.zeros(100, dtype=torch.int64), "n": 0})
    ckpt.list_steps(str(directory.parent))


@pytest.mark.parametrize("special", [pipe, bound, device])
@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", ".metadata", "model.safetensors.index.json", "latest"])
@pytest.mark.timeout(30)
def test_special_files_of_other_formats(tmp_path: Path, name: str, special: Callable[[Path], None]) -> None:
    special(tmp_path / name)
    for url in (str(tmp_path), str(tmp_path / name)):
        with pytest.raises(CkptError):
            ckpt.open(url)


# ------------------------------------------------------------------------------------------------- numbers and names


def test_metrics_beyond_floats(directory: Path) -> None:
    change_record(directory, metrics={"loss": int("9" * 400)})
    refused(str(directory), match="not a number, or none that fits")
    assert [s.damaged for s in ckpt.list_steps(str(directory))] == [True]


def test_lone_surrogates_in_paths(directory: Path, tmp_path: Path) -> None:
    members = json.loads((directory / "checkpoint.json").read_bytes())["index"]
    members["state.json"]["path"] = "index\ud800"
    change_record(directory, index=members)
    refused(str(directory), match="lone surrogate")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b\ud800.safetensors"}}))
    (tmp_path / "hf" / "b.safetensors").write_bytes(b"")
    refused(str(tmp_path / "hf"), match="lone surrogate")


def test_paths_that_a_caller_gives(tmp_path: Path) -> None:
    with pytest.raises(CkptError):
        ckpt.open(f"{tmp_path}/\ud800")
