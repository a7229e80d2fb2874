"""Files that several processes write together: nothing shows before all is there, and nobody's bytes are lost."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import ConflictError, StorageError, UsageError
from ckpt.io_backends import PosixBackend, posix_files
from ckpt.io_backends import posix_writer as posix_shared
from ckpt.io_backends.inprocess import InProcessBackend
from ckpt.io_backends.writer_base import WrittenRanges, left_behind, remove_left

DATA = os.urandom(10_000)


@pytest.fixture
def backend(tmp_path: Path) -> PosixBackend:
    return PosixBackend(str(tmp_path))


def test_two_write_and_one_publishes(backend: PosixBackend, tmp_path: Path) -> None:
    first = backend.create_shared("a/b", len(DATA))
    other = backend.create_shared("a/b", len(DATA), first.token)
    other.write(5_001, [DATA[5_001:7_000], DATA[7_000:]])
    first.write(0, [DATA[:5_001]])
    receipts = [other.flush(), first.flush()]
    other.close()
    assert not (tmp_path / "a" / "b").exists()
    first.complete(receipts, replace=False)
    assert (tmp_path / "a" / "b").read_bytes() == DATA and os.listdir(tmp_path / "a") == ["b"]
    with pytest.raises(UsageError, match="not open any more"):
        other.write(0, [b"x"])


@pytest.mark.parametrize("written", [9_999, 0])
def test_a_hole_is_an_error_and_nothing_shows(backend: PosixBackend, tmp_path: Path, written: int) -> None:
    shared = backend.create_shared("a", len(DATA))
    shared.write(0, [DATA[:written]])
    with pytest.raises(StorageError, match=f"10000 bytes were planned, but all processes together wrote {written}"):
        shared.complete([shared.flush()], replace=True)
    assert backend.list_dir() != ["a"]
    shared.abort()
    assert os.listdir(tmp_path) == []


def test_bytes_written_twice_fill_no_hole(backend: PosixBackend) -> None:
    shared = backend.create_shared("a", 100)
    shared.write(0, [bytes(50)])
    shared.write(0, [bytes(50)])
    with pytest.raises(StorageError, match="wrote 50"):
        shared.complete([shared.flush()], replace=False)
    shared.abort()


@pytest.mark.parametrize("link", [True, False])
def test_a_name_that_is_taken(backend: PosixBackend, tmp_path: Path, link: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "no links here")

    if not link:
        monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a").write_bytes(b"before")
    shared = backend.create_shared("a", len(DATA))
    shared.write(0, [DATA])
    receipt = shared.flush()
    with pytest.raises(ConflictError):
        shared.complete([receipt], replace=False)
    assert (tmp_path / "a").read_bytes() == b"before"
    shared.complete([receipt], replace=True)
    assert (tmp_path / "a").read_bytes() == DATA and os.listdir(tmp_path) == ["a"]


def test_who_joins_on_other_storage_is_told(backend: PosixBackend, tmp_path: Path) -> None:
    shared = backend.create_shared("a", 1)
    with pytest.raises(StorageError, match="that another process has begun is not there"):
        PosixBackend(str(tmp_path / "elsewhere")).create_shared("a", 1, shared.token)
    shared.abort()


def test_what_the_dead_leave_is_found(backend: PosixBackend, tmp_path: Path) -> None:
    backend.create_shared("model.safetensors", 10).close()
    (tmp_path / ".model.safetensors.tmp").touch()
    (left,) = left_behind(backend)
    assert left.path == "model.safetensors"
    remove_left(backend, left)
    assert os.listdir(tmp_path) == [".model.safetensors.tmp"]


def test_file_systems_without_a_coherent_cache_want_whole_parts(
    backend: PosixBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {tmp_path}/n\\040fs rw shared:1 - nfs4 server:/x rw\n")
    monkeypatch.setattr(posix_files, "MOUNTS", str(mounts))
    (tmp_path / "n fs").mkdir()
    parts = [backend.create_shared(name, 10).part_size for name in ("a", "n fs/b")]
    assert parts == [0, posix_shared.PART]


def test_storage_that_cannot(tmp_path: Path) -> None:
    assert InProcessBackend(f"inprocess://{tmp_path.name}").create_shared("a", 10) is None


# -------------------------------------------------------------------------------------------- ``WrittenRanges`` against a mask of booleans.

SIZE = 40
RANGES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(lambda r: (min(r), max(r))), max_size=30)


@given(ranges=RANGES)
def test_counts_every_byte_once(ranges: list[tuple[int, int]]) -> None:
    mask = np.zeros(SIZE, dtype=bool)
    written = WrittenRanges(SIZE)
    for start, stop in ranges:
        mask[start:stop] = True
        written.add(start, stop)
        assert written.count == mask.sum()
        assert len(written._starts) == np.count_nonzero(np.diff(mask, prepend=False) & mask)  # one entry per run, however it came about


def test_a_hole_does_not_hide_behind_repeats() -> None:
    written = WrittenRanges(10)
    for start, stop in ((0, 6), (2, 6), (7, 10)):  # 13 bytes in all, byte 6 not among them
        written.add(start, stop)
    assert written.count == 9
    written.add(6, 7)
    assert written.count == 10
