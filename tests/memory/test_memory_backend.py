"""``memory://`` keeps the tables of the storage port, against a real daemon; and what it is like from another machine."""

from __future__ import annotations

import socket
import time

import pytest

import ckpt
from ckpt.errors import AccessError, CorruptError, NotFoundError, StorageError, UsageError
from ckpt.io_backends import Backend, ObjectMeta, open_backend
from ckpt.io_backends.conformance import BackendConformance
from ckpt.nodes import memory_client
from ckpt.nodes.memory_client import MemoryClient


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
