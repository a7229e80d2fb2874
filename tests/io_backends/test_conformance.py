"""The backends of this package keep the tables of the port, bare and inside a FaultyBackend that only counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.io_backends import Backend, FaultyBackend, InProcessBackend, PosixBackend
from ckpt.io_backends.conformance import BackendConformance
from ckpt.io_backends.conformance.writing import WritingRows


class TestPosix(BackendConformance):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return PosixBackend(str(tmp_path / "some" / "root"))


@pytest.mark.parametrize("mode", ["on", "off"])
class TestPosixDirect(WritingRows):
    """Direct writes for whatever can be written so, and never; "auto" would ask the file system only for larger files."""

    @pytest.fixture
    def backend(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> Backend:
        monkeypatch.setenv("CKPT_DIRECT", mode)
        return PosixBackend(str(tmp_path / "some" / "root"))


class TestMemory(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        InProcessBackend.reset()
        return InProcessBackend("inprocess://test/root")


class TestFaultyWithoutFault(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        InProcessBackend.reset()
        return FaultyBackend(InProcessBackend("inprocess://test/root"))
