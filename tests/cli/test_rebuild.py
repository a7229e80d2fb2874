"""``ckpt rebuild``: a checkpoint whose index is lost or damaged comes back, whole by every digest, with what can be had again."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

import ckpt
from ckpt.errors import CkptError
from ckpt.formats.native.commit import CommitRecord, read_record
from ckpt.formats.native.rebuild import rebuild_checkpoint
from ckpt.io_backends import Fault, FaultyProcess, SimulatedCrash, wrap_backends
from ckpt.io_backends.registry import open_backend
from tests.cli.checkpoints import write_checkpoint
from tests.cli.running import run

ARRAYS = {
    "w": np.arange(24, dtype=np.float32).reshape(8, 3),
    "b": np.arange(5, dtype=np.int64),
    "scalar": np.array(2.5),
}
STATE = {"null": None}


@pytest.fixture
def url(tmp_path: Path) -> str:
    write_checkpoint(str(tmp_path / "c"), ARRAYS, state=STATE, aliases={"tied": "w"})
    return str(tmp_path / "c")


def index_file(url: str, name: str) -> Path:
    (path,) = Path(url).glob(f"index-*/{name}")
    return path


def check(url: str, *, tied: bool) -> None:
    """Every byte is what its digest says, and every tensor what was saved."""
    assert run("verify", url).exit_code == 0
    view = ckpt.open(url)
    assert set(view) == {*ARRAYS, *(["tied"] if tied else [])}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(np.asarray(view[name]), array)


@pytest.mark.parametrize(
    ("lost", "missing", "tied"),
    [
        (("tensors.arrow",), ["aliases and padding"], False),
        (("grids.arrow", "files.arrow"), ["aliases and padding"], False),
        (("state.json",), ["values"], True),
        (("tensors.arrow", "grids.arrow", "files.arrow", "state.json"), ["values", "aliases and padding"], False),
    ],
)
@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_a_lost_index_comes_back(url: str, lost: tuple[str, ...], missing: list[str], tied: bool, how: str) -> None:
    assert run("tag", url, "release").exit_code == 0
    for name in lost:
        path = index_file(url, name)
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert run("verify", url).exit_code == 20
    before = {p: p.read_bytes() for p in Path(url).rglob("*") if p.is_file()}
    told = json.loads(run("rebuild", "--dry-run", "--json", url).stdout)
    assert (told["rebuilt"], told["lost"], told["dry_run"]) == (True, missing, True)
    assert {p: p.read_bytes() for p in Path(url).rglob("*") if p.is_file()} == before
    done = run("rebuild", url)
    assert done.exit_code == 0 and all(word in done.stdout for word in ("rebuilt", "3 tensors", *missing))
    check(url, tied=tied)
    assert json.loads(run("tag", "--json", url).stdout)["tags"] == ["release"]
    assert "intact" in run("rebuild", url).stdout


@pytest.mark.parametrize("record", [b"", b"{", b"gone"])
def test_a_lost_commit_record(url: str, record: bytes) -> None:
    path = Path(url, "checkpoint.json")
    id = json.loads(path.read_text())["id"]
    path.unlink() if record == b"gone" else path.write_bytes(record)
    if record == b"gone":  # nobody knows whether it ever finished
        refused = run("rebuild", "--json", url)
        assert refused.exit_code == 2 and id in json.loads(refused.stdout)["error"]["hint"]
        assert run("rebuild", "--id", "0" * 16, url).exit_code == 10
    told = json.loads(run("rebuild", "--json", url, *(["--id", id] if record == b"gone" else [])).stdout)
    assert (told["id"], told["lost"]) == (id, ["values", "aliases and padding", "metrics and tags"])
    check(url, tied=False)


def test_what_is_not_there_is_said(url: str, tmp_path: Path) -> None:
    index_file(url, "grids.arrow").unlink()
    next(Path(url, "data").glob("*-00000.safetensors")).unlink()
    refused = run("rebuild", url)
    assert refused.exit_code == 20 and "is in no data file" in refused.stderr
    (tmp_path / "empty").mkdir()
    assert run("rebuild", str(tmp_path / "empty")).exit_code == 10


@pytest.mark.parametrize("lost", ["tensors.arrow", "grids.arrow", "files.arrow"])
def test_rows_that_no_header_misses_are_missed(tmp_path: Path, lost: str) -> None:
    """The last of three data files is gone: what is left would make smaller tensors without a hole."""
    url = str(tmp_path / "c")
    write_checkpoint(url, {"w": np.arange(24.0).reshape(8, 3)}, ranks=3)
    index_file(url, lost).unlink()
    next(Path(url, "data").glob("*-00002.safetensors")).unlink()
    before = {p: p.read_bytes() for p in Path(url).rglob("*") if p.is_file()}
    refused = run("rebuild", url)
    assert refused.exit_code == 20 and "144 bytes" in refused.stderr and "192" in refused.stderr and "--id" in refused.stderr
    assert {p: p.read_bytes() for p in Path(url).rglob("*") if p.is_file()} == before


def test_another_save_is_not_rebuilt_over_the_committed_one(url: str) -> None:
    index_file(url, "grids.arrow").unlink()
    refused = run("rebuild", "--id", "0" * 16, url)
    assert refused.exit_code == 2 and "is committed here" in refused.stderr


def test_killed_anywhere_it_is_begun_again(url: str) -> None:
    kept = {p: p.read_bytes() for p in Path(url).rglob("*") if p.is_file()}
    for at in range(3, 200):
        for path, data in kept.items():
            path.write_bytes(data)
        index_file(url, "tensors.arrow").unlink()
        index_file(url, "grids.arrow").write_bytes(b"damaged")
        process = FaultyProcess(Fault(at=at, kind="crash"))
        try:
            with wrap_backends(process.wrap):
                rebuild_checkpoint(url)
        except SimulatedCrash:
            assert rebuild_checkpoint(url).id
            check(url, tied=False)
        except CkptError as err:
            pytest.fail(f"at {process.log[-1]}: {err}")
        else:
            break
    assert not process.crashed and at > 10


def test_tags_and_values_outlast_a_killed_rebuild(url: str) -> None:
    """The record that confirms them is replaced once, by one that has the tags; until then, it goes on to confirm what it did."""
    backend = open_backend(url)
    data = read_record(backend)
    assert data is not None
    record = CommitRecord.from_bytes(data, url)
    spaced = index_file(url, "state.json").read_bytes().replace(b":", b": ")  # as another writer of the format may encode it
    row = replace(record.index["state.json"], size=len(spaced), digest=xxhash.xxh3_128_hexdigest(spaced))
    index_file(url, "state.json").write_bytes(spaced)
    index_file(url, "grids.arrow").unlink()
    tagged = replace(record, tags=("release",), index={**record.index, "state.json": row}, inline={})
    Path(url, "checkpoint.json").write_bytes(tagged.to_bytes())
    kept = {p: p.read_bytes() for p in Path(url).rglob("*") if p.is_file()}
    lost = {"aliases and padding"}
    for at in range(3, 200):
        for path, content in kept.items():
            path.write_bytes(content)
        for path in Path(url).glob("index-*/grids.arrow"):
            path.unlink()
        process = FaultyProcess(Fault(at=at, kind="crash"))
        with wrap_backends(process.wrap), suppress(SimulatedCrash):
            rebuild_checkpoint(url)
        assert {*rebuild_checkpoint(url).lost} <= lost, process.log[-1]
        after = json.loads(Path(url, "checkpoint.json").read_text())
        assert after["tags"] == ["release"] and index_file(url, "state.json").read_bytes() == spaced, process.log[-1]
        if not process.crashed:
            break
    assert not process.crashed and at > 10
