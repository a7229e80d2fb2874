"""Every member of every message between machines is once missing, and once of each wrong kind: an error of ours, or what is right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CkptError, FormatError
from ckpt.io_backends import PosixBackend
from ckpt.live import Sink, Source
from ckpt.live.control import ask_status, split_address
from ckpt.live.holdings import Manifest
from ckpt.nodes.file_server import NodeConnections, NodeServer, RemoteNode
from ckpt.nodes.memory_remote import MemoryConnections, serve_objects
from ckpt.nodes.memory_store import MemoryStore
from tests.live.mutating import MutatingProxy, mutating, mutations

MIB = 1 << 20


def all_wrong(proxy: MutatingProxy, ask: Callable[[], Any], right: Callable[[Any], bool], where: str) -> int:
    """Ask once as it is, and then with each mutation of each message that came by; how many errors there were."""
    seen: list[Any] = []
    proxy.change = lambda message: (seen.append(message), message)[1]
    assert right(ask())
    kinds = {str(sorted(message)): message for message in seen}
    errors = 0
    for like in kinds.values():
        for name, mutate in mutations(like):
            proxy.change = lambda message, mutate=mutate, like=like: mutate(message) if sorted(message) == sorted(like) else message
            error = None
            try:
                assert right(ask()), name
            except CkptError as err:
                error = str(err)
            except Exception as err:
                raise AssertionError(f"{name}: {err!r}") from err
            assert error is None or where in error, name
            errors += error is not None
    proxy.change = lambda message: message
    assert right(ask())
    return errors


@pytest.mark.parametrize("up", [False, True])
def test_between_sink_and_source(monkeypatch: pytest.MonkeyPatch, up: bool) -> None:
    monkeypatch.setenv("CKPT_LIVE_LOCAL", "off")
    state, into = {"a": torch.arange(6.0)}, {"a": torch.zeros(6)}
    with (
        Source("tcp://127.0.0.1:0/a", state, secret="s", job=ckpt.Job(timeout=5)) as source,
        mutating(split_address(source.address)[:2], up=up) as proxy,
    ):
        source.publish(1).result()
        address = f"tcp://127.0.0.1:{proxy.address[1]}/a"
        with Sink(source.address, {"a": torch.zeros(6)}, secret="s", job=ckpt.Job(timeout=5), relay=True) as relay:
            relay.take()
            with Sink(address, into, secret="s", job=ckpt.Job(timeout=5)) as sink:

                def take() -> bool:
                    into["a"].zero_()
                    sink.take(timeout=1)
                    return torch.equal(into["a"], state["a"])

                assert all_wrong(proxy, take, bool, "127.0.0.1") > (50 if up else 150)
            if not up:
                assert (
                    all_wrong(proxy, lambda: ask_status(address, b"s", 5), lambda status: isinstance(status.versions, tuple), "127.0.0.1")
                    > 100
                )
        with Sink(source.address, into, secret="s", job=ckpt.Job(timeout=5)) as other:
            assert other.take().step == 1


@pytest.mark.parametrize("rank", [" 1", "+1", "1_0", "01", "-1", "x"])
@pytest.mark.parametrize("member", ["own", "segments"])
def test_ranks_of_a_manifest_are_spelled_one_way(member: str, rank: str) -> None:
    manifest = Manifest(
        run="aa", step=1, number=1, ranks=(0, 1), tables=(("bb", (0, 1)),), state="cc", own={1: "dd"}, segments={0: (8, "ee"), 1: (8, "ff")}
    )
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    members = json.loads(manifest.to_bytes())
    members[member][rank] = members[member].pop("1")
    with pytest.raises(FormatError, match=f"{member} is {re.escape(repr(rank))}"):
        Manifest.from_bytes(json.dumps(members).encode())


def test_between_nodes(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "file").write_bytes(b"bytes")
    server = NodeServer(PosixBackend(str(tmp_path)), b"s", 5)
    with mutating(server.addresses[-1], up=False) as proxy:
        connections = NodeConnections("far", [proxy.address], b"s", 5, same_network=True)
        node = RemoteNode(connections)
        for ask, right in (
            (lambda: node.size("d/file"), 5),
            (lambda: [(m.path, m.size) for m in node.list_prefix("d/")], [("d/file", 5)]),
            (lambda: node.list_dir(""), ["d/"]),
        ):
            assert all_wrong(proxy, ask, lambda answer, right=right: type(answer) is type(right), "node far") > 5
        connections.close()
    server.close()


def test_between_a_daemon_and_another_machine() -> None:
    store = MemoryStore(MIB)
    store.put_bytes("run/f", b"content", None)
    server = serve_objects(store, "s")
    with mutating(server.addresses[-1], up=False) as proxy:
        memory = MemoryConnections(f"127.0.0.1:{proxy.address[1]}", "s", 5)
        files = RemoteNode(memory)
        for ask in (memory.hello, lambda: files.size("run/f") == 7, lambda: list(files.list_prefix(""))):
            assert all_wrong(proxy, ask, lambda answer: answer is not None, "127.0.0.1") > 5
        memory.close()
    server.close()
    store.close()
