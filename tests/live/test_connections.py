"""Serving connections where the process has run out of something."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import DeadlineError
from ckpt.live import Sink, Source
from ckpt.net import connections
from ckpt.net.connections import ConnectionServer
from ckpt.net.group import Job
from ckpt.net.wire import Channel, dial
from tests.distributed.ranks import in_process


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


_STRANGER = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
ports = [("127.0.0.1", int(port)) for port in sys.argv[1:]]
idle = [socket.create_connection(ports[n % len(ports)], timeout=20) for n in range(300)]
print("all", flush=True)
sys.stdin.read()
"""


def engine(pipe: Connection, address: str) -> None:
    into = {"w": torch.zeros(5)}
    with Sink(address, into, secret="s", job=Job(timeout=20)) as sink:
        pipe.send((sink.take().step, into["w"].tolist()))


def trainer(pipe: Connection, url: str) -> None:
    """Save and publish when others have connected; then tell how many files and more threads there are."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    state = {"w": torch.arange(5.0)}
    with Source("tcp://127.0.0.1:0/a", state, secret="s", job=Job(timeout=20)) as source:
        pieces = next(port for host, port in source._server.addresses if host.startswith("127."))
        before = threading.active_count()
        pipe.send((source.address, pieces))
        pipe.recv()
        open("/etc/passwd").close()
        ckpt.save(url, {"model": state})
        source.publish(3).result()
        pipe.send("published")
        pipe.recv()
        pipe.send((len(os.listdir("/proc/self/fd")), threading.active_count() - before))


@pytest.mark.alone
def test_strangers_who_say_nothing_take_neither_the_files_nor_the_threads_of_a_trainer(tmp_path: Path) -> None:
    """300 silent connections to a process that may open 256 files: it saves and publishes, and an engine takes what it has published."""
    training, trains = in_process(trainer, str(tmp_path / "step-1"))
    try:
        address, pieces = received(trains)
        stranger = [sys.executable, "-c", _STRANGER, address.split(":")[2].split("/")[0], str(pieces)]
        with subprocess.Popen(stranger, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as idle:
            assert idle.stdout is not None and idle.stdin is not None and idle.stdout.readline() == b"all\n"
            trains.send("connected")
            assert received(trains) == "published"
            _, takes = in_process(engine, address)
            assert received(takes) == (3, [0.0, 1.0, 2.0, 3.0, 4.0])
            trains.send("taken")
            files, threads = received(trains)
            idle.stdin.close()
        assert files < 128 and threads < 10
    finally:
        training.kill()
        training.join()


def received(pipe: Connection) -> Any:
    assert pipe.poll(60)
    return pipe.recv()


def test_peers_that_prove_themselves_leave_files_to_the_program(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for whom there is no room wait at the port, and are served once others have gone."""
    monkeypatch.setattr(connections, "_conversing", set())  # those of this server alone
    monkeypatch.setattr(connections, "_PART", 8)
    port, served = socket.create_server(("127.0.0.1", 0)), list[str]()

    def serve(channel: Channel) -> None:
        served.append(channel.peer)
        channel.await_next()

    server = ConnectionServer([port], b"secret", 10.0, purpose="test", name="test", serve=serve)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    peers, last = list[Channel](), threading.Thread(target=lambda: peers.append(reach()))

    def reach() -> Channel:
        return dial([port.getsockname()], b"secret", 20.0, peer="server", purpose="test")

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(256, 2 * len(os.listdir("/proc/self/fd"))), limits[1]))
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8
        peers += [reach() for _ in range(most)]
        wait_until(lambda: len(served) == most)
        last.start()
        wait_until(lambda: "others wait to be served" in caplog.text)
        time.sleep(0.5)
        assert len(served) == most
        peers.pop(0).close()
        last.join(20)
        assert len(peers) == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for peer in peers:
            peer.close()
        server.close()


