"""A bit that flips on the wire between machines: what arrives is right, or there is an error by name, and nothing wrong is kept."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.io_backends import Backend, PosixBackend
from ckpt.nodes import memory_client
from ckpt.nodes.backend import register_run, run_url, unregister_run
from ckpt.nodes.copies import NodeCopier
from ckpt.nodes.file_server import NodeConnections, NodeServer, RemoteNode
from ckpt.nodes.memory_client import MemoryClient
from ckpt.nodes.nodes import NodeSet, StorageNode
from tests.memory.flipping import flipping

MIB = 1 << 20


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
