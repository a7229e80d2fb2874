"""The daemon of a machine's memory: who it outlives, what it keeps, whom it refuses."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import AccessError, CorruptError, FormatError, NoSpaceError, NotFoundError, StorageError, UsageError
from ckpt.nodes import memory_client, memory_connection
from ckpt.nodes import memory_connection as place
from ckpt.nodes import memory_store as memory_store
from ckpt.nodes.memory_client import MemoryClient
from ckpt.nodes.memory_connection import receive, send
from ckpt.nodes.memory_store import MemoryStore
from ckpt.policies import EverySteps
from tests.memory.daemons import daemon_in

MIB = 1 << 20

TRAINERS = """
import itertools, os, sys, torch, ckpt
from ckpt.nodes import memory_client as client

def train(first, capture):
    state = {"w": torch.empty(1 << 18), "step": 0}
    for step in itertools.count(int(first)):
        state["w"].fill_(step)
        state["step"] = step
        ckpt.save_async(f"memory://run/step-{step:08d}", state, capture=capture).result()
        print("saved", step, flush=True)
        client.connect().drop(f"run/step-{step - 2:08d}")

for line in sys.stdin:
    child = os.fork()
    if not child:
        print("pid", os.getpid(), flush=True)
        train(*line.split())
    os.waitpid(child, 0)
    print("dead", child, flush=True)
"""
"""Forks a trainer for each line, and says what becomes of it: importing torch for each would take most of the time."""


def start(code: str) -> subprocess.Popen[str]:
    """In a session of its own."""
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)


def committed() -> list[str]:
    return [k.path.split("/")[1] for k in memory_client.connect().list("run/") if k.path.endswith("checkpoint.json")]


def is_running(pid: int) -> bool:
    """Not when nobody has asked yet what it ended with, either."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    return False


def await_nothing_lent(daemon: MemoryClient) -> None:
    end = time.monotonic() + 10
    while daemon.status()["lent"]:
        assert time.monotonic() < end, daemon.status()
        time.sleep(0.01)


def test_it_is_light(daemon: MemoryClient) -> None:
    pid = daemon.status()["pid"]
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
    status = Path(f"/proc/{pid}/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0])
    assert resident < 40 * 1024, f"{resident} kB"


@pytest.mark.parametrize("rounds", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_trainer_loses_nothing_that_was_committed(daemon: MemoryClient, rounds: int) -> None:
    choice, last = random.Random(rounds), 0
    with start(TRAINERS) as trainers:
        assert trainers.stdin is not None and trainers.stdout is not None
        for number in range(rounds):
            trainers.stdin.write(f"{last + 1} {('eager', 'lazy')[number % 2]}\n")
            trainers.stdin.flush()
            pid = int(trainers.stdout.readline().split()[1])
            last = [int(trainers.stdout.readline().split()[1]) for _ in range(2)][-1]
            time.sleep(choice.random() * 0.05)
            os.kill(pid, signal.SIGKILL)
            while (line := trainers.stdout.readline().split())[0] == "saved":
                last = int(line[1])
            # What it called saved is there, whole; what it was writing is not.
            steps = [int(name.removeprefix("step-")) for name in committed()]
            assert steps[-1] >= last and len(steps) >= 2
            for step in steps[-2:]:
                state = {"w": torch.empty(1 << 18), "step": 0}
                ckpt.load(f"memory://run/step-{step:08d}", state)
                assert state["step"] == step and bool((state["w"] == float(step)).all())
            await_nothing_lent(daemon)
            last = steps[-1]
        trainers.stdin.close()


def test_a_child_that_lives_on_keeps_nothing_borrowed(daemon: MemoryClient) -> None:
    """As a worker of a data loader does, whose trainer was killed."""
    code = """
import os, sys
from ckpt.nodes import memory_client as client
loan = client.connect().lend(5 << 20)
if os.fork():
    print(os.getpid(), flush=True)
sys.stdin.read()
os._exit(0)
"""
    with start(code) as process:
        assert process.stdin is not None and process.stdout is not None
        assert int(process.stdout.readline()) == process.pid and daemon.status()["lent"] > 0
        process.kill()
        process.wait()
        await_nothing_lent(daemon)
        process.stdin.close()  # the child ends
        assert process.stdout.read() == ""


def test_killing_the_process_group_of_its_first_client_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path / "deep" / ("x" * 90) / "memory"))  # longer than a socket's name may be
    code = "import time; from ckpt.nodes import memory_client as client; client.connect().put('a/b', b'kept')"
    code += "; print('ready', flush=True); time.sleep(60)"
    trainer = start(code)
    assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
    os.killpg(trainer.pid, signal.SIGKILL)
    trainer.communicate()
    daemon = memory_client.connect(start=False)
    try:
        pid = daemon.status()["pid"]
        assert [k.path for k in daemon.list()] == ["a/b"]
        assert os.getsid(pid) not in (trainer.pid, os.getsid(0))
    finally:
        daemon.stop()
    while is_running(pid):  # it has let go of its lock, and is about to end
        time.sleep(0.01)
    with pytest.raises(NotFoundError):
        memory_client.connect(start=False)


