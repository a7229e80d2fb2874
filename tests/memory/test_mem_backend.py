"""``mem://`` keeps the tables of the storage port, against a real daemon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckpt.io_backends import Backend, open_backend
from ckpt.io_backends.conformance import BackendConformance
from ckpt.memory.client import MemoryClient
from tests.memory.daemons import daemon_in


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryClient]:
    with daemon_in(tmp_path_factory.mktemp("memory")) as client:
        yield client


@pytest.fixture(autouse=True)
def _its_folder(daemon: MemoryClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(daemon.folder))


class TestMem(BackendConformance):
    @pytest.fixture
    def backend(self, daemon: MemoryClient) -> Backend:
        daemon.drop("")
        return open_backend("mem://runs/a")
