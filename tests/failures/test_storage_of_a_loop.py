"""Storage that fails under a training loop that saves in the background: it ends as docs/failures.md says, what was committed stays, and
the loop goes on once the storage does."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import AccessError, CkptError, NoSpaceError
from ckpt.io_backends.faulty import FaultyBackend, FaultyProcess
from ckpt.io_backends.protocol import Backend
from ckpt.io_backends.registry import wrap_backends
from ckpt.policies import EverySteps, Latest
from tests.mounts import small_file_system


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_file_system(tmp_path / "mount", "1m") as path:
        yield path


def remount(path: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(path)], check=True)


class Loop:
    """Trains, saves after every second step, catches what a step raises, and waits for each save, so that it is known where it was told."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = torch.nn.Linear(200, 200)  # 160 kB
        self.told: dict[int, CkptError] = {}

    def run(self, c: ckpt.Checkpointer, steps: range) -> None:
        for n in steps:
            with torch.no_grad():
                self.model.weight.fill_(float(n))
            try:
                c.step(n, {"model": self.model, "n": n})
                if c.handle is not None:
                    c.handle.wait(30)
            except CkptError as err:
                self.told[n] = err

    def check(self, *committed: int) -> None:
        """These steps are there, whole, and nothing else is."""
        assert [s.number for s in ckpt.list_steps(str(self.root)) if s.committed] == list(committed)
        assert not any(s.damaged for s in ckpt.list_steps(str(self.root)))
        for n in committed:
            view = ckpt.open(f"{self.root}/step-{n:08d}")
            assert view["model.weight"].read().unique().tolist() == [float(n)] and view.state()["n"] == n


def checkpointer(root: Path) -> ckpt.Checkpointer:
    return ckpt.Checkpointer(str(root), save=EverySteps(2), keep=Latest(2), job=ckpt.Job(timeout=20))


def spoilt(loop: Loop, spoil: Callable[[], object], mend: Callable[[], object], error: type[CkptError]) -> None:
    """Steps 2 and 4 are saved; the save of 6 fails, which is told at 7, and so does that of 8; then the storage is well again."""
    with checkpointer(loop.root) as c:
        loop.run(c, range(1, 6))
        loop.check(2, 4)
        spoil()
        loop.run(c, range(6, 9))
        assert list(loop.told) == [7] and type(loop.told[7]) is error and loop.told[7].hint, loop.told
        loop.check(2, 4)
        mend()
        with pytest.raises(error):  # what the save of step 8 failed with
            c.wait()
        loop.run(c, range(9, 10))
        assert c.latest == 9, "what was due is still due"
        loop.run(c, range(10, 13))
        assert list(loop.told) == [7]


def test_a_full_disk(mount: Path) -> None:
    loop, filler = Loop(mount / "run"), mount / "filler"

    def fill() -> None:
        with filler.open("wb") as file:
            file.write(bytes(os.statvfs(mount).f_bavail * 4096 - 40_000))

    spoilt(loop, fill, filler.unlink, NoSpaceError)
    loop.check(10, 12)
    files = {p.relative_to(mount / "run").parts[0] for p in mount.rglob("*") if p.is_file()}
    assert files == {path.name for path in loop.root.iterdir()} == {"step-00000010", "step-00000012", "ckpt-log.json"}, (
        "what failed is removed, its directory too, and noted"
    )


def test_a_file_system_that_becomes_read_only(mount: Path) -> None:
    loop = Loop(mount / "run")
    spoilt(loop, lambda: remount(mount, "ro"), lambda: remount(mount, "rw"), AccessError)
    loop.check(10, 12)


def test_a_directory_that_vanishes(tmp_path: Path) -> None:
    """What is gone is gone; the next save makes the directory again."""
    loop = Loop(tmp_path / "run")
    with checkpointer(loop.root) as c:
        loop.run(c, range(1, 6))
        shutil.rmtree(loop.root)
        loop.run(c, range(6, 9))
    assert loop.told == {}
    loop.check(6, 8)


def test_a_parent_that_vanishes_and_is_a_file_now(tmp_path: Path) -> None:
    loop = Loop(tmp_path / "disk" / "run")
    with checkpointer(loop.root) as c:
        loop.run(c, range(1, 3))
        (tmp_path / "disk").rename(tmp_path / "away")
        (tmp_path / "disk").write_text("")
        loop.run(c, range(3, 6))
        assert list(loop.told) == [5] and "disk" in str(loop.told[5]), loop.told
        (tmp_path / "disk").unlink()
        (tmp_path / "away").rename(tmp_path / "disk")
        loop.run(c, range(6, 9))
    loop.check(6, 8)


class Slow(FaultyProcess):
    """Every operation takes a while."""

    def wrap(self, inner: Backend) -> FaultyBackend:
        return FaultyBackend(inner, process=self)

    def operate(self, what, effect, half=None):
        time.sleep(0.02)
        return super().operate(what, effect, half)


def test_a_slow_store(tmp_path: Path) -> None:
    """Nothing fails: steps that are not due go on, a step that is due waits for the save before it, and nothing is lost."""
    loop = Loop(tmp_path / "run")
    idle, due = [], []
    with wrap_backends(Slow().wrap), checkpointer(loop.root) as c:
        for n in range(1, 9):
            began = time.monotonic()
            c.step(n, {"model": loop.model, "n": n})
            (idle if n % 2 else due).append(time.monotonic() - began)
            if c.handle is not None:
                c.handle.fence()
            with torch.no_grad():
                loop.model.weight.fill_(float(n + 1))
    assert sum(idle) < 0.5 * sum(due[1:])
    assert [s.number for s in ckpt.list_steps(str(loop.root)) if s.committed] == [6, 8]
