"""A training loop whose memory or local disk is full, and two jobs on one machine: training goes on, and nobody takes from another."""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import AccessError, CkptError
from ckpt.live.segment import MemorySegment
from ckpt.nodes import memory_client
from ckpt.nodes.memory_client import MemoryClient
from ckpt.nodes.memory_remote import MemoryConnections
from ckpt.policies import EverySteps
from tests.distributed.ranks import Ranks
from tests.memory.daemons import daemon_in
from tests.memory.test_daemon import await_no_memfds
from tests.mounts import small_file_system

MIB = 1 << 20


def train_in_full_memory(folder: str, free_at: int) -> list[str | None]:
    """Two machines; another job has filled the memory of the second one until step ``free_at``. What each step ended with."""
    machine = dist.get_rank()
    os.environ.update(CKPT_MEMORY_DIR=f"{folder}/daemon{machine}", CKPT_DOMAIN=f"machine{machine}")
    said: list[str | None] = []
    with ckpt.Checkpointer(f"{folder}/root", memory=ckpt.Memory(copies=0), save=EverySteps(100), job=ckpt.Job(timeout=20)) as c:
        for n in range(1, 6):
            if n == free_at and machine == 1:
                memory_client.connect().drop("another-job")
            dist.barrier()
            try:
                c.step(n, {"own": ckpt.PerRank(torch.full((MIB // 2,), float(n)))})
                assert c.handle is not None
                c.handle.result()
                said.append(None)
            except CkptError as err:
                c.handle = None
                said.append(f"{type(err).__name__}: {err}")
        assert c.latest == 5
    return said


def test_a_machine_whose_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_MEMORY_BUDGET", "8MiB")
    with daemon_in(tmp_path / "daemon0"), daemon_in(tmp_path / "daemon1") as full:
        full.lend(5 * MIB).put("another-job/f")
        free, short = Ranks(2).run(2, train_in_full_memory, str(tmp_path), 4)
        assert full.status()["lent"] == 0
    for said in (free, short):  # two MiB a step: the first one fits
        assert [text is None for text in said] == [True, False, False, True, True], said
    assert all("NoSpaceError" in text and "memory://another-job: 5.0 MiB" in text for text in short[1:3])
    assert all("rank 1 raised NoSpaceError" in text for text in free[1:3])
    assert [s.number for s in ckpt.list_steps(f"{tmp_path}/root") if s.committed] == [5]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 5 MiB."""
    with small_file_system(tmp_path / "small", "5m") as path:
        yield path


def test_a_full_local_disk_behind_memory(daemon: MemoryClient, small_disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps go into memory all the same; when there is room, the newest one goes to the disk and the root."""
    (small_disk / "of others").write_bytes(bytes(4 * MIB))
    root = str(tmp_path / "root")
    options = {"memory": ckpt.Memory(copies=0), "local": str(small_disk / "run"), "save": EverySteps(1), "publish_timeout": 1}
    with caplog.at_level(logging.WARNING), ckpt.Checkpointer(root, job=ckpt.Job(timeout=20), **options) as c:  # type: ignore[arg-type]
        for n in range(1, 5):
            c.step(n, {"w": torch.full((MIB // 2,), float(n))})
        assert c.handle is not None
        c.handle.result()
        with pytest.raises(CkptError, match=r"(?i)no space|full"):
            c.wait()
        assert c.latest == 4 and "step 4 is not published" in caplog.text
        assert not [path for path in small_disk.rglob("data/*") if path.is_file()]
        (small_disk / "of others").unlink()
        c.wait()
    assert [s.number for s in ckpt.list_steps(root) if s.committed][-1] == 4
    assert torch.equal(ckpt.open(f"{root}/step-00000004")["w"].read(), torch.full((MIB // 2,), 4.0))


def run_a_job(environment: dict[str, str], root: str, value: float) -> tuple[int | None, bool]:
    """Five steps; or what an earlier one of the same root has left."""
    os.environ.update(environment)
    state = {"w": torch.full((MIB // 2,), value), "n": 0}
    with ckpt.Checkpointer(root, memory=ckpt.Memory(copies=0), save=EverySteps(100), job=ckpt.Job(timeout=20)) as c:
        start = c.restore(state)
        right = bool((state["w"] == value).all()) and state["n"] == (start or 0)
        for n in range((start or 0) + 1, (start or 0) + 6):
            c.step(n, {"w": torch.full((MIB // 2,), value), "n": n})
        assert start is None or str(c.restored_from).endswith("root 0 B")
    return start, right


def test_two_jobs_have_one_daemon(tmp_path: Path) -> None:
    """At the same time, with secrets of their own. Neither sees the other's steps; what is dropped leaves nothing behind."""
    two = Ranks(1)
    with daemon_in(tmp_path / "daemon") as daemon, ThreadPoolExecutor(2) as pool:
        jobs = [
            ({"CKPT_MEMORY_DIR": str(daemon.folder), "CKPT_MEMORY_SECRET": f"of {name}"}, f"{tmp_path}/{name}/run", float(value))
            for value, name in enumerate("ab")
        ]
        for expected in (None, 5):
            ended = [pool.submit(two.run, 1, run_a_job, *job) for job in jobs]
            assert [one.result() for one in ended] == [[(expected, True)]] * 2
        kept = {known.path.split("/")[0] for known in daemon.list()}
        assert len(kept) == 2 and len({known.path.split("/")[1] for known in daemon.list()}) == 2
        pid = daemon.status()["pid"]
        first, second = sorted(kept)
        assert daemon.drop(first) > 0 and {known.path.split("/")[0] for known in daemon.list()} == {second}
        assert daemon.drop(second) > 0
        await_no_memfds(pid)
        with pytest.raises(AccessError, match="another secret"):
            MemoryConnections(daemon.address(), "of b").hello()  # its own is of the account
    state, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + 20  # whoever is told to stop may still give its memory back
    with suppress(FileNotFoundError, ProcessLookupError):
        while "Z" not in state.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@contextmanager
def no_files_left() -> Iterator[None]:
    """This process can open no file more."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_without_files_is_told_so_and_not_of_memory_or_daemons(daemon: MemoryClient) -> None:
    daemon.put("a/f", b"content")
    unreached = memory_client.MemoryClient(daemon.folder)
    with no_files_left():
        with pytest.raises(CkptError, match="no shared memory of .* bytes can be made: .*Too many open files"):
            MemorySegment(100)
        with pytest.raises(CkptError, match="no descriptor for a file of the memory daemon can be made: .*Too many open files"):
            daemon.get("a/f")
        with pytest.raises(CkptError, match="no connection to the memory daemon can be made: .*Too many open files"):
            unreached.reach(start=False)
    assert os.pread(daemon.get("a/f").file, 7, 0) == b"content"
