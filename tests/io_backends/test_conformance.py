"""The backends of this package keep the tables of the port, bare and inside a FaultyBackend that only counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.io_backends import Backend, FaultyBackend, MemoryBackend, PosixBackend
from ckpt.io_backends.conformance import BackendConformance


class TestPosix(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return PosixBackend(str(tmp_path / "some" / "root"))


class TestMemory(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        MemoryBackend.reset()
        return MemoryBackend("memory://test/root")


class TestFaultyWithoutFault(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        MemoryBackend.reset()
        return FaultyBackend(MemoryBackend("memory://test/root"))
