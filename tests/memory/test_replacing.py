"""A daemon whose program is replaced: nothing is lost, whatever becomes of the new one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import BusyError, StorageError
from ckpt.live.wire import receive, send
from ckpt.memory import client, place
from ckpt.memory.client import MemoryClient
from ckpt.memory.connection import DaemonConnection, try_to_connect
from ckpt.memory.daemon import MemoryDaemon, Replaced
from ckpt.memory.messages import close_all
from ckpt.memory.remote import RemoteMemory
from ckpt.memory.serving import MOST_ANSWER
from ckpt.memory.store import MemoryStore
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


def test_what_is_asked_at_that_moment_is_for_the_new_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a save would fill memory that nobody knows of."""
    place.make_private(folder := tmp_path / "daemon")
    lock, store, listening, go_on = place.open_lock(folder), MemoryStore(1 << 20), place.listen_socket(folder), threading.Event()
    original = store.usage
    monkeypatch.setattr(store, "usage", lambda: (go_on.wait(30), original())[1])
    daemon = MemoryDaemon(folder, listening, store, secret="secret", idle=60, lock=lock, server=None)
    ended: list[Replaced | None] = []
    threads = [threading.Thread(target=lambda: ended.append(daemon.run()))]
    threads[0].start()
    looks, asks, borrows = [connection for _ in range(3) if (connection := try_to_connect(folder)) is not None]
    answers: list[Any] = []
    for connection, question in ((looks, {"ask": "status"}), (asks, {"ask": "replace"}), (borrows, {"ask": "lend", "size": 5})):
        threads.append(threading.Thread(target=answer_to, args=(connection, question, answers)))
        threads[-1].start()
        time.sleep(0.2)
    go_on.set()  # both questions are there when the daemon looks
    for thread in threads:
        thread.join(60)
    (replaced,) = ended
    assert replaced is not None
    replaced.standby._process.kill()
    replaced.standby._process.wait()
    close_all([replaced.standby.taken, replaced.handed_over.socket, lock])
    store.close()
    assert [type(answer) for answer in answers].count(StorageError) == 1  # MemoryClient takes it for what it is, and asks again


def answer_to(connection: DaemonConnection, question: dict[str, Any], answers: list[Any]) -> None:
    try:
        answers.append(connection.ask(question))
    except StorageError as err:
        answers.append(err)


def test_a_daemon_of_more_than_a_thousand_files(daemon: MemoryClient) -> None:
    for number in range(520):
        daemon.put(f"many/{number}", b"x", expected=None)
    size = 24 << 20
    daemon.lend(size).put("many/large")
    peer = RemoteMemory(daemon.address(), daemon.secret())._dial()
    send(peer, {"ask": "read", "path": "many/large", "offset": 0, "length": size}, ())
    time.sleep(0.5)  # its buffers are full: the daemon waits
    receive(peer, MOST_ANSWER)
    peer.receive_into(memoryview(bytearray(size)))
    peer.close()
    daemon.replace()
    assert daemon.status()["count"] == 521
    daemon.drop("many")


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
