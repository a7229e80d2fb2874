"""A daemon whose program is replaced: nothing is lost, whatever becomes of the new one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import BusyError, StorageError
from ckpt.memory import client
from ckpt.memory.client import MemoryClient
from tests.distributed.ranks import ROOT


def test_another_program_goes_on_with_all_objects(daemon: MemoryClient) -> None:
    ckpt.save("mem://run/step-00000001", {"w": torch.arange(100_000)})
    before = daemon.list()
    pid, reader = daemon.status()["pid"], daemon.get(before[0].path)
    daemon.replace()
    assert (daemon.status()["pid"], daemon.list()) == (pid, before)
    assert daemon.get(before[0].path).known == reader.known
    assert torch.equal(ckpt.open("mem://run/step-00000001")["w"].read(), torch.arange(100_000))
    daemon.delete(before[0].path)
    assert daemon.status()["dropped"] > 0  # its reader from before
    reader.close()
    assert daemon.drop("") > 0 and daemon.status()["dropped"] == 0


def test_not_in_the_middle_of_a_save(daemon: MemoryClient) -> None:
    loan = daemon.lend(5)
    with pytest.raises(BusyError):
        daemon.replace()
    loan.put("run/f")
    assert daemon.stat("run/f").size == 5


@pytest.fixture
def upgraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MemoryClient, Path]]:
    """A daemon with a checkpoint, and a file of Python that the programs after it run first."""
    first = tmp_path / "first"
    first.mkdir()
    folder = tmp_path / "daemon"
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(folder))
    path = os.pathsep.join([str(first), str(ROOT)])
    command = [sys.executable, "-m", "ckpt.memory.running", str(folder), "--background"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)
    daemon = client.connect()
    ckpt.save("mem://run/step-00000001", {"w": torch.arange(100_000)})
    yield daemon, first / "sitecustomize.py"
    daemon.stop()


def test_a_program_that_does_not_start_changes_nothing(upgraded: tuple[MemoryClient, Path]) -> None:
    daemon, broken = upgraded
    status = daemon.status()
    broken.write_text("import os\nos._exit(1)\n")
    with pytest.raises(StorageError, match="was not replaced: the new program does not start"):
        daemon.replace()
    assert (daemon.status()["pid"], daemon.status()["count"]) == (status["pid"], status["count"])
    assert torch.equal(ckpt.open("mem://run/step-00000001")["w"].read(), torch.arange(100_000))


def test_a_program_that_dies_when_it_takes_over_is_stood_in_for(upgraded: tuple[MemoryClient, Path]) -> None:
    daemon, broken = upgraded
    pid, objects = daemon.status()["pid"], daemon.list()
    broken.write_text("import os, sys\nif '--taken' in sys.orig_argv: os._exit(1)\n")
    daemon.replace()
    end = time.monotonic() + 20
    while (now := daemon.status()["pid"]) == pid:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert now != pid and daemon.list() == objects
    assert torch.equal(ckpt.open("mem://run/step-00000001")["w"].read(), torch.arange(100_000))
    broken.unlink()
    daemon.replace()  # once more, and well
    assert daemon.status()["pid"] == now and daemon.list() == objects
