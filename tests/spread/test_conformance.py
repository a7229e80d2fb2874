"""The files of a node, here and from elsewhere, and those of all nodes together keep the tables of the port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.io_backends import Backend, PosixBackend
from ckpt.io_backends.conformance import BackendConformance
from ckpt.nodes.backend import open_spread, register_run, run_url, unregister_run
from ckpt.nodes.file_server import NodeConnections, NodeServer, RemoteNode
from ckpt.nodes.nodes import NodeSet, StorageNode


def directory(path: Path, name: str) -> StorageNode:
    return StorageNode(name=name, domain=name, below=lambda prefix: PosixBackend(str(path / name / prefix)))


class TestSpread(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        nodes = NodeSet(url=run_url("conformance"), nodes=[directory(tmp_path, n) for n in "abc"], own=1, copies=1)
        register_run(nodes)
        yield open_spread(f"{nodes.url}/a/run")
        unregister_run(nodes)


@pytest.fixture(scope="module")
def connections(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeConnections]:
    server = NodeServer(PosixBackend(str(tmp_path_factory.mktemp("node"))), b"secret", 10)
    connections = NodeConnections("a", server.addresses, b"secret", 10, same_network=True)
    yield connections
    connections.close()
    server.close()


class TestRemote(BackendConformance):
    """But for the row of reopening by URL: only the job's connections lead there."""

    exclusive_create = False

    @pytest.fixture
    def backend(self, connections: NodeConnections, tmp_path: Path) -> Backend:
        return RemoteNode(connections, f"{tmp_path.name}/a/run/")

    def test_url_opens_the_same_root(self, backend: Backend) -> None:
        assert backend.url.startswith("node a:") and backend.url.endswith("/a/run")
