"""``memory://`` keeps the tables of the storage port, against a real daemon; and what it is like from another machine."""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import AccessError, CorruptError, FormatError, NotFoundError, StorageError, UsageError
from ckpt.io_backends import Backend, ObjectMeta, PosixBackend, open_backend
from ckpt.io_backends.conformance import BackendConformance
from ckpt.net.wire import receive_head, send
from ckpt.nodes import memory_client, memory_remote
from ckpt.nodes.backend import register_run, run_url, unregister_run
from ckpt.nodes.copies import NodeCopier
from ckpt.nodes.file_server import NodeConnections, NodeServer, RemoteNode
from ckpt.nodes.memory_client import MemoryClient
from ckpt.nodes.memory_remote import MemoryConnections, serve_objects
from ckpt.nodes.memory_store import MemoryStore
from ckpt.nodes.nodes import NodeSet, StorageNode
from tests.memory.flipping import flipping


class TestMem(BackendConformance):
    @pytest.fixture
    def backend(self, daemon: MemoryClient) -> Backend:
        return open_backend("memory://runs/a")


def put(backend: Backend, path: str, data: bytes) -> None:
    with backend.create(path, len(data)) as writer:
        writer.write(0, [data])
        writer.commit()


def test_nothing_is_saved_to_all_memory_at_once(daemon: MemoryClient) -> None:
    for url in ("memory://", "memory:"):
        with pytest.raises(UsageError, match="memory://"):
            ckpt.save(url, {"step": 1})
    assert daemon.list("") == []


def test_memory_is_lent_before_the_object_has_a_name(daemon: MemoryClient) -> None:
    backend = open_backend("memory://a")
    lent = backend.lend(10_000)
    assert lent is not None and len(lent.memory) == 10_000
    lent.open(0, 10_000)
    lent.memory[:] = b"x" * 10_000
    assert backend.list_dir() == []
    with backend.create_in("data/f", lent) as writer:
        writer.write(0, [b"head"])
        writer.write(4, [lent.memory[4:]])  # it lies there already
        writer.commit()
    assert backend.read("data/f") == b"head" + b"x" * 9996
    unused = backend.lend(5000)
    assert unused is not None
    unused.close()
    unused.close()
    end = time.monotonic() + 20
    while daemon.status()["lent"]:  # a writer of the test before may be given up only now
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_reader_keeps_what_it_has_open(daemon: MemoryClient) -> None:
    """An object that is deleted while somebody has it open is not filled again under him."""
    size = 4 << 20
    backend = open_backend("memory://a")
    put(backend, "old", b"o" * size)
    opened = daemon.get("a/old")
    before = daemon.status()["dropped"]
    backend.delete("old")
    assert daemon.status()["dropped"] == before + size
    put(backend, "new", b"n" * size)
    with open(f"/proc/self/fd/{opened.file}", "rb") as file:
        assert file.read() == b"o" * size
    opened.close()
    put(backend, "newer", b"r" * size)  # into the memory of the old one
    assert daemon.status()["dropped"] + daemon.status()["spare"] == before
    assert (backend.read("new", 0, 3), backend.read("newer", 0, 3)) == (b"nnn", b"rrr")


def test_what_was_deleted_by_others_is_gone(daemon: MemoryClient) -> None:
    """A backend that has an object open asks again once any was deleted or replaced."""
    backend, other = open_backend("memory://a"), open_backend("memory://a")
    backend.put_if("f", b"one", expected=None)
    assert backend.read("f") == b"one"
    other.put_if("f", b"two", expected=b"one")
    assert backend.read("f") == b"two"
    other.delete("f")
    with pytest.raises(NotFoundError):
        backend.read("f")


