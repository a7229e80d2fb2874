"""The fixtures of the tests on several machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.distributed.ranks import Ranks
from tests.io_backends.conftest import tmp_path as tmp_path  # on a disk: each host has a /dev/shm of its own
from tests.machines.bed import Bed, Host, why_not


@pytest.fixture(scope="session")
def server() -> None:
    """The server that ranks are forked from."""
    if reason := why_not():
        pytest.skip(f"no bed of several machines: {reason}")
    Ranks(8)


@pytest.fixture(scope="module")
def bed_directory() -> Iterator[Path]:
    with TemporaryDirectory(prefix="ckpt-bed-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def bed(server: None, bed_directory: Path) -> Iterator[Bed]:
    """Three hosts h0, h1, h2 that reach each other and have nothing unusual."""
    with Bed([Host(name=f"h{i}") for i in range(3)], bed_directory) as bed:
        yield bed
