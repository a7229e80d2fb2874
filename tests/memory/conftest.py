"""One daemon for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckpt.nodes.memory_client import MemoryClient
from tests.memory.daemons import daemon_in


@pytest.fixture(scope="module")
def _daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryClient]:
    with daemon_in(tmp_path_factory.mktemp("memory")) as client:
        yield client


@pytest.fixture
def daemon(_daemon: MemoryClient, monkeypatch: pytest.MonkeyPatch) -> MemoryClient:
    """A daemon without objects, which ``CKPT_MEMORY_DIR`` leads to."""
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(_daemon.folder))
    _daemon.drop("")
    return _daemon