class TestFromAnotherMachine:
    @pytest.fixture
    def remote(self, daemon: MemoryClient) -> Backend:
        memory_client.trust(daemon.address(), daemon.secret())
        return open_backend(f"memory://{daemon.address()}/runs")

    def test_reads_and_lists(self, remote: Backend) -> None:
        data = bytes(range(256)) * 40_000
        local = open_backend("memory://runs")
        put(local, "a/big", data)
        put(local, "a/b/empty", b"")
        assert list(remote.list_prefix("a/")) == [ObjectMeta("a/b/empty", 0), ObjectMeta("a/big", len(data))]
        assert (remote.list_dir(), remote.list_dir("a"), remote.size("a/big")) == (["a/"], ["b/", "big"], len(data))
        assert remote.read("a/big") == data and remote.read("a/b/empty") == b""
        assert remote.read("a/big", 1000, 3_000_000) == data[1000:3_001_000]
        buffer, hashed = bytearray(2_000_000), bytearray()
        remote.read_hashed("a/big", 77, memoryview(buffer), hashed.extend)
        assert buffer == hashed == data[77:2_000_077]
        assert remote.version_token("a/big") == local.version_token("a/big")

    def test_errors_are_those_of_the_tables(self, remote: Backend) -> None:
        put(open_backend("memory://runs"), "f", b"1234")
        with pytest.raises(NotFoundError):
            remote.read("no", 0, 1)
        with pytest.raises(CorruptError, match="4"):
            remote.read("f", 2, 3)
        with pytest.raises(CorruptError):
            remote.read("f", 5)
        assert remote.read("f", 1, 2) == b"23"  # the connection goes on

    def test_is_read_only(self, remote: Backend) -> None:
        calls = (lambda: remote.create("f", 1), lambda: remote.put_if("f", b"", expected=None), lambda: remote.delete("f"), remote.prepare)
        for call in calls:
            with pytest.raises(AccessError, match="only read"):
                call()

    def test_another_secret_is_refused(self, daemon: MemoryClient, remote: Backend) -> None:
        memory_client.trust(daemon.address(), "wrong")
        with pytest.raises(AccessError, match="secret"):
            open_backend(remote.url).list_dir()

    def test_nobody_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CKPT_MEMORY_SECRET", "s")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        monkeypatch.setattr("ckpt.nodes.memory_remote.TIMEOUT", 0.3)
        with pytest.raises(StorageError):
            open_backend(f"memory://127.0.0.1:{port}/runs").list_dir()


def test_no_daemon_is_nothing_to_read(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_MEMORY_DIR", f"{tmp_path}/none")
    backend = open_backend("memory://a")
    assert (backend.list_dir(), list(backend.list_prefix())) == ([], [])
    backend.delete("f")
    with pytest.raises(NotFoundError, match="no memory daemon runs"):
        backend.read("f")


@pytest.mark.parametrize("url", ["memory:///a", "memory://a//b", "memory://../a"])
def test_refuses_what_is_no_path(url: str) -> None:
    with pytest.raises(UsageError):
        open_backend(url)


# -------------------------------------------------- Reading from the daemon of another machine: what stalls, lies or is of another release.

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


# ------------------------------------------------------------------------------------------------------------------------------------------
# A bit that flips on the wire between machines: what arrives is right, or there is an error by name, and nothing wrong is kept.


def test_in_a_load_from_another_machine(daemon: MemoryClient) -> None:
    """What was wrong is read once more."""
    wanted = torch.arange(2 * MIB)
    ckpt.save("memory://run/step-00000001", {"w": wanted})
    with flipping(daemon.addresses()[0], 9 * MIB, up=False) as proxy:
        address = f"127.0.0.1:{proxy.address[1]}"
        memory_client.trust(address, daemon.secret())
        state = {"w": torch.zeros_like(wanted)}
        ckpt.load(f"memory://{address}/run/step-00000001", state)
        assert torch.equal(state["w"], wanted) and proxy.flipped == 1


def below(path: Path, prefix: str) -> Backend:
    return PosixBackend(str(path / prefix))


def test_in_a_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other node refuses it, and has no part of the file; the next round copies it."""
    (tmp_path / "b").mkdir()
    server = NodeServer(PosixBackend(str(tmp_path / "b")), b"secret", 10)
    with flipping(server.addresses[0], 3 * MIB, up=True) as proxy:
        to_b = NodeConnections("b", [proxy.address], b"secret", 10, same_network=True)
        nodes = [
            StorageNode(name="a", domain="a", below=partial(below, tmp_path / "a")),
            StorageNode(name="b", domain="b", below=partial(RemoteNode, to_b)),
        ]
        run = NodeSet(url=run_url("flipped"), nodes=nodes, own=0, copies=1)
        register_run(run)
        proxy.armed = False
        ckpt.save(f"{run.url}/step-1", {"w": torch.rand(2 * MIB)})
        proxy.armed = True
        copier = NodeCopier(run, None)
        with caplog.at_level(logging.WARNING):
            copier.add()
            assert copier.finish(60)
        assert (copier.uncopied, proxy.flipped) == ((1,), 1) and "damaged on the way" in caplog.text
        assert list((tmp_path / "b").rglob("data/*")) == []
        copier.add()
        assert copier.finish(60) and copier.uncopied == ()
        unregister_run(run)
        to_b.close()
    server.close()
    (copy,) = (tmp_path / "b").rglob("data/*")
    assert copy.read_bytes() == (tmp_path / "a" / copy.relative_to(tmp_path / "b")).read_bytes()
