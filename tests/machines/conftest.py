"""The fixture of the tests on several machines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks
from tests.machines.bed import Bed, Host, why_not


@pytest.fixture(scope="session")
def server() -> None:
    """The server that ranks are forked from."""
    if reason := why_not():
        pytest.skip(f"no bed of several machines: {reason}")
    Ranks(8)


@pytest.fixture(scope="module")
def bed(server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Three hosts h0, h1, h2 that reach each other and have nothing unusual."""
    with Bed([Host(name=f"h{i}") for i in range(3)], tmp_path_factory.mktemp("bed")) as bed:
        yield bed
