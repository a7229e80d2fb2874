"""What the tests of the public face share: an empty place to save to, and small chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ckpt import settings
from ckpt.plan import ownership
from tests.api.checked import empty_directory


@pytest.fixture
def root() -> Iterator[str]:
    """An empty directory."""
    with empty_directory() as path:
        yield path


@pytest.fixture
def url(root: str) -> str:
    """Where a checkpoint may be saved: below an empty directory, not there yet."""
    return f"{root}/run/step-1"


@pytest.fixture
def chunks_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Call it with a number of bytes: chunks are at most that large from then on."""

    def limit(size: int) -> None:
        ownership._assignment.cache_clear()
        monkeypatch.setattr(settings, "CHUNK", size)

    yield limit
    ownership._assignment.cache_clear()
