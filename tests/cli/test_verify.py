"""verify finds every damage, names it exactly, and does not stop at the first. What lies where is read with json and struct."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckpt.catalog import Grid, TensorEntry
from ckpt.dtypes import DTYPES
from ckpt.engine.structure import check_tiling
from ckpt.engine.verify import Problem, verify
from ckpt.errors import NotCommittedError, NotFoundError, StorageError
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.commit import new_id
from ckpt.formats.native.writer import CheckpointJournal, write_index
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import open_backend, wrap_backends
from ckpt.plan.layout.geometry import Box
from tests.cli.checkpoints import data_files, files_of, flip, sample, stored, write_checkpoint

BYTES = sum(array.nbytes for array in sample().values())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(str(tmp_path / "c"), sample(), ranks=3, aliases={"tied": "model.norm"}, state={"w": {"$tensor": "model.wq.weight"}})
    return tmp_path / "c"


def _found(problems: tuple[Problem, ...]) -> set[tuple[str, str | None, str | None, str | None]]:
    return {(p.kind, p.file, p.tensor, None if p.box is None else str(p.box)) for p in problems}


@pytest.mark.parametrize("buffer", [1, 7, 100, 16 << 20])
@pytest.mark.parametrize("threads", [1, 4])
def test_an_undamaged_checkpoint_is_read_whole(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, buffer: int, threads: int) -> None:
    monkeypatch.setattr("ckpt.settings.HASH_BUFFER", buffer)
    calls: list[tuple[int, int]] = []
    report = verify(str(checkpoint), threads=threads, progress=lambda done, total: calls.append((done, total)))
    assert (report.problems, report.files, report.bytes, report.undigested) == ((), 3, BYTES, 0)
    assert report.chunks == sum(len(stored(path)) for path in data_files(checkpoint))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (BYTES, BYTES)


@pytest.mark.parametrize("buffer", [7, 16 << 20])
def test_a_flipped_bit_in_any_data_byte_names_its_chunk(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, buffer: int) -> None:
    monkeypatch.setattr("ckpt.settings.HASH_BUFFER", buffer)
    for path, begin, end in ((file, *span) for file in data_files(checkpoint) for span in stored(file).values()):
        for at in {begin, (begin + end) // 2, end - 1} if end > begin else ():
            flip(path, at)
            (problem,) = verify(str(checkpoint)).problems
            flip(path, at)
            key = problem.tensor if problem.box == Box.whole(sample()[str(problem.tensor)].shape) else f"{problem.tensor}{_slices(problem)}"
            assert (problem.kind, problem.file) == ("digest", f"data/{path.name}")
            assert stored(path)[str(key)] == (begin, end)


def _slices(problem: Problem) -> str:
    assert problem.box is not None
    shape = sample()[str(problem.tensor)].shape
    ranges = [":" if s == n else f"{o}:{o + s}" for o, s, n in zip(problem.box.offset, problem.box.shape, shape, strict=True)]
    return f"[{','.join(ranges)}]"


def test_a_flipped_bit_anywhere_else_names_its_file(checkpoint: Path) -> None:
    headers = [(path, range(0, min(begin for begin, _ in stored(path).values()), 61)) for path in data_files(checkpoint)]
    index = [(path, range(0, path.stat().st_size, 61)) for path in sorted(checkpoint.glob("index-*/*"))]
    record = [(checkpoint / "checkpoint.json", range(0, (checkpoint / "checkpoint.json").stat().st_size, 23))]
    for path, at in ((path, at) for path, places in headers + index + record for at in places):
        flip(path, at)
        problems = verify(str(checkpoint)).problems
        flip(path, at)
        assert {p.file for p in problems} == {path.relative_to(checkpoint).as_posix()}, at
        assert {p.kind for p in problems} == ({"header"} if path.parent.name == "data" else {"index"})


def test_all_problems_are_found_at_once(tmp_path: Path) -> None:
    arrays = {f"t{i}": np.full((8, 4), i, dtype=np.float32) for i in range(5)}
    write_checkpoint(str(tmp_path), arrays, ranks=4)
    first, second, third, fourth = data_files(tmp_path)
    for key in ("t1[0:2,:]", "t4[0:2,:]"):
        flip(first, stored(first)[key][0] + 3)
    second.unlink()
    third.write_bytes(third.read_bytes()[:-1])
    flip(fourth, 20)
    report = verify(str(tmp_path))
    assert _found(report.problems) == {
        ("digest", f"data/{first.name}", "t1", "[0:2,0:4]"),
        ("digest", f"data/{first.name}", "t4", "[0:2,0:4]"),
        ("missing", f"data/{second.name}", None, None),
        ("size", f"data/{third.name}", None, None),
        ("header", f"data/{fourth.name}", None, None),
    }
    assert not report.ok
    assert (report.files, report.chunks, report.bytes) == (4, 5, 5 * 2 * 4 * 4)


def test_all_damaged_index_files_are_named(checkpoint: Path) -> None:
    tensors, grids, files, state = (
        next(checkpoint.glob(f"index-*/{n}")) for n in ("tensors.arrow", "grids.arrow", "files.arrow", "state.json")
    )
    flip(tensors, 30)
    grids.unlink()
    files.write_bytes(files.read_bytes() + b"x")
    kinds = {p.file: p.kind for p in verify(str(checkpoint)).problems}
    names = {path.relative_to(checkpoint).as_posix(): kind for path, kind in ((tensors, "index"), (grids, "missing"), (files, "size"))}
    assert kinds == names
    assert state.exists()


def test_a_chunk_that_the_index_does_not_know(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path), sample(), ranks=2, left_out=frozenset({"model.norm"}))
    first, second = data_files(tmp_path)
    report = verify(str(tmp_path))
    assert [(p.kind, p.file) for p in report.problems] == [("unknown-chunk", f"data/{path.name}") for path in (first, second)]
    assert ["'model.norm[0:4]'" in p.message for p in report.problems] == [True, False]


def test_files_of_another_save(tmp_path: Path) -> None:
    """Data files whose own chain is whole, under an index that wants other boxes."""
    for name, rows in (("a", 6), ("b", 9)):
        write_checkpoint(str(tmp_path / name), {"w": np.ones((rows, 2), dtype=np.float32)}, ranks=3)
    (tmp_path / "a" / "checkpoint.json").unlink()
    tensors = tuple(NativeCatalog(open_backend(str(tmp_path / "b"))).tensors.values())
    write_index(
        CheckpointJournal(open_backend(str(tmp_path / "a")), id=new_id(), previous=None), files_of(tmp_path / "a", tensors), world_size=3
    )
    problems = verify(str(tmp_path / "a")).problems
    assert {(p.kind, p.tensor) for p in problems if p.kind != "unknown-chunk"} == {("header", "w")}
    assert {str(p.box) for p in problems if p.kind == "header"} == {"[0:3,0:2]", "[3:6,0:2]", "[6:9,0:2]"}


def test_a_reference_to_no_tensor(tmp_path: Path) -> None:
    state = {"a": [{"$map": [[1, {"$tensor": "gone"}]]}], "b": {"$tensor": "model.norm"}}
    write_checkpoint(str(tmp_path), sample(), state=state, rank_values={1: {"x": {"$tensor": "also gone"}}})
    assert _found(verify(str(tmp_path)).problems) == {("state", None, "gone", None), ("state", None, "also gone", None)}


@pytest.mark.parametrize(
    ("rows", "box"),
    [([(0, 4)], "[4:6,0:2]"), ([(0, 2), (3, 6)], "[2:3,0:2]"), ([(0, 4), (3, 6)], "[3:4,0:2]")],
)
def test_a_hole_or_overlap_names_all_tensors_that_are_cut_so(rows: list[tuple[int, int]], box: str) -> None:
    """Chunks of whole rows of a 6 × 2 tensor, as (start, stop). An alias is not named: it has no chunks of its own."""
    boxes = (np.array([(start, 0) for start, _ in rows]), np.array([(stop - start, 2) for start, stop in rows]))
    grid = Grid(boxes=boxes, files=np.zeros(1, dtype=np.int32))
    entries = {n: TensorEntry(name=n, dtype=DTYPES["float32"], shape=(6, 2), grid=grid, alias="a" if n == "c" else None) for n in "abc"}
    catalog: Any = SimpleNamespace(tensors=entries)
    assert _found(tuple(check_tiling(catalog))) == {("tiling", None, name, box) for name in "ab"}


class _Broken:
    """A backend that cannot read some bytes of one file."""

    def __init__(self, inner: Backend, path: str, bad: Callable[[int, int], bool]) -> None:
        self._inner, self._path, self._bad = inner, path, bad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        if path == self._path and self._bad(offset, offset + len(buffer)):
            raise StorageError("input/output error", where=path)
        self._inner.read_into(path, offset, buffer)

    def read_hashed(self, path: str, offset: int, buffer: memoryview, update: Callable[[memoryview], object]) -> None:
        self.read_into(path, offset, buffer)
        update(buffer)


@pytest.mark.parametrize("buffer", [7, 16 << 20])
def test_an_unreadable_place_costs_only_its_chunk(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, buffer: int) -> None:
    monkeypatch.setattr("ckpt.settings.HASH_BUFFER", buffer)
    path = data_files(checkpoint)[1]
    begin, end = stored(path)["model.ids[2:4,:,:]"]
    bad = begin + 8
    with wrap_backends(lambda inner: _Broken(inner, f"data/{path.name}", lambda lo, hi: lo <= bad < hi)):
        report = verify(str(checkpoint))
    assert _found(report.problems) == {("read", f"data/{path.name}", "model.ids", "[2:4,0:2,0:3]")}
    assert BYTES - (end - begin) <= report.bytes < BYTES


def test_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        verify(str(tmp_path))
    write_checkpoint(str(tmp_path / "c"), sample(), commit=False)
    with pytest.raises(NotCommittedError):
        verify(str(tmp_path / "c"))


def test_an_error_in_progress_ends_the_check(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.settings.HASH_BUFFER", 1)
    ticks = itertools.count()

    def stop(done: int, total: int) -> None:
        if next(ticks) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(str(checkpoint), progress=stop)
    assert next(ticks) == 3
