"""Objects that a daemon fetches from that of another machine."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import FormatError, StorageError, UsageError
from ckpt.live.wire import receive, send
from ckpt.memory import serving
from ckpt.memory.client import MemoryClient
from ckpt.memory.objects import MemoryObject
from ckpt.memory.pulling import ObjectPuller
from ckpt.memory.remote import RemoteMemory
from ckpt.memory.serving import MemoryServer
from ckpt.memory.store import MemoryStore
from tests.memory.daemons import daemon_in

MIB = 1 << 20


def test_objects_arrive_with_their_digest(daemon: MemoryClient, tmp_path: Path) -> None:
    ckpt.save("mem://run/step-00000001", {"w": torch.arange(3 * MIB)})
    wanted = [known.path for known in daemon.list()]
    with daemon_in(tmp_path / "other") as other:
        other.pull(daemon.address(), wanted, secret=daemon.secret())
        assert {row["state"] for row in await_pulls(other)} == {"complete"}
        here, there = other.list(), {known.path: known for known in daemon.list()}
        assert [(k.path, k.size, k.digest) for k in here] == [(p, there[p].size, there[p].digest) for p in wanted]
        assert all(known.digest for known in here)
        assert torch.equal(ckpt.open("mem://run/step-00000001")["w"].read(), torch.arange(3 * MIB))


def test_what_is_wrong_is_not_kept(daemon: MemoryClient, tmp_path: Path) -> None:
    loan = daemon.lend(5 * MIB)
    loan.put("run/damaged", digest="0" * 32)
    with daemon_in(tmp_path / "other") as other:
        other.pull(daemon.address(), ["run/damaged", "run/absent"], secret=daemon.secret())
        damaged, absent = await_pulls(other)
        assert (damaged["state"], damaged["error"]["type"]) == ("failed", "CorruptError")
        assert (absent["state"], absent["error"]["type"]) == ("failed", "NotFoundError")
        assert list(other.list()) == [] and other.status()["lent"] == 0


def test_the_pace_is_kept(daemon: MemoryClient, tmp_path: Path) -> None:
    daemon.lend(9 * MIB).put("run/f")
    with daemon_in(tmp_path / "other") as other:
        began = time.monotonic()
        other.pull(daemon.address(), ["run/f"], secret=daemon.secret(), pace=18 * MIB)
        await_pulls(other)
        assert time.monotonic() - began > 0.4


def test_only_the_same_bytes_count_as_copied(daemon: MemoryClient, tmp_path: Path) -> None:
    """Another step has the same sizes."""
    daemon.put("run/same", b"equal")
    daemon.put("run/other", b"right")
    with daemon_in(tmp_path / "other") as other:
        other.put("run/same", b"equal")
        other.put("run/other", b"wrong")
        other.pull(daemon.address(), ["run/same", "run/other"], secret=daemon.secret())
        same, different = await_pulls(other)
        assert same["state"] == "complete"
        assert (different["state"], different["error"]["type"]) == ("failed", "ConflictError")
        assert "another object of that name" in str(different["error"])


def test_a_reader_that_stalls_gets_bytes_and_then_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never an error message among the bytes of an object."""
    monkeypatch.setattr(serving, "_SILENT_SECONDS", 0.3)
    store = MemoryStore(64 * MIB)
    lent = store.lend(32 * MIB)
    os.pwrite(lent.file, b"\x01" * (32 * MIB), 0)
    store.put(lent, "run/f")
    server = MemoryServer(store, "secret")
    peer = RemoteMemory(f"127.0.0.1:{server.addresses[-1][1]}", "secret")._dial()
    send(peer, {"ask": "read", "path": "run/f", "offset": 0, "length": 32 * MIB}, ())
    receive(peer, MIB)
    time.sleep(1.0)
    got = bytearray()
    with suppress(ConnectionError):
        while data := peer.sock.recv(MIB):
            got += data
    assert 0 < len(got) < 32 * MIB and got.count(1) == len(got)
    original = MemoryStore.digest
    monkeypatch.setattr(MemoryStore, "digest", lambda self, path: (time.sleep(0.4), original(self, path))[1])
    hasty = RemoteMemory(f"127.0.0.1:{server.addresses[-1][1]}", "secret", 0.2)
    known = hasty.stat("run/f")
    with pytest.raises(StorageError, match="sends nothing for 0.2 s"):
        hasty.digest(replace(known, size=0))
    assert hasty.digest(replace(known, size=256 * MIB)).digest  # a larger object has more time
    hasty.close()
    bad = RemoteMemory(f"127.0.0.1:{server.addresses[-1][1]}", "secret")
    with pytest.raises(FormatError, match="cannot be read"):
        bad._ask({"ask": "read", "path": "run/f", "offset": "a"})
    assert bad.stat("run/f").size == 32 * MIB  # over the same connection
    bad.close()
    peer.close()
    server.close()
    store.close()


@pytest.mark.parametrize("host", ["a" * 64, "x..y"])
def test_a_host_that_no_name_can_be_is_gone(host: str) -> None:
    with pytest.raises(StorageError, match="the memory daemon is gone"):
        RemoteMemory(f"{host}:80", "secret").hello()
    with pytest.raises(UsageError):
        RemoteMemory("host:²", "secret")


def test_an_answer_of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteMemory, "_ask", lambda *_, **__: {"object": ["run/f", "large"]})
    memory = RemoteMemory("host:80", "secret")
    for question in (memory.hello, partial(memory.stat, "run/f"), partial(memory.list, "")):
        with pytest.raises(FormatError, match="answer cannot be read"):
            question()


def test_another_object_than_the_one_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(MIB)
    puller = ObjectPuller(store)
    monkeypatch.setattr(RemoteMemory, "stat", lambda *_, **__: MemoryObject("elsewhere", 0, None, "1", 0.0))
    puller.pull("127.0.0.1:1", "secret", ["run/f"], None)
    end = time.monotonic() + 30
    while puller.is_busy() and time.monotonic() < end:
        time.sleep(0.01)
    assert [(row["state"], row["error"]["type"]) for row in puller.rows()] == [("failed", "CorruptError")]
    assert store.list("") == []
    store.close()


def await_pulls(daemon: MemoryClient) -> list[dict[str, Any]]:
    end = time.monotonic() + 30
    while True:
        rows = list(daemon.pulls())
        if all(row["state"] in ("complete", "failed") for row in rows):
            return rows
        assert time.monotonic() < end, rows
        time.sleep(0.02)
