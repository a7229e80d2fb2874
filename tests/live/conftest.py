"""The fixture of the tests that need several processes."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """Runs a function on up to 8 ranks: ``ranks.run(world_size, function, *args)``."""
    return Ranks(8)
