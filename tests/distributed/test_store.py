"""The job's store when the process that serves it does not answer any more: each call ends in time, all later ones at once, and so does the
program."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, TCPStore

from ckpt.errors import DeadlineError
from ckpt.net.store import LOST, Store, group_store
from tests.distributed.ranks import ROOT

pytestmark = [pytest.mark.alone, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc whether a process has stopped")]


class Server:
    """A process that serves a store, and stops or dies when told to."""

    def __init__(self) -> None:
        code = "import sys; from torch.distributed import TCPStore; s = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
        code += "print(s.port, flush=True); sys.stdin.read()"
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def base(self) -> Any:
        return TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        states = list(Path(f"/proc/{self.process.pid}/task").glob("*/stat"))
        while not all(state.read_text().rpartition(") ")[2].startswith("T") for state in states):
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        with self.process:
            pass


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.end()


@pytest.fixture
def store(server: Server, request: pytest.FixtureRequest) -> Iterator[Store]:
    """A part of it that has been used."""
    store = group_store(server.base(), request.node.name, 0)
    assert store.add("count", 1) == 1
    yield store
    server.go_on()


def late(call: Callable[[], object]) -> tuple[float, DeadlineError]:
    """Seconds that a call took to fail, and its error."""
    began = time.monotonic()
    with pytest.raises(DeadlineError) as raised:
        call()
    return time.monotonic() - began, raised.value


def test_calls_end_in_time_and_later_ones_at_once(server: Server, store: Store) -> None:
    server.stop()
    seconds, error = late(lambda: store.within(1.0).check(["count"]))
    assert 0.9 < seconds < 20.0
    assert f"the job's store at 127.0.0.1:{server.port} cannot be reached: it has not answered for 1 s" in str(error)
    assert error.hint is not None and "network" in error.hint and "`ckpt ls`" in error.hint
    assert store.silent
    for call in (
        lambda: store.within(60).peek("count"),
        lambda: store.part("other").set("a", b"b"),
        lambda: store.add("count", 1),
        lambda: store.append("count", b"1"),
    ):
        assert late(call)[0] < 20.0
    server.go_on()
    assert late(lambda: store.check(["count"]))[0] < 20.0, "what a later call would mean, the ranks do not agree on"


def test_the_deadline_counts_from_the_last_answer(server: Server, store: Store) -> None:
    within = store.within(4.0)
    assert within.peek("count") == b"1"
    within._began -= 2.5  # as if it were made so long ago
    store._connection._answered -= 2.0
    server.stop()
    assert 1.9 < late(lambda: within.check(["count"]))[0] < 3.9


def test_what_is_sent_is_no_answer(server: Server, store: Store) -> None:
    within = store.within(4.0)
    server.stop()
    within.set("a", b"b")
    within._began -= 2.5  # as if all of that were so long ago
    store._connection._answered -= 2.5
    within.set("a", b"c")
    assert late(lambda: within.add("count", 1))[0] < 3.9


def test_whoever_waits_behind_a_call_that_is_given_up_is_told(server: Server, store: Store) -> None:
    ended: list[float] = []
    patient = store.within(60)
    server.stop()
    threads = [threading.Thread(target=lambda: ended.append(late(lambda: patient.check(["a"]))[0])) for _ in range(3)]
    for thread in threads:
        thread.start()
    late(lambda: store.within(1.0).check(["count"]))
    for thread in threads:
        thread.join(40)
    assert len(ended) == 3 and max(ended) < 20.0


def test_a_connection_that_cannot_be_made(server: Server) -> None:
    base = server.base()
    server.stop()
    try:
        began = time.monotonic()
        store = group_store(base, "late", 0).within(1.0)
        assert time.monotonic() - began < 10.0, "who makes a group does not wait"
        assert late(lambda: store.check(["a"]))[0] < 20.0
    finally:
        server.go_on()


def test_a_server_that_dies_is_found_at_once() -> None:
    server = Server()
    store = group_store(server.base(), "gone", 0)
    assert store.add("count", 1) == 1
    server.end()
    seconds, error = late(lambda: store.check(["count"]))
    assert seconds < 30.0 and not store.silent
    assert "the job's store is gone, so the process that serves it" in str(error) and str(server.port) in str(error)


def test_the_kernel_watches_the_connection(server: Server, store: Store) -> None:
    (own,) = store._connection._sockets
    assert own.getpeername()[1] == server.port
    assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == LOST * 1000


def test_other_kinds_of_stores(tmp_path: Path) -> None:
    for base in (FileStore(str(tmp_path / "store"), 1), HashStore()):
        one, two = group_store(base, "group", 0), group_store(base, "group", 0)
        for value, store in ((b"1", one), (b"2", two)):
            assert not store.check(["a"]), "each life of a name has its own part"
            store.set("a", value)
            store.part("below").set("a", b"3")
            assert (store.check(["a"]), store.peek("a"), store.part("below").peek("a"), store.add("n", 2)) == (True, value, b"3", 2)
            assert store.host is None


def test_groups_that_threads_make_at_once_all_connect() -> None:
    """Each group waits for the one before it. Two that took the same place would leave one that nobody makes to be waited for."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(16) as pool:
            groups = list(pool.map(lambda n: group_store(HashStore(), f"group {n}", 0), range(600)))
            assert set(pool.map(lambda group: group.within(10.0).add("n", 1), groups)) == {1}
    finally:
        sys.setswitchinterval(before)


def test_a_connection_that_nobody_uses_ends(server: Server) -> None:
    store = group_store(server.base(), "short", 0)
    assert store.add("count", 1) == 1
    thread = store._connection._thread
    assert thread.is_alive()
    del store
    thread.join(30)
    assert not thread.is_alive()


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import ckpt
folder = Path(sys.argv[1])
server = os.fork()
if server == 0:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "part").write_text(str(store.port))
    (folder / "part").rename(folder / "port")
    time.sleep(60)
    os._exit(1)
rank = 0 if (other := os.fork()) else 1
while not (folder / "port").exists():
    time.sleep(0.01)
store = dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
state = {"w": torch.ones(1000)}
ckpt.save(f"{folder}/one", state, job=ckpt.Job(timeout=20))
dist.barrier()
if rank == 0:
    os.kill(server, signal.SIGSTOP)
    time.sleep(0.2)
    (folder / "stopped").touch()
while not (folder / "stopped").exists():
    time.sleep(0.01)
began = time.monotonic()
handle = ckpt.save_async(f"{folder}/two", state, job=ckpt.Job(timeout=2))
if rank == 0:
    error = handle.durable.exception()
    print(rank, type(error).__name__, error.message, round(time.monotonic() - began, 1), flush=True)
if rank == 0:
    code = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
    os.kill(server, signal.SIGKILL)
    assert code == 0, code
"""


def test_a_program_with_a_call_that_does_not_come_back_ends(tmp_path: Path) -> None:
    """As an ordinary program, through the interpreter's own end: one rank has asked how the save ended, the other has not."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, str(program), str(tmp_path)], env=environment, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "cannot be reached: it has not answered for 2 s" in done.stdout
    assert float(done.stdout.split()[-1]) < 15.0, done.stdout
    assert done.stderr.count("in the background failed: save: the job's store at 127.0.0.1") == 2, done.stderr
    assert not (tmp_path / "two" / "checkpoint.json").exists()
