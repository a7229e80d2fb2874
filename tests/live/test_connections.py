"""Serving connections where the process has run out of something."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from contextlib import suppress

import pytest

from ckpt.live.connections import ConnectionServer
from ckpt.live.wire import dial


def test_waiting_for_files_costs_nothing_and_ends_when_there_are_some() -> None:
    port = socket.create_server(("127.0.0.1", 0))
    served = threading.Event()
    server = ConnectionServer([port], b"secret", 10.0, purpose="test", name="test", serve=lambda channel: served.set())
    limits, open_files = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    caller = threading.Thread(target=lambda: dial([address], b"secret", 10.0, peer="server", purpose="test").close())
    address = port.getsockname()
    waiting = socket.socket()
    time.sleep(0.2)  # the thread of the server has its selector
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
        with suppress(OSError):
            while True:
                open_files.append(os.dup(port.fileno()))
        waiting.connect(address)
        began, used = time.monotonic(), time.thread_time() - time.process_time()
        time.sleep(0.5)
        busy = time.thread_time() - time.process_time() - used
        assert -busy < 0.1 * (time.monotonic() - began) and not served.is_set()
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
    with socket.create_connection(port.getsockname()) as refused:
        refused.settimeout(10)
        assert refused.recv(1) == b"" and len(server) == 0
    dial([port.getsockname()], b"secret", 10.0, peer="server", purpose="test").close()
    assert served.wait(10)
    server.close()