def test_many_start_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path / "memory"))
    code = "from ckpt.nodes import memory_client as client; print(client.connect().status()['pid'])"
    starters = [start(code) for _ in range(4)]
    pids = {starter.communicate(timeout=60)[0] for starter in starters}
    memory_client.connect(start=False).stop()
    assert len(pids) == 1 and pids != {""}


class TestBudget:
    def test_what_does_not_fit_is_refused_by_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CKPT_MEMORY_BUDGET", "8MiB")
        with daemon_in(tmp_path) as daemon:
            state = {"w": torch.ones(MIB)}  # 4 MiB
            ckpt.save("memory://run/step-00000001", state)
            with pytest.raises(NoSpaceError) as error:
                ckpt.save_async("memory://run/step-00000002", state)
            for part in ("memory://run/step-00000001: 4.", "8.0 MiB", "CKPT_MEMORY_BUDGET", "ckpt memory drop"):
                assert part in str(error.value)
            await_nothing_lent(daemon)
            assert committed() == ["step-00000001"]
            assert daemon.drop("run/step-00000001") > 4 * MIB
            ckpt.save("memory://run/step-00000002", state)
            assert daemon.status()["objects"] <= daemon.status()["budget"]

    def test_no_budget_by_mistake(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path))
        for variable, text in (("CKPT_MEMORY_BUDGET", "much"), ("CKPT_MEMORY_PORT", "99999"), ("CKPT_MEMORY_IDLE", "-1")):
            monkeypatch.setenv(variable, text)
            with pytest.raises(UsageError) as caught:
                memory_client.connect()
            assert caught.value.where == variable
            monkeypatch.delenv(variable)
        assert list(tmp_path.iterdir()) == []

    def test_memory_goes_round(self, daemon: MemoryClient) -> None:
        """Pages of deleted objects are filled again; dropped ones are freed, though the one who filled them still maps them."""
        for number in range(3):
            loan = daemon.lend(2 * MIB)
            loan.open(0, 2 * MIB)
            loan.memory[:] = bytes([number]) * (2 * MIB)
            loan.put(f"run/{number}")
            daemon.delete(f"run/{number}")
        assert daemon.status()["spare"] == 2 * MIB
        pid = daemon.status()["pid"]
        assert [Path(f"/proc/{pid}/fd/{fd}").stat().st_blocks * 512 for fd in memfds(pid)] == [2 * MIB]
        daemon.drop("run")
        await_no_memfds(pid)
        assert daemon.status()["spare"] == 0


