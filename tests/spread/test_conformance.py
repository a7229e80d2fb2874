"""The files of a node, here and from elsewhere, and those of all nodes together keep the tables of the port; and what a node answers to
messages that are damaged, or that are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckpt.errors import CkptError
from ckpt.io_backends import Backend, PosixBackend
from ckpt.io_backends.conformance import BackendConformance
from ckpt.net.wire import _FRAME
from ckpt.nodes.backend import open_spread
from ckpt.nodes.file_server import NodeConnections, NodeServer, RemoteNode, receive, send
from tests.spread.directories import nodes_at, registered


class TestSpread(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        with registered(nodes_at(tmp_path, "abc", own=1)) as nodes:
            yield open_spread(f"{nodes.url}/a/run")


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


def test_a_damaged_question_is_answered_and_one_that_cannot_be_read_ends_the_connection(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    server = NodeServer(PosixBackend(str(tmp_path)), b"secret", 10)
    connections = NodeConnections("a", server.addresses, b"secret", 10, same_network=True)
    channel = connections.dial()
    try:
        head = json.dumps({"op": "size", "path": "file", "digest": "0" * 16}).encode()
        channel.send(_FRAME.pack(len(head), 3), head, b"abc")
        assert "damaged" in receive(channel)[0]["error"]["message"]
        send(channel, {"op": "size", "path": "file"})
        assert receive(channel)[0]["size"] == 5
        garbage = b"{not json"
        question = json.dumps({"op": "delete", "path": "file"}).encode()
        channel.send(_FRAME.pack(len(garbage), _FRAME.size + len(question)), garbage)
        # the bytes that belong to the message above must not be taken for another question
        with suppress(ConnectionError):
            channel.send(_FRAME.pack(len(question), 0), question)
        with pytest.raises((CkptError, ConnectionError)):
            receive(channel)
        assert (tmp_path / "file").read_bytes() == b"bytes"
    finally:
        channel.sock.close()
        connections.close()
        server.close()
