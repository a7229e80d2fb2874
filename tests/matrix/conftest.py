"""The Megatron checkpoints, unpacked once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import Ranks
from tests.formats.megatron_files import unpacked


@pytest.fixture(scope="session")
def megatron_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("megatron"))


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """Runs a function on up to 8 ranks."""
    return Ranks(8)