def test_memory_is_freed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a large state takes a minute, in which others want answers."""
    monkeypatch.setattr(memory_store, "_PIECE", MIB)
    store = MemoryStore(8 * MIB)
    lent = [store.lend(4 * MIB) for _ in range(2)]
    for each in lent:
        os.pwrite(each.file, b"x" * (4 * MIB), 0)
        store.take_back(each)

    def blocks() -> int:
        return sum(os.stat(each.file).st_blocks * 512 for each in lent if each.file in store_files())

    def store_files() -> list[int]:
        return [left.file for left in store._freeing]

    assert blocks() == store.usage()["freeing"] == 8 * MIB
    assert store.free_some() and blocks() == store.usage()["freeing"] == 7 * MIB
    again = store.lend(2 * MIB)  # who needs room waits for no more than that
    assert store.usage()["freeing"] == 6 * MIB
    while store.free_some():
        assert blocks() == store.usage()["freeing"]
    assert store_files() == [] and store.usage()["freeing"] == 0
    with pytest.raises(NoSpaceError):
        store.lend(7 * MIB)
    store.take_back(again)
    assert store.lend(8 * MIB).capacity == 8 * MIB
    store.close()


def test_a_daemon_out_of_files_keeps_what_it_has(daemon: MemoryClient) -> None:
    status = daemon.status()
    pid, before = status["pid"], resource.prlimit(status["pid"], resource.RLIMIT_NOFILE)
    daemon.put("run/checkpoint.json", b"0")
    put = failed = 0
    try:
        for free in range(4):  # so many descriptors until the next one fails
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")) + free - 1, before[1]))
            for path, expected in (("run/checkpoint.json", b"0"), (f"run/{free}", None)):
                try:
                    daemon.put(path, b"0", expected=expected)
                    put += 1
                except NoSpaceError:
                    failed += 1
                assert daemon.stat("run/checkpoint.json").size == 1
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert put and failed
    assert (daemon.status()["lent"], daemon.status()["dropped"]) == (0, 0)


def memfds(pid: int) -> list[str]:
    """The files of objects that a process has open."""
    objects = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if "ckpt-object" in os.readlink(f"/proc/{pid}/fd/{name}") and os.stat(f"/proc/{pid}/fd/{name}").st_size > 4096:
                objects.append(name)
    return objects


def await_no_memfds(pid: int) -> None:
    """The daemon frees memory piece by piece, after it has answered."""
    end = time.monotonic() + 20
    while left := memfds(pid):
        assert time.monotonic() < end, f"objects {left} are still open"
        time.sleep(0.01)


def test_the_capture_is_the_only_copy(daemon: MemoryClient) -> None:
    code = """
import torch, ckpt
def anonymous():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) >> 10
state = {"w": torch.ones(16 << 20)}
ckpt.save_async("memory://run/step-00000001", {"w": torch.ones(5)}).result()
before = anonymous()
for step in (2, 3):
    ckpt.save_async(f"memory://run/step-0000000{step}", state, capture="eager").result()
