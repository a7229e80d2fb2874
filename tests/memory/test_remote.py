"""Reading from the daemon of another machine: what stalls, lies or is of another release."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import pytest

from ckpt.errors import FormatError, StorageError, UsageError
from ckpt.net.wire import receive_head, send
from ckpt.nodes import memory_remote
from ckpt.nodes.file_server import RemoteNode
from ckpt.nodes.memory_remote import MemoryConnections, serve_objects
from ckpt.nodes.memory_store import MemoryStore

MIB = 1 << 20


def test_a_reader_that_stalls_gets_bytes_and_then_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never an error message among the bytes of an object."""
    monkeypatch.setattr(memory_remote, "SILENT_SECONDS", 0.3)
    store = MemoryStore(64 * MIB)
    lent = store.lend(32 * MIB)
    os.pwrite(lent.file, b"\x01" * (32 * MIB), 0)
    store.put(lent, "run/f")
    server = serve_objects(store, "secret")
    peer = MemoryConnections(f"127.0.0.1:{server.addresses[-1][1]}", "secret").dial()
    send(peer, {"op": "read", "path": "run/f", "offset": 0, "length": 32 * MIB}, ())
    receive_head(peer, 64 * MIB)
    end = time.monotonic() + 30
    while len(server) and time.monotonic() < end:
        time.sleep(0.05)
    got = bytearray()
    with suppress(ConnectionError):
        while data := peer.sock.recv(MIB):
            got += data
    assert 0 < len(got) < 32 * MIB and got.count(1) == len(got)
    bad = MemoryConnections(f"127.0.0.1:{server.addresses[-1][1]}", "secret")
    with pytest.raises(FormatError, match="cannot be read"):
        bad.ask({"op": "read", "path": "run/f", "offset": "a", "length": 1})
    assert RemoteNode(bad).size("run/f") == 32 * MIB  # over the same connection
    bad.close()
    peer.close()
    server.close()
    store.close()


@pytest.mark.parametrize("host", ["a" * 64, "x..y"])
def test_a_host_that_no_name_can_be_is_gone(host: str) -> None:
    with pytest.raises(StorageError, match="the memory daemon is gone"):
        MemoryConnections(f"{host}:80", "secret").hello()
    with pytest.raises(UsageError):
        MemoryConnections("host:²", "secret")