def test_waiting_for_files_costs_nothing_and_ends_when_there_are_some() -> None:
    port = socket.create_server(("127.0.0.1", 0))
    served = threading.Event()
    server = ConnectionServer([port], b"secret", 10.0, purpose="test", name="test", serve=lambda channel: served.set())
    limits, open_files = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    caller = threading.Thread(target=lambda: dial([address], b"secret", 10.0, peer="server", purpose="test").close())
    address = port.getsockname()
    waiting = socket.socket()
    dial([address], b"secret", 10.0, peer="server", purpose="test").close()
    assert served.wait(20) and server._thread.ident is not None
    served.clear()
    clock = time.pthread_getcpuclockid(server._thread.ident)  # other tests may have left threads that do something
    wait_until(lambda: not len(server))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
        with suppress(OSError):
            while True:
                open_files.append(os.dup(port.fileno()))
        waiting.connect(address)
        began, used = time.monotonic(), time.clock_gettime(clock)
        time.sleep(0.5)
        assert time.clock_gettime(clock) - used < 0.1 * (time.monotonic() - began) and not served.is_set()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in open_files:
            os.close(file)
        waiting.close()
    caller.start()
    caller.join(20)
    assert served.wait(10)
    server.close()


def test_a_process_out_of_threads_goes_on_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    port = socket.create_server(("127.0.0.1", 0))
    served = threading.Event()
    server = ConnectionServer([port], b"secret", 10.0, purpose="test", name="test", serve=lambda channel: served.set())
    original, left = threading.Thread.start, [1]

    def start(thread: threading.Thread) -> None:
        if thread.name == "test" and left.pop(0) if left else False:
            raise RuntimeError("can't start new thread")
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    dial([port.getsockname()], b"secret", 10.0, peer="server", purpose="test").close()
    wait_until(lambda: not left and not len(server))
    assert not served.is_set()
    dial([port.getsockname()], b"secret", 10.0, peer="server", purpose="test").close()
    assert served.wait(10)
    server.close()


def test_a_server_sleeps_and_a_forked_child_does_not_wake_it() -> None:
    """The child closes its copy of the server, as the collector of garbage may."""
    code = """
import os, socket, time
from ckpt.net.connections import ConnectionServer
from ckpt.net.wire import dial
port = socket.create_server(("127.0.0.1", 0))
server = ConnectionServer([port], b"s", 10.0, purpose="test", name="test", serve=lambda channel: channel.send(b"x"))
pid = os.fork()
if not pid:
    server.close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
before = time.process_time()
time.sleep(1)
print(time.process_time() - before < 0.1)
channel = dial([port.getsockname()[:2]], b"s", 10.0, peer="it", purpose="test")
print(channel.receive(1))
channel.close()
server.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["True", "b'x'"], done.stderr


def test_a_large_message_that_comes_slowly_is_received_and_a_small_one_wakes_at_once() -> None:
    sent = bytes(range(256)) * (3 << 12)  # 3 MiB, of which a receiver waits for 1 MiB at a time
    with socket.create_server(("127.0.0.1", 0)) as port, socket.create_connection(port.getsockname()) as sender:
        channel = Channel(port.accept()[0], "the sender", timeout=2.0)

        def send() -> None:
            for at in range(10):  # longer than the timeout, in all
                sender.sendall(sent[at : at + 1])
                time.sleep(0.3)
            sender.sendall(sent[10:] + b"after")

        thread = threading.Thread(target=send)
        thread.start()
        assert channel.receive(len(sent)) == sent
        assert channel.receive(5) == b"after"
        thread.join()
        sender.sendall(b"x")
        assert channel.await_next() and not channel.is_open() and channel.receive(1) == b"x"
        channel.close()


def test_who_answers_byte_by_byte_does_not_hold_a_caller_beyond_its_timeout() -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as port:

        def drip() -> None:
            with port.accept()[0] as stranger, suppress(OSError):
                while not over.wait(0.05):
                    stranger.sendall(b"c")  # 70 bytes would be an answer

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with pytest.raises(DeadlineError, match="the peer sends no whole answer for 0.5 s"):
                dial([port.getsockname()[:2]], b"s", 0.5, peer="the peer", purpose="test")
        finally:
            over.set()
            thread.join()