print(anonymous() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16, done.stdout  # MiB, of a state of 64


def test_what_was_saved_cannot_be_written(daemon: MemoryClient) -> None:
    code = """
import ctypes
from ckpt.nodes import memory_client as client
loan = client.connect().lend(1 << 20)
address = loan.data.ctypes.data
ctypes.memset(address, 1, 8)
loan.put("run/f")
print("put", flush=True)
ctypes.memset(address, 2, 8)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("put\n", -signal.SIGSEGV)
    read = daemon.get("run/f")
    assert os.pread(read.file, 8, 0) == b"\1" * 8
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(read.file, b"x", 0)


def test_loans_one_after_another_need_one_connection(daemon: MemoryClient) -> None:
    daemon.lend(10).close()
    before = daemon.status()["clients"]
    for number in range(4):
        daemon.lend(10).put(f"run/{number}")
        daemon.lend(10).close()
    assert (daemon.status()["clients"], daemon.status()["lent"]) == (before, 0)
    both = [daemon.lend(10), daemon.lend(10)]
    assert daemon.status()["lent"] == 2 * 4096
    del both  # without a word: their connections end
    deadline = time.monotonic() + 10
    while daemon.status()["lent"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert daemon.status()["lent"] == 0


def test_memory_that_is_lent_again_is_writable_only_where_it_is_opened(daemon: MemoryClient) -> None:
    code = """
import ctypes
from ckpt.nodes import memory_client as client
daemon = client.connect()
daemon.lend(4 << 20).put("run/old")
daemon.delete("run/old")
loan = daemon.lend(4 << 20)
address = loan.data.ctypes.data
assert loan.mapping.protected  # the mapping is the one that the first object was filled by
loan.open((1 << 20) + 5, 10)
ctypes.memset(address + (1 << 20), 1, 4096)
print("written", flush=True)
ctypes.memset(address + (2 << 20), 2, 1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("written\n", -signal.SIGSEGV), done.stderr


def test_a_flipped_byte_is_found(daemon: MemoryClient) -> None:
    state = {"w": torch.ones(MIB)}
    ckpt.save("memory://run/step-00000001", state)
    pid = daemon.status()["pid"]
    (data,) = [fd for fd in memfds(pid) if os.access(f"/proc/{pid}/fd/{fd}", os.W_OK) and is_writable(pid, fd)]
    with open(f"/proc/{pid}/fd/{data}", "r+b") as file:
        file.seek(2 * MIB)
        file.write(b"\xff")
    with pytest.raises(CorruptError, match="w"):
        ckpt.load("memory://run/step-00000001", state)


def is_writable(pid: int, fd: str) -> bool:
    flags = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_RDWR)


class TestStrangers:
    @pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another account")
    def test_another_account(self, daemon: MemoryClient) -> None:
        (daemon.folder / "socket").chmod(0o666)
        daemon.folder.chmod(0o711)
        ours, its = os.pipe()
        child = os.fork()
        if not child:
            answer = b"?"
            with suppress(BaseException):
                os.chdir(daemon.folder)
                os.setuid(65534)
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sock.settimeout(10)
                sock.connect("socket")
                packet = receive(sock)
                answer = str(packet.message if packet else None).encode()
            os.write(its, answer)
            os._exit(0)
        os.waitpid(child, 0)
        daemon.folder.chmod(0o700)
        assert b"another account" in os.read(ours, 1000)
        for fd in (ours, its):
            os.close(fd)

    def test_a_folder_that_others_reach(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o755)
        with pytest.raises(AccessError, match=r"(?s)others than this account.*chmod 700"):
            memory_client.connect(folder=tmp_path)

    def test_a_daemon_of_another_release(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o700)
        listening = place.listen_socket(tmp_path)

        def answer() -> None:
            sock, _ = listening.accept()
            receive(sock)
            send(sock, {"protocol": 99, "release": "9.0", "pid": 1})
            sock.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(FormatError, match=r"release 9\.0 and speaks version 99"):
            memory_client.connect(start=False, folder=tmp_path)
        thread.join()
        listening.close()

    def test_a_daemon_of_an_older_protocol(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A real one: the training loop is refused by name, and the daemon can be ended, which frees its memory."""
        monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path / "memory"))
        code = f"""
from ckpt.nodes import memory_connection as messages
messages.PROTOCOL = 0
from pathlib import Path
from ckpt.nodes.memory_daemon import serve
serve(Path({str(tmp_path / "memory")!r}), 1 << 20, lambda: print("listens", flush=True))
"""
        old = start(code)
        try:
            assert old.stdout is not None and old.stdout.readline() == "listens\n"
            with pytest.raises(FormatError, match=r"(?s)speaks version 0 of the protocol, this release 1.*ckpt memory stop --all"):
                ckpt.Checkpointer(str(tmp_path / "run"), memory=ckpt.Memory()).step(1, {"w": torch.ones(3)})
            memory_client.end_daemon(tmp_path / "memory")
            assert old.wait(20) == 0
        finally:
            old.kill()
            old.communicate()

    def test_nonsense_is_refused_and_others_are_served(self, daemon: MemoryClient) -> None:
        asked = ("get", "lend", "put_bytes", "pull", "delete")  # pull is of earlier daemons
        wrong = [
            b"j",
            b"jnot json",
            b"j[1]",
            b"f",
            b"\xff" * 1000,
            *(f'j{{"ask": "{a}", "size": -1, "path": [5]}}'.encode() for a in asked),
        ]
        for data in wrong:
            with place.connect_socket(daemon.folder, 5.0) as sock:
                send(sock, {"ask": "hello", "protocol": 1})
                hello = receive(sock)
                assert hello is not None
                os.close(hello.files[0])
                sock.send(data)
                answer = receive(sock)
                assert answer is None or "error" in answer.message or answer.message == {"deleted": False}
        daemon.put("run/f", b"x")
        assert len(daemon.list()) == 1


def test_two_jobs_have_a_daemon_each(daemon: MemoryClient, tmp_path: Path) -> None:
    daemon.put("run/f", b"one")
    with daemon_in(tmp_path / "other") as other:
        other.put("run/f", b"two")
        assert other.status()["pid"] != daemon.status()["pid"]
        assert other.drop("") == 3
    assert os.pread(daemon.get("run/f").file, 3, 0) == b"one"


def test_a_hanging_daemon_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon_in(tmp_path) as daemon:
        pid = daemon.status()["pid"]
        monkeypatch.setattr(memory_connection, "TIMEOUT", 2.0)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(StorageError, match="has not answered"):
                daemon.list()
        finally:
            os.kill(pid, signal.SIGCONT)
        monkeypatch.setattr(memory_connection, "TIMEOUT", 30.0)
        assert list(daemon.list()) == []


@pytest.mark.alone
def test_a_hanging_daemon_ends_a_save_within_the_deadline_of_that(tmp_path: Path) -> None:
    """Of the save itself, and of one of a training loop; whatever comes after does not wait as long again."""
    state = {"w": torch.ones(3)}
    with (
        daemon_in(tmp_path / "memory") as daemon,
        ckpt.Checkpointer(str(tmp_path / "root"), memory=ckpt.Memory(copies=0), save=EverySteps(100), job=ckpt.Job(timeout=3)) as c,
    ):
        for step in (1, 2):
            c.step(step, state)
            assert c.handle is not None
            c.handle.result()
        pid = daemon.status()["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            for save in (lambda: ckpt.save("memory://run/step-1", state, job=ckpt.Job(timeout=3)), lambda: c.save(3, state).result()):
                began = time.monotonic()
                with pytest.raises(StorageError, match="has not answered"):
                    save()
                assert time.monotonic() - began < 30, "60 s is what the daemon has where nobody set a deadline"
        finally:
            os.kill(pid, signal.SIGCONT)
        c.handle = None
        ckpt.save("memory://run/step-1", state, job=ckpt.Job(timeout=30))
        assert "run/step-1/checkpoint.json" in [each.path for each in daemon.list()]


def test_a_daemon_that_dies_is_started_again(tmp_path: Path) -> None:
    with daemon_in(tmp_path) as daemon:
        ckpt.save("memory://run/step-00000001", {"w": torch.ones(3)})
        loan = daemon.lend(10)
        pid = daemon.status()["pid"]
        os.kill(pid, signal.SIGKILL)
        while is_running(pid):
            time.sleep(0.01)
        with pytest.raises(StorageError, match="gone"):
            loan.put("run/f")
        with pytest.raises(NotFoundError):
            ckpt.load("memory://run/step-00000001", {"w": torch.ones(3)})
        ckpt.save("memory://run/step-00000001", {"w": torch.ones(3)})
        assert committed() == ["step-00000001"]


def test_it_ends_when_nobody_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_MEMORY_IDLE", "0.1")
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path))
    code = "from ckpt.nodes import memory_client as client; print(client.connect().status()['pid'])"
    pid = int(start(code).communicate(timeout=60)[0])
    end = time.monotonic() + 20
    while (tmp_path / "socket").exists():
        assert time.monotonic() < end, f"{pid} still runs"
        time.sleep(0.05)
