"""What the tests of removals share."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """Runs a function on one rank: ``ranks.run(1, function, *args)``."""
    return Ranks(1)
